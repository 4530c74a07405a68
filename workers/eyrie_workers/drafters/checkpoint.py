"""A drafter on disk, in the form SGLang and vLLM load: `config.json` and `model.safetensors`.

SGLang's loader is silent: a tensor whose name it does not know is skipped, one it misses stays at random
initialisation, and the drafter serves with an acceptance near zero and no error. So the contract is checked here,
strictly, both when writing and when reading: exact names, shapes and one dtype, a draft vocabulary that is in range
and ascending, `t2d` that agrees with it, and an output matrix that is not tied (a tied one would be replaced by the
target's embedding).

Both engines count aux layers, and differently. Ours is the index into Hugging Face `hidden_states` (0 = embeddings).
`eagle_config.eagle_aux_hidden_state_layer_ids` is read by SGLang and means "output of layer v": index - 1. The key of
the same name at the top level is read by vLLM and means "input of layer k": index. One file carries both.

A checkpoint is written into a directory aside and renamed: it is there whole or not at all.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyrie_api.errors import ArtifactMissing, Permanent, UnsupportedTarget
from eyrie_workers.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.vocabulary import DraftVocabulary
from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.targets.config import parse_config as parse_decoder

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointInvalid(Permanent):
    """A drafter checkpoint that a serving engine would load wrongly, or not at all."""

    exit_code = 65
    reason = "CheckpointInvalid"


def save_drafter(directory: Path, drafter: Eagle3Drafter, *, dtype: str = "float32",
                 provenance: Mapping[str, Any] | None = None) -> None:
    """Write a drafter to `directory`, replacing what is there, atomically.

    provenance   JSON-able facts about its making (target digest, step, data, code version): the `eyrie` block.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f".{directory.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    wanted = _DTYPES[dtype]
    tensors = {name: (tensor.to(wanted) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
               for name, tensor in drafter.state_dict().items()}
    config = config_json(drafter.config, dtype, provenance or {})
    validate(config, tensors)
    save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
    (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for path in (aside / WEIGHTS, aside / CONFIG, aside):
        _flush(path)
    if directory.exists():  # the same step exported again after an interruption: same bytes, so any order is safe
        shutil.rmtree(directory)
    os.replace(aside, directory)
    _flush(directory.parent)


def load_drafter(directory: Path, dtype: torch.dtype | None = None) -> Eagle3Drafter:
    """Read and check a drafter. Raises ArtifactMissing without its two files, CheckpointInvalid when it breaks the
    contract. `dtype` converts the parameters; default: as stored."""
    config, tensors = read_config(directory), _read_tensors(directory)
    validate(config, tensors)
    parsed = parse_config(config)
    vocabulary = DraftVocabulary.from_buffers(tensors["d2t"], tensors["t2d"])
    drafter = Eagle3Drafter(parsed, vocabulary)
    drafter.to(tensors["fc.weight"].dtype)
    drafter.load_state_dict(tensors, strict=True)
    return drafter.to(dtype) if dtype is not None else drafter


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint. Raises ArtifactMissing or CheckpointInvalid."""
    try:
        found = json.loads((directory / CONFIG).read_text())
    except FileNotFoundError:
        raise ArtifactMissing(f"no drafter in {directory}: {CONFIG} is missing",
                              "give the directory of an exported drafter") from None
    except json.JSONDecodeError as error:
        raise CheckpointInvalid(f"{directory / CONFIG} is not JSON: {error}", "export the drafter again") from error
    if not isinstance(found, dict):
        raise CheckpointInvalid(f"{directory / CONFIG} is not a JSON object", "export the drafter again")
    return found


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    path = directory / WEIGHTS
    if not path.is_file():
        raise ArtifactMissing(f"no drafter in {directory}: {WEIGHTS} is missing",
                              "give the directory of an exported drafter")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise CheckpointInvalid(f"{path} is not a readable safetensors file: {error}",
                                "copy or export the drafter again") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def config_json(config: Eagle3Config, dtype: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a drafter."""
    eos = list(config.eos_token_ids)
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURE], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size, "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_eps, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "rope_theta": config.rope.theta, "rope_parameters": _rope_json(config.rope),
        "num_aux_hidden_states": config.num_aux,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "eagle_config": {"use_aux_hidden_state": True,
                         "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers]},
        "bos_token_id": config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": dtype, "dtype": dtype, "eyrie": dict(provenance),
    }
    if config.rope.kind != "default":
        written["rope_scaling"] = _rope_json(config.rope)
    for flag in ("fc_norm", "norm_output"):
        if getattr(config, flag):
            written[flag] = True
    return written


def parse_config(found: Mapping[str, Any]) -> Eagle3Config:
    """An `Eagle3Config` from a `config.json`. Raises CheckpointInvalid naming the key."""
    architectures = found.get("architectures")
    _demand(architectures == [ARCHITECTURE], f"architectures is {architectures!r}, not [{ARCHITECTURE!r}]",
            "give an EAGLE-3 drafter with one Llama layer")
    _demand(found.get("tie_word_embeddings") is False, "tie_word_embeddings is not false",
            "a tied drafter would predict with the target's embedding: export it with tie_word_embeddings false")
    _demand(found.get("num_hidden_layers", 1) == 1, f"num_hidden_layers is {found.get('num_hidden_layers')!r}, not 1",
            "only drafters of one layer are supported")
    try:
        shape = parse_decoder(found)
    except UnsupportedTarget as error:
        raise CheckpointInvalid(f"drafter checkpoint: {error.message}", error.mend) from error
    target_hidden, draft_vocab = found.get("target_hidden_size", shape.hidden_size), found.get("draft_vocab_size")
    _demand(target_hidden == shape.hidden_size,
            f"target_hidden_size {target_hidden!r} differs from hidden_size {shape.hidden_size}",
            "a drafter shares its target's embedding: train it with the target's hidden size")
    draft_vocab = shape.vocab_size if draft_vocab is None else draft_vocab
    _demand(isinstance(draft_vocab, int) and 0 < draft_vocab <= shape.vocab_size,
            f"draft_vocab_size {draft_vocab!r} is not between 1 and vocab_size {shape.vocab_size}",
            "export the drafter again")
    return Eagle3Config(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab, aux_layers=_aux_layers(found), rms_eps=shape.rms_eps, rope=shape.rope,
        max_position_embeddings=shape.max_position_embeddings, eos_token_ids=shape.eos_token_ids,
        bos_token_id=found.get("bos_token_id"), fc_norm=bool(found.get("fc_norm", False)),
        norm_output=bool(found.get("norm_output", False)))


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        written["factor"] = rope.factor
    if rope.kind == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
                    "original_max_position_embeddings": rope.original_max_position}
    return written


def _aux_layers(found: Mapping[str, Any]) -> tuple[int, ...]:
    nested = (found.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = found.get("eagle_aux_hidden_state_layer_ids")
    _demand(nested is not None or top is not None, "eagle_aux_hidden_state_layer_ids is missing",
            "without it the layers the drafter was trained on are unknown; add it to config.json")
    layers = tuple(top) if top is not None else tuple(layer + 1 for layer in nested or ())
    _demand(nested is None or tuple(layer + 1 for layer in nested) == layers,
            f"eagle_config says layers {nested} and the top level says {top}: the first must be the second minus 1",
            "correct config.json; engines would capture different layers")
    return layers


def _demand(holds: bool, problem: str, mend: str) -> None:
    if not holds:
        raise CheckpointInvalid(f"drafter checkpoint: {problem}", mend)


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape: SGLang's contract for `LlamaForCausalLMEagle3`."""
    hidden, inner, (q, k, v) = config.hidden_size, config.intermediate_size, config.qkv_widths
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_aux * hidden),
        "midlayer.input_layernorm.weight": (hidden,), "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden), "midlayer.self_attn.k_proj.weight": (k, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (v, 2 * hidden), "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (inner, hidden), "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden),
        "d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(config.num_aux)}
    return shapes


def validate(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check tensors against the config. Raises CheckpointInvalid naming what differs and what a server would do."""
    parsed = parse_config(config)
    shapes = expected_shapes(parsed)
    unknown, missing = sorted(set(tensors) - set(shapes)), sorted(set(shapes) - set(tensors))
    _demand(not missing, f"tensors are missing: {', '.join(missing)}",
            "a server would leave them at random values; export the drafter again")
    _demand(not unknown, f"unknown tensors: {', '.join(unknown)}",
            "a server would skip them; export the drafter again, or set the flag in config.json that asks for them")
    for name, shape in shapes.items():
        _demand(tuple(tensors[name].shape) == shape,
                f"{name} has shape {tuple(tensors[name].shape)}, config.json implies {shape}",
                "config.json and model.safetensors belong to different drafters; export again")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    _demand(d2t.dtype == torch.int64, f"d2t is {d2t.dtype}, not int64", "export the drafter again")
    _demand(t2d.dtype == torch.bool, f"t2d is {t2d.dtype}, not bool", "export the drafter again")
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    _demand(len(dtypes) == 1 and dtypes <= set(_DTYPES.values()),
            f"parameters have dtypes {sorted(map(str, dtypes))}, not one of {sorted(_DTYPES)}",
            "convert all parameters to one of them")
    _validate_vocabulary(d2t, t2d)


def _validate_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    ids = d2t + torch.arange(d2t.numel())
    _demand(bool((ids >= 0).all() and (ids < t2d.numel()).all()),
            f"d2t leaves the target's vocabulary of {t2d.numel()}: ids {int(ids.min())} to {int(ids.max())}",
            "d2t holds offsets (target id minus draft id), not ids")
    _demand(bool((ids.diff() > 0).all()), "the target ids of d2t are not strictly ascending",
            "sort the draft vocabulary, and lm_head's rows with it")
    member = torch.zeros_like(t2d)
    member[ids] = True
    _demand(bool(torch.equal(member, t2d)), "t2d and d2t name different tokens", "export the drafter again")
