"""The operating map from the races' results, its description, and its form for SGLang. Pure.

The map has the best setting at every raced concurrency and, predicted, at the powers of two between them. The crossover
is the lowest load at which off is best. SGLang follows a map of chains by its adaptive speculation, whose JSON selects
by batch size: a slot applies from its key up to the next, and a slot with a single candidate drafts exactly that many
steps, 0 for no drafting (SGLang 0.5.23, srt/speculative/adaptive_spec_params.py). It accepts chains of the drafter
only; for any other map a server keeps one setting, that of the expected load.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pydantic import JsonValue

from eyrie_api.v1alpha1.tuning import OFF, OperatingMap, OperatingPoint, Setting, Trial
from eyrie_workers.measurement.tuner.predict import Prediction
from eyrie_workers.measurement.tuner.race import TIE


def between(concurrencies: Sequence[int]) -> list[int]:
    """Powers of two strictly between the lowest and the highest concurrency, without those given."""
    low, high = min(concurrencies), max(concurrencies)
    powers = (2**exponent for exponent in range(high.bit_length()))
    return [power for power in powers if low < power < high and power not in concurrencies]


def predicted_point(predictions: Mapping[Setting, Prediction], tried: Sequence[Setting]) -> OperatingPoint:
    """The best setting at a concurrency that was not raced, among the settings measured at another."""
    best = max((predictions[setting] for setting in tried if setting != OFF), key=lambda one: one.speedup,
               default=predictions[OFF])
    if best.speedup <= 1.0 + TIE:
        best = predictions[OFF]
    return OperatingPoint(concurrency=best.concurrency, setting=best.setting, speedup=best.speedup,
                          tokens_per_s=best.tokens_per_s, measured=False)


def compile_map(points: Sequence[OperatingPoint], trials: Sequence[Trial], seconds: float,
                remark: str = "") -> OperatingMap:
    """The map of these points, with its crossover, SGLang's JSON and the finding."""
    ordered = tuple(sorted(points, key=lambda point: point.concurrency))
    crossover = next((point.concurrency for point in ordered if point.setting == OFF), None)
    measured = sum(trial.blocks > 0 for trial in trials)
    sentences = [_best(ordered), _until(ordered, crossover), *_rivals(trials), remark, _trust(trials),
                 f"Measured: {measured} of {len(trials)} pairs of setting and concurrency, in {seconds:.0f} s."]
    return OperatingMap(points=ordered, crossover=crossover, adaptive=adaptive(ordered), trials_measured=measured,
                        trials_possible=len(trials), finding=" ".join(filter(None, sentences)))


def adaptive(points: Sequence[OperatingPoint]) -> dict[str, JsonValue] | None:
    """SGLang's adaptive-speculation JSON; None where SGLang cannot follow the map, or the map has one setting."""
    settings = [point.setting for point in points]
    chains = all(setting == OFF or _chain(setting) for setting in settings)
    if not chains or len(set(settings)) == 1:
        return None
    slots: dict[str, JsonValue] = {}
    for number, point in enumerate(points):
        if number == 0 or point.setting != points[number - 1].setting:
            # The first slot begins at batch size 1, whatever the lowest raced load: no batch is smaller.
            steps = point.setting.tree.num_steps if point.setting.tree is not None else 0
            slots["1" if number == 0 else str(point.concurrency)] = {"candidate_steps": [steps]}
    return slots


def _chain(setting: Setting) -> bool:
    return setting.method == "drafter" and setting.tree is not None and setting.tree.top_k == 1


def describe(setting: Setting) -> str:
    """A setting as text."""
    if setting.tree is None:
        return "no speculation"
    kind = "chain" if setting.tree.top_k == 1 else "tree"
    return f"{'n-gram ' if setting.method == 'ngram' else ''}{kind} {setting.tree.label()}"


def _best(points: Sequence[OperatingPoint]) -> str:
    best = []
    for point in points:
        if point.measured:
            interval = point.speedup_interval
            spread = f", {interval.low:.2f}-{interval.high:.2f}" if interval is not None else ""
            gain = "" if point.setting == OFF else f" ({point.speedup:.2f}x{spread})"
            best.append(f"at concurrency {point.concurrency} {describe(point.setting)}{gain}, "
                        f"{point.tokens_per_s:.0f} tokens/s")
    return f"Best {'; '.join(best)} (settings as num_steps/top_k/num_draft_tokens)."


def _until(points: Sequence[OperatingPoint], crossover: int | None) -> str:
    if crossover is None:
        return f"Speculation pays at every load examined, up to {points[-1].concurrency}."
    if crossover == points[0].concurrency:
        back = next((point.concurrency for point in points if point.setting != OFF), None)
        return (f"Speculation does not pay at concurrency {crossover}" + (
            f", but does at {back}." if back is not None else " nor at any load examined: keep it off."))
    below, first = next((a, b) for a, b in pairwise(points) if b.concurrency == crossover)
    source = "measured" if first.measured else "predicted"
    again = next((one.concurrency for one in points if one.concurrency > crossover and one.setting != OFF), None)
    return (f"Speculation stops paying between concurrency {below.concurrency} and {crossover} ({source})"
            + ("." if again is None else f", and pays again at {again}."))


def _rivals(trials: Sequence[Trial]) -> list[str]:
    """The speed-up of n-gram lookup: measured where it was raced, predicted otherwise."""
    sentences = []
    for concurrency in sorted({trial.concurrency for trial in trials}):
        rivals = [t for t in trials if t.concurrency == concurrency and t.setting.method == "ngram"]
        if rivals:
            best = max(rivals, key=lambda trial: (trial.speedup is not None, trial.speedup or trial.predicted_speedup))
            how = "measured" if best.speedup is not None else "predicted, not worth a trial"
            sentences.append(f"{best.speedup or best.predicted_speedup:.2f}x at {concurrency} ({how})")
    return [f"N-gram lookup reaches {', '.join(sentences)}."] if sentences else []


def _trust(trials: Sequence[Trial]) -> str:
    errors = [abs(trial.predicted_speedup / trial.speedup - 1.0) for trial in trials
              if trial.speedup is not None and trial.setting != OFF]
    if not errors:
        return ""
    return f"Predicted speed-ups were off by {sum(errors) / len(errors):.1%} on average where they were measured."
