"""Codecs come back within what their scales promise, and a budget takes the best that fits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.contract.capture import BEST_FIRST, BLOCK_VALUES, StoredAs, candidates, choose
from eyrie_workers.hidden_states.codecs import decode_into, encode, relative_error, zero_share


def states(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def decoded(codec: str, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(values.shape, torch.nan, dtype=dtype)
    decode_into(codec, *encode(codec, values), out)  # type: ignore[arg-type]
    return out


@settings(max_examples=40, deadline=None)
@given(num=st.integers(1, 5), hidden=st.integers(1, 100), seed=st.integers(0, 1000),
       scale=st.sampled_from([1e-20, 1e-3, 1.0, 300.0, 1e20]))
def test_int8_errs_by_half_a_step_and_int4_by_a_whole_one_at_most(num: int, hidden: int, seed: int,
                                                                 scale: float) -> None:
    values = states((num, hidden), seed, scale)
    largest = values.abs().amax(-1, keepdim=True)
    # A bfloat16 scale is up to 1/128 larger than need be.
    assert ((decoded("int8", values) - values).abs() <= largest / 127 / 2 * 1.02).all()
    padded = torch.nn.functional.pad(values, (0, -hidden % BLOCK_VALUES)).view(num, -1, BLOCK_VALUES)
    of_block = padded.abs().amax(-1, keepdim=True).expand_as(padded).flatten(-2)[:, :hidden]
    # Half a step, but a whole one for a value as large as the largest with the other sign: there are 7 codes on that
    # side, 8 on its own.
    assert ((decoded("int4", values) - values).abs() <= of_block / 8 * 1.05).all()


def test_fp8_decodes_exactly_what_pytorch_converts() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    wanted = every.view(torch.float8_e4m3fn).float()
    finite = wanted.isfinite()
    out = torch.empty(1, 256)
    decode_into("fp8", every.view(torch.int8)[None], torch.ones(1, dtype=torch.bfloat16), out)
    assert torch.equal(out[0][finite], wanted[finite])


def test_an_outlier_costs_fp8_nothing_and_int4_its_block_alone() -> None:
    values = states((1, 256))
    values[0, 5] = 3000.0
    rest = torch.ones(256, dtype=torch.bool)
    rest[:BLOCK_VALUES] = False

    def error(codec: str) -> float:
        return float((decoded(codec, values) - values)[0, rest].norm() / values[0, rest].norm())

    assert zero_share(values, "int8") > 0.9
    assert zero_share(values, "fp8") < 0.05
    assert zero_share(values[:, BLOCK_VALUES:], "int8") < 0.03
    assert not decoded("int4", values)[0, :5].any(), "its neighbours become zeros, not noise"
    assert error("int8") > 0.9, "one scale for all: the others are rounded away"
    assert error("fp8") < 0.05
    assert error("int4") < 0.12


@pytest.mark.parametrize("codec", BEST_FIRST)
def test_zeros_come_back_as_zeros_and_rows_do_not_touch_each_other(codec: str) -> None:
    values = states((4, 64))
    values[1] = 0.0
    back = decoded(codec, values)
    assert not back[1].any()
    assert torch.equal(back[2:], decoded(codec, values[2:]))
    assert decoded(codec, values[:0]).shape == (0, 64)


def test_the_order_of_quality_holds_for_ordinary_states() -> None:
    errors = {codec: float(relative_error(states((64, 256)), codec).mean()) for codec in BEST_FIRST}
    assert errors["float32"] == 0.0
    assert [errors[codec] for codec in BEST_FIRST[1:3]] == sorted(errors[codec] for codec in BEST_FIRST[1:3])
    assert errors["int8"] < errors["fp8"] < errors["int4"] < 0.12


def test_decoding_straight_to_bfloat16_is_as_good_as_rounding_afterwards() -> None:
    values = states((16, 96))
    for codec in BEST_FIRST:
        wide, narrow = decoded(codec, values), decoded(codec, values, torch.bfloat16).float()
        assert (wide - narrow).norm() / wide.norm() < 0.005, codec


@given(tokens=st.integers(1, 10**9), share=st.floats(0.0, 1.0), hidden=st.integers(1, 20_000),
       num_aux=st.integers(1, 8), budget=st.integers(1, 10**14), codec=st.sampled_from(BEST_FIRST))
def test_the_chosen_codec_fits_and_nothing_better_does(tokens: int, share: float, hidden: int, num_aux: int,
                                                       budget: int, codec: str) -> None:
    wanted, sizes = StoredAs(codec), (tokens, int(tokens * share), num_aux, hidden)  # type: ignore[arg-type]
    assert choose(wanted, None, *sizes) == wanted
    chosen = choose(wanted, budget, *sizes)
    ways = list(candidates(wanted))
    if chosen is None:
        assert all(way.bytes_of(*sizes) > budget for way in ways)
    else:
        assert chosen.bytes_of(*sizes) <= budget
        assert all(way.bytes_of(*sizes) > budget for way in ways[:ways.index(chosen)])
