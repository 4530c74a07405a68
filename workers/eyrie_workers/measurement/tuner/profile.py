"""The tuning profile: step times and replays, measured once, from which all predictions are computed.

`measure` answers the prompts at every concurrency in rounds of alternating shapes (`measurement.tuner.probe`), then
drafts along the answers (`measurement.tuner.draft_replay`) with every drafting method, at every width of the grid. The
profile is a value: predictions for any concurrency follow from it without further measurement, and an interrupted stage
reads it from disk, so the race resumes from the same predictions.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.tuning import OFF, DraftTime, Method, Setting, StepTime, TuneSpec
from eyrie_workers.conversations.suites import Prompt
from eyrie_workers.measurement.benchmark.blocks import BlockRunner
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
from eyrie_workers.speculation.engine import Request

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


def measure(runner: BlockRunner, settings: Sequence[Setting], prompts: Sequence[Prompt], tune: TuneSpec,
            belongs_to: str, between: Callable[[], None]) -> TuningProfile:
    """Measure and replay. `between` is called between rounds and may raise."""
    began = time.monotonic()
    profiler = _Profiler(runner, settings, prompts, between)
    for concurrency in sorted(set(tune.concurrencies)):
        for temperature in tune.temperatures:
            profiler.probe(concurrency, temperature)
    return TuningProfile(
        belongs_to=belongs_to, step_times=tuple(profiler.step_times), draft_times=tuple(profiler.draft_times),
        prefill_s=profiler.prefill(), replays=tuple(profiler.replay(tune)), seconds=time.monotonic() - began)


class _Profiler:
    """Collects the parts of a profile."""

    def __init__(self, runner: BlockRunner, settings: Sequence[Setting], prompts: Sequence[Prompt],
                 between: Callable[[], None]) -> None:
        self.runner, self.settings, self.prompts, self.between = runner, settings, prompts, between
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
            probe = run_probe(self.runner.engines[method], probed, concurrency, shapes, self.between,
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
        engine = self.runner.engines["off"]
        engine.tree = None
        plain = []
        for request in prompts:
            before = engine.stats.prefill_s
            engine.generate([request])
            plain.append(engine.stats.prefill_s - before)
        return {"off": median(plain)} | {method: median(times) for method, times in self._prefill_s.items() if times}

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
        drafter = self.runner.engines[method].drafter
        assert drafter is not None
        return trace(self.runner.session.target, drafter, answers, num_steps, widths, self.between)
