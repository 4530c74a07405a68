"""`eyrie reports`: push what `eyrie compare`, `eyrie compare-hardware` and the experiments wrote; list, show, delete.

These programs write a report twice, NAME.json with all figures and NAME.html for people; both are pushed. Title, kind
and what was found are read from the page, which the programs write in one form (`eyrie_workers.report_page`).
"""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.cli.access import InProject
from eyrie_api.cli.verbs import Json, Screen, Server, connect, printable, verb
from eyrie_api.client import DEFAULT_SERVER
from eyrie_api.errors import InvalidInput
from eyrie_api.quantities import size
from eyrie_api.v1alpha1.rules import first_problem
from eyrie_api.v1alpha1.stored_reports import StoredReport, StoreReport

reports_app = typer.Typer(no_args_is_help=False, help="List reports of comparisons; push, show, delete.")
ReportId = Annotated[str, typer.Argument(metavar="REPORT", help="Id.")]
KIND = "eyrie-report"
"""Name of the page's meta element with the kind of the report."""

_WRITERS = "give what eyrie compare, eyrie compare-hardware or an experiment wrote: a .html with its .json beside it"


class _Head(HTMLParser):
    """Kind, title and decision of a report's page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.kind, self.title = "", ""
        self.decision: list[str] = []
        self._open: list[str] = []
        """Elements from the title or the decision down to where the parser is."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "meta" and given.get("name") == KIND:
            self.kind = given.get("content") or ""
        if self._open or tag == "title" or (tag == "div" and given.get("class") == "decision"):
            self._open.append(tag)
            if self._open == ["div", "p"]:
                self.decision.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open == ["title"]:
            self.title += data
        elif self._open == ["div", "p"]:
            self.decision[-1] += data


def report_of(figures: str, page: str, where: str) -> StoreReport:
    """The report of the texts of its two files. Raises InvalidInput that names `where` they are from."""
    head = _Head()
    head.feed(page)
    head.close()
    if not head.kind:
        raise InvalidInput(f"{where}: not a report of this version of Eyrie", _WRITERS)
    try:
        return StoreReport.model_validate({
            "kind": head.kind, "title": _line(head.title), "decision": [_line(one) for one in head.decision],
            "report": json.loads(figures), "page": page})
    except ValidationError as error:
        raise InvalidInput(f"{where}: {first_problem(error)}", _WRITERS) from None
    except ValueError as error:
        raise InvalidInput(f"{where}: the figures are not JSON: {error}", _WRITERS) from None


def _line(text: str) -> str:
    return " ".join(text.split())


def find_reports(path: Path) -> list[StoreReport]:
    """The report of a file, or all in a directory, by name. Raises InvalidInput when there is none."""
    if path.is_dir():
        pages = sorted(one for one in path.glob("*.html") if one.with_suffix(".json").is_file())
        if not pages:
            raise InvalidInput(f"{path}: no report in this directory", _WRITERS)
    else:
        pages = [path.with_suffix(".html")]
    found = []
    for page in pages:
        try:
            figures, text = (one.read_text(encoding="utf-8") for one in (page.with_suffix(".json"), page))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{page} and its .json cannot be read: {error}", _WRITERS) from None
        found.append(report_of(figures, text, str(page)))
    return found


@reports_app.callback(invoke_without_command=True)
@verb
def reports(context: typer.Context, project: InProject = None, server: Server = DEFAULT_SERVER,
            as_json: Json = False) -> None:
    """List reports, newest first; push, show and delete them."""
    if context.invoked_subcommand is None:
        _list(50, None, project, server, as_json)


@reports_app.command("list")
@verb
def reports_list(
    limit: Annotated[int, typer.Option("--limit", min=1, max=200)] = 50,
    cursor: Annotated[str | None, typer.Option("--cursor", help="next_cursor of the previous page.")] = None,
    project: InProject = None, server: Server = DEFAULT_SERVER, as_json: Json = False,
) -> None:
    """List reports, newest first."""
    _list(limit, cursor, project, server, as_json)


def _list(limit: int, cursor: str | None, project: str | None, server: str, as_json: bool) -> None:
    screen = Screen(as_json=as_json)
    with connect(server, project) as client:
        page = client.stored_reports(limit=limit, cursor=cursor)
    screen.show(page, _table(page.items) if page.items else "No reports yet: eyrie reports push DIR")
    if page.next_cursor:
        screen.note(f"more: eyrie reports list --cursor {page.next_cursor}")


@reports_app.command("push")
@verb
def reports_push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A report, or the directory that a program wrote.")],
    project: InProject = None, server: Server = DEFAULT_SERVER, as_json: Json = False,
) -> None:
    """Keep reports on the server, which shows them in the console. One that is there already is not kept twice."""
    found = find_reports(path)
    with connect(server, project) as client:
        stored = [client.store_report(one) for one in found]
        address = f"{client.base_url}/console/reports/"
    Screen(as_json=as_json).show({"items": stored}, Text("\n".join(
        f"{printable(one.title)}: {address}{one.id}" for one in stored)))


@reports_app.command("show")
@verb
def reports_show(report: ReportId, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Show what a report found; with --json, all its figures."""
    with connect(server) as client:
        found = client.stored_report(report)
        address = f"{client.base_url}/console/reports/{found.id}"
    words: list[RenderableType] = [Text(printable(found.title), "bold"), *(
        Text(printable(sentence)) for sentence in found.decision), Text(address)]
    Screen(as_json=as_json).show(found, Group(*words))


@reports_app.command("delete")
@verb
def reports_delete(report: ReportId, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Delete a report from the server."""
    with connect(server) as client:
        client.delete_report(report)
    Screen(as_json=as_json).show({"id": report, "deleted": True}, Text(f"Report {report} is deleted."))


def _table(items: Sequence[StoredReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ID", "KIND", "TITLE", "FOUND", "PROJECT", "PUSHED", "SIZE"):
        table.add_column(name, overflow="fold")
    for one in items:
        table.add_row(one.id, one.kind, Text(printable(one.title)), Text(printable(one.decision[0])), one.project,
                      one.created_at.astimezone().strftime("%Y-%m-%d %H:%M"), size(one.size_bytes))
    return table
