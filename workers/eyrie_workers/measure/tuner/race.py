"""The race: which settings are measured at one concurrency, for how long, and which is best. Pure.

Predictions (`measure.tuner.predict`) rank every setting before anything is measured. They have errors: costs are
interpolated, caches are warm or cold. The race therefore repeats three steps:

    admit   `off` always, because it is the baseline and may win. Then, in order of prediction, every setting that could
            still win: its optimistic speed is at least the leader's pessimistic speed. Before any measurement both are
            predictions plus or minus MARGIN. Afterwards the optimistic speed is the prediction, corrected by the mean
            error of the predictions tried so far, plus twice their scatter; the pessimistic speed is the leader's
            estimate minus two standard errors.
    drop    every setting whose paired interval against the leader ends below 1 + TIE: slower, or not noticeably faster.
            Without this indifference zone (Bechhofer 1954) equally fast settings would never be separated.
    stop    when no setting can beat the leader, or trials, blocks or seconds run out.

A block is a few prompts at one temperature, answered by every active setting in turn; a rung is one block of each
temperature. Comparisons use the blocks that both settings have answered, by the confidence sequence of the proof
(`intervals.anytime_interval`), over rungs and over prompts. Among settings that are not separated, the
winner has the highest estimate, which combines prediction and measurement weighted by the inverse of their variances: a
short race is noisier than a replay, a long one is not. Where the two disagree by more than their errors allow, the
excess is attributed to the prediction. Speculation is chosen only when it wins by more than TIE: off is simpler. Where
it wins at no load of the job, and at some load is predicted to win and not shown to lose, the proof decides at that
load (`stages.tune.chosen`): it measures until it is clear, and a race that ran out of seconds decides nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, pstdev, stdev

from eyrie_api.contract.engine import DraftServing, Verification
from eyrie_api.contract.model import Interval
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_workers.measure.intervals import FEWEST_PAIRS, MeasuredBlock, anytime_interval, paired_logs
from eyrie_workers.measure.tuner.predict import PredictedSpeed

MARGIN = 0.08  # relative half-width of a prediction before any measurement
TIE = 0.01  # relative speed difference below which two settings count as equal
_PREDICTION_ERROR = 0.03
"""Standard error of a predicted ratio, at least (measured on the quickstart target: docs/results/tuner.md)."""

_BLOCK_ERROR = 0.06
"""Standard error of the ratio of two settings on one block, used while there are too few rungs to estimate it."""

_FEW_RUNGS = 3


BlockKey = tuple[float, int]  # temperature and rung


@dataclass
class Race:
    """The race at one concurrency. Its state is a function of the predictions and of the recorded blocks, in order."""

    predictions: Mapping[Setting, PredictedSpeed]
    most_trials: int  # settings that may be measured here, off included
    blocks: dict[Setting, dict[BlockKey, MeasuredBlock]] = field(default_factory=dict)
    """Results of every measured setting."""

    active: list[Setting] = field(default_factory=list)
    reasons: dict[Setting, str] = field(default_factory=dict)  # why a setting was dropped or withdrawn
    changed_output: set[Setting] = field(default_factory=set)
    """Settings that changed an answer: one wins only if all others did too, and promotion then refuses it."""

    def record(self, setting: Setting, block: BlockKey, measured: MeasuredBlock) -> None:
        self.blocks.setdefault(setting, {})[block] = measured

    # Admission

    def admit(self, affordable: int, required: Sequence[Setting] = ()) -> list[Setting]:
        """Activate off, the required settings and those that could still win, at most `affordable` active at once.

        Returns the newly active ones.
        """
        entered: list[Setting] = []
        for setting in [OFF, *required, *self._candidates()]:
            tried = set(self.blocks) | set(self.active)
            if len(tried) >= self.most_trials or len(self.active) >= affordable:
                break
            if setting not in tried and setting not in self.reasons:
                self.active.append(setting)
                entered.append(setting)
        return entered

    def withdraw(self, setting: Setting, reason: str) -> None:
        """Take out a setting that cannot be measured; it is not admitted again and uses no trial."""
        self.active.remove(setting)
        self.blocks.pop(setting, None)
        self.reasons[setting] = reason

    def _candidates(self) -> list[Setting]:
        """Untried settings that could win, best prediction first; settings similar to an earlier one come last."""
        by_speed = sorted(self.predictions, key=lambda setting: -self.predictions[setting].speedup)
        untried = [setting for setting in by_speed
                   if setting not in self.blocks and setting not in self.reasons and setting != OFF]
        bias, scatter = self._prediction_error()
        # The optimistic speed-up of a candidate must reach the pessimistic one of the leader.
        if self._compared():
            leader = self.leader()
            threshold = self.estimate(leader) * math.exp(-2.0 * self._error(leader))
        else:
            threshold = max(prediction.speedup for prediction in self.predictions.values()) * math.exp(-MARGIN)
        candidates = [setting for setting in untried
                      if self.predictions[setting].speedup * math.exp(bias + scatter) >= threshold]
        # Neighbouring shapes have nearly the same speed and prediction error: measuring both would tell little more.
        taken = [setting for setting in self.active if setting != OFF]
        first: list[Setting] = []
        for setting in candidates:
            tree = setting.tree
            if not any(setting.method == other.method and tree is not None and other.tree is not None
                       and (tree.top_k, tree.verification, tree.draft) == (
                           other.tree.top_k, other.tree.verification, other.tree.draft)
                       and abs(tree.num_steps - other.tree.num_steps) <= 1
                       for other in [*taken, *first]):
                first.append(setting)
        return first + [setting for setting in candidates if setting not in first]

    def _prediction_error(self) -> tuple[float, float]:
        """Mean of log(measured / predicted) over the settings tried, and the remaining half-width of a prediction."""
        errors = [math.log(self.speedup(setting) / self.predictions[setting].speedup) for setting in self._compared()]
        if not errors:
            return 0.0, MARGIN
        # The mean of a few noisy ratios is uncertain, so it is shrunk towards 0; less so with more of them.
        shrinkage = len(errors) / (len(errors) + 1)
        return fmean(errors) * shrinkage, max(2.0 * pstdev(errors), MARGIN / math.sqrt(1 + len(errors)))

    def _compared(self) -> list[Setting]:
        return [setting for setting in self.blocks if setting != OFF and self._common(setting, OFF)]

    # Comparison

    def _common(self, first: Setting, second: Setting) -> list[BlockKey]:
        """Blocks that both settings answered, of rungs that both completed."""
        both = self.blocks.get(first, {}).keys() & self.blocks.get(second, {}).keys()
        temperatures = {temperature for blocks in self.blocks.values() for temperature, _ in blocks}
        return sorted(key for key in both if all((temperature, key[1]) in both for temperature in temperatures))

    def _logs(self, setting: Setting, against: Setting) -> tuple[list[float], list[float]]:
        """`paired_logs` of the common blocks."""
        return paired_logs((key[1], self.blocks[setting][key], self.blocks[against][key])
                           for key in self._common(setting, against))

    def speedup(self, setting: Setting, against: Setting = OFF) -> float:
        """Measured speed-up, geometric mean over the common rungs."""
        return 1.0 if setting == against else math.exp(fmean(self._logs(setting, against)[0]))

    def interval(self, setting: Setting, against: Setting = OFF) -> Interval | None:
        """95 % interval of `speedup`, valid at every look; None where too few rungs or prompts are common to both."""
        logs = self._logs(setting, against)
        return None if setting == against or min(map(len, logs)) < FEWEST_PAIRS else anytime_interval(*logs)

    def estimate(self, setting: Setting) -> float:
        """Speed-up over off from prediction and measurement, weighted by the inverse of their variances."""
        if setting == OFF:
            return 1.0
        if not self._common(setting, OFF):
            return self.predictions[setting].speedup
        corrected, error = self._corrected(setting)
        measured = self._measurement_error(setting)
        weight = error**2 / (error**2 + measured**2)
        return math.exp((1.0 - weight) * math.log(corrected) + weight * math.log(self.speedup(setting)))

    def _error(self, setting: Setting) -> float:
        """Standard error of the logarithm of `estimate`."""
        if setting == OFF:
            return 0.0
        return (self._corrected(setting)[1] ** -2 + self._measurement_error(setting) ** -2) ** -0.5

    def _corrected(self, setting: Setting) -> tuple[float, float]:
        """A measured setting's prediction without the error common to all predictions, and its standard error."""
        corrected = self.predictions[setting].speedup * math.exp(self._prediction_error()[0])
        # The prediction's variance is the squared difference minus the measurement's variance.
        difference = math.log(self.speedup(setting) / corrected)
        unexplained = difference**2 - self._measurement_error(setting) ** 2
        return corrected, math.sqrt(max(_PREDICTION_ERROR**2, unexplained))

    def _measurement_error(self, setting: Setting) -> float:
        logs = self._logs(setting, OFF)[0]
        # Two rungs give no usable estimate of their own scatter; a typical one is used instead.
        if len(logs) < _FEW_RUNGS:
            return _BLOCK_ERROR / math.sqrt(len(self._common(setting, OFF)))
        return max(stdev(logs) / math.sqrt(len(logs)), 1e-4)

    def leader(self) -> Setting:
        """The active setting with the highest estimate, lossless ones first; off unless beaten by more than TIE."""
        drafted = [setting for setting in self.active if setting != OFF]
        measured = [setting for setting in drafted if self._common(setting, OFF)]
        lossless = [setting for setting in measured if setting not in self.changed_output]
        best = max(lossless or measured or drafted, key=self.estimate, default=OFF)
        return best if self.estimate(best) > 1.0 + TIE else OFF

    def best_drafted(self, method: str) -> Setting | None:
        tried = [setting for setting in self._compared() if setting.method == method]
        return max(tried, default=None, key=lambda setting: (
            setting not in self.changed_output, setting in self.active, self.estimate(setting)))

    def gains(self) -> list[str]:
        """What each measured way of verifying or computing drafts gained over the default one, of its best shape: over
        the same shape, or over the best where that was not measured."""
        ways: dict[tuple[Verification, DraftServing], list[Setting]] = {}
        for setting in sorted(self._compared(), key=self.estimate, reverse=True):
            if setting.method == "drafter" and setting.tree:
                ways.setdefault((setting.tree.verification, setting.tree.draft), []).append(setting)
        texts, default = [], ways.pop(("target", DraftServing()), [])
        for best, *_ in ways.values():
            against = min(default, key=lambda one: _shape(one) != _shape(best), default=None)
            if against is not None and self._common(best, against):
                interval = self.interval(best, against)
                sure = f"{interval.low:.2f} to {interval.high:.2f}" if interval else "too few blocks for an interval"
                texts.append(f"{best.label()} was {self.speedup(best, against):.2f} times as fast as "
                             f"{against.label()} ({sure}).")
        return texts

    # Elimination

    def drop(self) -> list[Setting]:
        """Drop the settings that cannot beat the leader by more than TIE; off stays as the baseline.

        Returns the dropped ones.
        """
        leader = self.leader()
        dropped = [setting for setting in self.active if setting not in (leader, OFF) and self._beaten(setting, leader)]
        for setting in dropped:
            self.active.remove(setting)
            self.reasons[setting] = (f"after {len(self._common(setting, leader))} blocks at "
                                     f"{self.speedup(setting, leader):.3f} of {leader.label()}")
        return dropped

    def _beaten(self, setting: Setting, leader: Setting) -> bool:
        interval = self.interval(setting, leader)
        return interval is not None and interval.high < 1.0 + TIE

    def undecided(self) -> Setting | None:
        """The drafter's best setting, where off leads although this one was predicted to be faster and the measurements
        do not show that it is not."""
        best = self.best_drafted("drafter")
        if best is None or self.leader() != OFF or self._beaten(best, OFF):
            return None
        return best if self.predictions[best].speedup > 1.0 + TIE else None

    @property
    def decided(self) -> bool:
        """Whether every active setting is beaten by the leader, and no unmeasured one may be admitted."""
        leader = self.leader()
        rivals = [setting for setting in {OFF, *self.active} if setting != leader]
        return all(self._beaten(setting, leader) for setting in rivals) and not (
            len(self.blocks) < self.most_trials and self._candidates())


def _shape(setting: Setting) -> tuple[int, int, int]:
    assert setting.tree is not None
    return setting.tree.num_steps, setting.tree.top_k, setting.tree.num_draft_tokens


def always_raced(by_speed: Sequence[Setting]) -> list[Setting]:
    """The settings that are measured whatever the budget, in addition to off: the best prediction of all, often n-gram
    lookup, because it is expected to win; and the drafter's best, which the final measurement needs.

    by_speed   in order of prediction, best first
    """
    best = [setting for setting in by_speed if setting != OFF][:1]
    drafter = [setting for setting in by_speed if setting.method == "drafter"][:1]
    return list(dict.fromkeys([*best, *drafter]))


def within_budget(order: Sequence[float], budget_s: float) -> int:
    """How many leading entries of these costs in seconds fit the budget; at least two (off and a leader)."""
    return min(len(order), max(2, sum(spent <= budget_s for spent in accumulate(order))))
