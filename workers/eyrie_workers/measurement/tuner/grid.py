"""The settings to compare, the prompts to compare them on, and the effect of depth and width. Pure.

The grid is num_steps x top_k x num_draft_tokens. Not every product is possible: a chain (top_k 1) verifies exactly
num_steps + 1 tokens, so it appears once per depth, and a tree has at most the nodes it grows and at least one path; the
rules are those of `DraftTreeShape`. The grid also has `off`, and n-gram lookup in chains of the same depths.

`depth_against_width` compares depth with width. Every shape has a prediction from the same texts, so every pair of
shapes can be compared.
"""

from collections.abc import Callable, Mapping, Sequence

from pydantic import ValidationError

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.tuning import OFF, Setting, TuneSpec
from eyrie_workers.conversations.suites import Prompt, select
from eyrie_workers.measurement.tuner.predict import Prediction

# Smaller differences are reported as none: a benchmark this short cannot resolve them.
_TELLING_SHARE = 0.03


def possible_shapes(spec: TuneSpec) -> tuple[DraftTreeShape, ...]:
    """Every shape of the grid that can exist, once, chains first, then by depth, width and tokens."""
    shapes: dict[DraftTreeShape, None] = {}
    for top_k in sorted(spec.top_k):
        for num_steps in sorted(spec.num_steps):
            for num_tokens in (num_steps + 1,) if top_k == 1 else sorted(spec.num_draft_tokens):
                try:
                    shape = DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=num_tokens)
                except ValidationError:
                    continue
                shapes[shape] = None
    return tuple(shapes)


def possible_settings(spec: TuneSpec) -> tuple[Setting, ...]:
    """All settings compared: off, the drafter in every shape, and n-gram lookup in chains of the same depths."""
    chains = [DraftTreeShape(num_steps=depth, top_k=1, num_draft_tokens=depth + 1)
              for depth in sorted(set(spec.num_steps))]
    return (OFF, *(Setting(tree=shape) for shape in possible_shapes(spec)),
            *(Setting(method="ngram", tree=chain) for chain in chains if spec.ngram))


def with_block(settings: Sequence[Setting], block_size: int) -> tuple[Setting, ...]:
    """The settings with the one shape that SGLang drafts with a drafter of blocks, in place of the drafter's shapes."""
    chain = DraftTreeShape(num_steps=block_size - 1, top_k=1, num_draft_tokens=block_size)
    return (OFF, Setting(tree=chain), *(one for one in settings if one.method == "ngram"))


def depth_against_width(predictions: Sequence[Prediction]) -> str:
    """The effects of depth, width and nodes over the predictions of the drafter's shapes, as a sentence."""
    shapes = {one.setting.tree: one for one in predictions if one.setting.tree and one.setting.method == "drafter"}
    trees = {shape: one for shape, one in shapes.items() if shape.top_k > 1}
    sentences = [
        _chain_against_tree(shapes),
        _effect("raising num_steps", shapes, lambda s: s.num_steps,
                lambda s: (s.top_k, 0 if s.top_k == 1 else s.num_draft_tokens)),
        _effect("raising top_k", trees, lambda s: s.top_k, lambda s: (s.num_steps, s.num_draft_tokens)),
        _effect("raising num_draft_tokens", trees, lambda s: s.num_draft_tokens, lambda s: (s.num_steps, s.top_k)),
    ]
    return "; ".join(sentence for sentence in sentences if sentence)


Shapes = Mapping[DraftTreeShape, Prediction]


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


def draw(prompts: list[Prompt], num_benchmark: int, num_grid: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts for the grid and for the final measurement of one suite, disjoint where the suite is long enough.

    The first `num_benchmark` prompts selected the checkpoint; grid and final prompts follow them. A short suite wraps
    around: first it reuses prompts that selected the checkpoint, then it gives the final measurement fewer prompts, and
    only when none would be left does it reuse the grid's.
    """
    grid = select(prompts, num_benchmark, num_grid)
    taken = {prompt.id for prompt in grid}
    rest = [prompt for prompt in select(prompts, num_benchmark, len(prompts)) if prompt.id not in taken]
    return grid, select(rest or prompts, 0, num_benchmark)
