"""The tune stage: the best setting at each load, and a final measurement of the drafter's best shape.

    python -m eyrie_workers.stages.tune --spec spec.json --out manifest.json

Three steps:

1. The profile (`measure.tuner.profile`): a few prompts in rounds of alternating shapes, then the drafter along the
   answers. From it every setting is predicted at every load.
2. The races (`measure.tuner.race`), one per concurrency: settings that could still win are measured block by block
   against the undrafted engine, until the race is decided or its trials or seconds run out.
3. The operating map (`measure.tuner.operating`).

The winner's speed-up is biased upwards: it is the largest of several noisy numbers. Promotion therefore decides on a
final measurement with other prompts of every suite, used by neither the profile nor the races nor, where the suites are
long enough, the selection of the checkpoint. It measures the drafter's best shape at the lowest concurrency, whatever
setting won, because promotion must also see a drafter that loses. A required suite that is slower than `min_speedup`,
but not by its interval, answers further prompts, up to four times as many in all.

With `promotion.must_beat: rivals` the best rival is tuned afterwards in the same way, without n-gram look-up, in the
folder `rival`: what the winner has to beat is the rival in its own best setting at each load. A rival that cannot be
tuned is left out, and promotion compares the benchmarks.

An interrupted stage resumes from its profile and its ledger. A race's budget counts the seconds of its measurements, so
a resumed race ends where an uninterrupted one would have.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from eyrie_api.artifacts import digest_model, read_sealed, write_sealed
from eyrie_api.contract.reports import CellReport, TuneCell, TuneReport
from eyrie_api.contract.stages import TuneStage
from eyrie_api.contract.tuning import OFF, DrafterUse, Method, OperatingMap, OperatingPoint, Setting, Trial
from eyrie_api.decisions.evidence import suite_standing
from eyrie_api.errors import ArtifactCorrupt, EyrieError, InvalidInput, Transient, UnsupportedTarget
from eyrie_workers.data.suites import Prompt
from eyrie_workers.engines.decoding_engine import EmbeddedEngine
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.machine import environment
from eyrie_workers.measure.benchmark.blocks import (
    RUNGS_PER_START,
    BlockRun,
    MeasuredBlocks,
    block_size,
    num_identical,
    rate,
)
from eyrie_workers.measure.benchmark.reports import benchmark_report, report_cells
from eyrie_workers.measure.benchmark.session import (
    Suites,
    is_measured,
    measure_units,
    measuring,
    open_ledger,
    open_session,
    read_suites,
    reported,
    round_robin,
    start_all,
    uses_of,
)
from eyrie_workers.measure.benchmark.variants import BASELINE, UNDRAFTED, Entry, Unit, Variant
from eyrie_workers.measure.intervals import FEWEST_PAIRS, acceptance_length, add_histograms
from eyrie_workers.measure.tuner import operating
from eyrie_workers.measure.tuner import profile as profiling
from eyrie_workers.measure.tuner.anchors import anchors
from eyrie_workers.measure.tuner.predict import PredictedSpeed
from eyrie_workers.measure.tuner.profile import TuningProfile
from eyrie_workers.measure.tuner.race import Race, always_raced, within_budget
from eyrie_workers.sglang.checkpoints import read_drafter
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.stage_program import Result, Stage, run_program
from eyrie_workers.targets.config import read_json

PROFILE = "profile.json"
BLOCKS = "blocks.jsonl"
FINAL_LEDGER = "final.jsonl"
RIVAL = "rival"  # folder of the rival's ledgers
_FEWEST_RACERS = 4  # off, the drafter's best and two rivals, also where fewer servers fit the memory


@dataclass(frozen=True)
class Prompts:
    """Prompts by purpose; disjoint where the suites are long enough."""

    probed: list[Prompt]
    raced: list[Prompt]
    final: Suites
    further: Suites  # for suites that the final ones do not decide


@dataclass
class Tuning:
    """Runs the races, and reports them, once everything is loaded."""

    spec: TuneStage
    stage: Stage
    blocks: MeasuredBlocks
    settings: tuple[Setting, ...]
    uses: Mapping[str, DrafterUse]
    profile: TuningProfile
    spent_s: float = 0.0

    def race(self, concurrency: int, budget_s: float) -> Race:
        predictions = self.profile.predictions(concurrency)
        race = Race(predictions, self.spec.tune.trials(len(self.settings)))
        by_speed = sorted(predictions.values(), key=lambda prediction: -prediction.speedup)
        rung_tokens = (block_size(concurrency) * self.profile.tokens_per_answer * len(self.spec.tune.temperatures))
        costs = [rung_tokens / prediction.tokens_per_s for prediction in [predictions[OFF], *by_speed]]
        # Fewer rungs have no interval.
        affordable = within_budget(costs, budget_s / FEWEST_PAIRS)
        resident = self.profile.num_resident
        if resident is not None:
            # Settings beyond those that are ready at once would replace each other in every rung.
            affordable = min(affordable, max(resident, _FEWEST_RACERS))
        spent, rung, most_rungs = 0.0, 0, self.most_rungs(concurrency)
        while True:
            rungs = self._admit(race, concurrency, rung, affordable, [prediction.setting for prediction in by_speed])
            seconds = self.measure_rungs(race, concurrency, rungs, len(rungs) == 1)
            spent, rung = spent + seconds, rungs.stop
            dropped = race.drop()
            if dropped:
                self.stage.event("Dropped", f"at concurrency {concurrency}: " + "; ".join(
                    f"{setting.label()} {race.reasons[setting]}" for setting in dropped))
            # The next rung is assumed to take as long as this one. Where none of the drafter could be measured, another
            # of its settings is tried.
            if race.best_drafted("drafter") is not None and (
                    race.decided or rung >= most_rungs or spent + seconds > budget_s):
                break
        self.spent_s += spent
        leader = race.leader()
        self.stage.event("Raced", f"at concurrency {concurrency}: {leader.label()} is best after {rung} rungs, "
                                  f"{race.estimate(leader):.2f}x; {len(race.blocks)} of {len(self.settings)} measured")
        return race

    def _admit(self, race: Race, concurrency: int, rung: int, affordable: int, by_speed: Sequence[Setting]) -> range:
        """Activate settings, and make them ready for the rungs that it returns: from `rung` on, more than one where not
        all can be ready at once. One that cannot start is withdrawn, and the next one admitted.

        Raises the error of off, and of the drafter when no setting of it can start.
        """
        while True:
            left = [setting for setting in by_speed if setting not in race.reasons or setting in race.blocks]
            required = always_raced(left)
            entered = race.admit(max(affordable, 1 + len(required)), required)
            resident = self.profile.num_resident
            rungs = range(rung, rung + (1 if resident is None or len(race.active) <= resident else RUNGS_PER_START))
            unknown = [setting for setting in race.active if any(
                (concurrency, temperature, number, setting.label()) not in self.blocks.runs
                for number in rungs for temperature in self.spec.tune.temperatures)]
            if not unknown:
                return rungs
            failed = self.blocks.engine.start({
                setting.label(): self.uses[setting.label()] for setting in race.active})
            if not failed:
                break
            for setting in [setting for setting in race.active if setting.label() in failed]:
                self._withdraw(race, setting, concurrency, failed[setting.label()])
        # Servers that replace each other are warmed when they start.
        for setting in entered if len(rungs) == 1 else ():
            if setting in unknown:
                try:
                    self.blocks.warm_up(setting, concurrency, self.spec.tune.temperatures)
                except (EngineFailed, InvalidInput) as error:
                    self._withdraw(race, setting, concurrency, error)
        return rungs

    def _withdraw(self, race: Race, setting: Setting, concurrency: int, error: EyrieError) -> None:
        """Drop a setting that cannot be measured. Raises `error` for off, and where the drafter has none left."""
        if setting == OFF:
            raise error
        race.withdraw(setting, f"could not be measured: {error.message}")
        self.stage.event("VariantDropped", f"{setting.label()} at concurrency {concurrency}: {error.message}",
                         warning=True)
        if not any(other.method == "drafter" and (other in race.blocks or other not in race.reasons)
                   for other in self.settings):
            raise error

    def most_rungs(self, concurrency: int) -> int:
        """Rungs that use every prompt twice per repeat; at least as many as an interval needs."""
        requests = 2 * self.spec.tune.max_prompts * self.spec.tune.repeats
        return max(FEWEST_PAIRS, math.ceil(requests / block_size(concurrency)))

    def measure_rungs(self, race: Race, concurrency: int, rungs: range, all_ready: bool = True) -> float:
        """Measure one block of each rung and temperature in every active setting; returns the seconds measured.

        A setting whose server ends again and again, or does not start where it replaces another, is withdrawn.
        """
        seconds = 0.0
        blocks = [(temperature, rung) for rung in rungs for temperature in self.spec.tune.temperatures]
        for setting, (temperature, rung) in self.blocks.turns(
                list(race.active), concurrency, blocks, rungs.start, all_ready):
            if setting not in race.active:
                continue
            self.stage.pause_point()
            try:
                run = self.blocks.measure(setting, concurrency, temperature, rung)
            except (EngineFailed, InvalidInput) as error:
                self._withdraw(race, setting, concurrency, error)
                continue
            race.record(setting, (temperature, rung), run.measured)
            seconds += run.seconds
            self.stage.progress(self.spent_s, self.spec.tune.budget_s, "seconds of racing",
                                f"{setting.label()} at concurrency {concurrency}")
        for temperature, rung in blocks:
            if temperature > 0.0 and not self.blocks.engine.same_samples:
                continue
            plain = self.blocks.runs[concurrency, temperature, rung, OFF.label()]
            race.changed_output |= {
                setting for setting in race.active if len(plain.answers) > num_identical(
                    self.blocks.runs[concurrency, temperature, rung, setting.label()], plain)}
        return seconds

    # Reports of a race

    def runs_of(self, setting: Setting, concurrency: int) -> dict[float, list[BlockRun]]:
        """The runs of one setting at one concurrency, by temperature."""
        return {temperature: [run for key, run in sorted(self.blocks.runs.items())
                              if (*key[:2], key[3]) == (concurrency, temperature, setting.label())]
                for temperature in self.spec.tune.temperatures}

    def trial(self, race: Race, prediction: PredictedSpeed, best: Setting) -> Trial:
        setting, concurrency = prediction.setting, prediction.concurrency
        predicted = {"setting": setting, "concurrency": concurrency, "predicted_tokens_per_s": prediction.tokens_per_s,
                "predicted_speedup": prediction.speedup, "predicted_tau": prediction.tau}
        if setting not in race.blocks:
            reason = race.reasons.get(setting) or (
                "not tried: the budget of trials, seconds or memory was used up"
                if prediction.speedup > max(race.predictions[tried].speedup for tried in race.blocks)
                else "not tried: others were predicted faster")
            return Trial.model_validate(predicted | {"reason": reason})
        runs = self.runs_of(setting, concurrency)
        reason = ("chosen" if setting == best else "baseline" if setting == OFF
                  else race.reasons.get(setting, "not separated from the leader; prediction and measurement decided"))
        if setting in race.changed_output:
            reason += "; changed an answer"
        return Trial.model_validate(predicted | {
            "measured_tokens_per_s": fmean(rate(of) for of in runs.values()),
            "speedup": race.speedup(setting), "speedup_interval": race.interval(setting), "tau": _tau(runs),
            "blocks": len(race.blocks[setting]), "seconds": sum(run.seconds for of in runs.values() for run in of),
            "reason": reason})

    def cell(self, race: Race, setting: Setting, concurrency: int) -> TuneCell:
        """The report of one shape of the drafter, measured against off on the same blocks."""
        assert setting.tree is not None
        runs, plain = self.runs_of(setting, concurrency), self.runs_of(OFF, concurrency)
        by_temperature = {str(t): acceptance_length(add_histograms([r.accepted_histogram for r in of]))
                          for t, of in runs.items()}
        rates = {t: rate(of) for t, of in runs.items()}
        # Off runs in every rung; only the rungs that this setting was in are comparable.
        paired = {t: [r for r in of if r.rung in {ours.rung for ours in runs[t]}] for t, of in plain.items()}
        pairs = [pair for t in runs for pair in zip(runs[t], paired[t], strict=True)]
        return TuneCell(
            tree=setting.tree, tau=_tau(runs), tau_by_temperature=by_temperature, tokens_per_s=fmean(rates.values()),
            speedup=race.speedup(setting),
            speedup_by_temperature={str(t): speed / rate(paired[t]) for t, speed in rates.items()},
            speedup_interval=race.interval(setting),
            identical=sum(num_identical(ours, theirs) for ours, theirs in pairs),
            prompts=sum(len(run.answers) for of in runs.values() for run in of))


def _tau(runs: dict[float, list[BlockRun]]) -> float:
    return fmean(acceptance_length(add_histograms([run.accepted_histogram for run in of])) for of in runs.values())


def tune(spec: TuneStage, stage: Stage) -> Result:
    """Predict every setting at every load, race the candidates, and measure the drafter's best shape on new prompts."""
    report, files = tune_drafter(spec, stage)
    stage.event("Tuned", described(report))
    points = [(f"{trial.setting.label()}@{trial.concurrency}/{name}", value)
              for trial in report.trials if trial.speedup is not None
              for name, value in (("speedup", trial.speedup), ("tau", trial.tau or 1.0))]
    for step, (name, value) in enumerate(points):
        stage.metric(name, step, value)
    if spec.rival is not None:
        part = stage.part(RIVAL)
        try:
            # N-gram look-up needs no drafter: the candidate's races have compared it.
            rival, its_files = tune_drafter(spec.model_copy(update={
                "checkpoint": spec.rival.checkpoint, "candidate": spec.rival.checkpoint,
                "drafter_dir": spec.rival.drafter_dir, "rival": None,
                "tune": spec.tune.model_copy(update={"ngram": False})}), part)
        except Transient:
            raise
        except EyrieError as error:
            stage.event("RivalNotTuned", f"{spec.rival.checkpoint}: {error.message}; the benchmarks are compared, "
                        "untuned", warning=True)
        else:
            stage.event("RivalTuned", f"{rival.checkpoint}: {described(rival)}")
            report, files = report.model_copy(update={"rival": rival}), [*files, *its_files]
    return reported(report, stage, files)


def described(report: TuneReport) -> str:
    final = report.final
    return (f"{report.finding} Final measurement, {report.winner.label()}: {final.speedup:.2f}x, "
            f"{'lossless' if final.lossless else 'NOT lossless'}.")


def tune_drafter(spec: TuneStage, stage: Stage) -> tuple[TuneReport, list[Path]]:
    """Tune one drafter; returns its report and the files of the measurement."""
    started = time.monotonic()
    settings = operating.possible_settings(spec.tune)
    if spec.engine.kind == "sglang":
        drafter = read_drafter(spec.drafter_dir, read_json(Path(spec.drafter_dir) / "config.json"))
        if drafter.block_size is not None:
            settings = operating.with_block(settings, drafter.block_size)
    concurrencies = sorted(set(spec.tune.concurrencies))
    suites = read_suites(spec, stage)
    final_ledger, ledger = open_ledger(Entry, stage, spec, FINAL_LEDGER), open_ledger(BlockRun, stage, spec, BLOCKS)
    prompts = draw_prompts(suites, spec)
    uses = uses_of(spec, {setting.label(): setting for setting in (*settings, *anchors(settings))} | {BASELINE: OFF})
    with measuring(stage), open_session(spec, suites, uses, stage, concurrencies[-1]) as session:
        blocks = MeasuredBlocks(session, prompts.raced, ledger)
        profile = read_or_measure_profile(stage, spec, blocks, settings, uses, prompts.probed).with_step_rates()
        settings = tuple(dict.fromkeys(replayed.setting for replayed in profile.replays))
        uses |= uses_of(spec, {setting.label(): setting for setting in settings})
        tuning = Tuning(spec, stage, blocks, settings, uses, profile)
        races = {}
        for number, concurrency in enumerate(concurrencies):
            left = spec.tune.budget_s - tuning.spent_s
            races[concurrency] = tuning.race(concurrency, left / (len(concurrencies) - number))
        map_, trials = build_map(tuning, races, time.monotonic() - started)
        lowest = races[concurrencies[0]]
        winner = lowest.best_drafted("drafter")
        assert winner is not None  # the best predicted one was required in the race
        assert winner.tree is not None
        began_final, variant = time.monotonic(), Variant(tree=winner.tree)

        def measure(units: Sequence[Unit]) -> list[tuple[Unit, Entry]]:
            if not is_measured(session, units, [UNDRAFTED, variant], final_ledger):
                start_all(session, uses_of(spec, {UNDRAFTED.title: OFF, variant.title: winner}))
            return measure_units(session, units, [UNDRAFTED, variant], final_ledger, stage)

        asked = session.units(round_robin(prompts.final), spec.benchmark.temperatures, spec.benchmark.repeats)
        measured = measure(asked)
        cells = report_cells(session, measured, variant)
        # A second look, and no third: sizes are fixed beforehand, so no suite is measured until it happens to pass.
        undecided = undecided_cells(cells, {name: len(more) for name, more in prompts.further.items()}, spec)
        if undecided:
            stage.event("SuitesUndecided", f"measured on further prompts, since {spec.min_speedup:.2f}x is not reached "
                        "but within the interval: " + ", ".join(map(_described_cell, undecided)))
            further = [unit for cell in undecided for unit in session.units(
                round_robin({cell.suite: prompts.further[cell.suite]}), [cell.temperature], spec.benchmark.repeats)]
            asked, measured = [*asked, *further], [*measured, *measure(further)]
            cells = report_cells(session, measured, variant)
        final = benchmark_report(session, spec, [entry for _, entry in measured], cells,
                                 time.monotonic() - began_final)
    # Whether the final figures are from prompts that also chose the setting.
    used = {(prompt.suite, prompt.id) for prompt in [*prompts.probed, *prompts.raced]}
    last = {(unit.prompt.suite, unit.prompt.id) for unit in asked}
    again = len(used & last)
    source = f"The final figures are from {len(last)} prompts" + (
        f", of which {again} were also used to choose the setting (the suites have no more), which flatters them."
        if again else " the tuner had not used.")
    return TuneReport(
        checkpoint=spec.checkpoint, path=spec.drafter_dir,
        cells=tuple(tuning.cell(lowest, setting, concurrencies[0]) for setting in lowest.blocks
                    if setting.method == "drafter"),
        winner=winner.tree, map=map_, trials=trials, step_times=profile.step_times,
        draft_times=profile.draft_times, needed_tau=profile.needed_tau(
            sorted([*concurrencies, *operating.between(concurrencies)]), spec.min_speedup),
        finding=f"{map_.finding} {source}", final=final, engine=final.engine,
        environment=environment(session.dtype), seconds=time.monotonic() - started), [
            stage.out_dir / name for name in (PROFILE, BLOCKS, FINAL_LEDGER)]


def undecided_cells(cells: Sequence[CellReport], further: Mapping[str, int], spec: TuneStage) -> list[CellReport]:
    """The cells of required suites that promotion would find undecided, and that have further prompts. Pure.

    further   number of further prompts by suite
    """
    required = {suite.name for suite in spec.benchmark.suites if suite.required}
    return [cell for cell in cells if cell.suite in required and further[cell.suite]
            and suite_standing(spec.min_speedup, cell.speedup, cell.speedup_interval) == "open"]


def _described_cell(cell: CellReport) -> str:
    interval = cell.speedup_interval
    return (f"{cell.suite} at temperature {cell.temperature:g} ({cell.speedup:.2f}x [{interval.low:.2f}, "
            f"{interval.high:.2f}] of {cell.prompts} prompts)")


def draw_prompts(suites: Suites, spec: TuneStage) -> Prompts:
    """Prompts to predict from and to race on, both of the suites that decide, and for the final measurement, of all."""
    deciding = [suite.name for suite in spec.benchmark.deciding_suites]
    shares = dict(zip(deciding, operating.even_shares(2 * spec.tune.max_prompts, len(deciding)), strict=True))
    drawn = {suite.name: operating.draw(suites[suite.name], suite.max_prompts, shares.get(suite.name, 0))
             for suite in spec.benchmark.suites}
    order = [prompt for _, prompt in round_robin({name: grid for name, (grid, _, _) in drawn.items() if grid})]
    half = (len(order) + 1) // 2
    return Prompts(probed=order[:half], raced=order[half:] or order,
                   final={name: final for name, (_, final, _) in drawn.items()},
                   further={name: further for name, (_, _, further) in drawn.items()})


def read_or_measure_profile(stage: Stage, spec: TuneStage, blocks: MeasuredBlocks, settings: Sequence[Setting],
                            uses: Mapping[str, DrafterUse], prompts: Sequence[Prompt]) -> TuningProfile:
    path: Path = stage.out_dir / PROFILE
    digest = digest_model(spec)
    if path.exists():
        try:
            kept = read_sealed(path.read_bytes(), TuningProfile)
        except ValueError as error:
            raise ArtifactCorrupt(f"{path} cannot be used: {error}", "delete the file and run again") from error
        if kept.belongs_to == digest:
            stage.event("Resumed", f"predictions and costs found in {PROFILE}")
            return kept
    measured = _measure_profile(stage, spec, blocks, settings, uses, prompts, digest)
    write_sealed(path, measured)
    stage.event("Predicted", f"{len(settings)} settings from {len(prompts)} prompts in {measured.seconds:.1f} s")
    return measured


def _measure_profile(stage: Stage, spec: TuneStage, blocks: MeasuredBlocks, settings: Sequence[Setting],
                     uses: Mapping[str, DrafterUse], prompts: Sequence[Prompt], digest: str) -> TuningProfile:
    engine, session = blocks.engine, blocks.session
    if isinstance(engine, EmbeddedEngine):
        engine.start(uses)
        return profiling.measure(blocks, _reference_engines(engine, settings, uses), settings, prompts,
                                 spec.tune, digest, stage.pause_point)
    anchored = anchors(settings)
    for name, error in engine.start({setting.label(): uses[setting.label()] for setting in anchored}).items():
        if name == OFF.label():
            raise error
        stage.event("VariantDropped", f"anchor {name}: {error.message}", warning=True)
        anchored = [setting for setting in anchored if setting.label() != name]
    if not any(setting.method == "drafter" for setting in anchored):
        raise InvalidInput("tune: no setting of the drafter could start in the engine",
                           "read the VariantDropped events, and the servers' logs in the stage's directory")
    engines: dict[Method, Engine] | None = None
    try:
        engines = _reference_engines(EmbeddedEngine(session.target, session.dtype), settings, uses)
    except UnsupportedTarget as error:
        stage.event("NoReference", f"acceptance is taken from the anchors, because Eyrie cannot replay this drafting: "
                    f"{error.message}", warning=True)
    return profiling.measure_from_outside(blocks, engines, settings, anchored, prompts, spec.tune, digest,
                                          stage.pause_point)


def _reference_engines(reference: EmbeddedEngine, settings: Sequence[Setting],
                       uses: Mapping[str, DrafterUse]) -> dict[Method, Engine]:
    one_of = {setting.method: uses[setting.label()] for setting in settings}
    # `off` last, because it uses the drafter's engine.
    return {method: reference.reference(one_of[method]) for method in sorted(one_of, key=lambda name: name == "off")}


def build_map(tuning: Tuning, races: dict[int, Race], seconds: float) -> tuple[OperatingMap, tuple[Trial, ...]]:
    """The operating map, and every trial it is computed from."""
    points, trials, best_of = [], [], chosen(races)
    for concurrency, race in races.items():
        best = best_of[concurrency]
        of_race = [tuning.trial(race, prediction, best) for prediction in race.predictions.values()]
        its = next(trial for trial in of_race if trial.setting == best)
        points.append(OperatingPoint(
            concurrency=concurrency, setting=best, speedup=race.estimate(best),
            speedup_interval=its.speedup_interval, tokens_per_s=its.measured_tokens_per_s or 0.0, measured=True))
        trials += of_race
    tried = list({setting: None for race in races.values() for setting in race.blocks})
    points += [operating.predicted_point(tuning.profile.predictions(concurrency), tried)
               for concurrency in operating.between([*races])]
    lowest = min(races)
    shape = operating.depth_against_width(list(races[lowest].predictions.values()))
    remarks = [f"Predicted at concurrency {lowest}: {shape}."] if shape else []
    remarks += [f"At concurrency {concurrency}, {text}" for concurrency, race in races.items() for text in race.gains()]
    return operating.compile_map(points, trials, seconds, " ".join(remarks)), tuple(trials)


def chosen(races: Mapping[int, Race]) -> dict[int, Setting]:
    """The setting of each load: the race's leader. Where off leads at all loads and one of the races was too noisy
    (`Race.undecided`), the drafter's best setting there, so that the proof decides."""
    best = {concurrency: race.leader() for concurrency, race in races.items()}
    if all(setting == OFF for setting in best.values()):
        undecided = [(race.estimate(setting), concurrency, setting) for concurrency, race in races.items()
                     if (setting := race.undecided()) is not None]
        if undecided:
            _, concurrency, best[concurrency] = max(undecided, key=lambda one: one[0])
    return best


if __name__ == "__main__":
    sys.exit(run_program(TuneStage, tune))
