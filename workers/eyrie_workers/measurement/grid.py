"""Which draft-tree shapes are tried, which are dropped early, which wins, and what the table says. Pure.

The grid is num_steps x top_k x num_draft_tokens. Not every product is possible: a chain (top_k 1) verifies exactly
num_steps + 1 tokens, so it appears once per depth, and a tree cannot hold more nodes than it grows nor fewer than one
path; the rules are those of `DraftTreeShape` itself.

Elimination. Measuring every shape on every prompt spends most of its time on shapes that are plainly slower. After
each rung of prompts those slower than the leader by more than a margin are dropped; the margin shrinks as prompts
accumulate. A dropped shape stays in the table with its smaller number of prompts, and cannot win.

The finding compares depth with width (the second seed: deeper helped, wider and more tokens hardly). It only compares
figures from the same prompts: those every shape was measured on.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from pydantic import ValidationError

from eyrie_api.v1alpha1.job import DraftTreeShape, TuneSpec
from eyrie_api.v1alpha1.reports import TuneCell
from eyrie_workers.measurement.suites import Prompt, select

# Dropped when slower than the leader by more than this share after n prompts: 0.3 / sqrt(n). One prompt's speed-up
# over another shape's varies by roughly a tenth to a fifth from prompt to prompt (miniature on CPU), so the margin
# is about twice the standard error of the difference at every n.
_MARGIN_AT_ONE = 0.3
_KEEP_AT_LEAST = 2
# Differences smaller than this are called none in the finding: a benchmark this short cannot tell them apart.
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


def survivors(speedups: Mapping[DraftTreeShape, float], num_prompts: int) -> tuple[DraftTreeShape, ...]:
    """The shapes still worth measuring after `num_prompts` prompts, in their given order."""
    ranked = sorted(speedups, key=lambda shape: -speedups[shape])
    floor = speedups[ranked[0]] * (1.0 - _MARGIN_AT_ONE / math.sqrt(num_prompts))
    kept = {shape for i, shape in enumerate(ranked) if i < _KEEP_AT_LEAST or speedups[shape] >= floor}
    return tuple(shape for shape in speedups if shape in kept)


def choose_winner(cells: Sequence[TuneCell]) -> TuneCell:
    """The fastest lossless shape among those measured on the most prompts.

    When no shape was lossless the fastest of all is returned; promotion sees that it is not and decides.
    """
    most = max(cell.prompts for cell in cells)
    finalists = [cell for cell in cells if cell.prompts == most]
    lossless = [cell for cell in finalists if cell.identical == cell.prompts]
    return max(lossless or finalists, key=lambda cell: cell.speedup)


def describe_finding(cells: Sequence[TuneCell], winner: TuneCell) -> str:
    """What the grid says of depth against width, computed from cells that were measured on the same prompts."""
    sentences = [
        _chain_against_tree(cells),
        _effect("Raising num_steps", cells, lambda s: s.num_steps, lambda s: (s.top_k, _tokens_if_tree(s))),
        _effect("Raising top_k", [c for c in cells if c.tree.top_k > 1], lambda s: s.top_k,
                lambda s: (s.num_steps, s.num_draft_tokens)),
        _effect("Raising num_draft_tokens", [c for c in cells if c.tree.top_k > 1], lambda s: s.num_draft_tokens,
                lambda s: (s.num_steps, s.top_k)),
        f"Chosen: {_name(winner.tree)}, {winner.speedup:.2f}x at tau {winner.tau:.2f} on {winner.prompts} "
        "prompts.",
    ]
    if winner.identical < winner.prompts:
        sentences.append(f"It was not lossless: {winner.prompts - winner.identical} of {winner.prompts} prompts "
                         "differed, as with every shape that finished.")
    return " ".join(sentence for sentence in sentences if sentence)


def _tokens_if_tree(shape: DraftTreeShape) -> int:
    return 0 if shape.top_k == 1 else shape.num_draft_tokens  # a chain's tokens follow from its depth


def _name(shape: DraftTreeShape) -> str:
    kind = "chain" if shape.top_k == 1 else "tree"
    return f"{kind} {shape.label()} (num_steps/top_k/num_draft_tokens)"


def _chain_against_tree(cells: Sequence[TuneCell]) -> str:
    """Best chain against best tree, at the depth of the better of the two when both exist there."""
    chains = [cell for cell in cells if cell.tree.top_k == 1]
    trees = [cell for cell in cells if cell.tree.top_k > 1]
    common = {c.tree.num_steps for c in chains} & {c.tree.num_steps for c in trees}
    if not common:
        return ""
    depth = max((cell for cell in cells if cell.tree.num_steps in common), key=lambda c: c.speedup).tree.num_steps
    chain = max((c for c in chains if c.tree.num_steps == depth), key=lambda c: c.speedup)
    tree = max((c for c in trees if c.tree.num_steps == depth), key=lambda c: c.speedup)
    verdict = _compare(chain.speedup, tree.speedup, "the chain wins", "the tree wins", "they are level")
    return (f"At depth {depth} the chain runs {chain.speedup:.2f}x (tau {chain.tau:.2f}) and the best tree, "
            f"{tree.tree.label()}, {tree.speedup:.2f}x (tau {tree.tau:.2f}): {verdict}.")


def _effect(what: str, cells: Sequence[TuneCell], axis: Callable[[DraftTreeShape], int],
            fixed: Callable[[DraftTreeShape], object]) -> str:
    """Mean relative change of speed between the lowest and the highest value of one axis, the others held."""
    groups: dict[object, list[TuneCell]] = {}
    for cell in cells:
        groups.setdefault(fixed(cell.tree), []).append(cell)
    pairs = []
    for group in groups.values():
        low, high = min(group, key=lambda c: axis(c.tree)), max(group, key=lambda c: axis(c.tree))
        if axis(low.tree) < axis(high.tree):
            pairs.append((low, high))
    if not pairs:
        return ""
    speed = sum(high.speedup / low.speedup for low, high in pairs) / len(pairs)
    tau = sum(high.tau - low.tau for low, high in pairs) / len(pairs)
    start, end = min(axis(low.tree) for low, _ in pairs), max(axis(high.tree) for _, high in pairs)
    verdict = _compare(speed, 1.0, "faster", "slower", "no telling difference")
    return f"{what} from {start} to {end} changes speed by {speed - 1:+.0%} and tau by {tau:+.2f}: {verdict}."


def _compare(first: float, second: float, above: str, below: str, level: str) -> str:
    if abs(first / second - 1.0) < _TELLING_SHARE:
        return level
    return above if first > second else below


def even_shares(total: int, num_suites: int) -> list[int]:
    """`total` prompts over the suites, as evenly as whole numbers allow, the first suites first."""
    return [total // num_suites + (i < total % num_suites) for i in range(num_suites)]


def draw(prompts: list[Prompt], num_benchmark: int, num_grid: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts for the grid and for the final measurement of one suite, disjoint where the suite allows it.

    The first `num_benchmark` chose the checkpoint; grid and final prompts follow them. A short suite wraps round: it
    gives up freshness towards the checkpoint's choice first, prompts of the final measurement second, and only when
    nothing would be left are the grid's prompts used again.
    """
    grid = select(prompts, num_benchmark, num_grid)
    taken = {prompt.id for prompt in grid}
    rest = [prompt for prompt in select(prompts, num_benchmark, len(prompts)) if prompt.id not in taken]
    return grid, select(rest or prompts, 0, num_benchmark)
