"""The grid of draft-tree shapes as maps: depth down, width across, one map per num_draft_tokens."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eyrie_api.v1alpha1.reports import TuneCell, TuneReport
from eyrie_workers.plots.measured import describe_environment
from eyrie_workers.plots.style import SEQUENCE, WARM_ORANGE, new_figure, title


def heat_maps(report: TuneReport) -> Figure:
    """Speed-up by num_steps and top_k. Chains have their own number of draft tokens and stand in every map."""
    tokens = sorted({c.tree.num_draft_tokens for c in report.cells if c.tree.top_k > 1}) or [0]
    depths = sorted({cell.tree.num_steps for cell in report.cells})
    widths = sorted({cell.tree.top_k for cell in report.cells})
    figure, panels = new_figure(max(6.5, 1.5 * len(widths) * len(tokens) + 2.5), 1.0 * len(depths) + 2.4, len(tokens))
    low, high = min(c.speedup for c in report.cells), max(c.speedup for c in report.cells)
    image = None
    for axes, num_tokens in zip(panels, tokens, strict=True):
        shown = {
            (cell.tree.num_steps, cell.tree.top_k): cell for cell in report.cells
            if cell.tree.top_k == 1 or cell.tree.num_draft_tokens == num_tokens
        }
        grid = np.array([[shown[d, w].speedup if (d, w) in shown else np.nan for w in widths] for d in depths])
        image = axes.imshow(grid, cmap=SEQUENCE, vmin=low, vmax=high, aspect="auto")
        _annotate(axes, report, shown, depths, widths, (low + high) / 2)
        axes.set_xticks(range(len(widths)), [f"{w}" if w > 1 else "1 (chain)" for w in widths])
        axes.set_yticks(range(len(depths)), [str(d) for d in depths])
        axes.set_xlabel("top_k")
        axes.grid(visible=False)
        if num_tokens:
            axes.set_title(f"num_draft_tokens {num_tokens}", fontsize=12, fontweight="normal")
    panels[0].set_ylabel("num_steps")
    assert image is not None
    figure.colorbar(image, ax=panels, label="speed-up over no drafter", shrink=0.9)
    winner = next(cell for cell in report.cells if cell.tree == report.winner)
    title(figure, f"{_kind(winner)} {winner.tree.label()} is fastest: {winner.speedup:.2f}x at tau {winner.tau:.1f}"
                  + _other_kind(report),
          f"mean over temperatures {', '.join(winner.speedup_by_temperature)}; {winner.prompts} prompts, fewer where "
          f"n is given (dropped early); a chain verifies num_steps + 1 tokens; {describe_environment(report)}")
    return figure


def _annotate(axes: Axes, report: TuneReport, shown: dict[tuple[int, int], TuneCell], depths: list[int],
              widths: list[int], middle: float) -> None:
    most = max(cell.prompts for cell in report.cells)
    for row, depth in enumerate(depths):
        for column, width in enumerate(widths):
            cell = shown.get((depth, width))
            if cell is None:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#EEEEEE", hatch="//",
                                         edgecolor="#CCCCCC", linewidth=0))
                continue
            text = f"{cell.speedup:.2f}x\ntau {cell.tau:.1f}" + (f"\nn={cell.prompts}" if cell.prompts < most else "")
            axes.text(column, row, text, ha="center", va="center", fontsize=10,
                      color="black" if cell.speedup > middle else "white")
            if cell.tree == report.winner:
                axes.add_patch(Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, fill=False, edgecolor=WARM_ORANGE,
                                         linewidth=3.5))


def _kind(cell: TuneCell) -> str:
    return "Chain" if cell.tree.top_k == 1 else "Tree"


def _other_kind(report: TuneReport) -> str:
    """How far the best shape of the other kind gets."""
    chain_won = report.winner.top_k == 1
    others = [cell for cell in report.cells if (cell.tree.top_k == 1) != chain_won]
    if not others:
        return ""
    best = max(others, key=lambda cell: cell.speedup)
    return f"; the best {'tree' if chain_won else 'chain'}, {best.tree.label()}, reaches {best.speedup:.2f}x"
