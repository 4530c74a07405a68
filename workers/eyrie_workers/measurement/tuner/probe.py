"""Times rounds of several draft-tree shapes, and records the answers: the run that all predictions are computed from.

The engine answers prompts while the draft-tree shape changes from round to round: the shallowest and the deepest of
each width, and no drafting. The text does not depend on the shape, so the answers are usable; neighbouring rounds run
under nearly the same conditions on nearly the same text, so times differ by shape alone. Rounds with an empty slot are
discarded. Each time is the median of its rounds, which is robust to single interruptions.

Prompts are repeated from the first until every shape has enough rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.tuning import DraftTime, Method, Setting, StepTime
from eyrie_workers.speculation.engine import Engine, Request

_MOST_REPEATS = 100  # of the prompts; beyond it the answers are too short to have timed rounds


@dataclass(frozen=True)
class Round:
    """One round with all slots taken."""

    shape: DraftTreeShape | None
    nodes: int
    """Verified per row, root included."""

    draft_s: float
    verify_s: float


@dataclass
class Probe:
    """The timed rounds and the answers of one run."""

    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Answers by request."""

    rounds: list[Round] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    """Prefill seconds of each request."""


def shapes_to_time(shapes: Sequence[DraftTreeShape]) -> list[DraftTreeShape]:
    """Of each width the shallowest shape with the fewest nodes, and the deepest with the most."""
    chosen: dict[DraftTreeShape, None] = {}
    for width in sorted({shape.top_k for shape in shapes}):
        same = sorted((shape for shape in shapes if shape.top_k == width),
                      key=lambda shape: (shape.num_steps, shape.num_draft_tokens))
        for shape in (same[0], same[-1]):
            chosen[shape] = None
    return list(chosen)


def run_probe(engine: Engine, requests: Sequence[Request], concurrency: int, shapes: Sequence[DraftTreeShape | None],
              between: Callable[[], None], rounds: int) -> Probe:
    """Answer all requests at this concurrency in alternating shapes. Leaves the engine idle."""
    probe, rotation = Probe(), _ShapeRotation(dict.fromkeys(shapes, 0))
    engine.set_tree_schedule(rotation, [shape for shape in shapes if shape is not None])
    rows = min(concurrency, len(requests))
    names = {request.id for request in requests}
    repeat = 0
    waiting = list(requests)
    while True:
        if not waiting and min(rotation.counts.values()) < rounds:
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
            probe.rounds.append(Round(rotation.last, spent.nodes - before.nodes, spent.draft_s - before.draft_s,
                                      spent.verify_s - before.verify_s))
            rotation.counts[rotation.last] += 1
        if len(probe.texts) == len(requests) and min(rotation.counts.values()) >= rounds:
            break
    for request in requests:
        for number in range(repeat + 1):
            engine.cancel(_repeat_id(request, number))
    engine.tree = None
    return probe


def _repeat_id(request: Request, repeat: int) -> str:
    return f"{request.id} (repeat {repeat})" if repeat else request.id


@dataclass
class _ShapeRotation:
    """The shape of each round: the first of those with the fewest counted rounds."""

    counts: dict[DraftTreeShape | None, int]
    last: DraftTreeShape | None = None

    def __call__(self, _num_rows: int) -> DraftTreeShape | None:
        self.last = min(self.counts, key=lambda shape: self.counts[shape])
        return self.last


def step_times(probe: Probe, concurrency: int, temperature: float) -> list[StepTime]:
    """The curve of target passes: one point per kind and number of nodes."""
    grouped: dict[tuple[bool, int], list[float]] = {}
    for one in probe.rounds:
        grouped.setdefault((one.shape is not None and one.shape.top_k > 1, one.nodes), []).append(one.verify_s)
    return [StepTime(concurrency=concurrency, temperature=temperature, verified_tokens=nodes, tree=tree,
                     verify_s=median(times), rounds=len(times))
            for (tree, nodes), times in sorted(grouped.items())]


def draft_times(probe: Probe, method: Method, concurrency: int, temperature: float) -> list[DraftTime]:
    """Drafting time by shape. Rounds without drafting are left out: in these the drafter only settles pairs."""
    grouped: dict[DraftTreeShape, list[float]] = {}
    for one in probe.rounds:
        if one.shape is not None:
            grouped.setdefault(one.shape, []).append(one.draft_s)
    return [DraftTime(concurrency=concurrency, temperature=temperature, setting=Setting(method=method, tree=shape),
                      draft_s=median(times), rounds=len(times)) for shape, times in grouped.items()]


