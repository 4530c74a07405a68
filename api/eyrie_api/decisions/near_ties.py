"""Whether drafting changed the output, judged the same way by benchmark, parity and promotion. Pure.

Greedy decoding chooses the token of the largest logit. Two correct programs add the same products in different orders,
so a logit may be rounded to either of two neighbouring values of its format, and two logits that are as close may
change places. Only this is accepted as equal output:

1. the first differing tokens are a near-tie: both logits are at most one rounding step below the largest;
2. every later token of the drafted answer is the target's choice too, or a near-tie of it, for the text before it
   (teacher-forced: the two answers continue from different tokens and may differ everywhere after).

Any other difference refuses a drafter under `promotion.require_identical`.
"""

from collections.abc import Mapping
from math import frexp

_STEP_BITS: Mapping[str, int] = {"bfloat16": 7, "float16": 10, "float32": 13}
"""Fraction bits that two programs agree on. For the 16-bit formats all that they store: their logits are rounded once.
In float32 the rounding of the last bit is far below what the order of additions changes (some 1e-5 of the largest
logit was measured between Eyrie and SGLang on a CPU); ten bits less are certain."""


def rounding_step(logit: float, dtype: str) -> float:
    """Distance of neighbouring values of `dtype` at this magnitude: 2**(e - 7) in bfloat16 for 2**e <= |logit|."""
    _, exponent = frexp(abs(logit))  # |logit| = m * 2**exponent with 0.5 <= m < 1
    return 2.0 ** (exponent - 1 - _STEP_BITS[dtype]) if logit else 0.0


def is_near_tie(gap: float, magnitude: float, dtype: str) -> bool:
    """Whether a token may be decoded whose logit is `gap` below the largest one.

    magnitude   the larger absolute value of the two logits
    """
    return gap <= rounding_step(magnitude, dtype)


def is_lossless(compared: int, identical: int, near_ties: int) -> bool:
    """Whether every answer is identical, or differs by near-ties alone."""
    return identical + near_ties >= compared
