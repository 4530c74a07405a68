"""The files of a target, as far as they can be checked without loading a model: weights, tokenizer and chat template.

Weights are checked by their headers: which tensors there are, of which shape and type. A safetensors file begins with
its header's length (8 bytes, little-endian) and the header, a JSON object of tensors with `dtype`, `shape` and
`data_offsets`; no weight is read. The names and shapes are those that the reference forward pass reads
(`eyrie_workers.targets.model`). A tensor that it would not read is refused as well: the answers would be those of
another model.

`tokenizer.json` is read as JSON: its ids against the model's vocabulary, and the special tokens that other files name
against its tokens. The chat template renders a few short conversations, in a process of its own
(`eyrie_api.chat_template`).
"""

# H hidden, V vocabulary, I intermediate, Q and G query and key-value heads, E head dimension

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from eyrie_api.chat_template import Form, Prompt, probe_apart, read_sources, special_tokens
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.data_files import open_regular
from eyrie_api.errors import NoChatTemplate, UnsupportedTarget
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.quantised import (
    FLOATS,
    Matrix,
    Quantisation,
    matrices,
    quantisation_config,
    read_quantisation,
    stored_bits,
)
from eyrie_api.planning.sglang_support import MTP_LAYER
from eyrie_api.planning.target_config import biases, computed_by_reference, end_token_ids, language_model

GIT_LFS = b"version https://git-lfs"
LFS_HINT = "run `git lfs pull` where it was cloned, or download it with `hf download`"
_MAX_JSON_BYTES = 1 << 28
"""The largest tokenizers are 40 MB."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_COMPARED_PLACES, _COMPARED_BYTES = 64, 1 << 14
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors that old checkpoints store and a forward pass computes."""

_READ_BY_DRAFTERS = re.compile(r"(^|\.)(embed_tokens|embeddings|embed_in|wte|word_embeddings|lm_head|embed_out)\.\w+$")
"""Names of embedding and output matrix, and of what a quantised one is stored in."""

_MIXTURES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe")
"""Values of `model_type` whose parameters `TargetFacts` counts as their classes have them, without layers for MTP."""

_LONGEST_NAME = 255  # bytes of a file's name; the system call fails for longer ones
_SAVE = "save the model again with save_pretrained, or download it again"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading. Raises UnsupportedTarget for another one, or one that cannot be read."""
    if path.exists() and not path.is_file():  # opening a FIFO waits for its other end, a device may never end
        raise UnsupportedTarget(f"{path} is not a regular file", "put the file itself there, or a link to it")
    try:
        with open_regular(path) as file:
            if file.read(len(GIT_LFS)) == GIT_LFS:
                raise UnsupportedTarget(f"{path} is a git-LFS pointer, not the file itself", LFS_HINT)
            file.seek(0)
            yield file
    except OSError as error:
        raise UnsupportedTarget(f"{path} cannot be read: {error.strerror}",
                                "make it readable for the server") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UnsupportedTarget for a file that is not one or cannot be read."""
    with _opened(path) as file:
        data = file.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise UnsupportedTarget(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB", "save the model again")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnsupportedTarget(f"{path} is not JSON: {error}", "download the model again") from None
    if not isinstance(value, dict):
        raise UnsupportedTarget(f"{path} is not a JSON object", "download the model again")
    return value


# Weights.


@dataclass(frozen=True)
class StoredTensor:
    """An entry of a header."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    """Of its values in the file."""

    size: int
    """Bytes of its values."""


def check_weights(directory: Path, config: Mapping[str, Any], facts: TargetFacts, *, known: bool,
                  computed_here: bool = True) -> None:
    """Check that the directory holds the weights of `config`. Raises UnsupportedTarget, naming file or tensor.

    known           whether the tensors of this architecture are known here; of the others, dtypes alone are checked
    computed_here   whether Eyrie or transformers computes the target; of a quantised one that SGLang alone computes,
                    only what drafters read is checked
    """
    if (directory / "adapter_config.json").is_file():
        raise UnsupportedTarget(
            f"target directory {directory} holds an adapter (adapter_config.json), which is not applied: drafters "
            "would be trained for the model without it",
            "merge it into the weights (peft: merge_and_unload, then save_pretrained) and give the merged model")
    stored = stored_tensors(directory)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    wanted = expected_tensors(config, facts) if known else {}
    is_quantised = quantisation_config(config) is not None
    for name, tensor in stored.items():
        if tensor.dtype in FLOATS:
            continue
        if is_quantised and _READ_BY_DRAFTERS.search(name):
            raise UnsupportedTarget(f"tensor {name!r} in {directory} is stored as {tensor.dtype}: drafters are trained "
                                    "with the values of embedding and output matrix, which are read as they are stored",
                                    "give a model whose embedding and output matrix are not quantised")
        if not is_quantised and (name in wanted or (not known and name.endswith(".weight"))):
            raise UnsupportedTarget(f"tensor {name!r} in {directory} is stored as {tensor.dtype}, and config.json has "
                                    "no quantization_config that says how", "give the unquantised model, or the "
                                    "config.json that was saved with these weights")
    if is_quantised and not computed_here:
        return
    quantisation = read_quantisation(config)
    if quantisation is not None:
        shapes = {name: matrix.shape for name, matrix in dense_matrices(directory, quantisation).items()}
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if facts.tie_word_embeddings and head is not None and embedding is not None and not _begin_alike(head, embedding):
        raise UnsupportedTarget(
            f"{directory}: config.json says that the output matrix is the embedding (tie_word_embeddings), and the "
            "weights hold an lm_head.weight of other values, which would be ignored",
            "set tie_word_embeddings to false in config.json if the model was trained with its own output matrix, else "
            "save the weights again without lm_head.weight")
    if not known:
        return
    for name, shape in wanted.items():
        if name not in shapes:
            raise UnsupportedTarget(f"the weights in {directory} have no tensor {name!r}, which config.json implies",
                                    _SAVE)
        if shapes[name] != shape:
            raise UnsupportedTarget(f"tensor {name!r} in {directory} has shape {list(shapes[name])}, config.json "
                                    f"implies {list(shape)}", "give the config.json that was saved with these weights")
    # GPTQ's writer stores a bias of zeros for every layer, also for those that have none.
    others = [name for name in shapes if name not in wanted and not _NOT_WEIGHTS.search(name)
              and not (facts.tie_word_embeddings and name == "lm_head.weight")
              and not (name.startswith(MTP_LAYER) and config.get("architectures") == [FAMILIES["mtp"].architecture])
              and not (quantisation is not None and name.endswith(".bias") and _is_zero(stored[name]))]
    if others:
        raise UnsupportedTarget(f"{len(others)} tensors in {directory} are no part of the model that config.json "
                                f"describes, the first is {min(others)!r}: they would be ignored",
                                "correct config.json, or merge and save the model with save_pretrained")


def _is_zero(tensor: StoredTensor) -> bool:
    with open_regular(tensor.file) as file:
        file.seek(tensor.begin)
        return not any(file.read(tensor.size))


def _begin_alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors agree in type, shape and some of their values. A stage compares all (`targets.loading`)."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    places = range(0, one.size, max(one.size // _COMPARED_PLACES, 1))
    with open_regular(one.file) as first, open_regular(other.file) as second:
        for place in places:
            first.seek(one.begin + place)
            second.seek(other.begin + place)
            most = min(_COMPARED_BYTES, one.size - place)
            if first.read(most) != second.read(most):
                return False
    return True


def expected_tensors(config: Mapping[str, Any], facts: TargetFacts) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a supported model."""
    family, (attention_bias, output_bias, mlp_bias) = config.get("model_type"), biases(config)
    hidden, inner = facts.hidden_size, facts.intermediate_size
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    post_norm = family in ("olmo2", "olmo3")
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.qkv_proj.weight": (queries + 2 * keys, hidden), "mlp.gate_up_proj.weight": (2 * inner, hidden),
    } if family == "phi3" else {
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden), "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden)}
    layer |= {
        "self_attn.o_proj.weight": (hidden, queries), "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight" if post_norm else "input_layernorm.weight": (hidden,)}
    if post_norm:
        layer |= {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}
    elif family == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (facts.head_dim,) for name in "qk"}
    if attention_bias:
        layer |= {"self_attn.q_proj.bias": (queries,), "self_attn.k_proj.bias": (keys,),
                  "self_attn.v_proj.bias": (keys,)}
    if output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if mlp_bias:
        layer |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    whole: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (facts.vocab_size, hidden),
                                         "model.norm.weight": (hidden,)}
    if not facts.tie_word_embeddings:
        whole["lm_head.weight"] = (facts.vocab_size, hidden)
    return whole | {f"model.layers.{index}.{name}": shape for index in range(facts.num_layers)
                    for name, shape in layer.items()}


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The headers of a target's weights, by name. Raises UnsupportedTarget."""
    index = directory / INDEX
    if not index.exists():
        if (directory / SINGLE).exists():
            return read_header(directory / SINGLE)
        others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf", "*.safetensors", "*.h5")
                        for file in directory.glob(pattern))
        if others:
            raise UnsupportedTarget(
                f"target directory {directory} has neither {SINGLE} nor its index, only {', '.join(others[:3])}",
                "save the model with save_pretrained(..., safe_serialization=True)")
        raise UnsupportedTarget(f"target directory {directory} has no weights ({SINGLE} or {INDEX})",
                                "copy the weight files next to its config.json")
    listed = indexed_files(index)
    files = sorted(set(listed.values()))
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise UnsupportedTarget(f"{len(missing)} of {len(files)} weight files that {index} lists are missing, the "
                                f"first is {missing[0]}", "finish the download (`hf download` resumes it)")
    held = {name: read_header(directory / name) for name in files}
    lost = [name for name, file in listed.items() if name not in held[file]]
    if lost:
        raise UnsupportedTarget(f"{index} lists tensor {lost[0]!r} in {listed[lost[0]]}, which does not hold it", _SAVE)
    return {name: tensor for file in files for name, tensor in held[file].items()}


def indexed_files(index: Path) -> dict[str, str]:
    """Names of files in the directory of an index of weights, by tensor. Raises UnsupportedTarget."""
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(
            isinstance(name, str) and Path(name).name == name and len(name.encode(errors="replace")) <= _LONGEST_NAME
            for name in listed.values()):
        raise UnsupportedTarget(f"{index} has no weight_map of tensor names to files", _SAVE)
    return listed


def dense_matrices(directory: Path, quantisation: Quantisation) -> dict[str, Matrix]:
    """The weights of a quantised checkpoint by the names that its model has for them. Raises UnsupportedTarget."""
    return matrices({name: (tensor.dtype, tensor.shape) for name, tensor in stored_tensors(directory).items()},
                    quantisation)


def weights_are_here(directory: Path) -> bool:
    """Whether the directory holds all weight files that it lists."""
    index = directory / INDEX
    if not index.is_file():
        return (directory / SINGLE).is_file()
    try:
        return all((directory / name).is_file() for name in set(indexed_files(index).values()))
    except UnsupportedTarget:
        return False


def served_bytes(directory: Path, config: Mapping[str, Any], facts: TargetFacts, dtype: str,
                 engine: EngineKind) -> int | None:
    """Bytes of the target's weights in the dtype of the job; quantised ones as SGLang loads them: those of the files,
    else of their index, else estimated from config.json. None where none of them says: an estimate for an unknown
    architecture may be too high."""
    as_stored = engine == "sglang" and quantisation_config(config) is not None
    if computed_by_reference(config) and not as_stored:
        return sum(prod(shape) for shape in expected_tensors(config, facts).values()) * ELEMENT_BYTES[dtype]
    if quantisation_config(config) is not None and not as_stored:
        return facts.parameters * ELEMENT_BYTES[dtype]
    index, stored = directory / INDEX, None
    if weights_are_here(directory):
        names = set(indexed_files(index).values()) if index.is_file() else {SINGLE}
        stored = sum((directory / name).stat().st_size for name in names)
    else:  # what the index says of files that are not here
        described = read_object(index).get("metadata") if index.is_file() else None
        total = described.get("total_size") if isinstance(described, dict) else None
        if isinstance(total, int | float) and total > 0:
            stored = int(total)
    if stored is None:
        return estimated_bytes(config, facts, dtype, as_stored=as_stored)
    element = ELEMENT_BYTES.get(facts.dtype or "")
    return stored if as_stored else None if element is None else stored * ELEMENT_BYTES[dtype] // element


def estimated_bytes(config: Mapping[str, Any], facts: TargetFacts, dtype: str, *, as_stored: bool) -> int | None:
    """Bytes of the weights by config.json alone, quantised ones `as_stored`; None for an unknown architecture."""
    bits = stored_bits(config) if as_stored else 8.0 * ELEMENT_BYTES[dtype]
    if bits is None or not (computed_by_reference(config) or language_model(config).get("model_type") in _MIXTURES):
        return None
    whole = facts.embedding_parameters
    return round(whole * ELEMENT_BYTES[dtype] + (facts.parameters - whole) * bits / 8)


def dense_bytes(directory: Path, config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of the weights in a dtype, where Eyrie or transformers compute the target: also of a quantised one every
    value. Raises UnsupportedTarget."""
    quantisation = read_quantisation(config)
    shapes = [tensor.shape for tensor in stored_tensors(directory).values()] if quantisation is None else [
        matrix.shape for matrix in dense_matrices(directory, quantisation).values()]
    return sum(map(prod, shapes)) * ELEMENT_BYTES[dtype]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises UnsupportedTarget for a truncated or another file."""
    try:
        with _opened(path) as file:
            size, first = path.stat().st_size, file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise UnsupportedTarget(f"{path} is truncated or not a safetensors file", "download it again")
            header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, after = entry["data_offsets"]
                tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), path, 8 + length + begin,
                                             after - begin)
        end = max((int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"),
                  default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, ArithmeticError):
        raise UnsupportedTarget(f"{path} has no safetensors header", "download it again") from None
    if size != 8 + length + end:
        raise UnsupportedTarget(f"{path} has {size} bytes, its header says {8 + length + end}: the file is truncated",
                                "download it again")
    return tensors


# Tokenizer and chat template.


def check_tokenizer(directory: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[str, ...]:
    """Check `tokenizer.json` and what the chat template does with a conversation; return warnings for the plan. Raises
    NoChatTemplate or UnsupportedTarget, naming the file and the value."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedTarget(
            f"target directory {directory} has no tokenizer.json, which is the only form of a tokenizer that is read",
            "copy it next to config.json; of a tokenizer.model, make it with transformers: "
            "AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR)")
    sources, special = _template_files(directory)
    if not sources:
        raise NoChatTemplate(f"target directory {directory} has a tokenizer without a chat template",
                             "use the chat model rather than the base model, or add chat_template.jinja")
    ends = end_token_ids(config, _optional(directory / "generation_config.json"))
    beyond = [token for token in ends if not 0 <= token < vocab_size]
    if beyond:
        raise UnsupportedTarget(f"target directory {directory}: eos_token_id {beyond[0]} is not in the model's "
                                f"vocabulary of {vocab_size}", "correct config.json and generation_config.json")
    tokens, special_names = _token_ids(file)
    named = {kind: special[kind] for kind in ("bos_token", "eos_token") if kind in special}
    unknown = sorted(kind for kind, token in named.items() if token not in tokens)
    if unknown:
        raise UnsupportedTarget(f"target directory {directory}: {unknown[0]} {named[unknown[0]]!r} is not a token of "
                                "tokenizer.json", "save the tokenizer again, or correct tokenizer_config.json")
    if not ends and "eos_token" not in named:
        raise UnsupportedTarget(f"target directory {directory} names no end-of-sequence token, so no answer would end",
                                "set eos_token_id in generation_config.json to the token that ends an answer")
    form, _ = _probed(json.dumps([sources, special, []]))
    lost = [role for role in ("system", "user", "assistant") if role in form.lost]
    if lost:
        raise NoChatTemplate(f"the chat template of {directory} loses the text of {' and '.join(lost)} in every form "
                             "of a conversation: it would not reach the prompt", "restore the model's own template")
    warnings = [f"the chat template has no place for {role}: conversations with them are refused"
                for role in form.lost]
    outside = sorted((number, token) for token, number in tokens.items() if number >= vocab_size)
    if outside:
        number, token = outside[0]
        warnings.append(f"tokens of tokenizer.json without an embedding: {len(outside)} (the first is {token!r} with "
                        f"id {number} of {vocab_size}); rows and requests whose text has one are refused")
    # The first special token in what follows an answer; none where the template writes none.
    places = {form.turn_end.find(token): token for token in sorted(special_names, key=len)
              if token and token in form.turn_end}
    end = places[min(places)] if places else None
    if end is not None and tokens[end] not in ends and end != named.get("eos_token"):
        warnings.append(f"the chat template ends an answer with {end!r}, which is no end token of the model: answers "
                        f"would run to their limit; add its id {tokens[end]} to eos_token_id in generation_config.json")
    return tuple(warnings)


def template_refusals(directory: Path, prompts: Sequence[Prompt]) -> list[str]:
    """For each prompt why the target's chat template refuses it, or loses its text; empty where it does not. Raises
    NoChatTemplate or UnsupportedTarget for a template that cannot be read, or not be rendered in time."""
    sources, special = _template_files(directory)
    return _probed(json.dumps([sources, special, prompts]))[1] if sources else [""] * len(prompts)


def _template_files(directory: Path) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Sources of the chat templates, and the special tokens."""
    settings = _optional(directory / "tokenizer_config.json")
    return (read_sources(directory, settings, _optional(directory / "chat_template.json")),
            special_tokens(_optional(directory / "special_tokens_map.json"), settings))


def _optional(path: Path) -> dict[str, Any]:
    """`read_object`; empty where there is no file."""
    return read_object(path) if path.is_file() else {}


@lru_cache(maxsize=16)
def _probed(given: str) -> tuple[Form, list[str]]:
    """A plan and the job that follows it name the same target and data; a process is started for the first."""
    return probe_apart(*json.loads(given))


def _token_ids(path: Path) -> tuple[dict[str, int], list[str]]:
    """Ids of the tokens, the added ones included, and the special tokens."""
    document = read_object(path)
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        tokens = {str(token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: pairs of token and score, in order
        tokens = {str(entry[0]): number for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    else:
        raise UnsupportedTarget(f"{path} has no vocabulary (model.vocab)", "save the tokenizer again")
    try:
        added = [(str(token["content"]), int(token["id"]), bool(token.get("special")))
                 for token in document.get("added_tokens") or []]
    except (TypeError, KeyError, ValueError):
        raise UnsupportedTarget(f"{path}: added_tokens is not a list of tokens with content and id",
                                "save the tokenizer again") from None
    return (tokens | {name: number for name, number, _ in added}, [name for name, _, is_special in added if is_special])
