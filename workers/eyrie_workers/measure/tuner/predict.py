"""Predicts the speed of every setting from one replay of the drafter and a few timed rounds. Pure.

Acceptance. The target's text does not depend on the drafter, so drafting can be replayed along a known text: at every
position the drafter proposes its deepest tree, and `locate` records which of its nodes carry the text's continuation.
With `top_k` fixed, tree growth is monotone in the other two numbers: a shallower tree is the upper part of the deeper
one, and fewer `num_draft_tokens` keep a prefix of the same nodes in order of confidence. One proposal per position and
width therefore answers for all shapes of that width: a shape holds the first d tokens of the continuation when its
depth is at least d and its `num_draft_tokens` at least a computed number. Stepping through the text in rounds
(`replay`) gives the histogram that the shape would have produced. The result is

    exact        for the replayed texts: depth, num_draft_tokens, where rounds begin (a shallower shape begins more of
                 them inside easily predicted passages), tokens dropped beyond the end of an answer;
    approximate  in the last bits: the target's states come from one pass over the whole text, and rows are batched
                 differently than when decoding, so a near-tie of the drafter may be decided the other way; and in trees
                 that could grow more than 512 nodes, whose least confident candidates are not examined;
    a sample     of texts, as every measurement is.

Two widths need two proposals: `top_k` determines which nodes are expanded, and a wide tree may omit a node that a
narrow one keeps.

Time. A round is one target pass over rows x nodes, and one drafting. Both are timed for a few shapes at each
concurrency (`StepTime`, `DraftTime`) and interpolated linearly: in the nodes of a pass (chains and trees apart), in the
passes of a draft (each width apart), and between concurrencies. A request costs its prefill, alone, and its share of
the rounds, so at full load

    tokens/s = tokens per request / (prefill_s + rounds per request * round_s / concurrency)

Prefill is included because users wait for it. Where a drafter proposes few nodes the engine verifies fewer than
`num_draft_tokens`; a batch costs as much as its largest row, modelled as the largest of `concurrency` independent
draws.

What would pay. The same formula, solved for the acceptance length (`needed_taus`): the tau with which a chain would be
`min_speedup` times as fast as no drafter.
"""

# B rows, N nodes of the whole tree, S num_steps

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eyrie_api.contract.engine import DraftTreeShape, StepRate
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.tuning import DraftTime, NeededTau, Setting, StepTime
from eyrie_api.planning.needed_tau import needed_tau
from eyrie_workers.measure.intervals import acceptance_length, add_histograms

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

NEVER = 1 << 30  # `needed` of a continuation that the tree does not contain
_NO_TOKEN = -1  # speculation.protocol.NO_TOKEN; that module imports torch


class ContinuationNodes(NamedTuple):
    """The nodes that carry the text's continuation in the deepest trees of B positions.

    needed  [B, S, S]  [b, s - 1, d - 1]: the smallest num_draft_tokens with which a tree of s steps contains the first
                       d tokens of the continuation; NEVER when none does
    filled  [B, S]     nodes, root included, of a tree of s steps that num_draft_tokens does not limit
    """

    needed: IntArray
    filled: IntArray


def locate(tokens: IntArray, parents: IntArray, scores: FloatArray, following: IntArray,
           num_steps: int) -> ContinuationNodes:
    """Find the continuation in the deepest trees: as many nodes as the drafter can grow, siblings distinct.

    tokens, parents [B, N] and scores [B, N] as in `speculation.protocol.DraftTree`; nodes in the order they were grown
    following       [B, S]: the text's next tokens, anything below zero beyond its end
    """
    num_rows, num_nodes = tokens.shape
    rows = np.arange(num_rows)[:, None]
    # Depth of each node: each iteration follows one edge up from every node, until the root, which is its own parent.
    above, depths = np.broadcast_to(np.arange(num_nodes), parents.shape), np.zeros_like(parents)
    for _ in range(num_steps + 1):
        depths += above != 0
        above = np.take_along_axis(parents, above, axis=1)
    filled_nodes = tokens != _NO_TOKEN
    filled_nodes[:, 0] = False
    # The most confident nodes are kept; of equal ones the earlier (`speculation.tree.rerank`).
    ranked = np.where(filled_nodes, scores, -np.inf)
    order = np.argsort(-ranked, axis=1, kind="stable")
    place = np.empty_like(order)  # [B, N]: each node's rank, the inverse permutation of `order`
    np.put_along_axis(place, order, np.arange(num_nodes)[None, :].repeat(num_rows, 0), axis=1)
    needed = np.full((num_rows, num_steps, num_steps), NEVER, dtype=np.int64)
    filled = np.empty((num_rows, num_steps), dtype=np.int64)
    path = _path(tokens, parents, following, num_steps)
    for steps in range(1, num_steps + 1):
        # A shallower tree is the deep one without its deeper nodes, so its budget goes to the remaining ones in order.
        kept = filled_nodes & (depths <= steps)
        filled[:, steps - 1] = 1 + kept.sum(axis=1)
        so_far = 1 + np.take_along_axis(kept, order, axis=1).cumsum(axis=1)  # the root, and all nodes up to each rank
        wanted = path[:, :steps]
        # A tree contains a node when its budget reaches the node's rank among the kept ones.
        at = so_far[rows, place[rows, np.maximum(wanted, 0)]]
        needed[:, steps - 1, :steps] = np.where(wanted >= 0, at, NEVER)
    return ContinuationNodes(needed, filled)


def _path(tokens: IntArray, parents: IntArray, following: IntArray, num_steps: int) -> IntArray:
    """[B, S]: the node of each following token, a child of the node before; -1 from the first missing one."""
    num_rows = tokens.shape[0]
    path = np.full((num_rows, num_steps), -1, dtype=np.int64)
    node, on_path = np.zeros(num_rows, dtype=np.int64), np.ones(num_rows, dtype=bool)
    for depth in range(num_steps):
        token = following[:, depth]
        carries = (parents == node[:, None]) & (tokens == token[:, None])
        carries[:, 0] = False
        on_path = on_path & (token >= 0) & carries.any(axis=1)
        node = carries.argmax(axis=1)
        path[:, depth] = np.where(on_path, node, -1)
    return path


@dataclass(frozen=True)
class Trace:
    """One answer and the nodes of the drafter's trees that carry it, at every answer token but the last."""

    num_tokens: int
    located: ContinuationNodes
    """Of positions 0 .. num_tokens - 2; the tree at a position continues the answer's token there."""


class ReplayedRounds(Frozen):
    """The rounds of one shape, decoded or replayed, for some answers."""

    tokens: int
    requests: int
    histogram: tuple[int, ...]
    """[k]: rounds of which k draft tokens are part of the answer."""

    passes: dict[int, int]
    """Nodes of a row in one target pass, root included -> rounds."""

    @property
    def rounds(self) -> int:
        """Target passes after the prefill."""
        return sum(self.histogram)

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return acceptance_length(self.histogram)


def replay(trace: Trace, shape: DraftTreeShape) -> ReplayedRounds:
    """The rounds `shape` needs for one answer. Its `top_k` must be the one the trace was recorded with."""
    needed = trace.located.needed[:, shape.num_steps - 1, :shape.num_steps]
    # A node is kept only with its ancestors, so the number of kept nodes is the length of the accepted path.
    accepted = (needed <= shape.num_draft_tokens).sum(axis=1).tolist()
    nodes = np.minimum(trace.located.filled[:, shape.num_steps - 1], shape.num_draft_tokens).tolist()
    histogram = [0] * (shape.num_steps + 1)
    passes: dict[int, int] = {}
    position = 0
    while position < trace.num_tokens - 1:
        taken = min(accepted[position] + 1, trace.num_tokens - 1 - position)
        histogram[taken - 1] += 1
        passes[nodes[position]] = passes.get(nodes[position], 0) + 1
        position += taken
    return ReplayedRounds(tokens=trace.num_tokens, requests=1, histogram=tuple(histogram), passes=passes)


def undrafted(num_tokens: Sequence[int]) -> ReplayedRounds:
    """Decoding without a drafter of answers of these lengths: one token per pass."""
    rounds = sum(num_tokens) - len(num_tokens)
    return ReplayedRounds(tokens=sum(num_tokens), requests=len(num_tokens), histogram=(rounds,), passes={1: rounds})


def merged(replays: Sequence[ReplayedRounds]) -> ReplayedRounds:
    passes: dict[int, int] = {}
    for part in replays:
        for nodes, rounds in part.passes.items():
            passes[nodes] = passes.get(nodes, 0) + rounds
    return ReplayedRounds(tokens=sum(part.tokens for part in replays), requests=sum(part.requests for part in replays),
                          histogram=add_histograms([part.histogram for part in replays]), passes=passes)


@dataclass(frozen=True)
class Costs:
    """Measured times in seconds, interpolated between shapes and concurrencies."""

    step_times: Sequence[StepTime]
    draft_times: Sequence[DraftTime]
    prefill_s: Mapping[str, float]
    """Prefill seconds of one request by drafting method: a drafter processes the prompt too."""

    def verify_s(self, concurrency: int, temperature: float, nodes: int, tree: bool) -> float:
        """Seconds of one target pass over `nodes` per row. Branching costs time, so trees have their own curve; where
        none was measured, that of chains is used."""
        points: dict[int, dict[int, float]] = {}
        kinds = {time.tree for time in self.step_times if time.verified_tokens > 1}
        kind = tree if tree in kinds else not tree
        for time in self.step_times:
            if time.temperature == temperature and (time.tree == kind or time.verified_tokens == 1):
                points.setdefault(time.concurrency, {})[time.verified_tokens] = time.verify_s
        return _line({rows: _line(curve, nodes) for rows, curve in points.items()}, concurrency)

    def draft_s(self, concurrency: int, temperature: float, setting: Setting) -> float:
        if setting.tree is None:
            return 0.0
        points: dict[int, dict[int, dict[int, float]]] = {}
        for time in self.draft_times:
            if time.temperature == temperature and time.setting.method == setting.method and time.setting.tree:
                by_width = points.setdefault(time.concurrency, {})
                by_width.setdefault(time.setting.tree.top_k, {})[time.setting.tree.num_steps] = time.draft_s
        return _line({rows: _line({width: _line(curve, setting.tree.num_steps) for width, curve in by_width.items()},
                                  setting.tree.top_k) for rows, by_width in points.items()}, concurrency)

    def with_step_rates(self, setting: Setting) -> Setting:
        """The setting with rates in place of an empty `step_rates`: of chains of each length up to its own at each load
        that was timed, at the lowest temperature, drafting included. SGLang looks up the last entry that has no more
        tokens than a step: an entry has the slowest step of those with as many or fewer, so more are never faster."""
        tree = setting.tree
        if tree is None or tree.draft.step_rates != ():
            return setting
        coldest = min(time.temperature for time in self.step_times)
        slowest, rates = 0.0, dict[int, StepRate]()
        for tokens, seconds in sorted(
                (load * nodes, self.verify_s(load, coldest, nodes, False) + self.draft_s(load, coldest, setting))
                for load in {time.concurrency for time in self.step_times}
                for nodes in range(1, tree.num_draft_tokens + 1)):
            slowest = max(slowest, seconds)
            rates[tokens] = StepRate(batch_tokens=tokens, steps_per_s=1.0 / slowest)
        draft = tree.draft.model_copy(update={"step_rates": tuple(rates.values())})
        return setting.model_copy(update={"tree": tree.model_copy(update={"draft": draft})})


def _line(points: Mapping[int, float], at: float) -> float:
    """Piecewise linear interpolation; extrapolates along the outer pieces, never below zero."""
    xs = sorted(points)
    if len(xs) == 1:
        return points[xs[0]]
    upper = min(max(1, sum(x < at for x in xs)), len(xs) - 1)
    left, right = xs[upper - 1], xs[upper]
    return max(0.0, points[left] + (points[right] - points[left]) * (at - left) / (right - left))


@dataclass(frozen=True)
class PredictedSpeed:
    setting: Setting
    concurrency: int
    tokens_per_s: float  # mean over temperatures, as `speedup` and `tau`
    speedup: float
    tau: float


def tokens_per_s(setting: Setting, done: ReplayedRounds, concurrency: int, temperature: float, costs: Costs) -> float:
    """Throughput of all rows at full load, prefill included (formula in the module docstring)."""
    branching = setting.tree is not None and setting.tree.top_k > 1
    verify_s = sum(share * costs.verify_s(concurrency, temperature, nodes, branching)
                   for nodes, share in distribution_of_largest(done.passes, concurrency).items())
    round_s = verify_s + costs.draft_s(concurrency, temperature, setting)
    return done.tokens / (done.requests * costs.prefill_s[setting.method] + done.rounds * round_s / concurrency)


def distribution_of_largest(passes: Mapping[int, int], num_rows: int) -> dict[int, float]:
    """Distribution of the largest of `num_rows` independent draws from `passes`, which counts rounds by nodes."""
    total, below, shares = sum(passes.values()), 0, {}
    for nodes in sorted(passes):
        upto = below + passes[nodes]
        # P(max <= nodes) is the cumulative share to the power of the rows; differences give P(max = nodes).
        shares[nodes] = (upto / total) ** num_rows - (below / total) ** num_rows
        below = upto
    return shares


def predict(done: Mapping[Setting, Mapping[float, ReplayedRounds]], concurrency: int, costs: Costs,
            off: Setting) -> dict[Setting, PredictedSpeed]:
    """Every setting at one concurrency, from its replays by temperature. Speed-ups are relative to `off`."""
    plain = {temperature: tokens_per_s(off, replayed, concurrency, temperature, costs)
             for temperature, replayed in done[off].items()}
    predictions = {}
    for setting, by_temperature in done.items():
        rates = {temperature: tokens_per_s(setting, replayed, concurrency, temperature, costs)
                 for temperature, replayed in by_temperature.items()}
        predictions[setting] = PredictedSpeed(
            setting, concurrency, fmean(rates.values()), fmean(rates[t] / plain[t] for t in rates),
            fmean(replayed.tau for replayed in by_temperature.values()))
    return predictions


def needed_taus(done: Mapping[Setting, Mapping[float, ReplayedRounds]], concurrencies: Sequence[int], costs: Costs,
                off: Setting, min_speedup: float) -> tuple[NeededTau, ...]:
    """The tau that the drafter's chains of each depth among `done` need at each concurrency, for answers as long as
    those that were replayed; means over temperatures."""
    shapes = {setting.tree.num_steps: setting for setting in done  # costs of equal depths are equal
              if setting.method == "drafter" and setting.tree is not None and setting.tree.top_k == 1}
    decoded = {temperature: plain for temperature, plain in done[off].items() if plain.rounds}
    needed = []
    for concurrency in concurrencies if decoded else ():
        for depth, setting in sorted(shapes.items()):
            rounds_s, budgets_s = [], []
            for temperature, plain in decoded.items():
                rounds_s.append(costs.verify_s(concurrency, temperature, depth + 1, False)
                                + costs.draft_s(concurrency, temperature, setting))
                # Of a round that emits one token: what the answers may take, without their prefills.
                seconds = plain.tokens / tokens_per_s(off, plain, concurrency, temperature, costs) / min_speedup
                budgets_s.append((seconds - plain.requests * costs.prefill_s[setting.method]) * concurrency
                                 / plain.rounds)
            needed.append(NeededTau(users=concurrency, num_steps=depth,
                                    tau=needed_tau(depth, fmean(rounds_s), fmean(budgets_s))))
    return tuple(needed)
