"""The tuning profile: step times and replays, measured once, from which all predictions are computed.

`measure` answers the prompts at every concurrency in rounds of alternating shapes (`measurement.tuner.probe`), then
drafts along the answers (`measurement.tuner.draft_replay`) with every drafting method, at every width of the grid.
`measure_from_outside` does it for an engine behind HTTP: costs come from anchor settings (`measurement.tuner.anchors`),
the answers from that engine, and the replay from the reference implementation. The profile is a value: predictions for
any concurrency follow from it without further measurement, and an interrupted stage reads it from disk, so the race
resumes from the same predictions.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.tuning import OFF, DraftTime, Method, Setting, StepTime, TuneSpec
from eyrie_workers.conversations.suites import Prompt
from eyrie_workers.measurement.benchmark.blocks import BlockRun, BlockRunner
from eyrie_workers.measurement.tuner import anchors
from eyrie_workers.measurement.tuner.draft_replay import KnownAnswer, trace
from eyrie_workers.measurement.tuner.predict import (
    Costs,
    Prediction,
    ReplayedRounds,
    Trace,
    merged,
    predict,
    replay,
    undrafted,
)
from eyrie_workers.measurement.tuner.probe import draft_times, run_probe, shapes_to_time, step_times
from eyrie_workers.speculation.engine import Engine, Request

_FEW_PROMPTS = 4  # probed at low concurrency, where rounds are cheap but whole answers are not
_ROUNDS = 10  # of each shape, at least; the time is their median
_LOOKUP_ROUNDS = 5  # drafting without a model costs so little that its timing error is negligible


class SettingReplay(Frozen):
    """One setting's rounds for the probed answers of one temperature."""

    setting: Setting
    temperature: float
    done: ReplayedRounds


class TuningProfile(Frozen):
    """Step times, draft times, prefill times and replays of one tuning."""

    belongs_to: str
    """Digest of the spec it was measured for."""

    step_times: tuple[StepTime, ...]
    draft_times: tuple[DraftTime, ...]
    prefill_s: dict[str, float]
    """Prefill seconds of one request, by method."""

    replays: tuple[SettingReplay, ...]
    num_resident: int | None = None
    """`DecodingEngine.num_resident` when it was measured: a resumed race admits as many settings as before."""

    seconds: float

    def predictions(self, concurrency: int) -> dict[Setting, Prediction]:
        """Every setting at one concurrency."""
        done: dict[Setting, dict[float, ReplayedRounds]] = {}
        for one in self.replays:
            done.setdefault(one.setting, {})[one.temperature] = one.done
        return predict(done, concurrency, Costs(self.step_times, self.draft_times, self.prefill_s), OFF)

    @property
    def tokens_per_answer(self) -> float:
        """Mean length of the probed answers."""
        plain = [one.done for one in self.replays if one.setting == OFF]
        return sum(done.tokens for done in plain) / sum(done.requests for done in plain)


Engines = Mapping[Method, Engine]
"""The reference engine of each method."""


def measure(runner: BlockRunner, engines: Engines, settings: Sequence[Setting], prompts: Sequence[Prompt],
            tune: TuneSpec, belongs_to: str, between: Callable[[], None]) -> TuningProfile:
    """Measure and replay in the reference engine. `between` is called between rounds and may raise."""
    began = time.monotonic()
    profiler = _Profiler(runner, engines, settings, prompts, between)
    for concurrency in sorted(set(tune.concurrencies)):
        for temperature in tune.temperatures:
            profiler.probe(concurrency, temperature)
    return TuningProfile(
        belongs_to=belongs_to, step_times=tuple(profiler.step_times), draft_times=tuple(profiler.draft_times),
        prefill_s=profiler.prefill(), replays=tuple(profiler.replay(tune)), seconds=time.monotonic() - began)


def measure_from_outside(
        runner: BlockRunner, engines: Engines | None, settings: Sequence[Setting], anchored: Sequence[Setting],
        prompts: Sequence[Prompt], tune: TuneSpec, belongs_to: str, between: Callable[[], None],
        measure_block: Callable[[Setting, int, float, int], BlockRun]) -> TuningProfile:
    """Measure in the session's engine, whose variants `anchored` are started, and replay in the reference engines.

    engines         None: the target has no reference implementation, and acceptance comes from the anchors
    measure_block   of a setting, concurrency, temperature and rung; the race's, so that it measures no block again
    """
    began = time.monotonic()
    # A method of which no anchor could start has no costs: its settings are not predicted, hence not raced.
    settings = [setting for setting in settings if setting.method in {one.method for one in anchored}]
    profiler = _Profiler(runner, engines or {}, settings, prompts, between)
    step_times: list[StepTime] = []
    draft_times: list[DraftTime] = []
    concurrencies = sorted(set(tune.concurrencies))
    at_lowest: dict[float, dict[Setting, BlockRun]] = {}
    prefill_s: dict[Setting, float] = {}
    measured: dict[tuple[int, float], dict[Setting, BlockRun]] = {}
    # One anchor after the other: where fewer servers fit than there are anchors, each is started once.
    for setting in anchored:
        runner.warm_up(setting, 1, tune.temperatures)
        prefill_s[setting] = profiler.prefill_outside(setting)
        for concurrency in concurrencies:
            if concurrency > 1:
                runner.warm_up(setting, concurrency, tune.temperatures)
            for temperature in tune.temperatures:
                run = measure_block(setting, concurrency, temperature, 0)
                measured.setdefault((concurrency, temperature), {})[setting] = run
    for concurrency in concurrencies:
        for temperature in tune.temperatures:
            runs = measured[concurrency, temperature]
            timed = {setting: anchors.round_seconds(run, prefill_s[setting]) for setting, run in runs.items()}
            costs = anchors.fit(timed[OFF], [(setting, timed[setting]) for setting in anchored if setting != OFF])
            rounds = min(sum(run.accepted_histogram) for run in runs.values())
            if concurrency == concurrencies[0]:
                at_lowest[temperature] = runs
            step_times += anchors.step_times(costs, settings, concurrency, temperature, rounds)
            draft_times += anchors.draft_times(costs, settings, concurrency, temperature, rounds)
    if engines is None:
        replays = [one for temperature, runs in at_lowest.items()
                   for one in _replays_of_anchors(settings, runs, temperature)]
    else:
        for temperature in tune.temperatures:
            profiler.answer_outside(concurrencies[-1], temperature)
        # Its servers verify `num_draft_tokens` nodes in every round, filled or not.
        replays = [one.model_copy(update={"done": _full_passes(one)}) for one in profiler.replay(tune)]
    methods: dict[str, list[float]] = {}
    for setting, seconds in prefill_s.items():
        methods.setdefault(setting.method, []).append(seconds)
    return TuningProfile(
        belongs_to=belongs_to, step_times=tuple(step_times), draft_times=tuple(draft_times),
        prefill_s={method: median(seconds) for method, seconds in methods.items()}, replays=tuple(replays),
        num_resident=runner.session.bench.engine.num_resident, seconds=time.monotonic() - began)


def _replays_of_anchors(settings: Sequence[Setting], runs: Mapping[Setting, BlockRun],
                        temperature: float) -> list[SettingReplay]:
    lengths = [len(tokens) for tokens in runs[OFF].answers.values() if tokens]
    found = [SettingReplay(setting=OFF, temperature=temperature, done=undrafted(lengths))]
    for setting in settings:
        anchor = anchors.anchor_of(setting, runs) if setting.tree is not None else None
        if anchor is not None:
            done = anchors.replay_of_anchor(setting, anchor, len(lengths), sum(lengths))
            found.append(SettingReplay(setting=setting, temperature=temperature, done=done))
    return found


def _full_passes(one: SettingReplay) -> ReplayedRounds:
    if one.setting.tree is None:
        return one.done
    return one.done.model_copy(update={"passes": {one.setting.tree.num_draft_tokens: one.done.rounds}})


class _Profiler:
    """Collects the parts of a profile."""

    def __init__(self, runner: BlockRunner, engines: Engines, settings: Sequence[Setting], prompts: Sequence[Prompt],
                 between: Callable[[], None]) -> None:
        self.runner, self.engines = runner, engines
        self.settings, self.prompts, self.between = settings, prompts, between
        self.step_times: list[StepTime] = []
        self.draft_times: list[DraftTime] = []
        self.answers: dict[tuple[str, float], KnownAnswer] = {}
        self._prefill_s: dict[str, list[float]] = {}
        self._methods = {setting.method: None for setting in settings if setting.tree is not None}

    def probe(self, concurrency: int, temperature: float) -> None:
        """Timed rounds at one load."""
        num = max(concurrency, min(len(self.prompts), max(_FEW_PROMPTS, 2 * concurrency)))
        requests = self.runner.some_requests(self.prompts, temperature, 0, num)
        for method in self._methods:
            trained = method == "drafter"
            probed = requests if trained else [
                replace(request, max_new_tokens=8 * _LOOKUP_ROUNDS) for request in requests[:concurrency]]
            # Rounds without drafting run in the drafter's probe, so all points of the step-time curve are of one run.
            shapes = [*([None] if trained else []), *shapes_to_time(self._shapes(method))]
            probe = run_probe(self.engines[method], probed, concurrency, shapes, self.between,
                              _ROUNDS if trained else _LOOKUP_ROUNDS)
            self.draft_times += draft_times(probe, method, concurrency, temperature)
            self._prefill_s.setdefault(method, []).extend(probe.prefill_s)
            if trained:
                self.step_times += step_times(probe, concurrency, temperature)
                for request in requests:
                    self.answers[request.id, temperature] = KnownAnswer(
                        tuple(request.prompt_ids), probe.texts[request.id], temperature, request.seed)

    def _shapes(self, method: Method) -> list[DraftTreeShape]:
        return [setting.tree for setting in self.settings if setting.method == method and setting.tree is not None]

    def prefill(self) -> dict[str, float]:
        """Median prefill seconds by method; those without drafting are timed here."""
        prompts = [replace(request, max_new_tokens=1) for request in self._first_requests()]
        engine = self.engines["off"]
        engine.tree = None
        plain = []
        for request in prompts:
            before = engine.stats.prefill_s
            engine.generate([request])
            plain.append(engine.stats.prefill_s - before)
        return {"off": median(plain)} | {method: median(times) for method, times in self._prefill_s.items() if times}

    def prefill_outside(self, setting: Setting) -> float:
        """Median seconds of the first token of a variant of the session's engine, one request at a time."""
        requests = [replace(request, max_new_tokens=1) for request in self._first_requests()[:_FEW_PROMPTS]]
        run = self.runner.session.bench.engine.generate(setting.label(), requests, 1)
        return median(answer.ttft_s for answer in run.answers)

    def answer_outside(self, concurrency: int, temperature: float) -> None:
        """Undrafted answers of the session's engine to all prompts, to replay along."""
        self.between()
        requests = self.runner.some_requests(self.prompts, temperature, 0, len(self.prompts))
        run = self.runner.session.bench.engine.generate(OFF.label(), requests, concurrency)
        for request, answer in zip(requests, run.answers, strict=True):
            self.answers[request.id, temperature] = KnownAnswer(
                tuple(request.prompt_ids), answer.token_ids, temperature, request.seed)

    def _first_requests(self) -> list[Request]:
        return self.runner.some_requests(self.prompts, 0.0, 0, len(self.prompts))

    def replay(self, tune: TuneSpec) -> list[SettingReplay]:
        """Every setting along every answer."""
        found = []
        temperatures = sorted(set(tune.temperatures))
        for temperature in temperatures:
            answers = [answer for (_, of), answer in self.answers.items() if of == temperature]
            lengths = [len(answer.token_ids) for answer in answers]
            found.append(SettingReplay(setting=OFF, temperature=temperature, done=undrafted(lengths)))
            for method in self._methods:
                shapes = self._shapes(method)
                traces = self._trace(method, answers, max(shape.num_steps for shape in shapes),
                                     {shape.top_k for shape in shapes})
                found += [SettingReplay(setting=Setting(method=method, tree=shape), temperature=temperature,
                                        done=merged([replay(one, shape) for one in traces[shape.top_k]]))
                          for shape in shapes]
        return found

    def _trace(self, method: Method, answers: Sequence[KnownAnswer], num_steps: int,
               widths: set[int]) -> Mapping[int, list[Trace]]:
        drafter = self.engines[method].drafter
        assert drafter is not None
        return trace(self.runner.session.target, drafter, answers, num_steps, widths, self.between)
