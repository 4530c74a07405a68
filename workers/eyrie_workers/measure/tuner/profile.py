"""The tuning profile: step times and replays, measured once, from which all predictions are computed.

`measure` answers the prompts at every concurrency in rounds of alternating shapes (`run_probe`), then drafts along the
answers (`trace`) with every drafting method, at every width of the grid. `measure_from_outside` does it for an engine
behind HTTP: costs come from anchor settings (`measure.tuner.anchors`), the answers from that engine, and the replay
from the reference implementation. The profile is a value: predictions for any concurrency follow from it without
further measurement, and an interrupted stage reads it from disk, so the race resumes from the same predictions.

The probe. The engine answers prompts while the draft-tree shape changes from round to round: the shallowest and the
deepest of each width, and no drafting. The text does not depend on the shape, so the answers are usable; neighbouring
rounds run under nearly the same conditions on nearly the same text, so times differ by shape alone. Rounds with an
empty slot are discarded. Each time is the median of its rounds, which is robust to single interruptions. Prompts are
repeated from the first until every shape has enough rounds.

The replay. Each answer is a row of the drafter. The target's states for all its positions come from one teacher-forced
pass. Then all rows step through their answers together, one position at a time: propose the deepest tree of every
width, locate the continuation in it, settle one pair. Batching the rows makes visiting every position cheaper than
decoding, because the drafter's small matrices are read once for all rows. Independent of the drafter's family:
everything goes through `speculation.protocol`.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median

import numpy as np
import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.tuning import OFF, DraftTime, Method, NeededTau, Setting, StepTime, TuneSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.benchmark.blocks import BlockRun, MeasuredBlocks
from eyrie_workers.measure.tuner import anchors
from eyrie_workers.measure.tuner.predict import (
    ContinuationNodes,
    Costs,
    PredictedSpeed,
    ReplayedRounds,
    Trace,
    locate,
    merged,
    needed_taus,
    predict,
    replay,
    undrafted,
)
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.noise import NoiseTable, RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, Drafter
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.model import TargetModel

_MOST_REPEATS = 100  # of the prompts; beyond it the answers are too short to have timed rounds


@dataclass
class Probe:
    """The answers of one run, and the seconds of its rounds with all slots taken."""

    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # answers by request
    verify_s: dict[tuple[bool, int], list[float]] = field(default_factory=dict)
    """By whether the shape is a tree, and the nodes verified per row, root included."""

    draft_s: dict[DraftTreeShape, list[float]] = field(default_factory=dict)
    """Without the rounds that do not draft: in these the drafter only settles pairs."""

    prefill_s: list[float] = field(default_factory=list)  # prefill seconds of each request


def run_probe(engine: Engine, requests: Sequence[Request], concurrency: int, shapes: Sequence[DraftTreeShape | None],
              between: Callable[[], None], rounds: int) -> Probe:
    """Answer all requests at this concurrency in alternating shapes. Leaves the engine idle."""
    probe, counts = Probe(), dict.fromkeys(shapes, 0)
    last: DraftTreeShape | None = None

    def least_counted(_num_rows: int) -> DraftTreeShape | None:
        """The shape of each round: the first of those with the fewest counted rounds."""
        nonlocal last
        last = min(counts, key=lambda shape: counts[shape])
        return last

    engine.set_tree_schedule(least_counted, [shape for shape in shapes if shape is not None])
    rows = min(concurrency, len(requests))
    names = {request.id for request in requests}
    repeat = 0
    waiting = list(requests)
    while True:
        if not waiting and min(counts.values()) < rounds:
            repeat += 1
            if repeat > _MOST_REPEATS:
                raise InvalidInput(f"answers are too short to time {rounds} rounds at concurrency {concurrency}",
                                   "raise benchmark.max_new_tokens, or name suites with longer answers")
            waiting = [replace(request, id=_repeat_id(request, repeat)) for request in requests]
        while waiting and engine.num_running + engine.num_waiting < rows:
            engine.submit(waiting.pop(0))
        between()
        before = replace(engine.stats)
        steps = engine.step()
        spent = engine.stats
        for progress in steps:
            if progress.generation is not None and progress.id in names:
                probe.texts[progress.id] = tuple(progress.generation.token_ids)
        admitted = sum(not progress.accepted for progress in steps)
        # A step may prefill several requests: its prefill time is divided equally among them.
        probe.prefill_s += [(spent.prefill_s - before.prefill_s) / admitted] * admitted if admitted else []
        # A round counts only when every slot decoded in it: otherwise it ran at a lower concurrency.
        if len(steps) - admitted == rows:
            kind = (last is not None and last.top_k > 1, spent.nodes - before.nodes)
            probe.verify_s.setdefault(kind, []).append(spent.verify_s - before.verify_s)
            if last is not None:
                probe.draft_s.setdefault(last, []).append(spent.draft_s - before.draft_s)
            counts[last] += 1
        if len(probe.texts) == len(requests) and min(counts.values()) >= rounds:
            break
    for request in requests:
        for number in range(repeat + 1):
            engine.cancel(_repeat_id(request, number))
    engine.tree = None
    return probe


def _repeat_id(request: Request, repeat: int) -> str:
    return f"{request.id} (repeat {repeat})" if repeat else request.id


_MOST_NODES = 512  # of a DraftTreeShape


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt and its answer, to draft along."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float
    seed: int


def whole_tree(num_steps: int, top_k: int) -> DraftTreeShape:
    """The shape of every node that can be grown at this depth and width, up to the limit of a shape."""
    grown = num_steps + 1 if top_k == 1 else 1 + top_k + (num_steps - 1) * top_k**2
    return DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=min(grown, _MOST_NODES))


def trace(target: TargetModel, drafter: Drafter, answers: Sequence[KnownAnswer], num_steps: int, widths: Iterable[int],
          between: Callable[[], None], rows_at_once: int = 16) -> dict[int, list[Trace]]:
    """By width, the trace of every answer, in the order given. `between` is called at every position."""
    shapes = [whole_tree(num_steps, width) for width in sorted(set(widths))]
    by_width: dict[int, dict[int, Trace]] = {shape.top_k: {} for shape in shapes}
    # One temperature per batch: greedy rows then draft without noise, as when decoding.
    order = sorted(range(len(answers)), key=lambda i: (answers[i].temperature, -len(answers[i].token_ids)))
    with device_scope(target.device):
        for temperature in sorted({answer.temperature for answer in answers}):
            same = [i for i in order if answers[i].temperature == temperature]
            for start in range(0, len(same), rows_at_once):
                batch = same[start:start + rows_at_once]
                replayed = _replayed(target, drafter, [answers[i] for i in batch], shapes, between)
                for shape, traces in zip(shapes, replayed, strict=True):
                    by_width[shape.top_k] |= dict(zip(batch, traces, strict=True))
    return {width: [traces[i] for i in range(len(answers))] for width, traces in by_width.items()}


@torch.inference_mode()
def _replayed(target: TargetModel, drafter: Drafter, answers: Sequence[KnownAnswer], shapes: Sequence[DraftTreeShape],
              between: Callable[[], None]) -> list[list[Trace]]:
    """Traces of some answers of one temperature, replayed together: by shape, then by answer."""
    num_steps, temperature = shapes[0].num_steps, answers[0].temperature
    state = drafter.new_state(len(answers))
    texts = [torch.tensor([*answer.prompt_ids, *answer.token_ids]) for answer in answers]
    aux_of = [aux for aux, _ in target.hidden_states(texts, drafter.aux_layers)]
    tables = [NoiseTable(answer.seed, target.config.vocab_size) for answer in answers]
    for row, (answer, aux) in enumerate(zip(answers, aux_of, strict=True)):
        drafter.admit(state, row, answer.prompt_ids)
        drafter.extend(state, CommittedTokens(
            [row], [0], [[*answer.prompt_ids[1:], answer.token_ids[0]]], aux[None, :len(answer.prompt_ids)]))
    kept: list[list[list[ContinuationNodes]]] = [[[] for _ in answers] for _ in shapes]
    for position in range(max(len(answer.token_ids) for answer in answers) - 1):
        between()
        rows = [row for row, answer in enumerate(answers) if position < len(answer.token_ids) - 1]
        starts = [len(answers[row].prompt_ids) + position for row in rows]
        # [B, S]: the answers' next tokens, -1 beyond their end.
        ahead = [answers[row].token_ids[position + 1:position + 1 + num_steps] for row in rows]
        following = np.array([[*text, *[-1] * (num_steps - len(text))] for text in ahead], dtype=np.int64)
        # The engine's noise for the token after `position` and those behind it.
        noise = None if temperature == 0.0 else RowNoise(
            torch.full((len(rows),), temperature, dtype=torch.float64),
            torch.stack([tables[row].at(start + 1, num_steps + 1) for row, start in zip(rows, starts, strict=True)]))
        # 1. For each width: propose at this position, find the answer's next tokens in the tree.
        for shape, of_rows in zip(shapes, kept, strict=True):
            tree = drafter.propose(state, rows, shape, noise)
            located = locate(tree.tokens.cpu().numpy(), tree.parents.cpu().numpy(),
                             tree.scores.double().cpu().numpy(), following, num_steps)
            for index, row in enumerate(rows):
                of_rows[row].append(ContinuationNodes(located.needed[index], located.filled[index]))
        # 2. Commit the answer's own next token, whatever was proposed.
        tokens = [[answers[row].token_ids[position + 1]] for row in rows]
        aux = torch.stack([aux_of[row][start:start + 1] for row, start in zip(rows, starts, strict=True)])
        drafter.extend(state, CommittedTokens(rows, starts, tokens, aux))
    return [[Trace(len(answer.token_ids), ContinuationNodes(
        np.array([nodes.needed for nodes in located], dtype=np.int64).reshape(-1, num_steps, num_steps),
        np.array([nodes.filled for nodes in located], dtype=np.int64).reshape(-1, num_steps)))
        for answer, located in zip(answers, of_rows, strict=True)] for of_rows in kept]


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

    def with_step_rates(self) -> "TuningProfile":
        """The profile of the settings as they are served: with the measured rates of those that wait for them."""
        return self.model_copy(update={"replays": tuple(replayed.model_copy(update={
            "setting": self._costs.with_step_rates(replayed.setting)}) for replayed in self.replays)})

    def predictions(self, concurrency: int) -> dict[Setting, PredictedSpeed]:
        return predict(self._done(), concurrency, self._costs, OFF)

    def needed_tau(self, concurrencies: Sequence[int], min_speedup: float) -> tuple[NeededTau, ...]:
        """The tau that chains of the drafter need at these concurrencies."""
        return needed_taus(self._done(), concurrencies, self._costs, OFF, min_speedup)

    @property
    def _costs(self) -> Costs:
        return Costs(self.step_times, self.draft_times, self.prefill_s)

    def _done(self) -> dict[Setting, dict[float, ReplayedRounds]]:
        done: dict[Setting, dict[float, ReplayedRounds]] = {}
        for replayed in self.replays:
            done.setdefault(replayed.setting, {})[replayed.temperature] = replayed.done
        return done

    @property
    def tokens_per_answer(self) -> float:
        plain = [replayed.done for replayed in self.replays if replayed.setting == OFF]
        return sum(done.tokens for done in plain) / sum(done.requests for done in plain)


Engines = Mapping[Method, Engine]  # the reference engine of each method


def measure(blocks: MeasuredBlocks, engines: Engines, settings: Sequence[Setting], prompts: Sequence[Prompt],
            tune: TuneSpec, belongs_to: str, between: Callable[[], None]) -> TuningProfile:
    """Measure and replay in the reference engine. `between` is called between rounds and may raise."""
    began = time.monotonic()
    profiler = _Profiler(blocks, engines, settings, prompts, between)
    for concurrency in sorted(set(tune.concurrencies)):
        for temperature in tune.temperatures:
            profiler.probe(concurrency, temperature)
    return TuningProfile(
        belongs_to=belongs_to, step_times=tuple(profiler.step_times), draft_times=tuple(profiler.draft_times),
        prefill_s=profiler.prefill(), replays=tuple(profiler.replay(tune)), seconds=time.monotonic() - began)


def measure_from_outside(
        blocks: MeasuredBlocks, engines: Engines | None, settings: Sequence[Setting], anchored: Sequence[Setting],
        prompts: Sequence[Prompt], tune: TuneSpec, belongs_to: str, between: Callable[[], None]) -> TuningProfile:
    """Measure in the session's engine, whose variants `anchored` are started, and replay in the reference engines.

    blocks    the race's, so that it measures no block again
    engines   None: the target has no reference implementation, and acceptance comes from the anchors
    """
    began = time.monotonic()
    # A method of which no anchor could start has no costs: its settings are not predicted, hence not raced.
    methods = {anchor.method for anchor in anchored}
    settings = [setting for setting in settings if setting.method in methods]
    profiler = _Profiler(blocks, engines or {}, settings, prompts, between)
    step_times: list[StepTime] = []
    draft_times: list[DraftTime] = []
    concurrencies = sorted(set(tune.concurrencies))
    at_lowest: dict[float, dict[Setting, BlockRun]] = {}
    prefill_s: dict[Setting, float] = {}
    measured: dict[tuple[int, float], dict[Setting, BlockRun]] = {}
    # One anchor after the other: where fewer servers fit than there are anchors, each is started once.
    for setting in anchored:
        blocks.warm_up(setting, 1, tune.temperatures)
        # Median seconds of the first token, one request at a time.
        first_tokens = blocks.engine.generate(
            setting.label(), profiler.prefill_requests()[:_FEW_PROMPTS], 1)
        prefill_s[setting] = median(answer.ttft_s for answer in first_tokens.answers)
        for concurrency in concurrencies:
            if concurrency > 1:
                blocks.warm_up(setting, concurrency, tune.temperatures)
            for temperature in tune.temperatures:
                run = blocks.measure(setting, concurrency, temperature, 0)
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
        replays = []
        for temperature, runs in at_lowest.items():
            lengths = [len(tokens) for tokens in runs[OFF].answers.values() if tokens]
            replays.append(SettingReplay(setting=OFF, temperature=temperature, done=undrafted(lengths)))
            replays += [SettingReplay(setting=setting, temperature=temperature, done=anchors.replay_of_anchor(
                setting, anchor, len(lengths), sum(lengths))) for setting in settings
                if setting.tree is not None and (anchor := anchors.anchor_of(setting, runs)) is not None]
    else:
        for temperature in tune.temperatures:
            # Undrafted answers of the session's engine to all prompts, to replay along.
            between()
            requests = blocks.some_requests(prompts, temperature, 0, len(prompts))
            answered = blocks.engine.generate(OFF.label(), requests, concurrencies[-1])
            for request, answer in zip(requests, answered.answers, strict=True):
                profiler.answers[request.id, temperature] = KnownAnswer(
                    tuple(request.prompt_ids), answer.token_ids, temperature, request.seed)
        # Its servers verify `num_draft_tokens` nodes in every round, filled or not.
        replays = [replayed if replayed.setting.tree is None else replayed.model_copy(update={
            "done": replayed.done.model_copy(update={
                "passes": {replayed.setting.tree.num_draft_tokens: replayed.done.rounds}})})
            for replayed in profiler.replay(tune)]
    by_method: dict[str, list[float]] = {}
    for setting, seconds in prefill_s.items():
        by_method.setdefault(setting.method, []).append(seconds)
    return TuningProfile(
        belongs_to=belongs_to, step_times=tuple(step_times), draft_times=tuple(draft_times),
        prefill_s={method: median(seconds) for method, seconds in by_method.items()}, replays=tuple(replays),
        num_resident=blocks.engine.num_resident, seconds=time.monotonic() - began)


class _Profiler:
    def __init__(self, blocks: MeasuredBlocks, engines: Engines, settings: Sequence[Setting], prompts: Sequence[Prompt],
                 between: Callable[[], None]) -> None:
        self.blocks, self.engines = blocks, engines
        self.settings, self.prompts, self.between = settings, prompts, between
        self.step_times: list[StepTime] = []
        self.draft_times: list[DraftTime] = []
        self.answers: dict[tuple[str, float], KnownAnswer] = {}
        self._prefill_s: dict[str, list[float]] = {}
        self._methods = {setting.method: None for setting in settings if setting.tree is not None}

    def probe(self, concurrency: int, temperature: float) -> None:
        num = max(concurrency, min(len(self.prompts), max(_FEW_PROMPTS, 2 * concurrency)))
        requests = self.blocks.some_requests(self.prompts, temperature, 0, num)
        for method in self._methods:
            trained = method == "drafter"
            probed = requests if trained else [
                replace(request, max_new_tokens=8 * _LOOKUP_ROUNDS) for request in requests[:concurrency]]
            # Rounds without drafting run in the drafter's probe, so all points of the step-time curve are of one run.
            # Of each width the shallowest shape with the fewest nodes, and the deepest with the most.
            shapes: dict[DraftTreeShape | None, None] = {None: None} if trained else {}
            ordered = sorted(self._shapes(method),
                             key=lambda shape: (shape.top_k, shape.num_steps, shape.num_draft_tokens))
            for _, same in groupby(ordered, key=lambda shape: shape.top_k):
                first, *others = same
                shapes |= dict.fromkeys((first, *others[-1:]))
            probe = run_probe(self.engines[method], probed, concurrency, list(shapes), self.between,
                              _ROUNDS if trained else _LOOKUP_ROUNDS)
            self.draft_times += [DraftTime(
                concurrency=concurrency, temperature=temperature, setting=Setting(method=method, tree=shape),
                draft_s=median(times), rounds=len(times)) for shape, times in probe.draft_s.items()]
            self._prefill_s.setdefault(method, []).extend(probe.prefill_s)
            if trained:
                # The curve of target passes: one point per kind and number of nodes.
                self.step_times += [
                    StepTime(concurrency=concurrency, temperature=temperature, verified_tokens=nodes, tree=tree,
                             verify_s=median(times), rounds=len(times))
                    for (tree, nodes), times in sorted(probe.verify_s.items())]
                for request in requests:
                    self.answers[request.id, temperature] = KnownAnswer(
                        tuple(request.prompt_ids), probe.texts[request.id], temperature, request.seed)

    def _shapes(self, method: Method) -> list[DraftTreeShape]:
        return [setting.tree for setting in self.settings if setting.method == method and setting.tree is not None]

    def prefill(self) -> dict[str, float]:
        """Median prefill seconds by method; those without drafting are timed here."""
        engine = self.engines["off"]
        engine.tree = None
        plain = []
        for request in self.prefill_requests():
            before = engine.stats.prefill_s
            engine.generate([request])
            plain.append(engine.stats.prefill_s - before)
        return {"off": median(plain)} | {method: median(times) for method, times in self._prefill_s.items() if times}

    def prefill_requests(self) -> list[Request]:
        """Requests whose answers end with their first token."""
        requests = self.blocks.some_requests(self.prompts, 0.0, 0, len(self.prompts))
        return [replace(request, max_new_tokens=1) for request in requests]

    def replay(self, tune: TuneSpec) -> list[SettingReplay]:
        replays = []
        for temperature in sorted(set(tune.temperatures)):
            answers = [answer for (_, of), answer in self.answers.items() if of == temperature]
            lengths = [len(answer.token_ids) for answer in answers]
            replays.append(SettingReplay(setting=OFF, temperature=temperature, done=undrafted(lengths)))
            for method in self._methods:
                shapes, drafter = self._shapes(method), self.engines[method].drafter
                assert drafter is not None
                traces = trace(self.blocks.session.target, drafter, answers, max(shape.num_steps for shape in shapes),
                               {shape.top_k for shape in shapes}, self.between)
                replays += [SettingReplay(setting=Setting(method=method, tree=shape), temperature=temperature,
                                          done=merged([replay(answer, shape) for answer in traces[shape.top_k]]))
                            for shape in shapes]
        return replays
