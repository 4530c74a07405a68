"""Drafters with EAGLE-3.1 norms and with a sliding window: SGLang computes them as our reference engine does.

The weights are the trained drafter's, under flags it was not trained with. That costs acceptance and leaves enough
of it to compare round by round: a variant computed differently would accept differently.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie_workers.drafters.eagle3.drafter import Eagle3Drafter
from eyrie_workers.drafters.eagle3.family import load_drafter, save_drafter
from eyrie_workers.sglang.process import SglangServer
from tests.sglang.servers import drafting, flags, serving
from tests.sglang.test_parity import CHAIN, parity

WINDOW = 24


def variant(drafter: Path, to: Path, **changed: Any) -> Path:
    """The drafter under other flags. Norms it lacks get weights around 1."""
    trained = load_drafter(drafter)
    made = Eagle3Drafter(replace(trained.config, **changed), trained.vocabulary)
    made.load_state_dict(trained.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name not in trained.state_dict():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    save_drafter(to, made)
    return to


@pytest.mark.parametrize(("changed", "more"), [
    ({"fc_norm": True, "norm_output": True}, ()),
    # SGLang counts the positions behind the present one, our window counts that one too.
    ({"norm_before_fc": True, "sliding_window": WINDOW}, ("--speculative-draft-window-size", str(WINDOW - 1))),
], ids=["fc_norm and norm_output", "norm_before_fc and sliding window"])
@pytest.mark.slow
def test_a_variant_of_the_drafter_accepts_the_same_rounds_in_sglang(
        changed: dict[str, Any], more: tuple[str, ...], plain: SglangServer, drafter: Path, prompts: list[list[int]],
        tmp_path: Path) -> None:
    served = variant(drafter, tmp_path / "variant", **changed)
    with serving(flags(*drafting(served, CHAIN), *more), tmp_path) as drafted:
        report = parity(f"variant {' and '.join(changed)}", plain, drafted, served, CHAIN, prompts[::2])
    assert report.passed, report.reasons
    assert report.histogram == report.reference_histogram or report.rounds_explained > 0
    assert sum(report.histogram[2:]) > 0, "hardly anything is accepted: the comparison says little"
