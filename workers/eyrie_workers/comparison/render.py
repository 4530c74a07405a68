"""The report of a comparison as Markdown (`report.md`) and for the terminal. Pure."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from eyrie_api.quantities import duration
from eyrie_workers.comparison import tables
from eyrie_workers.comparison.answer import QUESTION, decision
from eyrie_workers.comparison.report import CompareReport, VariantReport
from eyrie_workers.comparison.tables import speed
from eyrie_workers.report_page.page import Table

_STYLE = {"holds": "green", "does not hold here": "yellow", "indistinguishable": "dim", "not measured": "dim"}


def markdown(report: CompareReport, plots: Iterable[str] = ()) -> str:
    """The whole report as Markdown."""
    parts = [f"# Which drafter for {report.target}", decision(report), f"**{QUESTION}** {report.verdict}",
             "\n".join(f"- {name}: {value}" for name, value in tables.facts(report)),
             "## Leaderboard", _table(tables.leaderboard(report)), *(f"![{name}](plots/{name}.svg)" for name in plots),
             "## By data set and temperature", _table(tables.by_suite(report)),
             "## Acceptance and cost of a round", _table(tables.rounds(report)),
             "## Training", _table(tables.training(report))]
    if report.rows:
        parts += ["## Three versions side by side", _table(tables.versions(report))]
    parts += ["## Published claims, and what was measured here", _table(tables.claims(report))]
    if report.notes:
        parts += ["## Limits", "\n".join(f"- {note}" for note in report.notes)]
    return "\n\n".join(parts) + "\n"


def _table(one: Table) -> str:
    lines = [one.columns, ["---"] * len(one.columns), *one.rows]
    cells = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{one.caption}\n\n{cells}" if one.caption else cells


def view(report: CompareReport, where: Sequence[tuple[str, str]]) -> RenderableType:
    """The summary for the terminal."""
    board = Grid(box=None, pad_edge=False, header_style="bold")
    others = report.concurrencies[1:]
    for column in ("#", "VARIANT", "SHAPE"):
        board.add_column(column)
    for column in ("SPEED-UP (95 %)", *(f"T={t:g}" for t in report.temperatures),
                   *(f"{load} AT ONCE" for load in others), "TAU", "DRAFT MS", "TRAINED", "LOSSLESS"):
        board.add_column(column, justify="right")
    seconds = {one.family: one.seconds for one in report.trained}
    for one in report.variants:
        board.add_row(*_line(report, one, others, seconds.get(one.variant.family)),
                      style="bold green" if one.variant.title == report.winner else "")
    claims = Grid(box=None, pad_edge=False, header_style="bold")
    for column in ("CLAIM", "PUBLISHED", "HERE", ""):
        claims.add_column(column)
    for claim in report.claims:
        if claim.verdict != "not measured":
            claims.add_row(claim.aspect, claim.seed, claim.here, Text(claim.verdict, _STYLE[claim.verdict]))
    story: list[RenderableType] = [claims, Text()] if claims.row_count else []
    files = Grid.grid(padding=(0, 2))
    for name, path in where:
        files.add_row(Text(name, "bold"), path)
    notes = [Text(f"note: {note}", "dim") for note in report.notes]
    return Group(Text(), board, Text(), Text(QUESTION, "bold"), Text(report.verdict), Text(), *story, *notes, files)


def _line(report: CompareReport, one: VariantReport, others: Sequence[int], seconds: float | None) -> list[str]:
    first = report.concurrencies[0]
    return [str(one.rank), one.variant.title, one.variant.shape, speed(one.overall),
            *(f"{one.at(first, t).speedup:.2f}x" for t in report.temperatures),
            *(f"{one.at(load).speedup:.2f}x" for load in others), f"{one.overall.tau:.2f}",
            f"{one.overall.draft_ms:.1f}", "-" if seconds is None else duration(seconds),
            "yes" if one.lossless else "NO"]
