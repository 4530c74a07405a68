"""Save and load EAGLE-3 drafters in the format of SGLang and vLLM.

The contract of such a directory is `drafters.eagle3.validation`: saving and loading refuse a drafter with errors. Names
and shapes of the tensors are in `directory_format`.

The engines number aux layers differently. Eyrie uses the index into Hugging Face `hidden_states` (0 = embeddings).
SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids`, for most targets as "output of layer v": index - 1. vLLM
reads the key of the same name at the top level, as "input of layer k": index. The config contains both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyrie_api.decisions.sglang_support import captured_inputs, sglang_layer_ids
from eyrie_api.errors import UnsupportedTarget
from eyrie_workers.drafters.checkpoint.card import Card, TargetIdentity, read_card
from eyrie_workers.drafters.checkpoint.files import (
    CheckpointInvalid,
    as_stored,
    read_config,
    read_tensors,
    rope_json,
    write_checkpoint,
)
from eyrie_workers.drafters.eagle3.directory_format import (
    ARCHITECTURE,
    LAYER_IDS,
    MAPS,
    canonical_name,
    nested,
    shape_of,
)
from eyrie_workers.drafters.eagle3.model import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.eagle3.validation import validate_files
from eyrie_workers.drafters.validation.validator import DrafterFiles
from eyrie_workers.targets.config import parse_drafter_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary


def save_drafter(directory: Path, drafter: Eagle3Drafter, *, dtype: str = "float32", card: Card | None = None) -> None:
    """Write a drafter to `directory`, replacing an existing one, atomically. Raises CheckpointInvalid before writing.

    card   its provenance; names the target architecture that the layer ids are written for. None: no card is written.
    """
    whole = drafter.config.draft_vocab_size == drafter.config.vocab_size
    tensors = as_stored({name: tensor for name, tensor in drafter.state_dict().items()
                         if not (whole and name in MAPS)}, dtype)
    config = config_json(drafter.config, dtype, card.target if card else None)
    _refuse_errors(directory, DrafterFiles(config, tensors, card))
    write_checkpoint(directory, config, tensors, card)


def load_drafter(directory: Path, dtype: torch.dtype | None = None) -> Eagle3Drafter:
    """Read and validate a drafter. Raises ArtifactMissing when a file is missing, CheckpointInvalid when it breaks the
    contract or is a variant Eyrie's engine does not compute. `dtype` converts the parameters; default: as stored."""
    config, stored = read_config(directory), read_tensors(directory)
    _refuse_errors(directory, DrafterFiles(config, stored, read_card(directory)))
    tensors = {canonical_name(name): tensor for name, tensor in stored.items()}
    parsed = parse_config(config)
    ids = tensors["d2t"] + torch.arange(parsed.draft_vocab_size) if "d2t" in tensors else torch.arange(
        parsed.vocab_size)
    vocabulary = DraftVocabulary(ids, parsed.vocab_size)
    drafter = Eagle3Drafter(parsed, vocabulary)
    drafter.to(tensors["fc.weight"].dtype)
    tensors.pop("embed_tokens.weight", None)  # decoding uses the target's, as the engines do
    drafter.load_state_dict(tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, strict=True)
    return drafter.to(dtype) if dtype is not None else drafter


def _refuse_errors(directory: Path, files: DrafterFiles) -> None:
    faults = [finding for finding in validate_files(files) if finding.severity == "error"]
    if faults:
        raise CheckpointInvalid(f"drafter {directory.name}: " + "; ".join(fault.what for fault in faults),
                                faults[0].hint)


def config_json(config: Eagle3Config, dtype: str, target: TargetIdentity | None = None) -> dict[str, Any]:
    """The `config.json` of a drafter for a target; without one, with the layer ids of most architectures.

    Raises InvalidInput when SGLang cannot capture these layers for this target.
    """
    eos = list(config.eos_token_ids)
    ids = [layer - 1 for layer in config.aux_layers] if target is None else list(
        sglang_layer_ids(target.architecture, target.num_layers, config.aux_layers))
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURE], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size, "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_eps, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "rope_theta": config.rope.theta, "rope_parameters": rope_json(config.rope),
        "num_aux_hidden_states": config.num_aux, LAYER_IDS: list(config.aux_layers),
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: ids},
        "norm_before_residual": False,
        "bos_token_id": config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": dtype, "dtype": dtype,
    }
    if config.rope.kind != "default":
        written["rope_scaling"] = rope_json(config.rope)
    for flag in ("fc_norm", "norm_output"):
        if getattr(config, flag):
            written[flag] = True
    if config.norm_before_fc:  # SGLang and vLLM read the inner key first; trainers read the outer
        written["norm_before_fc"] = written["eagle_config"]["norm_before_fc"] = True
    if config.sliding_window is not None:
        written |= {"sliding_window": config.sliding_window, "layer_types": ["sliding_attention"]}
    return written


def parse_config(found: Mapping[str, Any]) -> Eagle3Config:
    """An `Eagle3Config` from a `config.json` without errors. Raises CheckpointInvalid for variants that Eyrie's engine
    does not compute."""
    shape = shape_of(found)
    computed = shape.num_layers == 1 and shape.target_hidden_size == shape.hidden_size and not shape.fc_bias
    if not computed or found["draft_vocab_size"] is None:
        raise CheckpointInvalid(
            "Eyrie's engine computes drafters of one layer, of their target's hidden size, without bias and with an "
            "output matrix of their own", "serve and measure this one in SGLang")
    try:
        decoder = parse_drafter_config(found)
    except UnsupportedTarget as error:
        raise CheckpointInvalid(f"drafter checkpoint: {error.message}", error.hint) from error
    top, inner = found.get(LAYER_IDS), nested(found)[LAYER_IDS]
    return Eagle3Config(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        aux_layers=tuple(top) if top is not None else captured_inputs("", inner),
        rms_eps=decoder.rms_eps, rope=decoder.rope, max_position_embeddings=decoder.max_position_embeddings,
        eos_token_ids=decoder.eos_token_ids, bos_token_id=found.get("bos_token_id"), fc_norm=shape.fc_norm,
        norm_before_fc=shape.norm_before_fc, norm_output=bool(found.get("norm_output", False)),
        sliding_window=found.get("sliding_window"))
