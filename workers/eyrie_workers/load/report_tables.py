"""A load report as tables and sentences for the terminal. Pure."""

from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.cli.tables import times
from eyrie_api.v1alpha1.load import LoadCell, LoadComparison, LoadReport, Quantiles
from eyrie_api.v1alpha1.model import Interval

Mode = Literal["closed", "open"]
_DESCRIPTIONS = {
    "closed": "Closed loop: a number of users, each sending its next request as soon as the previous one is complete.",
    "open": "Open loop: requests per second, arriving at random times whether or not earlier ones are complete.",
}
_UNITS = {"closed": "USERS", "open": "REQ/S"}


def load_view(report: LoadReport) -> RenderableType:
    """The tables, the findings and the notes of a report."""
    parts: list[RenderableType] = []
    modes: tuple[Mode, ...] = ("closed", "open")
    for mode in modes:
        if any(level.mode == mode for level in report.levels):
            parts += [Text(_DESCRIPTIONS[mode]), levels_table(report, mode), Text()]
        compared = [comparison for comparison in report.comparisons if comparison.mode == mode]
        if compared:
            parts += [Text(f"Against {compared[0].baseline}, with 95 % intervals over prompts:"),
                      comparisons_table(compared), Text()]
    parts += [Text(line) for line in findings(report)]
    parts += [Text(f"note: {note}", "yellow") for note in report.notes]
    return Group(*parts)


def levels_table(report: LoadReport, mode: Mode) -> Table:
    """One line per level and variant."""
    columns = [_UNITS[mode], "VARIANT", "ANSWERED", "TOKENS/S\nall", "TOKENS/S\none user", "FIRST TOKEN\np50 / p99 ms",
               "BETWEEN TOKENS\np50 / p99 ms", "WHOLE ANSWER\np50 / p99 s", "TAU"]
    if report.spec.slo is not None:
        columns.append("GOOD\nREQ/S")
    table = _table(columns, left=("VARIANT",))
    levels = sorted((level for level in report.levels if level.mode == mode), key=lambda level: level.level)
    previous_level = None
    for level in levels:
        row = [f"{level.level:g}" if level.level != previous_level else "", level.variant, *_cell_columns(level.total)]
        if report.spec.slo is not None:
            row.append("-" if level.total.goodput_per_s is None else f"{level.total.goodput_per_s:.2f}")
        table.add_row(*row)
        previous_level = level.level
    return table


def _cell_columns(cell: LoadCell) -> list[str]:
    return [
        f"{cell.completed}/{cell.requests}", f"{cell.tokens_per_s:.0f}", f"{cell.tokens_per_s_per_user:.1f}",
        _p50_p99(cell.ttft_s, 1e3), _p50_p99(cell.inter_token_s, 1e3), _p50_p99(cell.end_to_end_s, 1.0),
        "-" if cell.tau is None else f"{cell.tau:.2f}"]


def comparisons_table(comparisons: Sequence[LoadComparison]) -> Table:
    """One line per level and compared variant."""
    table = _table([_UNITS[comparisons[0].mode], "VARIANT", "ALL USERS", "ONE USER", "FIRST TOKEN p99", "SAME ANSWERS",
                    "VERDICT"], left=("VARIANT", "VERDICT"))
    for comparison in comparisons:
        table.add_row(
            f"{comparison.level:g}", comparison.variant,
            _ratio(comparison.throughput_ratio, comparison.throughput_interval),
            _ratio(comparison.user_ratio, comparison.user_interval), times(comparison.ttft_p99_ratio),
            f"{comparison.identical}/{comparison.compared}", _verdict(comparison))
    return table


def _verdict(comparison: LoadComparison) -> Text:
    """By the speed of one user in an open loop, where arrivals set the throughput, otherwise by all users together."""
    interval = comparison.throughput_interval if comparison.mode == "closed" else comparison.user_interval
    if interval.low > 1.0:
        return Text("faster", "green")
    if interval.high < 1.0:
        return Text("slower", "red")
    return Text("undecided", "yellow")


def findings(report: LoadReport) -> list[str]:
    """The result in sentences."""
    lines = [f"{name}: {description}" for name, description in report.variants.items()]
    closed = [comparison for comparison in report.comparisons if comparison.mode == "closed"]
    if closed:
        variant, baseline = closed[0].variant, closed[0].baseline
        loads = sorted(comparison.level for comparison in closed if comparison.variant == variant)
        if report.crossover is None:
            lines.append(
                f"{variant} gives all users together at least as many tokens per second as {baseline} at every "
                f"load measured ({loads[0]:g} to {loads[-1]:g} users)."
            )
        elif report.crossover <= loads[0]:
            lines.append(f"{variant} is slower than {baseline} for all users together already at {loads[0]:g} users.")
        else:
            lines.append(
                f"{variant} falls below {baseline} for all users together at about {report.crossover:.1f} users: "
                "the crossover."
            )
    if report.spec.temperature == 0.0:
        differ = [comparison for comparison in report.comparisons if comparison.identical < comparison.compared]
        if differ:
            lines.append("Not all greedy answers were the same: speculation must not change them. Rounding in 16-bit "
                         "arithmetic can; compare the baseline with itself to see how often.")
        elif report.comparisons:
            lines.append("All greedy answers were the same in every variant.")
    return lines


def _ratio(value: float, interval: Interval) -> str:
    return f"{value:.2f}x ({interval.low:.2f}-{interval.high:.2f})"


def _p50_p99(q: Quantiles | None, scale: float) -> str:
    return "-" if q is None else f"{_number(q.p50 * scale)} / {_number(q.p99 * scale)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(columns: Sequence[str], left: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table
