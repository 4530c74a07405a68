"""The figures of a load test: throughput with the crossover, latency, categories of prompts, acceptance. Pure.

Intervals are the 95 % intervals of the ratio to the baseline, drawn around the variant's value: where one crosses the
baseline's line, the comparison is undecided.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

from eyrie_api.contract.figures import Figure
from eyrie_api.contract.load import LoadComparison, LoadLevel, LoadReport
from eyrie_api.figures.vega_lite import Row, figure, layer, layered, number, ordinal, points, rounded, series

_MIN_ROUNDS = 8  # below it one round moves a point of acceptance by more than a tenth
_UNITS = {"closed": "concurrent users", "open": "requests per second"}


def load_figures(report: LoadReport) -> tuple[Figure, ...]:
    figures = []
    for mode, suffix in (("closed", ""), ("open", "-by-rate")):
        levels = sorted((level for level in report.levels if level.mode == mode), key=lambda level: level.level)
        if levels and mode == "closed":
            figures.append(throughput(report, levels))
        if levels:
            figures.append(latency(report, levels, f"load-latency{suffix}"))
    if any(len(ratio.by_category) > 1 for ratio in report.comparisons):
        figures.append(categories(report))
    if any(level.total.accepted_histogram for level in report.levels):
        figures.append(acceptance(report))
    return tuple(figures)


def throughput(report: LoadReport, levels: Sequence[LoadLevel]) -> Figure:
    """Tokens per second of one user, and of all together, by number of users. The levels are closed loops."""
    compared = {(ratio.variant, ratio.level): ratio for ratio in report.comparisons if ratio.mode == "closed"}
    rows: list[Row] = []
    for level in levels:
        users, together = level.total.tokens_per_s_per_user, level.total.tokens_per_s
        row: Row = {"variant": level.variant, "level": level.level, "tokens_per_s_per_user": rounded(users),
                    "tokens_per_s": rounded(together)} | dict.fromkeys(("user_low", "user_high", "low", "high"))
        if (ratio := compared.get((level.variant, level.level))) is not None:
            by_user, by_all = users / ratio.user_ratio, together / ratio.throughput_ratio  # the baseline's
            row |= {"user_low": rounded(by_user * ratio.user_interval.low),
                    "user_high": rounded(by_user * ratio.user_interval.high),
                    "low": rounded(by_all * ratio.throughput_interval.low),
                    "high": rounded(by_all * ratio.throughput_interval.high)}
        rows.append(row)
    x = _levels_axis(levels)
    panels: list[Row] = []
    for field, low, high, title in (("tokens_per_s_per_user", "user_low", "user_high", "tokens per second, one user"),
                                    ("tokens_per_s", "low", "high", "tokens per second, all users")):
        ranges = layer("rule", {"x": x, "y": {"field": low, "type": "quantitative"}, "y2": {"field": high},
                                "color": series("variant", rows) | {"legend": None}},
                       f"datum.{low} !== null", strokeWidth=2)
        panels.append(layered([ranges, *_line(rows, x, field, title)], width=360))
    if report.crossover is not None:
        at = {"x": {"datum": report.crossover, "type": "quantitative"}}
        panels[1]["layer"] += [
            layer("rule", at, strokeDash=[5, 4], strokeWidth=1.5),
            layer("text", at | {"y": {"value": 270}}, align="left", dx=5, text=f"crossover at {report.crossover:.3g}")]
    return figure("load-throughput", _finding(report, levels), _detail(report), rows, {"columns": 2, "concat": panels})


def _finding(report: LoadReport, levels: Sequence[LoadLevel]) -> str:
    closed = [ratio for ratio in report.comparisons if ratio.mode == "closed"]
    if not closed:
        most = max(levels, key=lambda level: level.total.tokens_per_s)
        return f"{most.variant}: at most {most.total.tokens_per_s:.0f} tokens/s, at {most.level:g} users"
    variant, baseline = closed[0].variant, closed[0].baseline
    points = sorted((ratio for ratio in closed if ratio.variant == variant), key=lambda ratio: ratio.level)
    least, most_users = points[0], points[-1]
    if report.crossover is not None and report.crossover <= least.level:
        return f"{variant} is slower than {baseline} in total at every load from {_level_label(least)} on"
    words = f"{variant}: {least.user_ratio:.2f}x for {'each of ' if least.level > 1 else ''}{_level_label(least)}"
    if report.crossover is not None:
        return f"{words}; below {baseline} in total from {report.crossover:.3g} users on"
    still = "" if most_users is least else "still "
    return f"{words}, {still}{most_users.throughput_ratio:.2f}x in total at {_level_label(most_users)}"


def latency(report: LoadReport, levels: Sequence[LoadLevel], name: str) -> Figure:
    """Time to the first token and between tokens by load: median solid, 99th percentile dashed."""
    rows: list[Row] = [
        {"variant": level.variant, "level": level.level, "quantile": quantile,
         "first_token_ms": None if first is None else rounded(1e3 * getattr(first, quantile)),
         "between_tokens_ms": None if between is None else rounded(1e3 * getattr(between, quantile))}
        for level in levels for first, between in [(level.total.ttft_s, level.total.inter_token_s)]
        for quantile in ("p50", "p99")]
    x = _levels_axis(levels)
    dashed = {"strokeDash": {"field": "quantile", "type": "nominal", "title": None, "legend": {"symbolSize": 400},
                             "scale": {"domain": ["p50", "p99"], "range": [[1, 0], [5, 4]]}}}
    panels = [layered(_line(rows, x, field, title, dashed), width=360) for field, title in (
        ("first_token_ms", "time to first token, ms"), ("between_tokens_ms", "time between tokens, ms"))]
    compared = [ratio for ratio in report.comparisons
                if ratio.mode == levels[0].mode and ratio.ttft_p99_ratio is not None]
    finding = "Latencies by load"
    if compared:
        worst = max((ratio for ratio in compared if ratio.variant == compared[0].variant),
                    key=lambda ratio: ratio.ttft_p99_ratio or 0.0)
        finding = (f"{worst.variant}: p99 time to first token at most {worst.ttft_p99_ratio:.2f}x that of "
                   f"{worst.baseline} (at {_level_label(worst)})")
    return figure("load-latency" if name == "load-latency" else "load-latency-by-rate", finding, _detail(report), rows,
                  {"columns": 2, "concat": panels})


def categories(report: LoadReport) -> Figure:
    """Speed-up of one user in each category, by load: the first compared variant against the baseline."""
    variant, baseline = report.comparisons[0].variant, report.comparisons[0].baseline
    shown = [ratio for ratio in report.comparisons if ratio.variant == variant]
    rows: list[Row] = [{"category": category, "load": _level_label(ratio), "ratio": rounded(value),
                        "label": f"{value:.2f}"} for ratio in shown for category, value in ratio.by_category.items()]
    across: Row = {"x": {"field": "category", "type": "nominal", "sort": None, "title": None,
                         "axis": {"labelAngle": 0}},
                   "xOffset": {"field": "load", "type": "nominal", "sort": None},
                   "y": {"field": "ratio", "type": "quantitative",
                         "title": f"tokens per second of one user, {variant} / {baseline}"}}
    layers = [layer("bar", across | {"color": series("load", rows)}, tooltip=True),
              layer("text", across | {"text": {"field": "label"}}, dy=-8, fontSize=10),
              layer("rule", {"y": {"datum": 1.0, "type": "quantitative"}}, strokeWidth=1.5)]
    worst = min(rows, key=lambda row: row["ratio"])
    finding = (f"{variant}: every category gains at every load, least {worst['category']} at {worst['load']} "
               f"({worst['ratio']:.2f}x)" if worst["ratio"] > 1.0 else
               f"{variant} loses in {worst['category']} at {worst['load']} ({worst['ratio']:.2f}x)")
    return figure("load-categories", finding, _detail(report), rows, {"width": 560, "height": 280, "layer": layers})


def acceptance(report: LoadReport) -> Figure:
    """Conditional acceptance by position, all levels together, one line per variant that drafts."""
    rows: list[Row] = []
    taus: dict[str, float] = {}
    for variant in report.variants:
        # Index k counts the rounds that accepted k draft tokens.
        histogram = [sum(counts) for counts in zip_longest(*(
            level.total.accepted_histogram for level in report.levels if level.variant == variant), fillvalue=0)]
        if not sum(histogram):
            continue
        taus[variant] = 1.0 + sum(k * count for k, count in enumerate(histogram)) / sum(histogram)
        at_least = [sum(histogram[k:]) for k in range(len(histogram))]
        rows += [{"variant": f"{variant} (tau {taus[variant]:.2f})", "position": position, "rounds": reached,
                  "acceptance": rounded(further / reached)}
                 for position, (reached, further) in enumerate(pairwise(at_least), start=1)
                 if reached >= _MIN_ROUNDS]
    best = max(taus, key=lambda variant: taus[variant])
    return figure("load-acceptance", f"{best}: {taus[best]:.2f} tokens per target pass under load",
                  f"{best} is {report.variants[best]}; positions reached in at least {_MIN_ROUNDS} rounds; "
                  f"{_detail(report)}", rows,
                  layered(_line(rows, ordinal("position", "position in the draft"), "acceptance",
                                "P(accepted | the one before was)")))


def _line(rows: Sequence[Row], x: Row, field: str, title: str, more: Row | None = None) -> list[Row]:
    """Layers of a line for each variant and its points."""
    colour, across = series("variant", rows), {"x": x, "y": {"field": field, "type": "quantitative", "title": title}}
    return [layer("line", across | {"color": colour | {"legend": None}} | (more or {}), strokeWidth=2),
            points(rows, across, colour)]


def _levels_axis(levels: Sequence[LoadLevel]) -> Row:
    return number("level", _UNITS[levels[0].mode]) | {
        "scale": {"type": "log", "base": 2},
        "axis": {"values": sorted({level.level for level in levels}), "format": "~g"}}


def _level_label(ratio: LoadComparison) -> str:
    unit = "requests/s" if ratio.mode == "open" else "user" if ratio.level == 1 else "users"
    return f"{ratio.level:g} {unit}"


def _detail(report: LoadReport) -> str:
    spec, place = report.spec, report.environment
    repeats = f", {spec.repeats} interleaved repeats" if spec.repeats > 1 else ""
    return (f"{report.model}; {spec.requests} requests per level and variant{repeats}, temperature "
            f"{spec.temperature:g}, at most {spec.max_new_tokens} tokens, 95 % intervals over prompts; load generator "
            f"on {place.hardware}, {place.date[:10]}")
