"""Pairs of blocks at the higher concurrencies: until they are clear, and again where a server ended."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from eyrie_api.contract.benchmark import BenchmarkSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_workers.data.suites import Prompt
from eyrie_workers.engines.decoding_engine import EmbeddedEngine, EngineRun
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure.benchmark.blocks import BlockRun, ConcurrentBenchmark, MeasuredBlocks
from eyrie_workers.measure.benchmark.session import Session, open_session, read_suites, round_robin, uses_of
from eyrie_workers.measure.benchmark.variants import BASELINE, UNDRAFTED, Variant
from eyrie_workers.measure.intervals import FEWEST_PAIRS, anytime_interval
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage
from tests.workers.measure.tiny_bench import stage_specs

TREE = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
CHAIN = Setting(tree=TREE)


class EndingEngine(EmbeddedEngine):
    """Answers as it does, and counts a server that ended and was started again in some of its measured runs."""

    ends_in: tuple[int, ...] = ()
    answered = 0

    def generate(self, variant: str, requests: Sequence[Request], concurrency: int, *,
                 truncate: bool = False) -> EngineRun:
        self.answered += requests[0].max_new_tokens > 4  # not a warm-up
        self.restarts += self.answered in self.ends_in
        return super().generate(variant, requests, concurrency, truncate=truncate)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    spec, stage = stage_specs(tmp_path_factory.mktemp("bench"))[0], Stage(tmp_path_factory.mktemp("stage"))
    uses = uses_of(spec, {OFF.label(): OFF, CHAIN.label(): CHAIN, BASELINE: OFF})
    with open_session(spec, read_suites(spec, stage), uses, stage, 3) as session:
        engine = EndingEngine(session.target, "float32", 3)
        engine.start(uses)
        yield dataclasses.replace(session, engine=engine)


def prompts(session: Session) -> list[Prompt]:
    return [prompt for _, prompt in round_robin(session.suites)]


def benchmark_of(session: Session, path: Path) -> tuple[ConcurrentBenchmark, MeasuredBlocks]:
    blocks = MeasuredBlocks(session, prompts(session), JsonlLedger(path, BlockRun, "d"))
    spec = BenchmarkSpec(concurrencies=(1, 3), temperatures=(0.0,))
    return ConcurrentBenchmark(spec, CHAIN, blocks, min_speedup=1.05), blocks


def block(blocks: MeasuredBlocks, rung: int, setting: Setting, seconds: float) -> BlockRun:
    answers = {request.id: (1, 2, 3) for request in blocks.requests(3, 0.0, rung)}
    return BlockRun(concurrency=3, temperature=0.0, rung=rung, variant=setting.label(), seconds=seconds, tokens=18,
                    accepted_histogram=(6,), answers=answers, whole=tuple(answers),
                    answer_s=dict.fromkeys(answers, seconds / 2))


@pytest.mark.parametrize(("speed", "noise", "pairs"), [(1.5, 0.02, FEWEST_PAIRS), (0.8, 0.02, FEWEST_PAIRS),
                                                      (1.1, 0.5, 2 * FEWEST_PAIRS)])
def test_pairs_of_blocks_are_measured_until_their_ratio_is_clear_or_the_budget_ends(
        speed: float, noise: float, pairs: int, session: Session, tmp_path: Path) -> None:
    benchmark, blocks = benchmark_of(session, tmp_path / "blocks.jsonl")
    draw, ratios = Random(1), list[float]()
    while not benchmark.is_measured:
        rung = len(ratios)
        ratios.append(speed * exp(draw.gauss(0.0, noise)))
        for setting, seconds in ((OFF, 1.0), (CHAIN, 1.0 / ratios[-1])):
            run = block(blocks, rung, setting, seconds)
            blocks.runs[run.key] = run
    assert len(ratios) == pairs
    (report,) = benchmark.reports()
    logs = [log(ratio) for ratio in ratios]
    assert (report.requests, report.identical) == (6 * pairs, 6 * pairs)
    assert report.speedup == pytest.approx(exp(fmean(logs)))
    by_prompt = dict[str, list[float]]()
    for rung, value in enumerate(logs):
        for request in blocks.requests(3, 0.0, rung):
            by_prompt.setdefault(request.id.split()[0], []).append(value)
    interval = anytime_interval(logs, [*map(fmean, by_prompt.values())])
    assert (report.speedup_interval.low, report.speedup_interval.high) == pytest.approx((interval.low, interval.high))
    assert benchmark.is_clear(report.speedup, report.speedup_interval) == (noise < 0.1)


def test_a_block_in_which_a_server_ended_is_measured_again_in_all_settings_once_per_concurrency(
        session: Session, tmp_path: Path) -> None:
    engine = session.engine
    assert isinstance(engine, EndingEngine)
    benchmark, blocks = benchmark_of(session, tmp_path / "blocks.jsonl")
    engine.answered, engine.ends_in = -2, (2, 7)  # two warm-ups; then in the first pair, and in the third
    benchmark.measure(Stage(tmp_path))
    assert benchmark.is_measured
    times = Counter((run.rung, run.variant) for run in blocks.ledger.entries)
    assert {key for key, number in times.items() if number == 2} == {(0, "off"), (0, CHAIN.label())}
    assert set(times.values()) == {1, 2}
    assert [run.variant for run in list(blocks.ledger.entries)[:4]] == ["off", CHAIN.label()] * 2
    (report,) = benchmark.reports()
    assert report.identical == report.requests == 6 * max(rung + 1 for rung, _ in times)


def test_a_prompt_in_which_a_server_ended_is_answered_again_in_all_variants_once(session: Session) -> None:
    engine, fresh = session.engine, dataclasses.replace(session)
    assert isinstance(engine, EndingEngine)
    engine.start({BASELINE: engine._uses[OFF.label()], Variant(tree=TREE).title: engine._uses[CHAIN.label()]})
    engine.answered, engine.ends_in = 0, (2, 6)
    first, second = session.units([(0, prompts(session)[0]), (1, prompts(session)[1])], (0.0,), 1)
    for unit, answers in ((first, 4), (second, 6)):
        entry = fresh.measure(unit, [UNDRAFTED, Variant(tree=TREE)], lambda: None)
        assert entry.samples.keys() == {BASELINE, Variant(tree=TREE).title}
        assert engine.answered == answers
