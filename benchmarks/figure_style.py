"""The common style of figures that benchmarks and experiments draw with matplotlib: readable at half size, safe for
colour-blind readers, the finding in the title.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), which stay distinguishable under every common form
of colour blindness; colour is never the only distinction. Sequences (heat maps, TTT steps) use cividis, which is
monotonic in brightness and designed for the same purpose (Nunez, Anderton, Renslow, PLOS ONE 2018).
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eyrie_api.contract.model import Interval

BASELINE_BLUE = "#0072B2"
BEST_GREEN = "#009E73"
OTHER_GREY = "#999999"
WARM_ORANGE = "#D55E00"
SKY_BLUE = "#56B4E9"
REDDISH_PURPLE = "#CC79A7"

SETTINGS = {
    "font.size": 12, "axes.titlesize": 14, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#DDDDDD", "grid.linewidth": 0.8, "axes.axisbelow": True, "legend.frameon": False,
    "lines.linewidth": 2.0, "savefig.dpi": 110, "svg.hashsalt": "eyrie",
}
_TITLE_CHARACTERS_PER_INCH = 8.2  # bold, 14 points


def new_figure(width: float = 9.0, height: float = 5.0, num_columns: int = 1, *,
               share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with `num_columns` axes in a row, by default with a common y axis. Needs no display.

    Call it, and draw, under `matplotlib.rc_context(SETTINGS)`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, num_columns, sharey=share_y, squeeze=False)[0])


def title(figure: Figure, finding: str, detail: str = "") -> None:
    """Set the finding as the title, wrapped to the figure's width, and below the axes how it was measured."""
    width = int(figure.get_figwidth() * _TITLE_CHARACTERS_PER_INCH)
    texts = [figure.suptitle(_wrapped(finding, width), x=0.01, ha="left", fontsize=14, fontweight="bold")]
    if detail:
        # Fainter than the text by alpha, so that it is so on a dark page too.
        texts.append(figure.supxlabel(_wrapped(detail, int(width * 1.6)), x=0.01, ha="left", fontsize=9, alpha=0.75))
    for text in texts:
        text.set_parse_math(False)  # the path of a target may contain two dollar signs


def ratios(axes: Axes, drawn: Mapping[str, tuple[float, Interval]], colour: str = BEST_GREEN, *, shift: float = 0.0,
           label: str | None = None) -> None:
    """One ratio with its interval per row, named at the left, the first at the top; a line at 1."""
    values = [value for value, _ in drawn.values()]
    reach = [[value - of.low for value, of in drawn.values()], [of.high - value for value, of in drawn.values()]]
    axes.errorbar(values, [row + shift for row in range(len(drawn))], xerr=reach, fmt="o", color=colour, capsize=3,
                  label=label)
    axes.axvline(1.0, color=OTHER_GREY, linestyle=":")
    axes.set_yticks(range(len(drawn)), list(drawn))
    axes.set_ylim(len(drawn) - 0.5, -0.5)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write `<name>.png` and `<name>.svg`; returns both paths. The SVG carries no date, so that it is reproducible."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    figure.savefig(paths[0])
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
