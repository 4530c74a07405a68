"""What the parity of one prompt is judged by: a value that the reference makes and the judgement reads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """What is known of one prompt."""

    id: str
    identical: bool
    """The two answers of the serving engine."""

    histogram: tuple[int, ...]
    reference_histogram: tuple[int, ...]
    """The reference's rounds on the served answer, counted as the serving engine counts."""

    divergence: str = ""
    """When not identical: where, and the logit gap."""

    divergence_is_tie: bool = False
    deviations: int | None = 0
    """Rounds decided otherwise by near-ties, which give the served histogram; None when they do not."""

    target_differs: str = ""
    """When the served tokens are not what our target chooses, beyond rounding: where."""
