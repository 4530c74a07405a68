"""Encodes and decodes hidden states: int8 and fp8 with a scale per vector, int4 in blocks of 32.

    int8    q = round(x / s) in -127 .. 127            s = max |x| / 127 of the vector
    fp8     e4m3 of x / s                              s = max |x| / 448 of the vector
    int4    q = round(x / s) in -8 .. 7                s = (x of largest |x|) / -8 of a block of 32; a byte holds
                                                       q + 8 of value i of the block's first half in its low, of
                                                       the second half in its high four bits

Scales are bfloat16 and codes are computed with the rounded scale; scales of int8 and fp8 are rounded up, so that no
code overflows. These are the formats of the feature store (`eyrie_workers.features.codecs` explains them), bit for bit:
a CPU decodes what a GPU encoded during capture, and the reverse. This requires

    rounding     to nearest even, by adding and subtracting 1.5 * 2^23: no library call, the same on every architecture
    e4m3         integer arithmetic on the bits of float32, since Ampere has no such type: normals keep 3 of 23 mantissa
                 bits, below 2^-6 the value is a multiple of 2^-9
    decoding     the bits of e4m3 shifted into a float16, whose value is 2^-8 of the decoded one
    division     correctly rounded (`div_rn`), which Triton's `/` is not

Lower bound of both directions: memory traffic, with states, codes and scales read or written once. A program of int8
and fp8 processes one vector, one of int4 up to 64 blocks of a vector; none writes intermediate results to memory.

    N vectors, H values
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_kernels.compiler import INTERPRETING, jit, launch, next_power_of_two, runs_kernels, tl

Codec = Literal["int8", "fp8", "int4"]
_LARGEST: dict[Codec, float] = {"int8": 127.0, "fp8": 448.0}
_LEVELS = 8.0
_CODECS: tuple[Codec, ...] = ("int8", "fp8", "int4")
_BLOCK, _HALF = 32, 16
_BLOCKS_AT_ONCE = 64


# --- the specification, and the CPU form -------------------------------------------------------------------------


def reference_encode(codec: Codec, values_NH: Tensor) -> tuple[Tensor, Tensor]:
    """The specification of `encode`, and its CPU form."""
    values = values_NH.to(torch.float32)
    if codec == "int4":
        blocks = F.pad(values, (0, -values.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
        most = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # the first of equal magnitudes
        scale = (most.squeeze(-1) / -_LEVELS).to(torch.bfloat16)
        levels = (blocks * _reciprocal(scale)).round_().add_(_LEVELS).clamp_(0, 15).to(torch.uint8)
        low, high = levels.split(_HALF, -1)
        return (low | high << 4).flatten(-2), scale
    largest = _LARGEST[codec]
    exact = values.abs().amax(-1) / largest
    scale = exact.to(torch.bfloat16)
    above = (scale.view(torch.int16) + 1).view(torch.bfloat16)  # next bfloat16: floats > 0 are ordered like their bits
    scale = torch.where(scale.to(torch.float32) < exact, above, scale)
    scaled = (values * _reciprocal(scale)).clamp_(-largest, largest)
    if codec == "int8":
        return scaled.round_().to(torch.int8), scale
    return scaled.to(torch.float8_e4m3fn).view(torch.int8), scale


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale as [..., 1] float32; 0 where the scale is 0, so that zeros encode as zeros."""
    wide = scale.to(torch.float32).unsqueeze(-1)
    return torch.where(wide != 0, 1.0 / wide, 0.0)


def reference_decode(codec: Codec, codes: Tensor, scales: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """The specification of `decode`, and its CPU form."""
    wide = scales.to(torch.float32).unsqueeze(-1)
    if codec == "int8":
        return (codes.to(torch.float32) * wide).to(dtype)
    if codec == "fp8":
        return (codes.view(torch.float8_e4m3fn).to(torch.float32) * wide).to(dtype)
    packed = codes.unflatten(-1, (-1, _HALF))
    levels = torch.cat([packed & 15, packed >> 4], -1).to(torch.float32) - _LEVELS
    return (levels * wide).to(dtype).flatten(-2)[..., :hidden]


# --- kernels -----------------------------------------------------------------------------------------------------


@jit
def _round(x):
    """Round to the nearest integer, ties to even; |x| < 2^22, where float32 has a spacing of 1 next to 1.5 * 2^23."""
    return (x + 12582912.0) - 12582912.0


@jit
def _scale_bits(most, LARGEST: tl.constexpr):
    """The bits of the smallest bfloat16 >= most / LARGEST: adding 65535 carries into the upper 16 bits unless the lower
    16 are zero."""
    exact = tl.div_rn(most, tl.zeros_like(most) + LARGEST)
    return (exact.to(tl.int32, bitcast=True) + 65535) >> 16


@jit
def _scale_of(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def _inverse(scale):
    return tl.where(scale != 0, tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale != 0, scale, 1.0)), 0.0)


@jit
def _nearest_bits(x):
    """The bits of the bfloat16 nearest to x, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@jit
def _narrowed(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """x as DTYPE. The interpreter truncates float32 to bfloat16 (Triton 3.9), a GPU rounds."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        return _nearest_bits(x).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@jit
def _to_e4m3(x):
    """The bits of the e4m3 value nearest to x, ties to even; |x| <= 448."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    # Normals: drop 20 of 23 mantissa bits, rounding ties to even; change the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals: above 2^14 (bits 0x46800000) float32 has a spacing of 2^-9, so the addition rounds to a multiple of
    # 2^-9, and the difference of the bits counts these multiples: e4m3's code. Code 8 is the least normal.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.int8)


@jit
def _encode_kernel(values, codes, scales, hidden, LARGEST: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """Encode one vector as int8 or fp8."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    x = tl.load(values + row * hidden + at, inside, other=0.0).to(tl.float32)
    bits = _scale_bits(tl.max(tl.abs(x), 0), LARGEST)
    tl.store(scales + row, bits.to(tl.int16))
    scaled = tl.minimum(tl.maximum(x * _inverse(_scale_of(bits)), -LARGEST), LARGEST)
    if FP8:
        code = _to_e4m3(scaled)
    else:
        code = _round(scaled).to(tl.int8)
    tl.store(codes + row * hidden + at, code, inside)


@jit
def _encode4_kernel(values, codes, scales, hidden, num_blocks, BLOCKS: tl.constexpr):
    """Encode up to BLOCKS blocks of one vector as int4."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    real = block < num_blocks
    lane = tl.arange(0, 16)
    at = block[:, None] * 32 + lane[None, :]
    first = tl.load(values + row * hidden + at, at < hidden, other=0.0).to(tl.float32)
    second = tl.load(values + row * hidden + at + 16, at + 16 < hidden, other=0.0).to(tl.float32)
    size_1 = tl.max(tl.abs(first), 1)
    size_2 = tl.max(tl.abs(second), 1)
    most_1 = tl.sum(tl.where(lane[None, :] == tl.argmax(tl.abs(first), 1)[:, None], first, 0.0), 1)
    most_2 = tl.sum(tl.where(lane[None, :] == tl.argmax(tl.abs(second), 1)[:, None], second, 0.0), 1)
    bits = _nearest_bits(tl.where(size_1 >= size_2, most_1, most_2) * -0.125)
    tl.store(scales + row * num_blocks + block, bits.to(tl.int16), real)
    inverse = _inverse(_scale_of(bits))[:, None]
    low = tl.minimum(tl.maximum(_round(first * inverse) + 8.0, 0.0), 15.0).to(tl.int32)
    high = tl.minimum(tl.maximum(_round(second * inverse) + 8.0, 0.0), 15.0).to(tl.int32)
    to = codes + (row * num_blocks + block[:, None]) * 16 + lane[None, :]
    tl.store(to, (low | (high << 4)).to(tl.uint8), real[:, None] & (lane[None, :] < 16))


@jit
def _decode_kernel(codes, scales, out, hidden, FP8: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Decode one vector of int8 or fp8."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    code = tl.load(codes + row * hidden + at, inside, other=0)
    scale = _scale_of(tl.load(scales + row))
    if FP8:
        # Sign-extended and shifted by 7: sign in bit 15, e4m3's other bits in 13..7. Bit 14 copies the sign: clear it.
        half = ((code.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
        x = half.to(tl.float32) * 256.0
    else:
        x = code.to(tl.float32)
    tl.store(out + row * hidden + at, _narrowed(x * scale, out.dtype.element_ty, INTERPRETED), inside)


@jit
def _decode4_kernel(codes, scales, out, hidden, num_blocks, BLOCKS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Decode up to BLOCKS blocks of one vector of int4."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    real = block < num_blocks
    lane = tl.arange(0, 16)
    source = codes + (row * num_blocks + block[:, None]) * 16 + lane[None, :]
    packed = tl.load(source, real[:, None] & (lane[None, :] < 16), other=0).to(tl.int32)
    scale = _scale_of(tl.load(scales + row * num_blocks + block, real, other=0))[:, None]
    at = block[:, None] * 32 + lane[None, :]
    first = ((packed & 15).to(tl.float32) - 8.0) * scale
    second = ((packed >> 4).to(tl.float32) - 8.0) * scale
    tl.store(out + row * hidden + at, _narrowed(first, out.dtype.element_ty, INTERPRETED), at < hidden)
    tl.store(out + row * hidden + at + 16, _narrowed(second, out.dtype.element_ty, INTERPRETED), at + 16 < hidden)


def encode(codec: Codec, values_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and bfloat16 scales of finite states [..., H] of any float dtype.

    int8, fp8  codes [..., H] int8                       scales [...]
    int4       codes [..., 16 * ceil(H / 32)] uint8      scales [..., ceil(H / 32)]
    """
    if not runs_kernels(values_NH):
        return reference_encode(codec, values_NH)
    hidden, lead, values = values_NH.shape[-1], values_NH.shape[:-1], values_NH.contiguous()
    rows = values.numel() // max(1, hidden)
    if codec == "int4":
        num_blocks = -(-hidden // _BLOCK)
        codes = torch.empty(*lead, num_blocks * _HALF, dtype=torch.uint8, device=values.device)
        scales = torch.empty(*lead, num_blocks, dtype=torch.bfloat16, device=values.device)
        launch(_encode4_kernel, (rows, -(-num_blocks // _BLOCKS_AT_ONCE)), values, codes, scales.view(torch.int16),
               hidden, num_blocks, BLOCKS=_BLOCKS_AT_ONCE)
        return codes, scales
    codes = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    scales = torch.empty(lead, dtype=torch.bfloat16, device=values.device)
    launch(_encode_kernel, (rows,), values, codes, scales.view(torch.int16), hidden, LARGEST=_LARGEST[codec],
           FP8=codec == "fp8", BLOCK=next_power_of_two(hidden), num_warps=8 if hidden > 2048 else 4)
    return codes, scales


def decode(codec: Codec, codes: Tensor, scales: Tensor, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """States [..., hidden] of `dtype` decoded from the codes and scales of `encode`."""
    if not runs_kernels(codes):
        return reference_decode(codec, codes, scales, hidden, dtype)
    codes, bits = codes.contiguous(), scales.contiguous().view(torch.int16)
    out = torch.empty(*codes.shape[:-1], hidden, dtype=dtype, device=codes.device)
    rows = out.numel() // max(1, hidden)
    if codec == "int4":
        num_blocks = scales.shape[-1]
        launch(_decode4_kernel, (rows, -(-num_blocks // _BLOCKS_AT_ONCE)), codes, bits, out, hidden, num_blocks,
               BLOCKS=_BLOCKS_AT_ONCE, INTERPRETED=INTERPRETING)
    else:
        launch(_decode_kernel, (rows,), codes, bits, out, hidden, FP8=codec == "fp8", BLOCK=next_power_of_two(hidden),
               INTERPRETED=INTERPRETING, num_warps=8 if hidden > 2048 else 4)
    return out
