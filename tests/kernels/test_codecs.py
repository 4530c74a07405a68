"""The kernels' codecs against their formulas and against the store's own codes, bit for bit."""

import pytest
import torch
from torch import Tensor

from eyrie_kernels.codecs import Codec, decode, encode
from eyrie_workers.features import codecs as store

CODECS: tuple[Codec, ...] = ("int8", "fp8", "int4")
SHAPES = [(5, 123), (3, 64), (2, 3, 32), (1, 1), (4, 33)]


def _states(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sizes over many powers of two, an outlier, a vector of zeros: what residual streams hold, and worse."""
    values = torch.randn(*shape) * torch.exp2(torch.randint(-12, 4, shape).float())
    flat = values.view(-1, shape[-1])
    flat[0, 0] = 100.0
    if flat.shape[0] > 1:
        flat[1] = 0.0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_codes_and_states_are_the_stores_own_bit_for_bit(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype,
                                                         device: str) -> None:
    values = _states(shape, dtype)
    codes, scales = store.encode(codec, values)
    assert scales is not None
    found_codes, found_scales = encode(codec, values.to(device))
    assert torch.equal(found_codes.cpu(), codes)
    assert torch.equal(found_scales.cpu(), scales)
    for out_dtype in (torch.float32, torch.bfloat16):
        wanted = torch.empty(shape, dtype=out_dtype)
        store.decode_into(codec, codes, scales, wanted)
        assert torch.equal(decode(codec, found_codes, found_scales, shape[-1], out_dtype).cpu(), wanted)


def test_every_e4m3_number_and_every_tie_between_two_is_encoded_as_torch_does(device: str) -> None:
    exact = torch.arange(0, 127, dtype=torch.int8).view(torch.float8_e4m3fn).float()  # 0 .. 448, ascending
    between = (exact[1:] + exact[:-1]) / 2
    values = torch.cat([exact, between, between.nextafter(exact[1:]), between.nextafter(exact[:-1])])
    values = torch.cat([values, -values])  # the largest is 448: the scale is 1
    codes, scales = encode("fp8", values.to(device))
    assert scales.item() == 1.0
    assert torch.equal(codes.cpu().view(torch.float8_e4m3fn).float(), values.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.5 / 127), ("fp8", 2**-4), ("int4", 1 / 8)])
def test_no_value_is_off_by_more_than_its_step_allows(codec: Codec, bound: float, device: str) -> None:
    values = torch.rand(4, 96, device=device) * 2 - 1
    back = decode(codec, *encode(codec, values), 96, torch.float32)
    # Relative to the largest, which is below 1: half a step, or int4's whole one where 8 would be the code and 7 is;
    # 2^-7 more for the scale that was rounded.
    assert (back - values).abs().max() <= bound * (1 + 2**-7)


def test_nothing_is_encoded_as_nothing(device: str) -> None:
    for codec in CODECS:
        assert decode(codec, *encode(codec, torch.zeros(0, 32, device=device)), 32).shape == (0, 32)
