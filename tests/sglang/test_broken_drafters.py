"""Three export errors of a drafter that SGLang loads without a warning and the parity gate detects.

The server gets the broken directory, the reference the drafter as it was trained. They reduce the speed, not the
output, sometimes by little: layers shifted by one cost 2 % of tau when this was written, which is less than the
interval of an average over prompts, while every sixth round differed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from eyrie_workers.sglang.process import SglangServer
from tests.sglang.broken_drafters import copy_drafter, ids_for_offsets, layers_shifted, norm_flipped
from tests.sglang.servers import drafting, flags, serving
from tests.sglang.test_parity import CHAIN, parity


@pytest.mark.parametrize(("damage", "cause"), [
    (layers_shifted, "the layers one after those of training"),
    pytest.param(norm_flipped, "its final norm, unlike training", marks=pytest.mark.slow),
], ids=["layer ids shifted by one", "norm flag flipped"])
def test_a_drafter_served_wrongly_loses_speed_fails_parity_and_the_cause_is_named(
        damage: Callable[[Path], None], cause: str, plain: SglangServer, drafter: Path, prompts: list[list[int]],
        tmp_path: Path) -> None:
    broken = copy_drafter(drafter, tmp_path / "broken")
    damage(broken)
    with serving(flags(*drafting(broken, CHAIN)), tmp_path) as drafted:
        report = parity(damage.__name__, plain, drafted, drafter, CHAIN, prompts)
    assert not report.passed
    assert report.identical == report.prompts
    assert report.rounds_unexplained > 0
    reasons = " ".join(report.reasons)
    assert cause in reasons, reasons
    assert "exactly" in reasons


def test_a_vocabulary_map_of_ids_instead_of_offsets_fails_parity_and_the_map_is_named(
        plain: SglangServer, drafter: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Draft tokens are then other tokens, or outside of the vocabulary, which crashes the server."""
    broken = copy_drafter(drafter, tmp_path / "broken")
    ids_for_offsets(broken)
    with serving(flags(*drafting(broken, CHAIN)), tmp_path) as drafted:
        report = parity(ids_for_offsets.__name__, plain, drafted, drafter, CHAIN, prompts)
    assert not report.passed
    reasons = " ".join(report.reasons)
    assert "d2t holds" in reasons or "ids read as offsets" in reasons, reasons
