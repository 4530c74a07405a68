"""Codecs for hidden states in plain tensor operations, and the tensors of blocks that they encode to.

    float32, bfloat16   unchanged
    int8                q = round(x / s) in -127 .. 127,   s = max |x| / 127 per token and layer
    fp8                 e4m3 of x / s,                     s = max |x| / 448 per token and layer
    int4                x ~ q s, q in -8 .. 7,             s = (x of largest |x|) / -8 per block of 32 values

Scales are bfloat16, and codes are computed with the rounded scale, so its rounding adds no error. Those of int8 and fp8
are rounded up, so that no code overflows. An all-zero vector has scale 0 and decodes to zeros.

int4's scale has a sign: the value of largest magnitude always has code -8, so that all 16 levels are used and 0 is one
of them (the scheme of ggml's Q4_0). Levels without 0 have the same spacing, but next to an outlier of 1000 they decode
every small value to an error of 67; 0 is the better value for those. Blocks are small because residual streams have
such outliers: an outlier affects only the 31 other values of its block. A Hadamard rotation would spread it over all H
values instead (`benchmarks/codecs` prints both errors).

A single scale for H values has the same problem with outliers at a larger scale: `zero_share` measures it, and capture
warns.

Decoding writes into the caller's buffer, which may be a slice of a batch; it needs no temporary of its width except one
of codes for int4 and fp8. fp8 is decoded by shifting its bits into a float16, whose value is then 2^-8 of the right
one: PyTorch's own conversion on the CPU is 3 times slower than a table, and the shift is faster than both.

`encode_states` works on the device that holds the states and on all tokens of a forward pass at once; `block_of` cuts
its result into blocks, which copies nothing. The store writes these tensors and reads them back; the stream decodes
them directly (`hidden_states.streaming`), so a drafter is trained on the same numbers either way.

Legend: N tokens (vectors of any leading shape), M supervised positions of them, A aux layers, H hidden, K top-k
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eyrie_api.contract.capture import BLOCK_VALUES, Codec, final_codec
from eyrie_workers.hidden_states.shard_format import StoreFormat, TopKLogits, block_sections

_HALF = BLOCK_VALUES // 2
_INT8_MAX, _FP8_MAX, _INT4_LEVELS = 127.0, 448.0, 8.0
_FP8_SHIFT = 2.0**8  # float16 has exponent bias 15, e4m3 has 7


def encode(codec: Codec, values_NH: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of finite states [..., H] of any float dtype; scales are None where the codec has none."""
    if codec == "float32":
        return values_NH.to(torch.float32), None
    if codec == "bfloat16":
        return values_NH.to(torch.bfloat16), None
    values = values_NH.to(torch.float32)
    if codec == "int4":
        # The low 4 bits of a byte hold value i of the first half of its block, the high 4 bits value i of the second.
        short = -values.shape[-1] % BLOCK_VALUES
        blocks = torch.nn.functional.pad(values, (0, short)).unflatten(-1, (-1, BLOCK_VALUES))
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = (largest.squeeze(-1) / -_INT4_LEVELS).to(torch.bfloat16)
        wide = scale.to(torch.float32).unsqueeze(-1)
        inverse = torch.where(wide != 0, 1.0 / wide, 0.0)
        levels = (blocks * inverse).round_().add_(_INT4_LEVELS).clamp_(0, 15).to(torch.uint8)
        low, high = levels.split(_HALF, -1)
        return (low | high << 4).flatten(-2), scale
    scale_N, inverse_N1 = _scales(values, _INT8_MAX if codec == "int8" else _FP8_MAX)
    scaled = values * inverse_N1
    if codec == "int8":
        return scaled.round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale_N
    return scaled.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.int8), scale_N


def decode_into(codec: Codec, codes: Tensor, scales: Tensor | None, out_NH: Tensor) -> None:
    """Decode codes and scales (as `encode` returns them) into `out_NH` [..., H], float32 or bfloat16."""
    if codec in ("float32", "bfloat16"):
        out_NH.copy_(codes)
        return
    assert scales is not None
    if codec == "int8":
        out_NH.copy_(codes)
        out_NH.mul_(scales.unsqueeze(-1))
    elif codec == "fp8":
        # Sign-extended, shifted by 7: sign at 15, e4m3's seven bits at 13..7; bit 14 is a copy of the sign and is
        # cleared.
        half = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
        out_NH.copy_(half.view(torch.float16))
        out_NH.mul_((scales.to(torch.float32) * _FP8_SHIFT).unsqueeze(-1).to(out_NH.dtype))
    else:
        _decode_int4(codes, scales, out_NH)


def _scales(values_NH: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """[N] bfloat16 scales, never too small, and their float32 inverses [N, 1], 0 where a vector is all zero."""
    exact = values_NH.abs().amax(-1) / largest
    scale = exact.to(torch.bfloat16)
    # The next larger bfloat16: bit patterns of positive floats are ordered as integers.
    up = (scale.view(torch.int16) + 1).view(torch.bfloat16)
    scale = torch.where(scale.to(torch.float32) < exact, up, scale)
    wide = scale.to(torch.float32).unsqueeze(-1)
    return scale, torch.where(wide > 0, 1.0 / wide, 0.0)


def _decode_int4(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    hidden = out.shape[-1]
    if hidden % BLOCK_VALUES:
        whole = out.new_empty(*out.shape[:-1], scales.shape[-1] * BLOCK_VALUES)
        _decode_int4(codes, scales, whole)
        out.copy_(whole[..., :hidden])
        return
    packed, blocks = codes.unflatten(-1, (-1, _HALF)), out.unflatten(-1, (-1, BLOCK_VALUES))
    blocks[..., :_HALF].copy_(packed & 15)
    blocks[..., _HALF:].copy_(packed >> 4)
    blocks.sub_(_INT4_LEVELS).mul_(scales.unsqueeze(-1))


def zero_share(values_NH: Tensor, codec: Codec) -> float:
    """Share of non-zero values that decode to 0 because of outliers. About 1 % for Gaussian states in int8.

    `relative_error` does not show it: the outlier dominates the norm that it divides by.
    """
    values = values_NH.to(torch.float32)
    decoded = torch.empty_like(values)
    decode_into(codec, *encode(codec, values), decoded)
    return float(((decoded == 0) & (values != 0)).float().mean())


def relative_error(values_NH: Tensor, codec: Codec) -> Tensor:
    """[...] float32: |decoded - x| / |x| of each vector; 0 for a vector of zeros."""
    values = values_NH.to(torch.float32)
    decoded = torch.empty_like(values)
    decode_into(codec, *encode(codec, values), decoded)
    return (decoded - values).norm(dim=-1) / values.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)


_TOPK_SECTIONS = ("ids", "logits", "tail", "mass", "choice")

_ENCODED_TOGETHER = 2048
"""Tokens encoded at a time: some codecs need several float32 temporaries of the states, which a device that holds a
large target has no room for at a whole pass's size."""


def encode_states(fmt: StoreFormat, aux_NAH: Tensor, last_NH: Tensor, supervised_M: Tensor,
                  topk_logits: TopKLogits | None = None) -> dict[str, Tensor]:
    """The sections of N tokens by name, on the device of the states: `aux_*` have a row per token, all others one per
    supervised position.

    supervised_M  the supervised positions, on the device of the states.
    topk_logits   of these positions, where the format stores them.
    """
    tensors = _encoded("aux", fmt.codec, aux_NAH)
    if fmt.final_state == "keep":
        return tensors | _encoded("final", final_codec(fmt.codec), last_NH.index_select(0, supervised_M))
    assert topk_logits is not None
    dtypes = {section.name: section.dtype for section in block_sections(fmt, 1, 1)}
    return tensors | {name: getattr(topk_logits, name).to(dtypes[name]) for name in _TOPK_SECTIONS}


def block_of(tensors: Mapping[str, Tensor], tokens: range, supervised: range) -> dict[str, Tensor]:
    """The sections of a block: these tokens and these supervised positions of what `encode_states` returned."""
    ranges = {name: tokens if name.startswith("aux_") else supervised for name in tensors}
    return {name: tensor[ranges[name].start:ranges[name].stop] for name, tensor in tensors.items()}


def decode_block(fmt: StoreFormat, tensors: Mapping[str, Tensor], supervised_N: Tensor, aux_NAH: Tensor,
                 last_NH: Tensor) -> None:
    """Write the states to `aux_NAH` and, where they are stored, the final states to `last_NH`, which holds zeros.

    supervised_N  on the CPU, also where everything else is on another device: its positions are needed on the host.
    """
    decode_into(fmt.codec, tensors["aux_codes"], tensors.get("aux_scales"), aux_NAH)
    where = supervised_N.nonzero().squeeze(1)
    if fmt.final_state != "keep" or where.numel() == 0:
        return
    codes, scales, codec = tensors["final_codes"], tensors.get("final_scales"), final_codec(fmt.codec)
    first, final = int(where[0]), int(where[-1])
    if final - first + 1 == where.numel():  # one contiguous answer: decoded in place, without a temporary
        decode_into(codec, codes, scales, last_NH[first:final + 1])
        return
    decoded = last_NH.new_empty(where.numel(), last_NH.shape[1])
    decode_into(codec, codes, scales, decoded)
    last_NH[where.to(last_NH.device)] = decoded


def concat_topk_logits(parts: Sequence[Mapping[str, Tensor]]) -> TopKLogits:
    """Top-k logits of the blocks of some rows, in order."""
    ids, logits, tail, mass, choice = (torch.cat([part[name] for part in parts]) for name in _TOPK_SECTIONS)
    return TopKLogits(ids.to(torch.int64), logits, tail, mass, choice.to(torch.int64))


def _encoded(name: str, codec: Codec, states: Tensor) -> dict[str, Tensor]:
    if codec in ("float32", "bfloat16"):
        return {f"{name}_codes": encode(codec, states)[0]}
    parts = [encode(codec, part) for part in states.split(_ENCODED_TOGETHER)]
    return {f"{name}_codes": torch.cat([codes for codes, _ in parts]),
            f"{name}_scales": torch.cat([scales for _, scales in parts if scales is not None])}
