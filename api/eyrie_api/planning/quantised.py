"""How a quantised checkpoint stores its matrices: rules on config.json and on the headers of its files. Pure.

A matrix W [rows, columns] is stored as integers or 8-bit floats q, scales s and, in some forms, zero points z, from
which W = (q - z) * s is computed exactly but for the rounding of the result (`eyrie_workers.targets.dequantise`):

| `quant_method`     | stored for a matrix                                       | scales of                           |
|--------------------|-----------------------------------------------------------|-------------------------------------|
| fp8                | weight (e4m3), weight_scale_inv or weight_scale           | blocks (`weight_block_size`), or all|
| compressed-tensors | weight (e4m3 or int8), weight_scale, weight_zero_point    | blocks, groups, rows, or all        |
| the same, packed   | weight_packed, weight_scale, weight_zero_point, weight_g_idx | groups or rows                   |
| gptq               | qweight, qzeros, scales, g_idx: W transposed              | groups of columns                   |
| awq                | qweight, qzeros, scales: W transposed, values interleaved | groups of columns                   |
| mxfp4 (gpt-oss)    | X_blocks (e2m1), X_scales (e8m0) of all experts' X        | 32 columns                          |

Which matrices are quantised is read from what is stored, not from the lists of layers in config.json, of which every
method has its own grammar. An integer or 8-bit tensor that no rule here explains is refused: read without its scale it
would be another model, without an error.

Other methods are left to the serving engine (`sglang_support.QUANTISED_BY_SGLANG`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyrie_api.errors import UnsupportedTarget
from eyrie_api.planning.sglang_support import QUANTISED_BY_SGLANG

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that hold weights as they are."""

READ_METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
"""Values of `quant_method` whose weights are computed here."""

_WHOLE, _WORDS, _BYTES = ("F8_E4M3", "I8"), "I32", "U8"
_CT_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_PARTS = (("scale", "weight_scale"), ("scale", "weight_scale_inv"), ("scale", "scales"), ("zero", "weight_zero_point"),
          ("zero", "qzeros"), ("group", "weight_g_idx"), ("group", "g_idx"))
"""What is stored with the values of a matrix."""

_BESIDE = ("input_scale", "input_zero_point", "activation_scale", "weight_shape")
"""What engines that quantise activations store with the weights."""


@dataclass(frozen=True)
class Quantisation:
    """How the matrices of a checkpoint are quantised, as far as its config.json says."""

    method: str
    bits: int
    """Of one value."""

    block: tuple[int, int] | None = None
    """Rows and columns of one scale, where the scales are those of blocks."""

    zero_offset: int = 0
    """What is added to a stored zero point: 1 in the first format of GPTQ."""

    rounds_activations: bool = False
    """Whether engines also quantise what the matrices are multiplied with, which is not computed here."""


@dataclass(frozen=True)
class Matrix:
    """A weight of a checkpoint as a model has it: a matrix, or those of all experts."""

    shape: tuple[int, ...]
    parts: Mapping[str, str]
    """Names of the stored tensors by their part: `weight` alone where it is not quantised."""

    block: tuple[int, int] = (1, 1)
    """Rows and columns of one scale."""

    @property
    def is_quantised(self) -> bool:
        return len(self.parts) > 1


def quantisation_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of a config.json, or of its language model's part; None: not quantised."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text if isinstance(text, Mapping) else {}).get("quantization_config")
    if found is None or isinstance(found, Mapping):
        return found
    raise UnsupportedTarget(f"config.json: quantization_config is {found!r}, not an object", "download the model again")


def scale_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of one scale, which SGLang reads of `weight_block_size`; None: not in blocks."""
    data = quantisation_config(config)
    block = None if data is None else data.get("weight_block_size")
    return None if data is None or block is None else _block(data, block)


def stored_bits(config: Mapping[str, Any]) -> float | None:
    """Of a value of a quantised matrix with its share of a scale, by config.json alone; None where it does not say."""
    try:
        quantisation = read_quantisation(config)
    except UnsupportedTarget:
        return None
    if quantisation is None:
        return None
    rows, columns = (1, 32) if quantisation.method == "mxfp4" else quantisation.block or (1, 2**20)
    scale = {"mxfp4": 8, "fp8": 32}.get(quantisation.method, 16)
    return quantisation.bits + scale / (rows * columns)


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """How a target is quantised; None: not at all. Raises UnsupportedTarget for what is not computed here."""
    data = quantisation_config(config)
    if data is None:
        return None
    method = data.get("quant_method")
    if method == "fp8":
        if data.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn") or data.get("expert_dtype", "fp8") != "fp8":
            raise _refused(data, f"fmt {data.get('fmt')!r} with expert_dtype {data.get('expert_dtype')!r}", "e4m3")
        return Quantisation("fp8", 8, scale_block(config), rounds_activations=True)
    if method == "compressed-tensors":
        return _compressed_tensors(data)
    if method == "gptq":
        offsets, form = {"gptq": 1, "gptq_v2": 0}, data.get("checkpoint_format") or "gptq"
        if form not in offsets or data.get("is_marlin_format"):
            raise _refused(data, f"checkpoint_format {form!r} with is_marlin_format "
                           f"{data.get('is_marlin_format', False)}", ", ".join(offsets))
        return Quantisation("gptq", _packed_bits(data, data.get("bits")), _group(data), zero_offset=offsets[form])
    if method == "awq":
        if str(data.get("version") or "gemm").lower() != "gemm" or data.get("bits", data.get("w_bit")) != 4:
            raise _refused(data, f"version {data.get('version')!r} of {data.get('bits')!r} bits", "'gemm' of 4 bits")
        return Quantisation("awq", 4, _group(data))
    if method == "mxfp4":
        return Quantisation("mxfp4", 4)
    raise _refused(data, f"quant_method {method!r}", ", ".join(READ_METHODS))


def _compressed_tensors(data: Mapping[str, Any]) -> Quantisation:
    form = data.get("format")
    groups = [group for group in (data.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    formats = {form, *(group.get("format") or form for group in groups)}
    if not formats <= set(_CT_FORMATS):
        raise _refused(data, f"format {', '.join(sorted(map(str, formats)))}", ", ".join(_CT_FORMATS))
    sparsity = data.get("sparsity_config") or {}
    for field, is_set in (("sparsity_config", sparsity.get("format", "dense") != "dense"),
                          ("transform_config", data.get("transform_config")),
                          ("kv_cache_scheme", data.get("kv_cache_scheme"))):
        if is_set:
            raise _refused(data, field, "weights that are quantised alone")
    weights = [group.get("weights") for group in groups]
    read = {tuple(str(each.get(field)) for field in ("num_bits", "type", "block_structure", "group_size"))
            for each in weights if isinstance(each, Mapping)}
    if len(read) != 1:
        raise _refused(data, f"config_groups with {len(read)} forms of weights", "one form")
    first = next(each for each in weights if isinstance(each, Mapping))
    bits, kind, block = first.get("num_bits"), first.get("type", "int"), first.get("block_structure")
    if "pack-quantized" in formats:
        bits = _packed_bits(data, bits)
    elif bits != 8:
        raise _refused(data, f"weights of {bits!r} bits that are not packed", "8 bits")
    if kind not in ("int", "float"):
        raise _refused(data, f"weights of type {kind!r}", "int, float")
    return Quantisation("compressed-tensors", int(bits), _group(first) if block is None else _block(data, block),
                        rounds_activations=any(group.get("input_activations") for group in groups))


def _packed_bits(data: Mapping[str, Any], bits: Any) -> int:
    if bits not in (2, 4, 8):
        raise _refused(data, f"weights of {bits!r} bits", "2, 4 and 8 bits")
    return int(bits)


def _group(data: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block of a group of columns; None where a row has one scale, or the entry is not there."""
    size = data.get("group_size")
    return (1, size) if isinstance(size, int) and size > 0 else None


def _block(data: Mapping[str, Any], block: Any) -> tuple[int, int]:
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise _refused(data, f"blocks of {block!r}", "two positive sizes")
    return block[0], block[1]


def _refused(data: Mapping[str, Any], value: str, known: str) -> UnsupportedTarget:
    method = data.get("quant_method")
    return UnsupportedTarget(
        f"quantization_config: {value} is not computed by Eyrie or through transformers, only {known}",
        "give the unquantised model" + (
            f", or set engine to 'sglang', whose own states of {method} are captured" if method in QUANTISED_BY_SGLANG
            else ""))


# Headers.


def matrices(stored: Mapping[str, tuple[str, tuple[int, ...]]], quantisation: Quantisation) -> dict[str, Matrix]:
    """The weights of a checkpoint by the names that its model has for them.

    stored   type and shape of every tensor in the files

    Raises UnsupportedTarget for a tensor that is stored as an integer or in 8 bits and has no scale that fits.
    """
    whole: dict[str, Matrix] = {}
    used: set[str] = set()
    for name, (dtype, shape) in stored.items():
        if quantisation.method == "mxfp4" and name.endswith("_blocks"):  # [experts, rows, columns / 32, 16 bytes]
            base = name.removesuffix("_blocks")
            scales = f"{base}_scales"
            if dtype != _BYTES or shape[3:] != (16,) or stored.get(scales) != (_BYTES, shape[:3]):
                raise UnsupportedTarget(f"tensor {name!r} is stored as {dtype} {list(shape)} without scales of each "
                                        "32 values", "give the checkpoint as it was published")
            used |= {name, scales}
            whole[base] = Matrix((shape[0], 32 * shape[2], shape[1]), {"weight": name, "scale": scales})
            continue
        dense = _dense_shape(name.rpartition(".")[2], dtype, shape, quantisation)
        if dense is None:
            continue
        module = name.rpartition(".")[0]
        parts = {"weight": name} | {part: f"{module}.{last}" for part, last in _PARTS if f"{module}.{last}" in stored}
        if len(dense) != 2 or "scale" not in parts:
            raise UnsupportedTarget(
                f"tensor {name!r} is stored as {dtype} {list(shape)} without scales, or is no matrix",
                "give the unquantised model, or correct quantization_config")
        used |= {*parts.values()}
        whole[f"{module}.weight"] = Matrix(dense, parts, _scaled_by(parts, stored, dense, quantisation))
    for name, (dtype, shape) in stored.items():
        if name in used or (whole and name.rpartition(".")[2] in _BESIDE):
            continue
        if dtype not in FLOATS:
            raise UnsupportedTarget(
                f"tensor {name!r} is stored as {dtype}, which {quantisation.method} of this config.json does not "
                "explain", "give the unquantised model, or correct quantization_config")
        whole[name] = Matrix(shape, {"weight": name})
    return whole


def _dense_shape(last: str, dtype: str, shape: tuple[int, ...], quantisation: Quantisation) -> tuple[int, ...] | None:
    """Of the matrix whose values a tensor holds, by the last part of its name; None for any other tensor."""
    method, per_word = quantisation.method, 32 // quantisation.bits
    if last == "weight" and dtype in _WHOLE and method in ("fp8", "compressed-tensors"):
        return shape
    if dtype != _WORDS or len(shape) != 2:
        return None
    first, second = shape
    if last == "weight_packed" and method == "compressed-tensors":
        return first, second * per_word
    if last == "qweight" and method == "gptq":
        return second, first * per_word
    return (second * per_word, first) if last == "qweight" and method == "awq" else None


def _scaled_by(parts: Mapping[str, str], stored: Mapping[str, tuple[str, tuple[int, ...]]], shape: tuple[int, ...],
               quantisation: Quantisation) -> tuple[int, int]:
    """Rows and columns of a matrix that share a scale."""
    dtype, sizes = stored[parts["scale"]]
    per_word, is_transposed = 32 // quantisation.bits, quantisation.method in ("gptq", "awq")
    grid = (*(sizes[::-1] if is_transposed else sizes), 1, 1)[:2]
    spans = []
    for length, num, block in zip(shape, grid, quantisation.block or (None, None), strict=True):
        if block is not None:
            fits, span = num == -(-length // block), min(block, length)
        else:
            fits, span = num == 1 or (num > 0 and length % num == 0), length // max(num, 1)
        spans.append(span if fits else -1)
    if quantisation.block is None and spans[0] not in (1, shape[0]):
        spans[0] = -1
    zeros = sizes
    if is_transposed:
        zeros = (grid[1], grid[0] // per_word)
    elif stored[parts["weight"]][0] == _WORDS:
        zeros = (-(-grid[0] // per_word), grid[1])
    for part, fits in (("scale", dtype in FLOATS and len(sizes) <= 2 and -1 not in spans),
                       ("zero", "zero" not in parts or stored[parts["zero"]][1] == zeros),
                       ("group", "group" not in parts or stored[parts["group"]][1] == shape[1:])):
        if not fits:
            held = stored[parts[part]]
            raise UnsupportedTarget(
                f"tensor {parts[part]!r} of {held[0]} {list(held[1])} does not belong to a matrix of {list(shape)}"
                + (f" in blocks of {list(quantisation.block)}" if quantisation.block else ""),
                "give the unquantised model, or the config.json that was saved with these weights")
    return spans[0], spans[1]
