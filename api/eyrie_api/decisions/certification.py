"""What a certified job says of its best drafter, for a reader and for CI. Pure.

The decision of promotion has all checks; this module says which kind of them failed. The kinds are ordered: output that
differs from the target's says more than a speed, and a speed that was measured says more than one that was not.

    not-lossless   some output differs from the target's, or the serving engine does not serve the drafter as measured
    not-faster     a check of speed, of the time to the first token or of failed requests failed by its figure
    undecided      a measurement was too noisy to decide (`decisions.evidence`); or nothing was proven
    faster         every check passed

Whether the drafter is promoted is another question: `promotion.mode: never` changes nothing here.
"""

from typing import Literal

from eyrie_api.contract.reports import PromotionDecision

Verdict = Literal["faster", "not-faster", "not-lossless", "undecided"]

EXIT_CODES: dict[Verdict, int] = {"faster": 0, "not-faster": 3, "not-lossless": 4, "undecided": 5}
"""Of `eyrie certify`. A drafter, a target or prompts that are refused have those of their errors, 65 and 66."""

WORDS: dict[Verdict, str] = {
    "faster": "Certified and faster", "not-faster": "Certified, and not faster", "not-lossless": "Not lossless",
    "undecided": "Undecided"}

_OF_OUTPUT = ("identical", "parity", "parity-load", "parity-sampled")


def certification(decision: PromotionDecision) -> Verdict:
    """The kind of the most telling check that failed."""
    failed = [check for check in decision.checks if not check.passed]
    for check in failed:
        reached = check.figure is not None and check.bound is not None and check.figure >= check.bound
        # With another system prompt one check has both, the speed as its figure.
        if check.name in _OF_OUTPUT or (check.name == "changed-prompt" and reached):
            return "not-lossless"
    if any(check.name != "proof" and not check.undecided for check in failed):
        return "not-faster"
    return "undecided" if failed or not decision.checks else "faster"
