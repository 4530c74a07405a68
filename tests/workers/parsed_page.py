"""A report's page as a browser reads it: its text, the cells of its tables, its pictures, its elements."""

import base64
from html.parser import HTMLParser

VOID = {"meta", "img", "source", "br", "link"}


class ParsedPage(HTMLParser):
    """One page, parsed. Character references are resolved."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.elements: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.pictures: list[str] = []
        """SVG of every picture."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        for name, value in attrs:
            self.attributes.append((name, value or ""))
            if name in ("src", "srcset"):
                kind, _, data = (value or "").partition(",")
                assert kind == "data:image/svg+xml;base64", "a page loads nothing"
                self.pictures.append(base64.b64decode(data).decode())

    def handle_endtag(self, tag: str) -> None:
        """End an element; elements are closed in order."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Collect text outside the style sheet."""
        if "style" in self.open:
            return
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def parsed_page(html: str) -> ParsedPage:
    """The page, whose elements are all closed."""
    page = ParsedPage()
    page.feed(html)
    page.close()
    assert page.open == []
    return page
