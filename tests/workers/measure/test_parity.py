"""The parity gate: its decision on plain values, near-ties and errors, the complete gate."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.processes import free_port
from eyrie_workers.engines.process import EngineCommand, EngineFailed, start_engine
from eyrie_workers.measure.known_misconfigurations import known_misconfigurations
from eyrie_workers.measure.parity import (
    Evidence,
    Served,
    compare_answers,
    compare_prompts,
    decide,
    first_difference,
    report_without_answers,
    request_answer,
    request_answers,
)
from eyrie_workers.measure.parity_reference import (
    Reference,
    RoundReplay,
    histogram_of,
    reference_rounds,
    why_not_held,
)
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import DraftStep, DraftTree
from eyrie_workers.speculation.tree import build_draft_tree
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import tiny_target
from tests.workers.measure.tiny_bench import random_drafter
from tests.workers.speculation.drafters import RandomDrafter, TextState

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
TREE = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)
SAME = Evidence("prompt 0", True, (4, 2, 6, 3), (4, 2, 6, 3))


# The decision


def test_equal_answers_and_rounds_pass() -> None:
    report = decide("sglang", CHAIN, "float32", [SAME, replace(SAME, id="prompt 1")])
    assert report.passed
    assert (report.prompts, report.identical, report.rounds_unexplained) == (2, 2, 0)
    assert report.histogram == report.reference_histogram == (8, 4, 12, 6)
    assert report.tau == report.reference_tau == 1 + (4 + 24 + 18) / 30
    assert report.tau_interval.low <= report.tau <= report.tau_interval.high


def test_a_changed_answer_passes_only_as_a_rounding_tie() -> None:
    line = "prompt 1: position 7, token 4 undrafted, token 9 drafted, logit gap 1e-06 (a rounding tie in float32)"
    tie = replace(SAME, id="prompt 1", identical=False, divergence=line, divergence_is_tie=True)
    report = decide("sglang", CHAIN, "float32", [SAME, tie])
    assert report.passed
    assert (report.identical, report.explained, report.divergences) == (1, 1, (line,))
    report = decide("sglang", CHAIN, "float32", [SAME, replace(tie, divergence_is_tie=False)])
    assert not report.passed
    assert any("must not be served" in reason for reason in report.reasons)


def test_changed_rounds_pass_when_near_ties_give_exactly_them_and_fail_with_the_cause_when_not() -> None:
    tied = Evidence("prompt 1", True, (5, 2, 6, 3), (4, 2, 6, 3), deviations=1)
    report = decide("sglang", CHAIN, "float32", [SAME, tied])
    assert report.passed
    assert (report.rounds_explained, report.rounds_unexplained) == (1, 0)
    wrong = Evidence("prompt 1", True, (30, 3, 1), (4, 2, 6, 3), deviations=None)
    report = decide("sglang", CHAIN, "float32", [SAME, wrong], "likely cause: the engine reads other layers")
    assert not report.passed
    assert report.rounds_unexplained == 27
    assert "likely cause: the engine reads other layers" in report.reasons


def test_half_precision_leaves_smallest_common_shape_a_few_rounds_while_tau_agrees() -> None:
    many = [Evidence(f"prompt {i}", True, (40 + i, 20, 60 - i, 30), (40 + i, 20, 60 - i, 30)) for i in range(8)]
    off_by_one = Evidence("prompt 9", True, (41, 20, 60, 30), (40, 20, 60, 30), deviations=None)
    assert decide("sglang", CHAIN, "bfloat16", [*many, off_by_one]).passed
    assert not decide("sglang", CHAIN, "float32", [*many, off_by_one]).passed
    way_off = Evidence("prompt 9", True, (140, 5, 2, 1), (40, 20, 60, 30), deviations=None)
    assert not decide("sglang", CHAIN, "bfloat16", [*many, way_off]).passed


def test_an_engine_with_another_target_fails_though_both_its_answers_agree() -> None:
    stranger = replace(SAME, target_differs="prompt 0, position 3: 2.1 logits below our target's choice")
    report = decide("sglang", CHAIN, "float32", [stranger])
    assert not report.passed
    assert any("the engine's target differs from ours beyond rounding" in reason for reason in report.reasons)


def test_a_drafter_that_is_never_accepted_is_said_to_prove_little() -> None:
    report = decide("sglang", CHAIN, "float32", [Evidence("prompt 0", True, (9,), (9,))])
    assert report.passed
    assert "no draft token was accepted" in report.reasons[-1]


@pytest.mark.parametrize(("is_tie", "passed"), [(True, True), (False, False)])
def test_without_a_replay_answers_decide_alone_and_the_report_says_why(is_tie: bool, passed: bool) -> None:
    plain = [Served(token_ids=(1, 2, 3), histogram=()), Served(token_ids=(4, 5), histogram=())]
    drafted = [Served(token_ids=(1, 2, 3), histogram=(1, 1)), Served(token_ids=(4, 6), histogram=(2,))]
    report = compare_answers("sglang", CHAIN, plain, drafted, lambda index: (f"prompt {index}", is_tie), "not replayed")
    assert (report.passed, report.identical, report.explained, report.divergences) == (
        passed, 1, int(is_tie), ("prompt 1",))
    assert (report.histogram, report.tau, report.reference_tau, report.reference_histogram) == ((3, 1), 1.25, None, ())
    assert report.reasons[-1] == "not replayed"


@pytest.mark.parametrize(("dtype", "needed"), [("bfloat16", "4097.0 GiB"), ("float32", "8193.0 GiB")])
def test_a_target_that_the_memory_cannot_hold_in_the_dtype_computed_is_found_before_it_is_loaded(
        dtype: str, needed: str, tmp_path: Path) -> None:
    assert why_not_held(tiny_target(tmp_path / "small", "qwen3"), dtype) is None
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2**20, 2**21], "data_offsets": [0, 2**42]}}).encode()
    with (large / "model.safetensors").open("wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header)
        weights.truncate(8 + len(header) + 2**42)  # sparse: 4 TiB that take no disk
    found = why_not_held(large, dtype)
    assert found is not None
    assert f"{needed} are needed" in found


def test_an_engine_that_ends_on_its_drafts_fails() -> None:
    report = report_without_answers("sglang", CHAIN, 12, "the engine ended")
    assert not report.passed
    assert report.reference_tau is None
    assert "d2t" in report.reasons[-1]


def test_the_round_that_ends_an_answer_counts_whole_in_sglang_and_as_far_as_it_reached_in_ours() -> None:
    # First token from the prefill, then 3 + 1 and 3 + 1 tokens: the ninth of them is beyond an answer of eight.
    assert histogram_of([3, 3], 8, whole_last_round=True) == (0, 0, 0, 2)
    assert histogram_of([3, 3], 8, whole_last_round=False) == (0, 0, 1, 1)
    assert histogram_of([], 1, whole_last_round=True) == ()


# Near-ties


@dataclass
class TiedDrafter(RandomDrafter):
    """Proposes what the target would say; at every third length of the text its two best are all but equal.

    `bias` decides those: above zero the target's choice wins, below it the runner-up.
    """

    target: TargetModel | None = None
    bias: float = 1e-7

    def propose(self, state: TextState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        text = state.texts[rows[0]]

        def logits(path: list[int]) -> Tensor:
            assert self.target is not None
            ((_, last),) = self.target.hidden_states([torch.tensor(text + path)], ())
            found = self.target.logits(last[-1:]).double()
            if (len(text) + len(path)) % 3 == 0:
                best = found.topk(2).indices[0]
                found[0, best[1]] = found[0, best[0]] - self.bias
            return found[None]

        paths: list[int] = []

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
            paths.append(int(tokens[0, 0]))
            return DraftStep(logits(paths), hidden)

        return build_draft_tree(DraftStep(logits([]), torch.zeros(1, 1, 1)), step, shape, None, noise)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny", seed=3)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> TargetModel:
    return load_target(target_dir, "float32")


def rounds(target: TargetModel, drafter: RandomDrafter, prompt: Sequence[int],
           length: int) -> tuple[tuple[int, ...], list[int]]:
    found = reference_rounds(Engine(target, drafter), CHAIN, prompt, length)
    return found.token_ids, list(found.accepted)


def test_retracing_an_answer_of_the_reference_engine_finds_its_own_rounds(target: TargetModel) -> None:
    drafter = TiedDrafter(target.config.vocab_size, target=target, bias=-1e-7)
    answer, accepted = rounds(target, drafter, [5, 9, 2, 40], 24)
    assert len(set(accepted)) > 1
    retracer = RoundReplay(target, drafter, CHAIN, "float32", [5, 9, 2, 40], answer)
    assert list(retracer.rounds()) == accepted
    assert retracer.target_gap() is None
    assert retracer.explain(histogram_of(accepted, 24, whole_last_round=True), whole_last_round=True) == ()


def test_rounds_decided_otherwise_by_a_near_tie_are_explained_and_others_are_not(target: TargetModel) -> None:
    prompt, length = [5, 9, 2, 40], 10
    drafter = TiedDrafter(target.config.vocab_size, target=target)
    answer, accepted = rounds(target, drafter, prompt, length)
    other_answer, otherwise = rounds(target, replace(drafter, bias=-1e-7), prompt, length)
    assert answer == other_answer
    served = histogram_of(otherwise, length, whole_last_round=True)
    assert served != histogram_of(accepted, length, whole_last_round=True)
    starts = RoundReplay(target, drafter, CHAIN, "float32", prompt, answer).explain(served, whole_last_round=True)
    assert starts
    # A gap no rounding makes: the same rounds are then a mistake.
    wide = replace(drafter, bias=0.5)
    assert RoundReplay(target, wide, CHAIN, "float32", prompt, answer).explain(served, whole_last_round=True) is None


def test_a_served_token_that_the_target_does_not_choose_is_measured(target: TargetModel) -> None:
    drafter = TiedDrafter(target.config.vocab_size, target=target)
    answer, _ = rounds(target, drafter, [5, 9, 2, 40], 8)
    changed_output = [*answer[:6], (answer[6] + 1) % target.config.vocab_size, answer[7]]
    gap = RoundReplay(target, drafter, CHAIN, "float32", [5, 9, 2, 40], changed_output).target_gap()
    assert gap is not None
    assert not gap.is_tie
    assert gap.position >= 6


def test_every_misconfiguration_differs_from_the_correct_drafter(target_dir: Path, target: TargetModel,
                                                            tmp_path: Path) -> None:
    drafter = random_drafter(tmp_path / "drafter", target_dir)
    causes = [one.cause for one in known_misconfigurations(drafter, target, "frontier_slots")]
    assert len(set(causes)) == len(causes)
    assert any("its final norm" in cause for cause in causes)
    assert any("one before" in cause for cause in causes)  # the highest layer of this drafter is the target's last
    assert not any("one after" in cause for cause in causes)


# The whole gate


def test_our_own_engine_passes_and_a_dead_one_fails(target_dir: Path, tmp_path: Path) -> None:
    drafter = random_drafter(tmp_path / "drafter", target_dir)
    vocab = read_config(target_dir).vocab_size
    prompts = [[(7 * i + 3 * j) % vocab for j in range(5 + i)] for i in range(4)]
    plain = start_engine(EngineCommand(target=target_dir, model="tiny", max_concurrency=2, threads=1),
                         tmp_path / "plain")
    use = DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=TREE))
    drafted = start_engine(EngineCommand(target=target_dir, model="tiny", use=use, max_concurrency=2, threads=1),
                           tmp_path / "drafted")
    try:
        paused: list[int] = []
        urls = plain.wait_ready(180.0), drafted.wait_ready(180.0)
        answers = [request_answers("embedded", url, "tiny", prompts, 20, lambda: paused.append(1)) for url in urls]
        report = Reference(target_dir, drafter, "embedded", TREE, "float32").replay_parity(prompts, *answers)
        assert report.passed, report.reasons
        assert (report.engine, report.prompts, report.identical) == ("embedded", 4, 4)
        assert report.histogram == report.reference_histogram
        assert sum(report.histogram) > 0
        assert paused
        drafted.stop()
        with pytest.raises(EngineFailed, match="did not complete the request") as failure:
            request_answers("embedded", urls[1], "tiny", prompts[:1], 8)
        report = report_without_answers("embedded", TREE, 1, failure.value.message)
        assert not report.passed
        assert "did not answer" in report.reasons[0]
    finally:
        plain.stop()
        drafted.stop()


def test_a_conversation_that_the_server_does_not_answer_is_a_difference(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tiny_target(tmp_path / "target"))
    conversation = [{"role": "user", "content": "Hi"}]
    (difference,) = compare_prompts(f"http://127.0.0.1:{free_port()}", "tiny", tokenizer, [(conversation, [])])
    assert difference.startswith("conversation 0: SGLang does not answer it")


def test_a_missing_token_is_a_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [5]) == 0


# Streams


@pytest.fixture
def streaming() -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers every request with the lines, and its URL."""
    lines: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if lines else 503)
            self.end_headers()
            self.wfile.write(b"\n\n".join(lines) + b"\n\n")

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", lines
        server.shutdown()


def test_the_last_piece_of_sglang_s_stream_is_the_answer_and_a_stream_that_is_cut_is_none(
        streaming: tuple[str, list[bytes]]) -> None:
    url, lines = streaming

    def answer() -> Served:
        return request_answer("sglang", url, "m", [1], 4, stream=True)

    with pytest.raises(EngineFailed, match="answered 503"):
        answer()
    lines += [b'data: {"output_ids": [5], "meta_info": {}}',
              b'data: {"output_ids": [5, 6], "meta_info": {"spec_correct_drafts_histogram": [1, 0]}}', b"data: [DONE]"]
    assert answer() == Served(token_ids=(5, 6), histogram=(1, 0))
    lines.pop()
    with pytest.raises(EngineFailed, match="ended the stream before the answer: the connection closed"):
        answer()
    lines[:] = [b'data: {"error": {"message": "out of memory"}}', b"data: [DONE]"]
    with pytest.raises(EngineFailed, match="out of memory"):
        answer()
