"""A load report as tables and sentences, for a reader who sees one for the first time. Pure."""

from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.cli.tables import times
from eyrie_api.v1alpha1.load import LoadCell, LoadComparison, LoadReport, Quantiles
from eyrie_api.v1alpha1.model import Interval

Mode = Literal["closed", "open"]
_ESSAYS = {
    "closed": "Closed loop: so many users, each asking again as soon as it is answered.",
    "open": "Open loop: so many requests per second, arriving at random moments whether answered or not.",
}
_UNITS = {"closed": "USERS", "open": "REQ/S"}


def load_view(report: LoadReport) -> RenderableType:
    """What was measured, what it means, what to be careful about."""
    parts: list[RenderableType] = []
    modes: tuple[Mode, ...] = ("closed", "open")
    for mode in modes:
        if any(level.mode == mode for level in report.levels):
            parts += [Text(_ESSAYS[mode]), levels_table(report, mode), Text()]
        compared = [comparison for comparison in report.comparisons if comparison.mode == mode]
        if compared:
            parts += [Text(f"Against {compared[0].baseline}, with 95 % intervals over prompts:"),
                      comparisons_table(compared), Text()]
    parts += [Text(line) for line in findings(report)]
    parts += [Text(f"note: {note}", "yellow") for note in report.notes]
    return Group(*parts)


def levels_table(report: LoadReport, mode: Mode) -> Table:
    """One line per level and variant."""
    columns = [_UNITS[mode], "ARM", "ANSWERED", "TOKENS/S\nall", "TOKENS/S\none user", "FIRST TOKEN\np50 / p99 ms",
               "BETWEEN TOKENS\np50 / p99 ms", "WHOLE ANSWER\np50 / p99 s", "TAU"]
    if report.spec.slo is not None:
        columns.append("GOOD\nREQ/S")
    table = _table(columns, left=("ARM",))
    levels = sorted((level for level in report.levels if level.mode == mode), key=lambda level: level.level)
    before = None
    for level in levels:
        row = [f"{level.level:g}" if level.level != before else "", level.variant, *_figures(level.total)]
        if report.spec.slo is not None:
            row.append("-" if level.total.goodput_per_s is None else f"{level.total.goodput_per_s:.2f}")
        table.add_row(*row)
        before = level.level
    return table


def _figures(cell: LoadCell) -> list[str]:
    return [
        f"{cell.completed}/{cell.requests}", f"{cell.tokens_per_s:.0f}", f"{cell.tokens_per_s_per_user:.1f}",
        _spread(cell.ttft_s, 1e3), _spread(cell.inter_token_s, 1e3), _spread(cell.end_to_end_s, 1.0),
        "-" if cell.tau is None else f"{cell.tau:.2f}"]


def comparisons_table(comparisons: Sequence[LoadComparison]) -> Table:
    """One line per level and compared variant."""
    table = _table([_UNITS[comparisons[0].mode], "ARM", "ALL USERS", "ONE USER", "FIRST TOKEN p99", "SAME ANSWERS",
                    "VERDICT"], left=("ARM", "VERDICT"))
    for one in comparisons:
        table.add_row(
            f"{one.level:g}", one.variant, _ratio(one.throughput_ratio, one.throughput_interval),
            _ratio(one.user_ratio, one.user_interval), times(one.ttft_p99_ratio), f"{one.identical}/{one.compared}",
            _verdict(one))
    return table


def _verdict(one: LoadComparison) -> Text:
    """Told of what one user feels in an open loop, where arrivals set the throughput, and of all users otherwise."""
    interval = one.throughput_interval if one.mode == "closed" else one.user_interval
    if interval.low > 1.0:
        return Text("faster", "green")
    if interval.high < 1.0:
        return Text("slower", "red")
    return Text("undecided", "yellow")


def findings(report: LoadReport) -> list[str]:
    """The result in sentences."""
    lines = [f"{name}: {what}" for name, what in report.variants.items()]
    closed = [comparison for comparison in report.comparisons if comparison.mode == "closed"]
    if closed:
        variant, baseline = closed[0].variant, closed[0].baseline
        loads = sorted(one.level for one in closed if one.variant == variant)
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
        differ = [one for one in report.comparisons if one.identical < one.compared]
        if differ:
            lines.append("Not all greedy answers were the same: speculation must not change them. Rounding in 16-bit "
                         "arithmetic can; compare the baseline with itself to see how often.")
        elif report.comparisons:
            lines.append("All greedy answers were the same in every variant.")
    return lines


def _ratio(value: float, interval: Interval) -> str:
    return f"{value:.2f}x ({interval.low:.2f}-{interval.high:.2f})"


def _spread(q: Quantiles | None, scale: float) -> str:
    return "-" if q is None else f"{_short(q.p50 * scale)} / {_short(q.p99 * scale)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(columns: Sequence[str], left: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table
