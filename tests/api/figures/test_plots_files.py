"""`eyrie plots` writes the figures of the API as files, and says what is missing where the library is."""

import re
import sys
from pathlib import Path

import pytest

from eyrie_api.cli.plots import Format, NoPlotLibrary, write_figures
from eyrie_api.figures.job_figures import figures_of
from eyrie_api.figures.vega_lite import PAGE
from eyrie_api.http.console import pages
from tests.api.figures.job_values import NAMES, job_report


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_each_figure_becomes_a_file_of_the_format(kind: Format, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    files = write_figures(figures_of(job_report()), tmp_path / "plots", kind, "dark")
    assert [one.name for one in files] == [f"{name}.{kind}" for name in NAMES]
    assert all(one.read_bytes().startswith(start) for one in files)


def test_without_the_library_the_hint_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(NoPlotLibrary) as refused:
        write_figures(figures_of(job_report()), tmp_path / "plots", "svg", "light")
    assert "eyrie[plots]" in (refused.value.hint or "")
    assert not (tmp_path / "plots").exists()


def test_figures_and_the_consoles_pages_have_the_same_ink_lines_and_background() -> None:
    style = (Path(pages.HERE) / "static/console.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part)) for part in style.split("@media", 2)[:2])
    assert [{name: found[name] for name in PAGE["light"]} for found in (light, dark)] == [PAGE["light"], PAGE["dark"]]
