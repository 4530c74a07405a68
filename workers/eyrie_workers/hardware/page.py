"""The comparison of hardware as text: the table of the terminal, and one HTML file (`report.html`). Pure.

The page's figure is that of a job's page in the console, by the same definition.
"""

import importlib
from typing import Literal

from eyrie_api.decisions.hardware_choice import sentence
from eyrie_api.figures.job_figures import hardware
from eyrie_api.v1alpha1.figures import Figure
from eyrie_api.v1alpha1.hardware import HardwareReport, HardwareRow
from eyrie_workers.figure_style import Picture
from eyrie_workers.report_page.page import PageFigure, ReportPage, Section, Table, render

COLUMNS = ("users", "profile", "variant", "tokens/s\nall", "tokens/s\na device", "tokens/s\none user",
           "first token\np50 / p99 ms", "money\na million tokens", "to the baseline\n95 % interval")


def html(report: HardwareReport) -> str:
    """The whole report as a page."""
    load, spec, e = report.load, report.load.spec, report.load.environment
    prices = [[one.name, f"{one.price_per_hour:g}", str(one.num_devices)] for one in report.profiles]
    suites = dict.fromkeys(name for one in load.levels for name in one.by_category)
    sections = [
        _speed_and_money(report),
        Section("Acceptance and answers", table=answers(report)),
        Section("Profiles", table=Table(("profile", "price of an hour", "devices"), prices)),
        Section("Variants", table=Table(("variant", "server and setting"), list(load.variants.items())))]
    if load.notes:
        sections.append(Section("Limits", items=load.notes))
    facts = [
        ("Target", load.model),
        ("Load", f"{spec.repeats} blocks of {spec.requests} requests (at least two per user) for each variant and "
                 f"number of users, {spec.max_new_tokens} tokens at most, temperature {spec.temperature:g}"),
        ("Data sets", ", ".join(suites) or "not named"),
        ("Load generator", f"{e.hardware}, {e.cpu_count} processors"),
        ("Measured", f"{e.date[:10]}, code {e.code_version}")]
    return render(ReportPage("hardware", f"Hardware compared for {load.model}",
                             [sentence(choice, report) for choice in report.choices], facts, sections))


def _speed_and_money(report: HardwareReport) -> Section:
    title, table, figure = "Speed and money", speeds(report), hardware(report)
    try:
        picture = Picture(figure.title, figure.caption, _drawn(figure, "light"), _drawn(figure, "dark"))
    except ImportError:
        return Section(title, ["The figure needs `pip install 'eyrie[plots]'`; the table has its values."], table=table)
    return Section(title, table=table, figures=[PageFigure(picture, table)])


def _drawn(figure: Figure, theme: Literal["light", "dark"]) -> str:
    svg: str = importlib.import_module("vl_convert").vegalite_to_svg(
        figure.spec | {"config": figure.themes[theme]}, vl_version="5.21")
    return svg


def speeds(report: HardwareReport) -> Table:
    """Every variant on every profile, by number of users."""
    return Table(COLUMNS, [_cells(row) for row in sorted(report.rows, key=lambda row: row.users)],
                 f"The baseline is {report.profiles[0].name} without a drafter at the same number of users; money is "
                 "in the currency of the profiles.", header=1)


def _cells(row: HardwareRow) -> list[str]:
    first = "-" if row.ttft_p50_s is None or row.ttft_p99_s is None else (
        f"{row.ttft_p50_s * 1e3:.0f} / {row.ttft_p99_s * 1e3:.0f}")
    return [f"{row.users:g}", row.profile, row.variant, f"{row.tokens_per_s:.0f}", f"{row.tokens_per_s_per_device:.0f}",
            f"{row.tokens_per_s_per_user:.1f}", first, f"{row.money_per_million_tokens:.3g}",
            f"{row.money_ratio:.2f} ({row.money_interval.low:.2f} to {row.money_interval.high:.2f})"]


def answers(report: HardwareReport) -> Table:
    """tau and equality of the answers, by number of users."""
    equal = {(one.variant, one.level): f"{one.identical} of {one.compared}" for one in report.load.comparisons}
    rows = []
    for one in sorted(report.load.levels, key=lambda one: one.level):
        cell = one.total
        tau = "-" if cell.tau is None else f"{cell.tau:.2f}" + (
            f" ({cell.tau_interval.low:.2f}-{cell.tau_interval.high:.2f})" if cell.tau_interval else "")
        rows.append([f"{one.level:g}", one.variant, tau, equal.get((one.variant, one.level), "baseline"),
                     f"{cell.completed} of {cell.requests}"])
    return Table(("users", "variant", "tau", "answers equal to the baseline's", "requests completed"), rows,
                 f"At temperature {report.load.spec.temperature:g}, all data sets; settings are below, under Variants.",
                 header=1)
