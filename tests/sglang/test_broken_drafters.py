"""Three ways to serve a drafter wrongly, each loaded by SGLang without a word, and each caught by the parity gate.

The server gets the broken directory, the reference the drafter as it was trained. What is lost is speed, not answers,
and sometimes little of it: layers one off cost 2 % of tau when this was written, which no average over prompts would
show beside its interval, and round by round every sixth differed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from eyrie_workers.engines.sglang.process import SglangServer
from tests.sglang.broken_drafters import copied, ids_for_offsets, layers_shifted, norm_flipped
from tests.sglang.servers import drafting, flags, serving
from tests.sglang.test_parity import CHAIN, parity


@pytest.mark.parametrize(("spoil", "cause"), [
    (layers_shifted, "the layers one after those of training"),
    (norm_flipped, "its final norm, unlike training"),
], ids=["layer ids shifted by one", "norm flag flipped"])
def test_a_drafter_served_wrongly_loses_speed_fails_parity_and_the_cause_is_named(
        spoil: Callable[[Path], None], cause: str, plain: SglangServer, drafter: Path, prompts: list[list[int]],
        tmp_path: Path) -> None:
    broken = copied(drafter, tmp_path / "broken")
    spoil(broken)
    with serving(flags(*drafting(broken, CHAIN)), tmp_path) as drafted:
        report = parity(spoil.__name__, plain, drafted, drafter, CHAIN, prompts)
    assert not report.passed
    assert report.identical == report.prompts
    assert report.rounds_unexplained > 0
    said = " ".join(report.reasons)
    assert cause in said, said
    assert "exactly" in said


def test_a_vocabulary_map_of_ids_instead_of_offsets_fails_parity_and_the_map_is_named(
        plain: SglangServer, drafter: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Drafts then lie elsewhere in the vocabulary, or outside of it, which ends the server."""
    broken = copied(drafter, tmp_path / "broken")
    ids_for_offsets(broken)
    with serving(flags(*drafting(broken, CHAIN)), tmp_path) as drafted:
        report = parity(ids_for_offsets.__name__, plain, drafted, drafter, CHAIN, prompts)
    assert not report.passed
    said = " ".join(report.reasons)
    assert "d2t holds" in said or "ids read as offsets" in said, said
