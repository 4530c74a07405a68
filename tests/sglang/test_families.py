"""Drafters of other families in the real SGLang: the same answers, and the same rounds as our reference engine.

EAGLE-1 and EAGLE-2 are one checkpoint in a chain and in a tree; a small language model of its own is STANDALONE. They
are trained for a minute at most, so they accept less than the EAGLE-3 drafter of `test_parity`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.prove import ParityReport
from eyrie_api.contract.tuning import Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.processes import free_port
from eyrie_workers.drafters.checkpoint import read_config
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments
from eyrie_workers.sglang.process import SglangServer
from tests.sglang.servers import MODEL, TARGET, serving
from tests.sglang.test_parity import parity
from tests.sglang.trained_drafter import trained_drafter

CHAIN = DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5)
TREE = DraftTreeShape(num_steps=4, top_k=4, num_draft_tokens=12)


@contextmanager
def served(drafter: Path, tree: DraftTreeShape, directory: Path) -> Iterator[SglangServer]:
    """A server as we would start it in production, but for the warm-up."""
    plan = LaunchPlan(
        target=read_target(str(TARGET), read_config(TARGET)), drafter=read_drafter(str(drafter), read_config(drafter)),
        machine=profile("cpu"), served_model_name=MODEL, setting=Setting(tree=tree), dtype="float32", port=free_port(),
        max_running_requests=8, context_length=1024)
    # A cached prefix ends, for a drafter, with the token that followed it in another text; for EAGLE SGLang keeps them
    # apart by pairs of tokens, for STANDALONE not. So the second is compared without the cache.
    more = ("--disable-radix-cache",) if plan.drafter and plan.drafter.algorithm == "STANDALONE" else ()
    with serving((*launch_arguments(plan), "--skip-server-warmup", *more), directory) as server:
        yield server


def assert_same_rounds(report: ParityReport) -> None:
    assert report.passed, report.reasons
    assert report.identical == report.prompts
    assert report.divergences == ()
    assert report.rounds_unexplained == 0
    assert report.histogram == report.reference_histogram or report.rounds_explained > 0
    # Acceptance is mixed, so that sameness means something: many rounds, and of every length.
    assert report.tau >= 1.3
    assert sum(report.histogram) >= 100
    assert len(report.histogram) == report.tree.num_steps + 1


@pytest.mark.parametrize(("family", "tree"), [
    pytest.param("eagle1", CHAIN, marks=pytest.mark.slow), ("eagle1", TREE),
    pytest.param("standalone", TREE, marks=pytest.mark.slow)])
def test_a_family_is_drafted_as_in_the_reference_engine_request_by_request(
        family: str, tree: DraftTreeShape, plain: SglangServer, prompts: list[list[int]], tmp_path: Path) -> None:
    drafter = trained_drafter(family)
    with served(drafter, tree, tmp_path) as drafted:
        assert_same_rounds(parity(f"{family} {tree.label()}", plain, drafted, drafter, tree, prompts, in_flight=4))
