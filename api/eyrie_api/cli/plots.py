"""`eyrie plots`: the figures of a job, its training curves among them, as SVG or PNG files.

The figures come from the REST API, as the console's do, so the command runs wherever the server can be reached. They
are drawn by `vl-convert-python` (extra `plots`, 33 MB), which needs no browser and no display.
"""

import importlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from eyrie_api.client import Client
from eyrie_api.contract.figures import Figure
from eyrie_api.errors import Permanent
from eyrie_api.figures.training_curves import training_figures
from eyrie_api.figures.vega_lite import PAGE

Format = Literal["svg", "png"]

_SCALE = 2.0  # PNG: pixels per unit, for dense displays and print
_TITLE_CHARACTERS, _CAPTION_CHARACTERS = 72, 96  # of lines about as wide as most figures
_VL_VERSION = "5.21"  # the newest of major version 5 that vl-convert 1.9 brings


class NoPlotLibrary(Permanent):
    """The library that draws figures is not installed."""


def figures_of_job(client: Client, job_id: str) -> tuple[Figure, ...]:
    """The figures of the job's page: the training curves and everything measured."""
    return (*training_figures(client.curves(job_id)), *client.figures(job_id))


def write_figures(figures: Sequence[Figure], out: Path, kind: Format, theme: Literal["light", "dark"]) -> list[Path]:
    """Write one file per figure into `out`, which is made; returns their paths. Raises NoPlotLibrary."""
    try:
        library: Any = importlib.import_module("vl_convert")
    except ImportError:
        raise NoPlotLibrary("figures are drawn by vl-convert-python, which is not installed",
                            "pip install 'eyrie[plots]', or open the job's page in the console") from None
    out.mkdir(parents=True, exist_ok=True)
    page, paths = PAGE[theme], [out / f"{figure.name}.{kind}" for figure in figures]
    for figure, path in zip(figures, paths, strict=True):
        # A file stands alone: it has a background, and its title and caption in the picture.
        spec = figure.spec | {"config": figure.themes[theme] | {"background": page["paper"]}, "padding": 12, "title": {
            "text": textwrap.wrap(figure.title, _TITLE_CHARACTERS), "color": page["ink"], "anchor": "start",
            "subtitle": textwrap.wrap(figure.caption, _CAPTION_CHARACTERS), "subtitleColor": page["quiet"],
            "subtitlePadding": 4}}
        if kind == "svg":
            path.write_text(library.vegalite_to_svg(spec, vl_version=_VL_VERSION), encoding="utf-8")
        else:
            path.write_bytes(library.vegalite_to_png(spec, vl_version=_VL_VERSION, scale=_SCALE))
    return paths
