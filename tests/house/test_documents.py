"""The documents: layers as in the import contract, links that lead somewhere, short READMEs."""

import re
import tomllib
from itertools import takewhile
from pathlib import Path

from tests.house.sources import COMPONENTS, ROOT

BEGIN, END = "<!-- layers -->\n", "<!-- end of layers -->\n"
DOCUMENTS = sorted(path for pattern in ("*.md", "*/*.md", "docs/**/*.md") for path in ROOT.glob(pattern))


def layers_table(contract: str) -> str:
    """The layers of a contract with the sentence of each, from its comments in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    body = text[text.index(f'name = "{contract}"'):].partition("layers = [\n")[2]
    rows = []
    for line in takewhile(lambda line: not line.startswith("]"), body.splitlines()):
        names, sentence = re.fullmatch(r'\s*"([^"]+)",\s*#\s*(.+)', line).groups()  # type: ignore[union-attr]
        rows.append(f"| {', '.join(f'`{name.strip()}`' for name in names.split('|'))} | {sentence} |\n")
    return f"### {contract}\n\n| room | contains |\n|---|---|\n" + "".join(rows)


def rooms() -> str:
    """The tables of all contracts of layers, from the lowest component to the highest."""
    parts = ("API", "workers", "drafters", "pipelines", "operator")
    return "\n".join(layers_table(f"Layers of the {part}") for part in parts)


def test_the_architecture_page_shows_the_rooms_of_the_import_contracts() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    shown = page[page.index(BEGIN) + len(BEGIN):page.index(END)]
    assert shown == rooms(), "copy the sentences of the contracts \"Layers of the ...\" in pyproject.toml"
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for one in contracts if one["name"].startswith("Layers of the") for layer in one["layers"]]
    assert len(layers) == sum(line.startswith("| `") for line in rooms().splitlines())


def _prose(text: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^ *(```|~~~).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors GitHub gives to a document's headings: lower case, punctuation removed, spaces as hyphens, the second
    of the same text with `-1`."""
    slugs: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", _prose(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slugs.append(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return {f"{slug}-{before}" if (before := slugs[:num].count(slug)) else slug for num, slug in enumerate(slugs)}


def _links(path: Path) -> list[tuple[str, str]]:
    """The relative links of a document: path (empty: the same page) and anchor (empty: none)."""
    return re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", _prose(path.read_text()))


def test_every_relative_link_of_a_document_leads_to_a_file() -> None:
    broken = [(str(path.relative_to(ROOT)), link) for path in DOCUMENTS for link, _ in _links(path)
              if not (path.parent / link).exists()]
    assert broken == []


def test_every_anchor_of_a_link_is_one_of_a_heading_of_its_page() -> None:
    pages = [(path, path.parent / link if link else path, anchor) for path in DOCUMENTS
             for link, anchor in _links(path) if anchor]
    assert pages
    assert [f"{path.relative_to(ROOT)}: {page.name}#{anchor}" for path, page, anchor in pages
            if page.suffix == ".md" and anchor not in anchors(page.read_text())] == []


def test_anchors_are_those_of_github() -> None:
    text = "# `eyrie up`: what, when?\n## A [link](page.md)\n## Same\n```sh\n# no heading\n```\n## Same\n## a_b C-d\n"
    assert anchors(text) == {"eyrie-up-what-when", "a-link", "same", "same-1", "a_b-c-d"}


def test_every_make_target_and_module_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        text = path.read_text()
        named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^ *make ([a-z-]+)", text, re.MULTILINE))
        assert named <= targets, path
        for module in re.findall(r"python -m ((?:eyrie_|tests\.)[a-z_0-9.]+[a-z_0-9])(?![<*])", text):
            home = next((ROOT / name for name in COMPONENTS if module.startswith(f"eyrie_{name}")), ROOT)
            file = home / module.replace(".", "/")
            assert file.with_suffix(".py").exists() or (file / "__main__.py").exists() or file.is_dir(), (path, module)


def test_every_test_that_a_document_names_exists() -> None:
    named = {one for path in DOCUMENTS
             for one in re.findall(r"`(tests/[a-z_0-9/]+\.py)::(test_\w+)`", path.read_text())}
    assert named
    assert [f"{file}::{test}" for file, test in sorted(named)
            if not (ROOT / file).is_file() or f"def {test}(" not in (ROOT / file).read_text()] == []


def test_readmes_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in ROOT.glob("*/README.md")}
    assert {path: length for path, length in lengths.items() if length > 80} == {}
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
