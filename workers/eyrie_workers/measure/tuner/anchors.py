"""The cost of a round in an engine that can only be timed from outside, from a few anchor settings. Pure.

A server reports how many rounds a request took and when its answer ended, not how long one target pass or one draft
step takes. Both follow from a few settings whose rounds differ in known numbers. At one concurrency, with the seconds
of an undrafted round u, a round of a setting takes

    u + beta (nodes - 1) + fixed + step * num_steps + branch * (num_steps - 1) (top_k - 1)      with the drafter
    u + beta (nodes - 1) + lookup                                                               with n-gram lookup

beta is the cost of one more verified token per row, `fixed` what drafting costs once per round, `step` one pass of the
drafter, `branch` one more row in a pass: every pass of a tree but the first drafts top_k rows. The five are fitted by
least squares of the relative errors, none below zero: a negative cost is noise. The anchors do not separate all of them
(in chains, nodes and passes grow together); of the costs that fit equally well, those with the least sum of squares are
taken, which spread what cannot be separated.

Where the target has no reference implementation to replay drafting in, acceptance comes from the anchors too
(`replay_of_anchor`): a shallower setting accepts what the deepest anchor of its kind accepted up to its depth. That is
exact in probability by position for chains, and an upper bound for trees with fewer nodes than the anchor.

Anchors are off, the shallowest and the deepest chain, the largest tree, and the deepest n-gram chain; each answers the
first block of the race, whose result the race then reuses. The drafter's are computed in one way, the first that is
given, and verified as whole blocks: step rates follow from these times. Errors of the model are corrected by the race,
which shifts all predictions by their mean error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import OFF, DraftTime, Method, Setting, StepTime
from eyrie_workers.measure.benchmark.blocks import BlockRun
from eyrie_workers.measure.tuner.predict import ReplayedRounds

_FEATURES = 5


@dataclass(frozen=True)
class RoundCosts:
    """Seconds at one concurrency and temperature."""

    undrafted_s: float
    per_node_s: float
    fixed_s: float
    per_step_s: float
    per_branch_s: float
    lookup_s: float

    def round_s(self, setting: Setting) -> float:
        return self.undrafted_s + float(np.dot(_features(setting), (
            self.per_node_s, self.fixed_s, self.per_step_s, self.per_branch_s, self.lookup_s)))


def anchors(settings: Sequence[Setting]) -> list[Setting]:
    """The settings to time, off first."""
    def size(shape: DraftTreeShape) -> tuple[int, int, int]:
        return shape.num_steps, shape.num_draft_tokens, shape.top_k

    whole = [setting.tree.model_copy(update={"draft": setting.tree.draft.model_copy(update={"step_rates": None})})
             for setting in settings if setting.method == "drafter" and setting.tree]
    alike = sorted((shape for shape in whole if shape.draft == whole[0].draft
                    and (shape.top_k > 1 or shape.verification == whole[0].verification)), key=size)
    chains, trees = ([shape for shape in alike if (shape.top_k > 1) is wide] for wide in (False, True))
    lookups = sorted((setting.tree for setting in settings if setting.method == "ngram" and setting.tree), key=size)
    chosen = dict.fromkeys((*(chains or trees)[:1], *chains[-1:], *trees[-1:]))
    return [OFF, *(Setting(tree=shape) for shape in chosen),
            *(Setting(method="ngram", tree=shape) for shape in lookups[-1:])]


def round_seconds(run: BlockRun, prefill_s: float) -> float:
    """Mean seconds of one round of all rows in a block: its seconds without the prefills of its requests. Raises
    ValueError for a block without a round."""
    rounds = sum(run.accepted_histogram)
    if rounds == 0:
        raise ValueError(f"block of {run.variant} at concurrency {run.concurrency} has no round")
    prefilled = sum(bool(tokens) for tokens in run.answers.values())
    # A block of short answers may be mostly prefill; its rounds are not free.
    return max(run.seconds - prefilled * prefill_s, 0.1 * run.seconds) * run.concurrency / rounds


def fit(undrafted_s: float, timed: Sequence[tuple[Setting, float]]) -> RoundCosts:
    """Costs from the seconds of one round of some drafted settings, and of one without drafting."""
    rows = np.array([_features(setting) for setting, _ in timed], dtype=np.float64).reshape(-1, _FEATURES)
    seconds = np.array([round_s for _, round_s in timed], dtype=np.float64)
    weights = 1.0 / seconds
    best, least = np.zeros(_FEATURES), np.inf
    # Five parameters: the best of all 32 subsets without a negative one is the constrained optimum. Of equally good
    # ones the largest is taken, of which `lstsq` returns the solution with the least sum of squares.
    for num in range(_FEATURES, -1, -1):
        for subset in map(list, combinations(range(_FEATURES), num)):
            costs = np.zeros(_FEATURES)
            if subset:
                costs[subset] = np.linalg.lstsq(rows[:, subset] * weights[:, None],
                                                (seconds - undrafted_s) * weights, rcond=None)[0]
            error = float(np.sum(((undrafted_s + rows @ costs - seconds) * weights) ** 2))
            if (costs >= -1e-12).all() and error < least - 1e-12:
                best, least = costs, error
    return RoundCosts(undrafted_s, *(max(0.0, float(cost)) for cost in best))


def replay_of_anchor(setting: Setting, anchor: BlockRun, requests: int, tokens: int) -> ReplayedRounds:
    """The rounds a setting needs for answers of `tokens` tokens in all, from those of an anchor at least as deep."""
    assert setting.tree is not None
    depth, total = setting.tree.num_steps, sum(anchor.accepted_histogram)
    shares = [count / total for count in anchor.accepted_histogram[:depth]]
    shares += [0.0] * (depth - len(shares))
    shares.append(max(0.0, 1.0 - sum(shares)))  # of the anchor's rounds that accepted at least `depth`
    # The prefill yields the first token of every answer.
    rounds = (tokens - requests) / (1.0 + sum(accepted * share for accepted, share in enumerate(shares)))
    histogram = tuple(round(rounds * share) for share in shares)
    return ReplayedRounds(tokens=tokens, requests=requests, histogram=histogram,
                          passes={setting.tree.num_draft_tokens: max(1, sum(histogram))})


def anchor_of(setting: Setting, runs: Mapping[Setting, BlockRun]) -> BlockRun | None:
    """The deepest anchor of the same method and kind, of another kind where there is none; None without any."""
    assert setting.tree is not None
    same = [anchor for anchor in runs if anchor.tree is not None and anchor.method == setting.method]
    kind = [anchor for anchor in same if anchor.tree and (anchor.tree.top_k > 1) == (setting.tree.top_k > 1)]
    deepest = max(kind or same, default=None, key=lambda anchor: anchor.tree.num_steps if anchor.tree else 0)
    return None if deepest is None else runs[deepest]


def step_times(costs: RoundCosts, settings: Sequence[Setting], concurrency: int, temperature: float,
               rounds: int) -> list[StepTime]:
    """The line of target passes, from one node to the most of any setting; chains and trees have the same."""
    most = max((setting.tree.num_draft_tokens for setting in settings if setting.tree is not None), default=2)
    return [StepTime(concurrency=concurrency, temperature=temperature, verified_tokens=nodes, rounds=rounds,
                     verify_s=costs.undrafted_s + costs.per_node_s * (nodes - 1)) for nodes in (1, most)]


def draft_times(costs: RoundCosts, settings: Sequence[Setting], concurrency: int, temperature: float,
                rounds: int) -> list[DraftTime]:
    """Drafting seconds of the shallowest and the deepest setting of each method and width."""
    groups: dict[tuple[Method, int], list[Setting]] = {}
    for setting in settings:
        if setting.tree is not None:
            groups.setdefault((setting.method, setting.tree.top_k), []).append(setting)
    chosen: dict[Setting, None] = {}
    for group in groups.values():
        depths = sorted(group, key=lambda setting: setting.tree.num_steps if setting.tree is not None else 0)
        chosen |= dict.fromkeys((depths[0], depths[-1]))
    return [DraftTime(concurrency=concurrency, temperature=temperature, setting=setting, rounds=rounds,
                      draft_s=float(np.dot(_features(setting)[1:], (
                          costs.fixed_s, costs.per_step_s, costs.per_branch_s, costs.lookup_s))))
            for setting in chosen]


def _features(setting: Setting) -> tuple[float, ...]:
    """Multipliers of per_node_s, fixed_s, per_step_s, per_branch_s and lookup_s."""
    tree = setting.tree
    if tree is None:
        return (0.0,) * _FEATURES
    nodes = tree.num_draft_tokens - 1.0
    if setting.method == "ngram":
        return (nodes, 0.0, 0.0, 0.0, 1.0)
    return (nodes, 1.0, float(tree.num_steps), (tree.num_steps - 1.0) * (tree.top_k - 1.0), 0.0)
