"""The report of a comparison as one HTML file (`report.html`)."""

from eyrie_workers.comparison import tables
from eyrie_workers.comparison.answer import QUESTION, decision
from eyrie_workers.comparison.plots import figures_of
from eyrie_workers.comparison.report import CompareReport
from eyrie_workers.figure_style import picture
from eyrie_workers.report_page.page import PageFigure, ReportPage, Section, render

_BEHIND = {"speedup": tables.by_temperature, "acceptance": tables.positions, "round-cost": tables.rounds,
           "concurrency": tables.by_load}
"""The table with the values of each figure."""


def html(report: CompareReport) -> str:
    """The whole report as a page; draws the figures."""
    sections = [
        Section(QUESTION, [report.verdict]),
        Section("Leaderboard", table=tables.leaderboard(report)),
        Section("Figures", figures=[PageFigure(picture(draw), _BEHIND[name](report))
                                    for name, draw in figures_of(report).items()]),
        Section("By data set and temperature", table=tables.by_suite(report)),
        Section("Training", table=tables.training(report))]
    if report.rows:
        sections.append(Section("Three versions side by side", table=tables.versions(report)))
    sections.append(Section("Published claims, and what was measured here", table=tables.claims(report)))
    if report.notes:
        sections.append(Section("Limits", items=report.notes))
    return render(ReportPage("comparison", f"Which drafter for {report.target}", [decision(report)],
                             tables.facts(report), sections))
