"""SGLang's n-gram speculation, which compiles its trie in C++ at the first start, and our account of it."""

import shutil
from collections.abc import Iterator

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.processes import free_port
from eyrie_workers.drafters.checkpoint import read_config
from eyrie_workers.measure.intervals import acceptance_length, add_histograms
from eyrie_workers.measure.parity import request_answers
from eyrie_workers.measure.parity_reference import histogram_of, reference_rounds
from eyrie_workers.sglang.checkpoints import read_target
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments
from eyrie_workers.sglang.process import SglangServer
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.targets.loading import load_target
from tests.sglang.ngram_trie import TrieDrafter
from tests.sglang.servers import MODEL, TARGET, serving
from tests.sglang.summary import SUMMARY

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="SGLang compiles its trie with g++: none here")
TREE = DraftTreeShape(num_steps=11, top_k=4, num_draft_tokens=12)
TOKENS = 64


@pytest.fixture(scope="module")
def ngram(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    plan = LaunchPlan(
        target=read_target(str(TARGET), read_config(TARGET)), machine=profile("cpu"), served_model_name=MODEL,
        setting=Setting(method="ngram", tree=TREE), dtype="float32", port=free_port(), max_running_requests=8,
        context_length=1024)
    with serving((*launch_arguments(plan), "--skip-server-warmup"), tmp_path_factory.mktemp("ngram")) as server:
        yield server


@pytest.mark.slow
def test_every_round_of_every_request_accepts_what_our_trie_accepts_as_both_go_on_remembering(
        plain: SglangServer, ngram: SglangServer, prompts: list[list[int]]) -> None:
    """The last prompts are the first ones again: what was remembered of them drafts them nearly whole."""
    asked = [*prompts, *prompts[:4]]
    undrafted = request_answers("sglang", plain.url, MODEL, asked, TOKENS)
    served = request_answers("sglang", ngram.url, MODEL, asked, TOKENS)
    engine = Engine(load_target(TARGET, "float32"), TrieDrafter(), max_length=1024)
    ours = []
    for prompt, answer in zip(asked, served, strict=True):
        rounds = reference_rounds(engine, TREE, prompt, len(answer.token_ids))
        assert rounds.token_ids == answer.token_ids
        ours.append(histogram_of(rounds.accepted, len(answer.token_ids), whole_last_round=True))
    theirs = [answer.histogram for answer in served]
    tau, own = (acceptance_length(add_histograms(found)) for found in (theirs, ours))
    SUMMARY.append(f"n-gram {TREE.label()}: tau {tau:.3f} served, {own:.3f} in the reference engine; rounds equal for "
                f"{sum(a == b for a, b in zip(theirs, ours, strict=True))} of {len(asked)} requests")
    assert [answer.token_ids for answer in served] == [answer.token_ids for answer in undrafted]
    assert theirs == ours
    again = acceptance_length(add_histograms(theirs[len(prompts):]))
    assert again > 1.5 * acceptance_length(add_histograms(theirs[:len(prompts)]))
