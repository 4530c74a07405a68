"""The settings to compare and the operating map that the races' results give, with its description and its form for
SGLang. Pure.

The grid is num_steps x top_k x num_draft_tokens. Not every product is possible: a chain (top_k 1) verifies exactly
num_steps + 1 tokens, so it appears once per depth, and a tree has at most the nodes it grows and at least one path; the
rules are those of `DraftTreeShape`. The grid also has `off`, and n-gram lookup in chains of the same depths.
`depth_against_width` compares depth with width: every shape has a prediction from the same texts, so every pair of
shapes can be compared.

The map has the best setting at every raced concurrency and, predicted, at the powers of two between them. The crossover
is the lowest load at which off is best. SGLang follows a map of chains by its adaptive speculation, whose JSON selects
by batch size: a slot applies from its key up to the next, and a slot with a single candidate drafts exactly that many
steps, 0 for no drafting (SGLang 0.5.23, srt/speculative/adaptive_spec_params.py). It accepts chains of the drafter
only; for any other map a server keeps one setting, that of the expected load.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from pydantic import JsonValue

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import FINAL_TIMES, OFF, OperatingMap, OperatingPoint, Setting, Trial, TuneSpec
from eyrie_workers.data.suites import Prompt, select
from eyrie_workers.measure.tuner.predict import PredictedSpeed
from eyrie_workers.measure.tuner.race import TIE

# Smaller differences are reported as none: a benchmark this short cannot resolve them.
_TELLING_SHARE = 0.03


def possible_settings(spec: TuneSpec) -> tuple[Setting, ...]:
    """All settings compared: off, the drafter in every shape, and n-gram lookup in chains of the same depths."""
    chains = [DraftTreeShape(num_steps=depth, top_k=1, num_draft_tokens=depth + 1)
              for depth in sorted(set(spec.num_steps))]
    return (OFF, *(Setting(tree=shape) for shape in spec.shapes),
            *(Setting(method="ngram", tree=chain) for chain in chains if spec.ngram))


def with_block(settings: Sequence[Setting], block_size: int) -> tuple[Setting, ...]:
    """The settings with those that SGLang drafts with a drafter of blocks, in place of the drafter's shapes: chains of
    the whole block and of its first tokens."""
    trees = [setting.tree for setting in settings if setting.method == "drafter" and setting.tree is not None]
    shorter = {tree.num_steps for tree in trees if tree.num_steps < block_size}
    chains = [DraftTreeShape(num_steps=depth, num_draft_tokens=depth + 1, verification=verification, draft=draft)
              for depth in sorted({*shorter, block_size - 1})
              for verification, draft in dict.fromkeys((tree.verification, tree.draft) for tree in trees)]
    return (OFF, *(Setting(tree=chain) for chain in chains),
            *(setting for setting in settings if setting.method == "ngram"))


def depth_against_width(predictions: Sequence[PredictedSpeed]) -> str:
    """The effects of depth, width and nodes over the predictions of the drafter's shapes, as a sentence."""
    shapes = {prediction.setting.tree: prediction for prediction in predictions
              if prediction.setting.tree and prediction.setting.method == "drafter"}
    trees = {shape: prediction for shape, prediction in shapes.items() if shape.top_k > 1}
    sentences = [
        _chain_against_tree(shapes),
        _effect("raising num_steps", shapes, lambda s: s.num_steps,
                lambda s: (s.top_k, 0 if s.top_k == 1 else s.num_draft_tokens)),
        _effect("raising top_k", trees, lambda s: s.top_k, lambda s: (s.num_steps, s.num_draft_tokens)),
        _effect("raising num_draft_tokens", trees, lambda s: s.num_draft_tokens, lambda s: (s.num_steps, s.top_k)),
    ]
    return "; ".join(sentence for sentence in sentences if sentence)


Shapes = Mapping[DraftTreeShape, PredictedSpeed]


def _chain_against_tree(shapes: Shapes) -> str:
    """Best chain against best tree, at the depth of the better of the two when both exist there."""
    common = ({shape.num_steps for shape in shapes if shape.top_k == 1}
              & {shape.num_steps for shape in shapes if shape.top_k > 1})
    if not common:
        return ""
    depth = max((shape for shape in shapes if shape.num_steps in common),
                key=lambda shape: shapes[shape].speedup).num_steps
    at_depth = [shape for shape in shapes if shape.num_steps == depth]
    chain = next(shape for shape in at_depth if shape.top_k == 1)
    tree = max((shape for shape in at_depth if shape.top_k > 1), key=lambda shape: shapes[shape].speedup)
    first, second = shapes[chain], shapes[tree]
    verdict = _compare(first.speedup, second.speedup, "the chain is faster", "the tree is faster",
                       "no significant difference")
    return (f"at depth {depth} the chain runs {first.speedup:.2f}x (tau {first.tau:.2f}) and the best tree, "
            f"{tree.label()}, {second.speedup:.2f}x (tau {second.tau:.2f}): {verdict}")


def _effect(what: str, shapes: Shapes, axis: Callable[[DraftTreeShape], int],
            fixed: Callable[[DraftTreeShape], object]) -> str:
    """Mean relative change of speed between the lowest and the highest value of one axis, the others held."""
    groups: dict[object, list[DraftTreeShape]] = {}
    for shape in shapes:
        groups.setdefault(fixed(shape), []).append(shape)
    pairs = [(min(group, key=axis), max(group, key=axis)) for group in groups.values()]
    pairs = [(low, high) for low, high in pairs if axis(low) < axis(high)]
    if not pairs:
        return ""
    speed = sum(shapes[high].speedup / shapes[low].speedup for low, high in pairs) / len(pairs)
    tau = sum(shapes[high].tau - shapes[low].tau for low, high in pairs) / len(pairs)
    start, end = min(axis(low) for low, _ in pairs), max(axis(high) for _, high in pairs)
    verdict = _compare(speed, 1.0, "faster", "slower", "no significant difference")
    return f"{what} from {start} to {end} changes speed by {speed - 1:+.0%} and tau by {tau:+.2f}: {verdict}"


def _compare(first: float, second: float, above: str, below: str, level: str) -> str:
    if abs(first / second - 1.0) < _TELLING_SHARE:
        return level
    return above if first > second else below


def even_shares(total: int, num_suites: int) -> list[int]:
    """`total` prompts over the suites, as evenly as whole numbers allow, the first suites first."""
    return [total // num_suites + (i < total % num_suites) for i in range(num_suites)]


def draw(prompts: list[Prompt], num_benchmark: int, num_grid: int) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """Prompts for the grid, for the final measurement of one suite, and for more of it; disjoint where the suite is
    long enough.

    The first `num_benchmark` prompts selected the checkpoint; the others follow them. A short suite wraps around: first
    it reuses prompts that selected the checkpoint, then it gives the final measurement fewer prompts, and only when
    none would be left does it reuse the grid's.
    """
    grid = select(prompts, num_benchmark, num_grid)
    taken = {prompt.id for prompt in grid}
    rest = [prompt for prompt in select(prompts, num_benchmark, len(prompts)) if prompt.id not in taken] or prompts
    return grid, rest[:num_benchmark], rest[num_benchmark:FINAL_TIMES * num_benchmark]


def between(concurrencies: Sequence[int]) -> list[int]:
    """Powers of two strictly between the lowest and the highest concurrency, without those given."""
    low, high = min(concurrencies), max(concurrencies)
    powers = (2**exponent for exponent in range(high.bit_length()))
    return [power for power in powers if low < power < high and power not in concurrencies]


def predicted_point(predictions: Mapping[Setting, PredictedSpeed], tried: Sequence[Setting]) -> OperatingPoint:
    """The best setting at a concurrency that was not raced, among the settings measured at another."""
    best = max((predictions[setting] for setting in tried if setting != OFF), key=lambda prediction: prediction.speedup,
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
    errors = [abs(trial.predicted_speedup / trial.speedup - 1.0) for trial in trials
              if trial.speedup is not None and trial.setting != OFF]
    trust = f"Predicted speed-ups were off by {sum(errors) / len(errors):.1%} on average where they were measured." \
        if errors else ""
    sentences = [_best(ordered), _until(ordered, crossover), *_rivals(trials), remark, trust,
                 f"Measured: {measured} of {len(trials)} pairs of setting and concurrency, in {seconds:.0f} s."]
    return OperatingMap(points=ordered, crossover=crossover, adaptive=adaptive(ordered), trials_measured=measured,
                        trials_possible=len(trials), finding=" ".join(filter(None, sentences)))


def adaptive(points: Sequence[OperatingPoint]) -> dict[str, JsonValue] | None:
    """SGLang's adaptive-speculation JSON; None where SGLang cannot follow the map, or the map has one setting."""
    settings = [point.setting for point in points]
    chains = all(setting == Setting(tree=DraftTreeShape(
        num_steps=setting.tree.num_steps, num_draft_tokens=setting.tree.num_steps + 1))
        for setting in settings if setting.tree is not None)
    if not chains or len(set(settings)) == 1:
        return None
    slots: dict[str, JsonValue] = {}
    for number, point in enumerate(points):
        if number == 0 or point.setting != points[number - 1].setting:
            # The first slot begins at batch size 1, whatever the lowest raced load: no batch is smaller.
            steps = point.setting.tree.num_steps if point.setting.tree is not None else 0
            slots["1" if number == 0 else str(point.concurrency)] = {"candidate_steps": [steps]}
    return slots


def describe(setting: Setting) -> str:
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
    undecided = next((point for point in points if point.setting != OFF and point.speedup <= 1.0 + TIE), None)
    if undecided is not None:
        return (f"Whether speculation pays at concurrency {undecided.concurrency} was too noisy to decide here: the "
                "proof measures it until it is clear.")
    if crossover is None:
        return f"Speculation pays at every load examined, up to {points[-1].concurrency}."
    if crossover == points[0].concurrency:
        back = next((point.concurrency for point in points if point.setting != OFF), None)
        return (f"Speculation does not pay at concurrency {crossover}" + (
            f", but does at {back}." if back is not None else " nor at any load examined: keep it off."))
    below, first = next((a, b) for a, b in pairwise(points) if b.concurrency == crossover)
    source = "measured" if first.measured else "predicted"
    again = next((point.concurrency for point in points
                  if point.concurrency > crossover and point.setting != OFF), None)
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
