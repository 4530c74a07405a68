"""The plot of codecs: bytes per token against acceptance length, one point per seed."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.codecs.report import CodecReport
from benchmarks.figure_style import (
    BASELINE_BLUE,
    BEST_GREEN,
    OTHER_GREY,
    SETTINGS,
    WARM_ORANGE,
    new_figure,
    save,
    title,
)

DEFAULT = "int8"


def draw(report: CodecReport, out: Path) -> list[Path]:
    """Write `codecs.png` and `codecs.svg`."""
    with matplotlib.rc_context(SETTINGS):
        return save(figure(report), out, "codecs")


def figure(report: CodecReport) -> Figure:
    """tau over bytes; the band is the standard deviation over seeds."""
    drawn, (axes,) = new_figure()
    base = report.ways[0]
    axes.axhspan(base.tau - report.seed_spread, base.tau + report.seed_spread, color=OTHER_GREY, alpha=0.25,
                 label="float32, and what another seed changes")
    for way in report.ways:
        colour = BASELINE_BLUE if way is base else BEST_GREEN if way.name == DEFAULT else WARM_ORANGE
        axes.plot([way.bytes_per_token] * len(way.seeds), [one.tau for one in way.seeds], "o", color=OTHER_GREY,
                  markersize=5)
        axes.plot([way.bytes_per_token], [way.tau], "D", color=colour, markersize=9)
        axes.annotate(way.name, (way.bytes_per_token, way.tau), xytext=(8, 8), textcoords="offset points",
                      color=colour)
    axes.set_xscale("log")
    axes.set(xlabel="bytes on disk per captured token (log)", ylabel="tokens per target pass (tau)")
    axes.legend(loc="lower right")
    default = next((way for way in report.ways if way.name == DEFAULT), report.ways[-1])
    title(drawn, f"{default.name} stores a token in {default.bytes_per_token:.0f} bytes instead of "
                 f"{base.bytes_per_token:.0f} and loses {default.lost:.3f} of {base.tau:.2f} tokens per pass",
          f"{len(base.seeds)} seeds each, {report.conversations} conversations ({report.tokens} tokens), "
          f"{report.prompts} held-out prompts, greedy, {report.target}")
    return drawn
