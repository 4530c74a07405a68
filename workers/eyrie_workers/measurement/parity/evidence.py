"""The observations about one prompt that the parity decision is made from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """The serving engine's answers and rounds for one prompt, compared with the reference engine's."""

    id: str
    identical: bool
    """Whether the serving engine's answers with and without the drafter are equal."""

    histogram: tuple[int, ...]
    """[k]: served rounds that accepted k draft tokens."""

    reference_histogram: tuple[int, ...]
    """The reference engine's rounds on the served answer, counted as the serving engine counts."""

    divergence: str = ""
    """When not identical: position and logit gap."""

    divergence_is_tie: bool = False
    deviations: int | None = 0
    """Near-ties that must be decided the other way to reproduce the served histogram; None when none do."""

    target_differs: str = ""
    """When the served tokens are not the reference target's choice, beyond rounding: where."""
