"""The real SGLang with the published target and the drafter that `make demo-published` trained for it.

One request at a time and eight at once, on prompts of GSM8K, HumanEval and MT-Bench: greedy answers equal those without
a drafter, and the rounds those of the reference engine. The figures are in docs/results/published.md.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.processes import free_port
from eyrie_workers.measure.parity import Served, request_answer
from eyrie_workers.measure.parity_reference import Reference
from tests.published_drafter import published
from tests.sglang.servers import CPU, drafting, serving
from tests.sglang.summary import add_to_summary

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
TOKENS, MODEL = 48, "published"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sglang_answers_and_drafts_as_the_reference_engine_on_a_published_model(
        tmp_path_factory: pytest.TempPathFactory) -> None:
    found = published()

    def answers(url: str, in_flight: int) -> dict[str, list[Served]]:
        with ThreadPoolExecutor(in_flight) as pool:
            return {suite: list(pool.map(lambda ids: request_answer("sglang", url, MODEL, ids, TOKENS), prompts))
                    for suite, prompts in found.prompts.items()}

    runs = {}
    for name, more in (("plain", ()), ("drafted", drafting(found.drafter, CHAIN))):
        line = ("--model-path", str(found.target), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port",
                str(free_port()), *CPU, "--disable-radix-cache", *more)
        with serving(line, tmp_path_factory.mktemp(name)) as server:
            runs[name] = {in_flight: answers(server.url, in_flight) for in_flight in (1, 8)}
    reference = Reference(found.target, found.drafter, "sglang", CHAIN, "float32")
    for in_flight, drafted in runs["drafted"].items():
        for suite, prompts in found.prompts.items():
            report = reference.replay_parity(prompts, runs["plain"][in_flight][suite], drafted[suite])
            add_to_summary(f"{suite}, {len(prompts)} prompts, {in_flight} at a time", report)
            assert report.passed, report.reasons
            assert report.identical == report.prompts
            assert report.rounds_unexplained == 0
            assert sum(report.histogram[1:]) > 0, "drafts are accepted"
