"""Sphinx configuration of `make docs`. The pages are Markdown; their order is that of the tables of README.md."""

import re
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent

project = "Eyrie"
author = "the Eyrie authors"
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["results/experiments/*.json"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Eyrie"
html_static_path: list[str] = []
html_copy_source = False
# Links to files that are no pages (examples, JSON, the repository's own files) are links to text, not to pages.
suppress_warnings = ["myst.xref_missing"]


def _add_contents(_app: Sphinx, name: str, source: list[str]) -> None:
    """Give each README a table of contents made of the links of its tables, so that there is one list of pages."""
    if Path(name).name != "README":
        return
    folder = (HERE / name).parent
    pages = dict.fromkeys(re.findall(r"^\| \[[^\]]+\]\(([^)#]+)\.md\)", source[0], re.MULTILINE))
    missing = [page for page in pages if not (folder / f"{page}.md").exists()]
    if missing:
        raise ValueError(f"{name} lists pages that do not exist: {missing}")
    if pages:
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    """Register the table of contents."""
    app.connect("source-read", _add_contents)
