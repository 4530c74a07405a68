"""Writes a tiny target as the published quantised checkpoints are: names, types and shapes of each method.

The forms of compressed-tensors are written by that package, the others here. Embedding, norms and output matrix stay as
they are. Returned are the weights that were meant, for those who compare: rounded once, by the writer.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK, GROUP = 16, 8
_E4M3_MAX = 448.0

Stored = dict[str, Tensor]
Form = tuple[dict[str, Any], Callable[[Tensor], tuple[Stored, Tensor]]]
"""The quantization_config, and what a matrix [R, C] is stored as: the parts by name, and the values they stand for."""


def _fp8(scale_name: str, block: int | None, **static: float) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        size = block or max(rows, columns)
        scale = torch.empty(-(-rows // size), -(-columns // size))
        q, values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                here = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
                scale[i, j] = weight[here].abs().max() / _E4M3_MAX
                q[here] = (weight[here] / scale[i, j]).to(torch.float8_e4m3fn)
                values[here] = q[here].float() * scale[i, j]
        kept = scale if block else scale.reshape(1)
        return {"weight": q, scale_name: kept} | {name: torch.tensor(value) for name, value in static.items()}, values
    return store


def _packed(values: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """[., n] int64 -> [., n * bits / 32] int32; `order` names the value in each place of a word, from the low bits."""
    words = torch.zeros(values.shape[0], values.shape[1] // len(order), dtype=torch.int64)
    for place, value in enumerate(order):
        words |= values[:, value::len(order)] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


_IN_TURN, _AWQ = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)


def _four_bits(weight: Tensor, group_of_column: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [R, C], zero [R, G] and scale [R, G] float16, and the values that they stand for."""
    num_groups = int(group_of_column.max()) + 1
    scale, zero = torch.empty(weight.shape[0], num_groups), torch.full((weight.shape[0], num_groups), 8)
    for group in range(num_groups):
        part = weight[:, group_of_column == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale[:, group] = part.abs().amax(1) / 7 if symmetric else (high - low) / 15
        if not symmetric:
            zero[:, group] = (-low / scale[:, group]).round().long().clamp(1, 15)
    scale = scale.half().float()
    q = ((weight / scale[:, group_of_column]).round().long() + zero[:, group_of_column]).clamp(0, 15)
    return q, zero, scale, (q - zero[:, group_of_column]) * scale[:, group_of_column]


def _gptq(offset: int, *, symmetric: bool, in_order: bool = True) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        columns = torch.arange(weight.shape[1]) // GROUP
        if not in_order:  # act-order: columns of a group are not next to each other
            columns = columns[torch.randperm(len(columns), generator=torch.Generator().manual_seed(len(columns)))]
        q, zero, scale, values = _four_bits(weight, columns, symmetric=symmetric)
        return {"qweight": _packed(q, 4, _IN_TURN).T.contiguous(),
                "qzeros": _packed((zero - offset).T.contiguous(), 4, _IN_TURN),
                "scales": scale.T.contiguous().half(), "g_idx": columns.to(torch.int32)}, values
    return store


def _awq(weight: Tensor) -> tuple[Stored, Tensor]:
    q, zero, scale, values = _four_bits(weight, torch.arange(weight.shape[1]) // GROUP, symmetric=False)
    return {"qweight": _packed(q.T.contiguous(), 4, _AWQ), "qzeros": _packed(zero.T.contiguous(), 4, _AWQ),
            "scales": scale.T.contiguous().half()}, values


def experts_in_mxfp4(weights: Tensor) -> tuple[Stored, Tensor]:
    """[experts, C, R] -> blocks and scales as gpt-oss stores them, and the values that they stand for."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = weights.float().transpose(1, 2).unflatten(2, (-1, 32))
    scale = (blocks.abs().amax(-1) / 6).log2().ceil()
    small = blocks / scale.exp2().unsqueeze(-1)
    place = (small.abs().unsqueeze(-1) - steps).abs().argmin(-1)
    halves = (place + 8 * (small < 0)).to(torch.uint8).unflatten(-1, (16, 2))
    values = steps[place] * small.sign() * scale.exp2().unsqueeze(-1)
    return {"_blocks": halves[..., 0] | halves[..., 1] << 4, "_scales": (scale + 127).to(torch.uint8)}, (
        values.flatten(2).transpose(1, 2).contiguous())


def _compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Form:
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
              "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": {
                  "targets": ["Linear"], "weights": weights, "input_activations": activations}}}

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(form)
        rows, columns = weight.shape
        if args.strategy == "block":
            high, wide = args.block_structure
            tiles = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high)).unflatten(
                1, (-1, wide)).unflatten(0, (-1, high))
            low, top = tiles.amin((1, 3)), tiles.amax((1, 3))
        else:
            span = {"tensor": rows * columns, "channel": columns, "group": args.group_size}[args.strategy]
            tiles = weight.reshape(-1, span)
            low, top = (edge.reshape(1 if args.strategy == "tensor" else rows, -1) for edge in (
                tiles.amin(1), tiles.amax(1)))
        scale, zero = calculate_qparams(low, top, args)
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        stored = compressor.compress({"weight": weight, "weight_scale": scale.bfloat16().float(),
                                      "weight_zero_point": zero}, scheme)
        values = compressor.decompress(stored, scheme)["weight"].float()
        return {name: value.contiguous() for name, value in stored.items()}, values

    return config, store


_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def _weights(bits: int, kind: str, strategy: str, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}


FORMS: Mapping[str, Form] = {
    "fp8-block": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                   "weight_block_size": [BLOCK, BLOCK]}, _fp8("weight_scale_inv", BLOCK)),
    "fp8-block-uneven": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                          "weight_block_size": [24, 24]}, _fp8("weight_scale_inv", 24)),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, _fp8("weight_scale", None, input_scale=1.0)),
    "ct-fp8-channel": _compressed("float-quantized", _weights(8, "float", "channel"), _TOKENS),
    "ct-fp8-block": _compressed("float-quantized", _weights(8, "float", "block", block_structure=[24, 16]), _TOKENS),
    "ct-int8": _compressed("int-quantized", _weights(8, "int", "channel"), {**_TOKENS, "type": "int"}),
    "ct-int8-tensor": _compressed("int-quantized", _weights(8, "int", "tensor", symmetric=False)),
    "ct-int4": _compressed("pack-quantized", _weights(4, "int", "group", group_size=GROUP)),
    "ct-int4-zeros": _compressed("pack-quantized", _weights(4, "int", "group", symmetric=False, group_size=GROUP)),
    "ct-int8-packed": _compressed("pack-quantized", _weights(8, "int", "channel")),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
              "checkpoint_format": "gptq"}, _gptq(1, symmetric=True)),
    "gptq-v2-act-order": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False,
                           "checkpoint_format": "gptq_v2"}, _gptq(0, symmetric=False, in_order=False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, _awq),
}


MXFP4 = "mxfp4"
"""Of gpt-oss alone: the experts are quantised, and nothing else."""


def quantised(source: Path, out: Path, form: str) -> dict[str, Tensor]:
    """Write the target in `source` to `out` with quantised matrices; return every weight of it as it is meant."""
    settings, store = ({"quant_method": MXFP4}, experts_in_mxfp4) if form == MXFP4 else FORMS[form]
    shutil.copytree(source, out)
    weights, meant = Stored(), Stored()
    for name, value in load_file(source / "model.safetensors").items():
        meant[name] = value
        if name.endswith("_proj" if form == MXFP4 else "_proj.weight"):
            parts, meant[name] = store(value.float())
            weights |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
        else:
            weights[name] = value
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return meant
