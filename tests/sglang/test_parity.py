"""The real SGLang with a really trained drafter: the same answers, and the same rounds as our reference engine."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eyrie_api.chat_template import probes
from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.prove import ParityReport
from eyrie_api.contract.tuning import OperatingMap, Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.processes import free_port
from eyrie_workers.data.suites import load_suite
from eyrie_workers.drafters.checkpoint import read_config
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.measure.parity import Served as Answer
from eyrie_workers.measure.parity import compare_prompts, is_same, report_without_answers, request_answer
from eyrie_workers.measure.parity_reference import Reference
from eyrie_workers.measure.parity_under_load import request_under_load, requests_under_load
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, adaptive_config, launch_arguments
from eyrie_workers.sglang.process import SglangServer
from eyrie_workers.targets.templates import ChatTokenizer
from tests.sglang.servers import MODEL, READY_S, TARGET, drafting, flags, serving
from tests.sglang.summary import add_to_summary
from tests.sglang.trained_drafter import SUITES
from tests.waiting import wait_for
from tests.workers.engines.request_fields import CHECKS, Served, behind_gateway

CHAIN = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)
TREE = DraftTreeShape(num_steps=5, top_k=4, num_draft_tokens=16)
NARROW_TREE = DraftTreeShape(num_steps=7, top_k=2, num_draft_tokens=10)
TOKENS = 64


def chain_plan(drafter: Path) -> LaunchPlan:
    return LaunchPlan(
        target=read_target(str(TARGET), read_config(TARGET)), drafter=read_drafter(str(drafter), read_config(drafter)),
        machine=profile("cpu"), served_model_name=MODEL, setting=Setting(tree=CHAIN), dtype="float32", port=free_port(),
        max_running_requests=8, context_length=1024)


@pytest.fixture(scope="module")
def chain(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """A server as we would start it in production, but for the warm-up: our launch line, prefix cache on."""
    line = (*launch_arguments(chain_plan(drafter)), "--skip-server-warmup")
    with serving(line, tmp_path_factory.mktemp("chain")) as server:
        yield server


def parity(what: str, plain: SglangServer, drafted: SglangServer, drafter: Path, tree: DraftTreeShape,
           prompts: Sequence[Sequence[int]], in_flight: int = 1) -> ParityReport:
    def answers(url: str) -> list[Answer]:
        with ThreadPoolExecutor(in_flight) as pool:  # with several in flight the engine batches
            return list(pool.map(lambda prompt: request_answer("sglang", url, MODEL, prompt, TOKENS), prompts))

    undrafted = answers(plain.url)
    try:
        report = Reference(TARGET, drafter, "sglang", tree, "float32").replay_parity(
            prompts, undrafted, answers(drafted.url))
    except EngineFailed as error:  # as in the proof
        report = report_without_answers("sglang", tree, len(prompts), error.message)
    add_to_summary(f"{what}, {in_flight} at a time", report)
    return report


def assert_proven(report: ParityReport) -> None:
    assert report.passed, report.reasons
    assert report.identical == report.prompts
    assert report.divergences == ()
    assert report.rounds_unexplained == 0
    assert report.histogram == report.reference_histogram or report.rounds_explained > 0
    assert report.tau_interval.low <= report.reference_tau <= report.tau_interval.high
    # Acceptance is high and mixed, so that sameness means something: many rounds, and of every length.
    assert report.tau >= 2.5
    assert sum(report.histogram) >= 100
    assert len(report.histogram) == report.tree.num_steps + 1
    assert min(report.histogram) > 0


def test_a_chain_is_drafted_as_in_the_reference_engine_request_by_request(
        plain: SglangServer, chain: SglangServer, drafter: Path, prompts: list[list[int]]) -> None:
    assert_proven(parity("chain", plain, chain, drafter, CHAIN, prompts))


@pytest.mark.parametrize("field", sorted(set(CHECKS) - {"chat_template_kwargs"}))  # needs the template of `plain`
def test_a_request_field_works_while_sglang_drafts(field: str, chain: SglangServer, tmp_path: Path) -> None:
    with behind_gateway(chain.url, MODEL, tmp_path) as served:
        CHECKS[field](served)


def test_sglang_renders_conversations_to_the_tokens_that_drafters_are_trained_on(chain: SglangServer) -> None:
    tokenizer = ChatTokenizer(TARGET)
    conversations = [*probes(tokenizer.form), *(
        (prompt.messages, prompt.tools) for name in SUITES
        for prompt in load_suite(SuiteSpec(name=name, path=f"quickstart:{name}"))[:3])]
    assert len(conversations) > 8
    assert compare_prompts(chain.url, MODEL, tokenizer, conversations) == ()
    spelled = ([{"role": "user", "content": "Say <|im_end|> now"}], [])
    (difference,) = compare_prompts(chain.url, MODEL, tokenizer, [spelled])
    assert "in SGLang" in difference
    assert "'<|im_end|>' in SGLang" in difference, "it reads the text of a token as the token"


def test_under_load_no_shape_of_request_has_another_answer_while_sglang_drafts(
        plain: SglangServer, chain: SglangServer) -> None:
    tokenizer = ChatTokenizer(TARGET)
    chat, tools = (load_suite(SuiteSpec(name=name, path=f"quickstart:{name}")) for name in ("chat", "tools"))
    sent = [*chat[:3], *[prompt for prompt in tools if prompt.tools][:3]]
    prompts = [tokenizer.render(list(prompt.messages), list(prompt.tools) or None) for prompt in sent]
    alone = [request_answer("sglang", plain.url, MODEL, prompt, 32) for prompt in prompts]
    requests = requests_under_load("sglang", prompts, alone, 32, 4, tokenizer.decode, [one.tools for one in sent])
    assert {one.shape for one in requests} == {"plain", "streamed", "stopped", "continued", "formatted", "called"}
    undrafted, drafted = (request_under_load("sglang", server.url, MODEL, requests, 4) for server in (plain, chain))
    for request, one, two in zip(requests, undrafted, drafted, strict=True):
        assert is_same(one, two), request.title
        assert request.expected is None or is_same(one, request.expected), request.title
        begin = {"formatted": "{", "called": "["}.get(request.shape, "")
        assert tokenizer.decode(two.token_ids).lstrip().startswith(begin)
    within = [answer.histogram for request, answer in zip(requests, drafted, strict=True) if request.json_schema]
    assert sum(sum(histogram[1:]) for histogram in within) > 0, "drafts are accepted within a grammar"


def test_drafting_changes_no_log_probability_of_sglang(plain: SglangServer, chain: SglangServer) -> None:
    found = []
    for server in (plain, chain):
        with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
            answer = Served(client, MODEL).asked(logprobs=True, top_logprobs=3)
        found.append([(entry["bytes"], *(top["logprob"] for top in entry["top_logprobs"]))
                      for entry in answer["choices"][0]["logprobs"]["content"]])
    for undrafted, drafted in zip(*found, strict=True):
        assert drafted[0] == undrafted[0]
        assert drafted[1:] == pytest.approx(undrafted[1:], abs=1e-3)


@pytest.mark.slow
def test_an_adaptive_server_drafts_by_the_number_of_requests_and_shows_the_depth_in_use(
        plain: SglangServer, drafter: Path, tmp_path: Path) -> None:
    """Without graphs of decoding, with which SGLang 0.5.23 does not start adaptive speculation on a CPU."""
    file = tmp_path / "adaptive.json"
    plan = replace(
        chain_plan(drafter), adaptive_path=str(file),
        map=OperatingMap(points=(), adaptive={"1": {"candidate_steps": [5]}, "2": {"candidate_steps": [0]}}),
        engine=EngineSpec.model_validate({"kind": "sglang", "sglang_arguments": {"disable_decode_cuda_graph": True}}))
    file.write_text(adaptive_config(plan) or "")

    def ask(server: SglangServer) -> str:
        body = {"model": MODEL, "prompt": "One, two, three", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=READY_S, trust_env=False).json()
        return str(answer["choices"][0]["text"])

    def in_use(server: SglangServer) -> tuple[float, float]:  # SGLang sets these gauges every 40 rounds
        text = httpx.get(f"{server.url}/metrics", timeout=READY_S, trust_env=False).text
        shown = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}
        return shown["sglang:spec_num_steps"], shown["sglang:spec_num_draft_tokens"]

    expected = ask(plain)
    line = (*launch_arguments(plan), "--skip-server-warmup")
    with serving(line, tmp_path) as server, ThreadPoolExecutor(3) as users:
        assert ask(server) == expected
        assert in_use(server) == (5, 6)
        together = [users.submit(ask, server) for _ in range(3)]
        wait_for(lambda: in_use(server) == (0, 1), "three requests are decoded without drafting", READY_S)
        assert [answer.result() for answer in together] == [expected] * 3
        assert ask(server) == expected
        assert in_use(server) == (5, 6)


@pytest.mark.slow
def test_a_chain_is_drafted_the_same_in_batches_and_from_cached_prefixes(
        plain: SglangServer, chain: SglangServer, drafter: Path, prompts: list[list[int]]) -> None:
    """Six requests at a time, of texts this server has answered before: their prefixes come from its cache."""
    assert_proven(parity("chain", plain, chain, drafter, CHAIN, prompts, in_flight=6))


def test_a_tree_is_drafted_as_in_the_reference_engine_alone_and_in_batches(
        plain: SglangServer, drafter: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    with serving(flags(*drafting(drafter, TREE)), tmp_path) as drafted:
        assert_proven(parity("tree", plain, drafted, drafter, TREE, prompts))
        assert_proven(parity("tree", plain, drafted, drafter, TREE, prompts, in_flight=6))
