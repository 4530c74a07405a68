"""Which settings are measured at one concurrency, when one may stop being measured, and which is best. Pure.

Predictions (`measurement.tuner.predict`) rank every setting before anything is measured. They are good, not perfect:
costs are interpolated, caches are warm or cold. So

    admit   off, always: it is the baseline and may win. Then, in the order of prediction, whoever could still win: its
            optimistic speed is at least the leader's pessimistic one. Before any measurement both ends are predictions
            give or take MARGIN; afterwards the prediction is corrected by how it did on the settings tried so far, give
            or take twice the scatter around that, and the leader's end is what its measurements leave possible.
    drop    whose paired interval against the leader ends below 1 + TIE: slower, or not faster by more than anyone would
            notice. Without that zone of indifference (Bechhofer 1954) equals would race for ever.
    stop    when nobody is left to beat the leader, or trials, blocks or seconds run out.

A block is a few prompts at one temperature, answered by every setting in the race in turn; a rung is one block of each
temperature. Comparisons use the blocks both have answered. Two sources then name the winner among those not separated:
prediction and measurement, weighted by the inverse of their variances, because a short race is noisier than a replay
and a long one is not. Where the two contradict each other by more than both errors allow, the prediction is taken to be
wrong by the rest. Speculation is switched on only when it wins by more than TIE: off is simpler.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.tuning import OFF, Setting
from eyrie_workers.intervals import Tally, mean_speed_ratio, speed_interval, student_quantile
from eyrie_workers.measurement.tuner.predict import Prediction

MARGIN = 0.08
"""Half-width given to predictions that nothing has been measured against."""

TIE = 0.01
_PREDICTION_ERROR = 0.03
"""Standard error of a predicted ratio, at least (measured on the quickstart target: docs/results/tuner.md)."""

_BLOCK_ERROR = 0.06
"""Standard error of the ratio of two variants on one block, while there are too few blocks to tell."""

_FEW_BLOCKS = 3


@dataclass(frozen=True)
class Measured:
    """What one setting did with one block."""

    tokens: int
    seconds: float


BlockKey = tuple[float, int]
"""Temperature and rung."""


@dataclass
class Race:
    """One concurrency's race. Everything in it follows from the predictions and the blocks taken, in order."""

    predictions: Mapping[Setting, Prediction]
    most_trials: int
    """Settings that may be measured here, off included."""

    blocks: dict[Setting, dict[BlockKey, Measured]] = field(default_factory=dict)
    """Of every setting tried."""

    active: list[Setting] = field(default_factory=list)
    reasons: dict[Setting, str] = field(default_factory=dict)
    """Why a setting stopped."""

    spoilt: set[Setting] = field(default_factory=set)
    """Settings that changed an answer: they win only when every one does, and promotion then sees to it."""

    _intervals: dict[tuple[Setting, Setting, int, int], Interval | None] = field(default_factory=dict)

    def take(self, setting: Setting, block: BlockKey, measured: Measured) -> None:
        """Enter one measurement."""
        self.blocks.setdefault(setting, {})[block] = measured

    # Who may start

    def admit(self, affordable: int, invited: Sequence[Setting] = ()) -> list[Setting]:
        """Let in off, the invited and whoever could still win, at most `affordable` at once; returns the new ones."""
        entered: list[Setting] = []
        for setting in [OFF, *invited, *self._hopeful()]:
            tried = set(self.blocks) | set(self.active)
            if len(tried) >= self.most_trials or len(self.active) >= affordable:
                break
            if setting not in tried:
                self.active.append(setting)
                entered.append(setting)
        return entered

    def _hopeful(self) -> list[Setting]:
        """Untried settings that could win, best prediction first; of two alike the second waits for another turn."""
        untried = [setting for setting in self._by_prediction() if setting not in self.blocks and setting != OFF]
        floor = self._to_beat()
        hopeful = [setting for setting in untried if self._optimistic(setting) >= floor]
        taken = [setting for setting in self.active if setting != OFF]
        first: list[Setting] = []
        for setting in hopeful:
            if not any(_alike(setting, other) for other in [*taken, *first]):
                first.append(setting)
        return first + [setting for setting in hopeful if setting not in first]

    def _by_prediction(self) -> list[Setting]:
        return sorted(self.predictions, key=lambda setting: -self.predictions[setting].speedup)

    def _optimistic(self, setting: Setting) -> float:
        bias, scatter = self._prediction_error()
        return self.predictions[setting].speedup * math.exp(bias + scatter)

    def _to_beat(self) -> float:
        if not self._compared():
            return max(prediction.speedup for prediction in self.predictions.values()) * math.exp(-MARGIN)
        leader = self.leader()
        return self.estimate(leader) * math.exp(-2.0 * self._error(leader))

    def _prediction_error(self) -> tuple[float, float]:
        """Mean of log(measured / predicted) over the settings tried, and how far a prediction may still be off."""
        errors = [math.log(self.speedup(setting) / self.predictions[setting].speedup) for setting in self._compared()]
        if not errors:
            return 0.0, MARGIN
        # The mean of a few noisy ratios is itself uncertain: it is believed the more the more there are.
        believed = len(errors) / (len(errors) + 1)
        return fmean(errors) * believed, max(2.0 * pstdev(errors), MARGIN / math.sqrt(1 + len(errors)))

    def _compared(self) -> list[Setting]:
        return [setting for setting in self.blocks if setting != OFF and self._common(setting, OFF)]

    # How they stand

    def _common(self, one: Setting, other: Setting) -> list[BlockKey]:
        """Blocks both answered, of rungs that are whole for both."""
        both = self.blocks.get(one, {}).keys() & self.blocks.get(other, {}).keys()
        temperatures = {temperature for blocks in self.blocks.values() for temperature, _ in blocks}
        return sorted(key for key in both if all((temperature, key[1]) in both for temperature in temperatures))

    def _groups(self, setting: Setting, against: Setting) -> list[list[Tally]]:
        keys = self._common(setting, against)
        ours, theirs = self.blocks[setting], self.blocks[against]
        return [[Tally(ours[key].tokens, ours[key].seconds, theirs[key].tokens, theirs[key].seconds)
                 for key in keys if key[0] == temperature] for temperature in sorted({key[0] for key in keys})]

    def speedup(self, setting: Setting, against: Setting = OFF) -> float:
        """Measured, mean over temperatures, on common blocks."""
        return 1.0 if setting == against else mean_speed_ratio(self._groups(setting, against))

    def interval(self, setting: Setting, against: Setting = OFF, seed: int = 0) -> Interval | None:
        """95 %, blocks resampled in pairs; None while there are fewer than two a temperature."""
        if setting == against:
            return None
        # Blocks are only ever added, so their number says which they are.
        key = (setting, against, len(self._common(setting, against)), seed)
        if key not in self._intervals:
            groups = self._groups(setting, against)
            self._intervals[key] = speed_interval(groups, seed) if groups and len(groups[0]) > 1 else None
        return self._intervals[key]

    def estimate(self, setting: Setting) -> float:
        """Speed-up over off by prediction and measurement together."""
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
        """The prediction of a measured setting without what all predictions have in common, and its standard error."""
        corrected = self.predictions[setting].speedup * math.exp(self._prediction_error()[0])
        surprise = math.log(self.speedup(setting) / corrected)
        unexplained = surprise**2 - self._measurement_error(setting) ** 2
        return corrected, math.sqrt(max(_PREDICTION_ERROR**2, unexplained))

    def _measurement_error(self, setting: Setting) -> float:
        groups = self._groups(setting, OFF)
        num = len(groups[0])
        rough = _BLOCK_ERROR / math.sqrt(num * len(groups))
        interval = self.interval(setting)
        if interval is None or num < _FEW_BLOCKS:
            return rough
        return max(math.log(interval.high / interval.low) / (2 * student_quantile(0.975, num - 1)), 1e-4)

    def leader(self) -> Setting:
        """The best so far: highest estimate among the active; off unless it is beaten by more than a tie."""
        drafted = [setting for setting in self.active if setting != OFF]
        measured = [setting for setting in drafted if self._common(setting, OFF)]
        faithful = [setting for setting in measured if setting not in self.spoilt]
        best = max(faithful or measured or drafted, key=self.estimate, default=OFF)
        return best if self.estimate(best) > 1.0 + TIE else OFF

    def best_drafted(self, method: str) -> Setting | None:
        """The best of one method among all that were measured."""
        tried = [setting for setting in self._compared() if setting.method == method]
        return max(tried, default=None, key=lambda setting: (
            setting not in self.spoilt, setting in self.active, self.estimate(setting)))

    # Who goes on

    def drop(self) -> list[Setting]:
        """Drop who cannot beat the leader by more than a tie; off goes on as the baseline. Returns the dropped."""
        leader = self.leader()
        gone = [setting for setting in self.active if setting not in (leader, OFF) and self._beaten(setting, leader)]
        for setting in gone:
            self.active.remove(setting)
            self.reasons[setting] = (f"after {len(self._common(setting, leader))} blocks at "
                                     f"{self.speedup(setting, leader):.3f} of {leader.label()}")
        return gone

    def _beaten(self, setting: Setting, leader: Setting) -> bool:
        if not self._common(setting, leader):
            return False
        interval = self.interval(setting, leader)
        return interval is not None and interval.high < 1.0 + TIE

    @property
    def decided(self) -> bool:
        """Whether nobody measured is left that could beat the leader, and nobody unmeasured may be let in."""
        leader = self.leader()
        rivals = [setting for setting in {OFF, *self.active} if setting != leader]
        return all(self._beaten(setting, leader) for setting in rivals) and not self._may_enter()

    def _may_enter(self) -> bool:
        return len(self.blocks) < self.most_trials and bool(self._hopeful())


def _alike(one: Setting, other: Setting) -> bool:
    """Whether two settings differ so little that measuring one tells of the other."""
    if one.tree is None or other.tree is None or one.method != other.method:
        return one == other
    return one.tree.top_k == other.tree.top_k and abs(one.tree.num_steps - other.tree.num_steps) <= 1


def trials_allowed(num_settings: int, share: float) -> int:
    """How many of a concurrency's settings may be measured: at least off, a leader and a rival."""
    return min(num_settings, max(3, math.floor(share * num_settings)))


def within_budget(order: Sequence[float], budget_s: float) -> int:
    """How many of these costs in seconds, first come first, fit the budget; at least two (off and a leader)."""
    spent, count = 0.0, 0
    for cost in order:
        spent += cost
        if spent > budget_s and count >= 2:
            break
        count += 1
    return count
