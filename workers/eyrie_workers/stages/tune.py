"""The tune stage: the chosen drafter in every draft-tree shape of the grid, then the best shape measured anew.

    python -m eyrie_workers.stages.tune --spec spec.json --out manifest.json

The grid (`measurement.grid`) is walked prompt by prompt: all shapes still in the race and the undrafted engine answer
the same prompt in turn, so one baseline serves them all. After every round over the suites the clearly slower shapes
drop out; they stay in the table with the prompts they had.

The winner's figure on the grid's prompts is optimistic: it is the largest of several noisy numbers. So the figure that
promotion decides on comes from a second measurement on other prompts, of every suite, that neither the grid nor, where
the suites are long enough, the choice of the checkpoint has seen.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from eyrie_api.artifacts import write_model
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.job import DraftTreeShape
from eyrie_api.v1alpha1.reports import TuneCell, TuneReport
from eyrie_api.v1alpha1.stages import TuneStage
from eyrie_workers.measurement.environment import environment
from eyrie_workers.measurement.grid import (
    choose_winner,
    describe_finding,
    draw,
    even_shares,
    possible_shapes,
    survivors,
)
from eyrie_workers.measurement.ledger import Ledger
from eyrie_workers.measurement.reports import common_prompts, tune_cell
from eyrie_workers.measurement.samples import Arm, Entry
from eyrie_workers.measurement.session import (
    LEDGER,
    REPORT,
    Progress,
    Session,
    Suites,
    ask,
    benchmark_report,
    interleave,
    measuring,
    open_ledger,
    open_session,
    read_suites,
    report_cells,
)
from eyrie_workers.stages.program import Result, Stage, run_program

FINAL_LEDGER = "final.jsonl"


@dataclass
class _Race:
    """The grid while it is walked."""

    shapes: tuple[DraftTreeShape, ...]
    active: tuple[DraftTreeShape, ...]
    entries: list[Entry] = field(default_factory=list)


def tune(spec: TuneStage, stage: Stage) -> Result:
    """Measure the grid of draft-tree shapes and confirm the winner."""
    started = time.monotonic()
    shapes = possible_shapes(spec.tune)
    if not shapes:
        raise InvalidInput("tune: no combination of num_steps, top_k and num_draft_tokens is possible",
                           "add 1 to tune.top_k (chains), or raise tune.num_draft_tokens above num_steps")
    suites = read_suites(spec, stage)
    ledger, final_ledger = open_ledger(stage, spec), open_ledger(stage, spec, FINAL_LEDGER)
    grid_prompts, final_prompts = _draw(suites, spec)
    progress = Progress(stage)
    with measuring(stage):
        session = open_session(spec, suites)
        entries = _walk_grid(session, spec, stage, shapes, grid_prompts, ledger, progress)
        cells = tuple(tune_cell(entries, shape, spec.tune.temperatures, seed=spec.benchmark.seed) for shape in shapes)
        winner = choose_winner(cells)
        stage.event("Chosen", f"{winner.tree.label()}: {winner.speedup:.2f}x at tau {winner.tau:.2f} on "
                              f"{winner.prompts} prompts")
        arm, final_started = Arm(winner.tree), time.monotonic()
        units = session.units(interleave(final_prompts), spec.benchmark.temperatures, spec.benchmark.repeats)
        final_entries = ask(session, units, [Arm(None), arm], final_ledger, progress)
    final = benchmark_report(session, spec, final_entries, report_cells(session, final_entries, units, arm), None,
                             time.monotonic() - final_started)
    report = TuneReport(
        checkpoint=spec.checkpoint, path=spec.drafter_dir, cells=cells, winner=winner.tree,
        finding=_finding(spec, entries, shapes, winner, grid_prompts, final_prompts), final=final,
        environment=environment(session.dtype), seconds=time.monotonic() - started)
    for step, cell in enumerate(cells):
        stage.metric(f"{cell.tree.label()}/speedup", step, cell.speedup)
        stage.metric(f"{cell.tree.label()}/tau", step, cell.tau)
    stage.event("Tuned", f"{report.finding} Measured anew: {final.speedup:.2f}x, "
                         f"{'lossless' if final.lossless else 'NOT lossless'}.")
    write_model(stage.out_dir / REPORT, report)
    return Result(report, [stage.out_dir / name for name in (LEDGER, FINAL_LEDGER, REPORT)])


def _draw(suites: Suites, spec: TuneStage) -> tuple[Suites, Suites]:
    """Prompts of the grid and of the final measurement, by suite."""
    shares = even_shares(spec.tune.max_prompts, len(spec.benchmark.suites))
    drawn = {
        suite.name: draw(suites[suite.name], suite.max_prompts, share)
        for suite, share in zip(spec.benchmark.suites, shares, strict=True)
    }
    return {name: grid for name, (grid, _) in drawn.items()}, {name: final for name, (_, final) in drawn.items()}


def _walk_grid(session: Session, spec: TuneStage, stage: Stage, shapes: tuple[DraftTreeShape, ...],
               prompts: Suites, ledger: Ledger[Entry], progress: Progress) -> list[Entry]:
    """Ask rung after rung of prompts (one of every suite), dropping slow shapes between rungs."""
    race = _Race(shapes, shapes)
    numbered = interleave(prompts)
    per_prompt = len(spec.tune.temperatures) * spec.tune.repeats
    finals = sum(s.max_prompts for s in spec.benchmark.suites) * len(spec.benchmark.temperatures)
    rungs = [numbered[i : i + len(prompts)] for i in range(0, len(numbered), len(prompts))]
    warm = session.units(numbered[:1], spec.tune.temperatures, 1)
    session.bench.warm_up(warm[: spec.benchmark.warmup_prompts], [Arm(None), *map(Arm, shapes)], stage.pause_point)
    for number, rung in enumerate(rungs, start=1):
        left = sum(map(len, rungs[number - 1 :])) * per_prompt * (1 + len(race.active))
        progress.total = progress.done + left + 2 * finals * spec.benchmark.repeats
        units = session.units(rung, spec.tune.temperatures, spec.tune.repeats)
        race.entries += ask(session, units, [Arm(None), *map(Arm, race.active)], ledger, progress)
        if number < len(rungs):
            _drop_the_slow(race, spec, stage)
    return race.entries


def _drop_the_slow(race: _Race, spec: TuneStage, stage: Stage) -> None:
    cells = [tune_cell(race.entries, shape, spec.tune.temperatures) for shape in race.active]
    kept = survivors({cell.tree: cell.speedup for cell in cells}, cells[0].prompts)
    dropped = [cell for cell in cells if cell.tree not in kept]
    if dropped:
        stage.event("Dropped", f"after {cells[0].prompts} prompts, clearly slower than the leader: "
                    + ", ".join(f"{cell.tree.label()} ({cell.speedup:.2f}x)" for cell in dropped))
    race.active = kept


def _finding(spec: TuneStage, entries: Sequence[Entry], shapes: Sequence[DraftTreeShape], winner: TuneCell,
             grid: Suites, final: Suites) -> str:
    """The sentences of the grid, and where the final figures come from."""
    common = common_prompts(entries, shapes, spec.tune.temperatures)
    cells = [tune_cell(entries, shape, spec.tune.temperatures, common) for shape in shapes]
    used = {(p.suite, p.id) for prompts in grid.values() for p in prompts}
    asked = {(p.suite, p.id) for prompts in final.values() for p in prompts}
    again = len(used & asked)
    source = (f"The final figures are from {len(asked)} prompts the grid did not use." if not again else
              f"The final figures are from {len(asked)} prompts, of which {again} were also used to choose the shape "
              "(the suites have no more), which flatters them.")
    return f"On {len(common)} prompts common to all shapes: {describe_finding(cells, winner)} {source}"


if __name__ == "__main__":
    sys.exit(run_program(TuneStage, tune))
