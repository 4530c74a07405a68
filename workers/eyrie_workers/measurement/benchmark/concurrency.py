"""A drafter against no drafter with several requests decoded at once, for the benchmark's higher concurrencies.

The prompts of all suites are mixed and answered in blocks (`measurement.benchmark.blocks`), as when tuning races
settings: at each rung every temperature's block is answered with and without the drafter, in an order that changes from
rung to rung. Suites are not reported separately: a block holds few prompts of each. Only first turns are asked, because
a later turn of one conversation would have to wait for its first.
"""

from collections.abc import Sequence

from eyrie_api.decisions.near_ties import is_lossless
from eyrie_api.v1alpha1.benchmark import BenchmarkSpec
from eyrie_api.v1alpha1.reports import ConcurrencyReport
from eyrie_api.v1alpha1.tuning import OFF, Setting
from eyrie_workers.intervals import Tally, acceptance_length, add_histograms, speed_interval, speed_ratio
from eyrie_workers.measurement.benchmark.blocks import (
    BlockRun,
    Blocks,
    block_size,
    comparable,
    num_identical,
    turns,
)
from eyrie_workers.measurement.benchmark.losslessness import explain
from eyrie_workers.stage_program import Stage

_FEWEST_RUNGS = 2  # one block has no interval


def num_rungs(num_requests: int, concurrency: int) -> int:
    """Blocks of each temperature and variant: as many as ask every request once."""
    return max(_FEWEST_RUNGS, -(-num_requests // block_size(concurrency)))


class ConcurrentBenchmark:
    """The blocks of one drafted setting, and of no drafter, at the concurrencies above 1."""

    def __init__(self, spec: BenchmarkSpec, setting: Setting, blocks: Blocks) -> None:
        self._spec, self._setting, self._blocks = spec, setting, blocks
        self._concurrencies = [one for one in spec.concurrencies if one > 1]
        self._rungs = {one: num_rungs(len(blocks.runner.prompts) * spec.repeats, one) for one in self._concurrencies}

    @property
    def is_measured(self) -> bool:
        """Whether the ledger has all blocks."""
        return all((concurrency, temperature, rung, setting.label()) in self._blocks.runs
                   for concurrency in self._concurrencies for temperature, rung in self._keys(concurrency)
                   for setting in (OFF, self._setting))

    def measure(self, stage: Stage) -> None:
        """Measure what the ledger does not have. The variants must be started under the names of `Setting.label`."""
        resident = self._blocks.engine.num_resident
        total = 2 * sum(len(self._keys(one)) for one in self._concurrencies)
        done = 0
        for concurrency in self._concurrencies:
            for setting in (OFF, self._setting):
                stage.pause_point()
                self._blocks.runner.warm_up(setting, concurrency, self._spec.temperatures)
            for setting, (temperature, rung) in turns((OFF, self._setting), self._keys(concurrency), 0,
                                                      resident is None or resident >= 2):
                stage.pause_point()
                self._blocks.measure(setting, concurrency, temperature, rung)
                done += 1
                stage.progress(done, total, "blocks", f"{setting.label()}, {concurrency} at once")

    def reports(self) -> tuple[ConcurrencyReport, ...]:
        """One report per concurrency and temperature. Where an answer differs, the reference implementation of the
        target explains it."""
        return tuple(self._report(concurrency, temperature) for concurrency in self._concurrencies
                     for temperature in self._spec.temperatures)

    def _keys(self, concurrency: int) -> list[tuple[float, int]]:
        return [(temperature, rung) for rung in range(self._rungs[concurrency])
                for temperature in self._spec.temperatures]

    def _runs(self, setting: Setting, concurrency: int, temperature: float) -> list[BlockRun]:
        return [self._blocks.runs[concurrency, temperature, rung, setting.label()]
                for rung in range(self._rungs[concurrency])]

    def _report(self, concurrency: int, temperature: float) -> ConcurrencyReport:
        drafted = self._runs(self._setting, concurrency, temperature)
        plain = self._runs(OFF, concurrency, temperature)
        tallies = [Tally(ours.tokens, ours.seconds, theirs.tokens, theirs.seconds)
                   for ours, theirs in zip(drafted, plain, strict=True)]
        compared = temperature == 0.0 or self._blocks.engine.same_samples
        lines, ties = self._differences(drafted, plain) if compared else ([], 0)
        return ConcurrencyReport(
            concurrency=concurrency, temperature=temperature, requests=sum(len(run.answers) for run in drafted),
            tau=acceptance_length(add_histograms([run.accepted_histogram for run in drafted])),
            tokens_per_s=_rate(drafted), baseline_tokens_per_s=_rate(plain), speedup=speed_ratio(tallies),
            speedup_interval=speed_interval([tallies], self._spec.seed),
            identical=sum(num_identical(ours, theirs) for ours, theirs in zip(drafted, plain, strict=True)),
            near_ties=ties, compared=compared, divergences=tuple(lines))

    def _differences(self, drafted: Sequence[BlockRun], plain: Sequence[BlockRun]) -> tuple[list[str], int]:
        """A line for every request whose answers differ, and how many of them differ by near-ties alone."""
        session, lines, ties = self._blocks.runner.session, [], 0
        for ours, theirs in zip(drafted, plain, strict=True):
            for request in self._blocks.runner.requests(ours.concurrency, ours.temperature, ours.rung):
                one, other = comparable(ours, theirs, request.id)
                if one == other:
                    continue
                found = explain(session.judge, request.id, request.prompt_ids, other, one,
                                temperature=ours.temperature, seed=request.seed)
                assert found is not None
                lines.append(found.line(session.dtype))
                ties += found.is_tie(session.dtype)
        return lines, ties


def all_lossless(reports: Sequence[ConcurrencyReport]) -> bool:
    """Whether every compared request is identical, or differs by near-ties alone."""
    return all(is_lossless(one.requests, one.identical, one.near_ties) for one in reports if one.compared)


def _rate(runs: Sequence[BlockRun]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
