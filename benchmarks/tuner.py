"""The tuner against the exhaustive grid.

    python -m benchmarks.tuner --target quickstart --drafter DIR --out report.json [--engine sglang]

Three measurements on one machine. The tuner, as the stage runs it. The grid: every setting at every concurrency, for as
many blocks as the tuner would give its finalists, interleaved. The finalists: at each concurrency the tuner's choice,
SGLang's default for a Llama, the grid's best two and off, measured again on other blocks, because the best of fifty
noisy figures is biased upwards on the blocks that selected it; until the interval of how far the choice is behind has a
half-width of 3 % or less, or six times the grid's blocks are measured.

The report has how far the tuner's choice is behind the best, how far the default and a random choice are, and the cost
of finding it: trials (settings tried at a concurrency), blocks, and seconds, probe and replay included.

And the tau that a chain needs to be `--min-speedup` times as fast as no drafter, three times: predicted by `eyrie plan`
from the machine's rates, computed by the tuner from timed rounds, and measured: a chain of the grid, whose tau and
speed-up are known, would need tau * min_speedup / speed-up.

All measurements are in ledgers next to the report, from which an interrupted run resumes. A benchmark, not a test.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import matplotlib
from matplotlib.figure import Figure

from benchmarks.experiments.fits import rank_correlation
from benchmarks.figure_style import (
    BASELINE_BLUE,
    BEST_GREEN,
    OTHER_GREY,
    SETTINGS,
    WARM_ORANGE,
    new_figure,
    save,
    title,
)
from eyrie_api.artifacts import digest_model, read_sealed, write_model
from eyrie_api.contract.benchmark import QUICKSTART_SUITES, BenchmarkSpec
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen, Interval
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.reports import Environment, TuneReport
from eyrie_api.contract.stages import TuneStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, NeededTau, Setting, TuneSpec
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.planning.facts import target_dir, target_facts
from eyrie_api.planning.needed_tau import needed_tau
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.preflight import rates
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_workers.drafters.checkpoint import read_config
from eyrie_workers.drafters.family import family_of
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure.benchmark.blocks import BlockRun, MeasuredBlocks
from eyrie_workers.measure.benchmark.session import measuring, open_session, read_suites, uses_of
from eyrie_workers.measure.intervals import acceptance_length, add_histograms
from eyrie_workers.measure.tuner.operating import possible_settings
from eyrie_workers.measure.tuner.profile import TuningProfile
from eyrie_workers.measure.tuner.race import Race
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.tune import PROFILE, Tuning, draw_prompts, tune

_FINALISTS = 2  # of the grid, in addition to the tuner's choice, the default and off
_FINAL_SHARE = 6  # times the grid's rungs, at most: the difference to resolve is a percent or two
_HALF_WIDTH = 0.03
SGLANG_DEFAULT = Setting(tree=DraftTreeShape(num_steps=5, top_k=4, num_draft_tokens=8))
"""What SGLang 0.5.23 drafts with for LlamaForCausalLM by default (`_auto_choose_speculative_params`)."""
GRID, FINALISTS = "grid.jsonl", "finalists.jsonl"


class GridRow(Frozen):
    """One setting at one concurrency in the exhaustive grid."""

    setting: Setting
    concurrency: int
    predicted_speedup: float
    speedup: float
    speedup_interval: Interval | None
    tau: float
    """1 for off."""

    seconds: float


class NeededRow(Frozen):
    """The tau that a chain of the drafter needs at one load; None: no tau of that depth is enough."""

    concurrency: int
    num_steps: int
    planned: float | None
    """By `eyrie plan`."""

    timed: float | None
    """By the tuner."""

    measured: float | None
    measured_interval: Interval | None
    """95 %, of the speed-up."""

    tau: float
    """The drafter's, measured."""


class Verdict(Frozen):
    """One concurrency."""

    concurrency: int
    chosen: Setting
    grid_best: Setting
    best: Setting
    """Of the finalists, measured together."""

    behind_in_grid: float
    """Share by which the choice is slower than the grid's best, on the grid's own blocks (biased towards the best)."""

    behind: float
    """The same among the finalists, 0 when the choice is the best of them."""

    behind_interval: Interval | None
    """95 %, blocks in pairs."""

    default_behind: float | None
    """The same of SGLang's default; None where the grid does not have it."""

    default_behind_interval: Interval | None
    random_behind: float
    """Mean over the grid of each setting's share behind the grid's best: what a random choice costs."""

    trials: int
    trials_possible: int
    blocks: int
    blocks_possible: int
    seconds: float
    seconds_possible: float
    prediction_error: float
    """Median over the grid of |predicted / measured - 1| of the speed-up."""

    rank_correlation: float
    """Spearman's, of predicted and measured speed-ups."""

    dispersion: float
    """Median relative half-width of the grid's intervals: smaller differences are not significant."""


class TunerReport(Frozen):
    """The tuner against the grid."""

    target: str
    drafter: str
    tune: TuneSpec
    verdicts: tuple[Verdict, ...]
    grid: tuple[GridRow, ...]
    needed: tuple[NeededRow, ...]
    tuner: TuneReport
    profile_seconds: float
    environment: Environment


def run(spec: TuneStage, out: Path) -> TunerReport:
    """Measure all three and compare."""
    directory = out.parent / f"{out.stem}.work"
    directory.mkdir(parents=True, exist_ok=True)
    stage = Stage(directory, quiet=True)
    tuned = directory / "tuned.json"
    if tuned.exists():
        report = TuneReport.model_validate_json(tuned.read_bytes())
    else:
        found = tune(spec, stage).report
        assert isinstance(found, TuneReport)
        report = found
        write_model(tuned, report)
    settings = possible_settings(spec.tune)
    suites = read_suites(spec, stage)
    uses = uses_of(spec, {setting.label(): setting for setting in settings})
    with measuring(stage), open_session(spec, suites, uses, stage, max(spec.tune.concurrencies)) as session:
        raced = draw_prompts(suites, spec).raced
        profile = read_sealed((directory / PROFILE).read_bytes(), TuningProfile)
        grid, final = (
            Tuning(spec, stage, MeasuredBlocks(session, raced, JsonlLedger(directory / name, BlockRun,
                                                                           digest_model(spec))),
                   settings, uses, profile) for name in (GRID, FINALISTS))
        rows, verdicts = [], []
        concurrencies = sorted(set(spec.tune.concurrencies))
        races = measure_grid(grid, concurrencies, settings)
        for concurrency in concurrencies:
            rungs, everyone = grid.most_rungs(concurrency), races[concurrency]
            rows += [_row(grid, everyone, setting, concurrency) for setting in settings]
            chosen = _choice(report, concurrency)
            ranked = sorted(settings, key=lambda setting: -everyone.speedup(setting))
            asked = [SGLANG_DEFAULT] if SGLANG_DEFAULT in settings else []
            finalists = list(dict.fromkeys([OFF, chosen, *asked, *ranked[:_FINALISTS]]))
            for part in range(2, _FINAL_SHARE + 2):
                last = measure_all(final, concurrency, finalists, range(rungs, part * rungs))
                behind = _behind(last, chosen, max(last.blocks, key=last.speedup))
                if behind is not None and behind.high - behind.low <= 2 * _HALF_WIDTH:
                    break
            verdicts.append(_verdict(report, [row for row in rows if row.concurrency == concurrency], everyone, last,
                                     chosen))
            print(_summary(verdicts[-1]), flush=True)
    return TunerReport(target=spec.target.model, drafter=spec.drafter_dir, tune=spec.tune, verdicts=tuple(verdicts),
                       grid=tuple(rows), needed=needed_rows(spec, rows, report), tuner=report,
                       profile_seconds=profile.seconds, environment=report.environment)


def measure_grid(tuning: Tuning, concurrencies: Sequence[int], settings: Sequence[Setting]) -> dict[int, Race]:
    """A race without elimination at every concurrency. Where not all servers fit, each setting's is started once and
    measured at every concurrency before the next."""
    resident = tuning.blocks.engine.num_resident
    if resident is None or len(settings) <= resident:
        return {one: measure_all(tuning, one, settings, range(tuning.most_rungs(one))) for one in concurrencies}
    races = {one: Race(tuning.profile.predictions(one), len(settings)) for one in concurrencies}
    for number, setting in enumerate(settings, start=1):  # `off` first: the others' answers are compared with its
        for concurrency, race in races.items():
            rungs = range(tuning.most_rungs(concurrency))
            if any((concurrency, temperature, rung, setting.label()) not in tuning.blocks.runs for rung in rungs
                   for temperature in tuning.spec.tune.temperatures):
                for error in tuning.blocks.engine.start({setting.label(): tuning.uses[setting.label()]}).values():
                    raise error
                tuning.blocks.warm_up(setting, concurrency, tuning.spec.tune.temperatures)
            race.active = [setting]
            tuning.measure_rungs(race, concurrency, rungs, all_ready=False)
        print(f"grid: {number} of {len(settings)} settings", file=sys.stderr, flush=True)
    return races


def measure_all(tuning: Tuning, concurrency: int, settings: Sequence[Setting], rungs: range) -> Race:
    """A race without elimination."""
    race = Race(tuning.profile.predictions(concurrency), len(settings), active=list(settings))
    engine = tuning.blocks.engine
    all_ready = engine.num_resident is None or len(settings) <= engine.num_resident
    labels = {setting.label(): setting for setting in settings}
    steps = [range(rung, rung + 1) for rung in rungs] if all_ready else [rungs]
    if any((concurrency, temperature, rung, label) not in tuning.blocks.runs for label in labels for rung in rungs
           for temperature in tuning.spec.tune.temperatures):
        for name, error in engine.start({label: tuning.uses[label] for label in labels}).items():
            print(f"{name} is left out: {error.message}", file=sys.stderr, flush=True)
            race.withdraw(labels[name], error.message)
        for setting in race.active if all_ready else ():
            tuning.blocks.warm_up(setting, concurrency, tuning.spec.tune.temperatures)
    for step in steps:
        tuning.measure_rungs(race, concurrency, step, all_ready)
        print(f"concurrency {concurrency}: {step.stop - rungs.start} of {len(rungs)} rungs of {len(settings)} settings",
              file=sys.stderr, flush=True)
    return race


def _row(tuning: Tuning, race: Race, setting: Setting, concurrency: int) -> GridRow:
    runs = tuning.runs_of(setting, concurrency).values()
    return GridRow(setting=setting, concurrency=concurrency, speedup=race.speedup(setting),
                   predicted_speedup=race.predictions[setting].speedup, speedup_interval=race.interval(setting),
                   tau=mean(acceptance_length(add_histograms([run.accepted_histogram for run in of])) for of in runs),
                   seconds=sum(one.seconds for one in race.blocks[setting].values()))


def needed_rows(spec: TuneStage, grid: Sequence[GridRow], report: TuneReport) -> tuple[NeededRow, ...]:
    """Predicted, timed and measured, of each chain of the drafter in the grid."""
    planned, timed = ({(row.users, row.num_steps): row.tau for row in rows}
                      for rows in (_planned(spec), report.needed_tau))
    needed = []
    for row in grid:
        if row.setting.method != "drafter" or row.setting.tree is None or row.setting.tree.top_k != 1:
            continue
        at = (row.concurrency, depth := row.setting.tree.num_steps)
        if at not in timed:  # no chain of the drafter could start as an anchor
            continue
        ends, bound = row.speedup_interval, row.tau * spec.min_speedup
        needed.append(NeededRow(
            concurrency=row.concurrency, num_steps=depth, planned=planned[at], timed=timed[at], tau=row.tau,
            measured=needed_tau(depth, bound / row.speedup, 1.0),
            measured_interval=None if ends is None else Interval(low=bound / ends.high, high=bound / ends.low)))
    return tuple(needed)


def _planned(spec: TuneStage) -> tuple[NeededTau, ...]:
    """What `eyrie plan` says of a job that trains a drafter of the same family for the same target on this machine."""
    family = family_of(read_config(Path(spec.drafter_dir)))
    assert family is not None  # the tuner has loaded it
    job = JobSpec.model_validate({
        "target": {"model": spec.target.model, "dtype": spec.target.dtype}, "drafter": {"family": family.name},
        "data": {"sources": [{"path": "quickstart"}]}, "tune": spec.tune.model_dump(),
        "promotion": {"min_speedup": spec.min_speedup}})
    directory = target_dir(job.target)
    assert directory is not None
    return make_plan(derive(job), target_facts(directory), None, rates=rates(Settings())).needed_tau


def needed_table(needed: Sequence[NeededRow]) -> str:
    """For docs/results/tuner.md, with how far prediction and timed rounds are from what was measured."""
    def cell(tau: float | None) -> str:
        return "none" if tau is None else f"{tau:.2f}"

    lines = ["| at once | depth | planned | timed rounds | measured (95 %) | the drafter's tau |",
             "|---|---|---|---|---|---|"]
    for row in needed:
        ends = row.measured_interval
        interval = "" if ends is None else f" ({ends.low:.2f} to {ends.high:.2f})"
        lines.append(f"| {row.concurrency} | {row.num_steps} | {cell(row.planned)} | {cell(row.timed)} | "
                     f"{cell(row.measured)}{interval} | {row.tau:.2f} |")
    for name in ("planned", "timed"):
        both = [(found, row.measured) for row in needed
                if (found := getattr(row, name)) is not None and row.measured is not None]
        same = sum((getattr(row, name) is None) == (row.measured is None) for row in needed)
        error = f"median error {median(abs(found / seen - 1.0) for found, seen in both):.1%} of {len(both)}; " \
            if both else ""
        lines.append(f"{name}: {error}{same} of {len(needed)} agree on whether any tau is enough")
    return "\n".join(lines)


def _choice(report: TuneReport, concurrency: int) -> Setting:
    assert report.map is not None
    return report.map.at(concurrency).setting


def _verdict(report: TuneReport, rows: Sequence[GridRow], everyone: Race, last: Race, chosen: Setting) -> Verdict:
    concurrency = rows[0].concurrency
    grid_best = max(rows, key=lambda row: row.speedup).setting
    best = max(last.blocks, key=last.speedup)
    default = SGLANG_DEFAULT if SGLANG_DEFAULT in last.blocks else None
    tried = [t for t in report.trials if t.concurrency == concurrency and t.blocks]
    drafted = [row for row in rows if row.setting != OFF]
    widths = [(row.speedup_interval.high / row.speedup_interval.low) ** 0.5 - 1.0 for row in drafted
              if row.speedup_interval is not None]
    return Verdict(
        concurrency=concurrency, chosen=chosen, grid_best=grid_best, best=best,
        behind_in_grid=1.0 - everyone.speedup(chosen, grid_best), behind=1.0 - last.speedup(chosen, best),
        behind_interval=_behind(last, chosen, best),
        default_behind=None if default is None else 1.0 - last.speedup(default, best),
        default_behind_interval=None if default is None else _behind(last, default, best),
        random_behind=mean(1.0 - row.speedup / everyone.speedup(grid_best) for row in rows),
        trials=len(tried), trials_possible=len(rows), blocks=sum(trial.blocks for trial in tried),
        blocks_possible=sum(map(len, everyone.blocks.values())), seconds=sum(trial.seconds for trial in tried),
        seconds_possible=sum(row.seconds for row in rows),
        prediction_error=median(abs(row.predicted_speedup / row.speedup - 1.0) for row in drafted),
        rank_correlation=rank_correlation([row.predicted_speedup for row in drafted], [row.speedup for row in drafted]),
        dispersion=median(widths) if widths else 0.0)


def _behind(race: Race, setting: Setting, best: Setting) -> Interval | None:
    interval = race.interval(setting, best)
    return Interval(low=1.0 - interval.high, high=1.0 - interval.low) if interval else None


def _summary(one: Verdict) -> str:
    interval = f" ({one.behind_interval.low:+.1%} to {one.behind_interval.high:+.1%})" if one.behind_interval else ""
    return (f"concurrency {one.concurrency}: chose {one.chosen.label()}; best of the finalists {one.best.label()}, "
            f"{one.behind:.1%} faster{interval}; grid's best {one.grid_best.label()}, {one.behind_in_grid:.1%} faster "
            f"on its own blocks. Behind the best: SGLang's default "
            f"{'-' if one.default_behind is None else format(one.default_behind, '.1%')}, a random choice "
            f"{one.random_behind:.1%}. Trials {one.trials} of {one.trials_possible}, blocks {one.blocks} of "
            f"{one.blocks_possible}, seconds {one.seconds:.0f} of {one.seconds_possible:.0f}. Predictions: median "
            f"error {one.prediction_error:.1%}, rank correlation {one.rank_correlation:.2f}; a grid figure is good to "
            f"{one.dispersion:.1%}.")


def parse(argv: Sequence[str] | None = None) -> tuple[TuneStage, Path]:
    """The command line. Raises InvalidInput for an invalid grid."""
    parser = argparse.ArgumentParser(description="The tuner against the exhaustive grid.")
    default = TuneSpec()
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--no-ngram", action="store_true")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON report; ledgers and plots go next to it")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--min-speedup", type=float, default=PromotionPolicy().min_speedup)
    parser.add_argument("--threads", type=int)
    for name in ("num_steps", "top_k", "num_draft_tokens", "concurrencies"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="+", default=list(getattr(default, name)))
    parser.add_argument("--prompts", type=int, default=default.max_prompts, help="to predict from, and to race on")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(default.temperatures))
    options = parser.parse_args(argv)
    suites = tuple(suite.model_copy(update={"max_prompts": 2}) for suite in QUICKSTART_SUITES)
    try:
        tune_spec = TuneSpec(
            num_steps=tuple(options.num_steps), top_k=tuple(options.top_k), concurrencies=tuple(options.concurrencies),
            num_draft_tokens=tuple(options.num_draft_tokens), max_prompts=options.prompts,
            temperatures=tuple(options.temperatures), ngram=not options.no_ngram)
        benchmark = BenchmarkSpec(suites=suites, max_new_tokens=options.tokens, threads=options.threads,
                                  temperatures=tuple(options.temperatures))
        target = TargetSpec.model_validate({"model": options.target, "dtype": options.dtype})
    except ValueError as error:
        raise InvalidInput(f"the options make no valid trial: {error}", "see --help") from error
    return TuneStage(job_id="trial", checkpoint=options.drafter.name, candidate="trial", target=target,
                     benchmark=benchmark, tune=tune_spec, drafter_dir=str(options.drafter),
                     min_speedup=options.min_speedup, engine=EngineSpec(kind=options.engine)), options.out


def predicted_against_measured(outcomes: Sequence[tuple[Setting, int, float, float]], detail: str) -> Figure:
    """Predicted against measured speed-up: one point per setting and concurrency, which `outcomes` begin with."""
    figure, (axes,) = new_figure(6.5, 6.0)
    loads = sorted({concurrency for _, concurrency, _, _ in outcomes})
    for concurrency, colour, marker in zip(loads, (BEST_GREEN, WARM_ORANGE, BASELINE_BLUE, OTHER_GREY) * len(loads),
                                           "osD^" * len(loads), strict=False):
        points = [(p, m) for setting, rows, p, m in outcomes if rows == concurrency and setting != OFF]
        axes.scatter([p for p, _ in points], [m for _, m in points], c=colour, marker=marker, s=44, alpha=0.8,
                     label=f"concurrency {concurrency}", zorder=3)
    ends = [min(min(p, m) for _, _, p, m in outcomes), max(max(p, m) for _, _, p, m in outcomes)]
    axes.plot(ends, ends, color="#444444", linewidth=1.2)
    axes.set(xlabel="predicted speed-up over no speculation", ylabel="measured")
    axes.legend(loc="upper left", fontsize=10)
    errors = sorted(abs(p / m - 1.0) for setting, _, p, m in outcomes if setting != OFF)
    title(figure, f"Predictions are off by {errors[len(errors) // 2]:.1%} (median of {len(errors)})", detail)
    return figure


def _environment_of(report: TuneReport) -> str:
    """In one line."""
    e = report.environment
    threads = "1 thread" if e.threads == 1 else f"{e.threads} threads"
    return f"{e.hardware}, {threads}, {e.dtype}, torch {e.torch}, concurrency 1, {e.date[:10]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial; returns the exit code."""
    try:
        spec, out = parse(argv)
        out.parent.mkdir(parents=True, exist_ok=True)
        report = run(spec, out)
    except EyrieError as error:
        print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    write_model(out, report)
    outcomes = [(row.setting, row.concurrency, row.predicted_speedup, row.speedup) for row in report.grid]
    with matplotlib.rc_context(SETTINGS):
        for path in save(predicted_against_measured(outcomes, _environment_of(report.tuner)),
                         out.with_suffix(""), "predictions"):
            print(path)
    trials, possible = (sum(getattr(one, name) for one in report.verdicts) for name in ("trials", "trials_possible"))
    worst = max(one.behind for one in report.verdicts)
    print(f"at most {worst:.1%} behind the best, with {trials} of {possible} trials ({trials / possible:.0%}) and "
          f"{report.profile_seconds:.0f} s of probing and replay")
    print(f"tau that a chain needs for {spec.min_speedup:.2f}x:\n{needed_table(report.needed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
