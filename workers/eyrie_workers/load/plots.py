"""Figures of a load report: throughput per user and in total with the crossover, latency, categories, acceptance.

The baseline is blue, the variant it is compared with green, further variants orange and grey, in every figure. Error
bars are the 95 % intervals of the ratio to the baseline, drawn around the variant's value: where a bar crosses the
baseline's line, the comparison is undecided.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from eyrie_api.v1alpha1.load import LoadComparison, LoadLevel, LoadReport, Quantiles
from eyrie_api.v1alpha1.model import Interval
from eyrie_workers.figure_style import (
    BASELINE_BLUE,
    BEST_GREEN,
    OTHER_GREY,
    REDDISH_PURPLE,
    SETTINGS,
    SKY_BLUE,
    WARM_ORANGE,
    new_figure,
    save,
    title,
)
from eyrie_workers.intervals import acceptance_length, add_histograms, conditional_acceptance

Drawing = tuple[str, Callable[[], Figure]]
_MIN_ROUNDS = 8  # below it one round moves a point of acceptance by more than a tenth
_MARKERS = "osD^v"


def drawings(report: LoadReport) -> Iterator[Drawing]:
    """Name and drawing function of every figure that has data."""
    if any(level.mode == "closed" for level in report.levels):
        yield "load-throughput", lambda: throughput(report)
        yield "load-latency", lambda: latency(report, "closed")
    if any(level.mode == "open" for level in report.levels):
        yield "load-latency-by-rate", lambda: latency(report, "open")
    if any(len(comparison.by_category) > 1 for comparison in report.comparisons):
        yield "load-categories", lambda: categories(report)
    if any(level.total.accepted_histogram for level in report.levels):
        yield "load-acceptance", lambda: acceptance(report)


def draw_load(report: LoadReport, out: Path) -> list[Path]:
    """Write PNG and SVG of every figure; returns the paths."""
    with matplotlib.rc_context(SETTINGS):
        return [path for name, make in drawings(report) for path in save(make(), out, name)]


def throughput(report: LoadReport) -> Figure:
    """Tokens per second of one user, and of all together, by concurrency; the crossover marked."""
    figure, (individual, aggregate) = new_figure(12.0, 5.2, 2, share_y=False)
    colours = _colours(report)
    compared = {(c.variant, c.level): c for c in report.comparisons if c.mode == "closed"}
    for variant, levels in _by_variant(report, "closed").items():
        xs = [level.level for level in levels]
        users = [level.total.tokens_per_s_per_user for level in levels]
        totals = [level.total.tokens_per_s for level in levels]
        of_variant = [compared.get((variant, x)) for x in xs]
        for axes, ys, what in ((individual, users, "user"), (aggregate, totals, "throughput")):
            axes.errorbar(
                xs,
                ys,
                _bars(ys, of_variant, what),
                color=colours[variant],
                marker=_marker(report, variant),
                label=variant,
                capsize=4,
            )
    individual.set_ylabel("tokens per second, one user")
    aggregate.set_ylabel("tokens per second, all users")
    levels_shown = sorted({level.level for level in report.levels if level.mode == "closed"})
    for axes in (individual, aggregate):
        _from_zero(axes)
        _logarithmic(axes, levels_shown, "concurrent users")
    if report.crossover is not None:
        aggregate.axvline(report.crossover, color=WARM_ORANGE, linestyle="--", linewidth=1.5)
        aggregate.annotate(f" crossover at {_format_users(report.crossover)}", (report.crossover, 0.03),
                           xycoords=("data", "axes fraction"), color=WARM_ORANGE, fontsize=11)
    individual.legend(loc="best", fontsize=10)
    title(figure, _finding(report), _detail(report))
    return figure


def latency(report: LoadReport, mode: str) -> Figure:
    """Time to first token and inter-token latency by load: median solid, 99th percentile dashed."""
    figure, (first, between) = new_figure(12.0, 5.2, 2, share_y=False)
    colours = _colours(report)
    for variant, levels in _by_variant(report, mode).items():
        for axes, pick in ((first, _ttft), (between, _inter_token)):
            shown = [(level.level, q) for level in levels if (q := pick(level)) is not None]
            xs = [x for x, _ in shown]
            axes.plot(xs, [1e3 * q.p50 for _, q in shown], color=colours[variant], marker=_marker(report, variant),
                      label=f"{variant}, median")
            axes.plot(xs, [1e3 * q.p99 for _, q in shown], color=colours[variant], linestyle="--", linewidth=1.3,
                      marker=_marker(report, variant), markersize=4, label=f"{variant}, p99")
    unit = "concurrent users" if mode == "closed" else "requests per second"
    shown_levels = sorted({level.level for level in report.levels if level.mode == mode})
    first.set_ylabel("time to first token, ms")
    between.set_ylabel("time between tokens, ms")
    for axes in (first, between):
        _logarithmic(axes, shown_levels, unit)
        _from_zero(axes)
    first.legend(loc="best", fontsize=10)
    title(figure, _latency_finding(report, mode), _detail(report))
    return figure


def categories(report: LoadReport) -> Figure:
    """Speed-up of one user in each category, by load: the first variant against the baseline."""
    variant = report.comparisons[0].variant
    shown = [c for c in report.comparisons if c.variant == variant and c.by_category]
    names = list(dict.fromkeys(name for c in shown for name in c.by_category))
    figure, (axes,) = new_figure(max(7.0, 1.6 * len(names) + 0.5 * len(names) * len(shown)), 5.0)
    xs = np.arange(len(names))
    width = 0.84 / len(shown)
    shades = np.linspace(0.15, 0.85, len(shown))
    for number, comparison in enumerate(shown):
        heights = [comparison.by_category.get(name, np.nan) for name in names]
        bars = axes.bar(xs + (number - (len(shown) - 1) / 2) * width, heights, width, edgecolor="white",
                        color=matplotlib.colormaps["cividis"](shades[number]), label=_level_label(comparison))
        axes.bar_label(bars, [f"{h:.2f}" for h in heights], fontsize=9, padding=2)
    axes.axhline(1.0, color="black", linewidth=1.2)
    axes.set_xticks(xs, names)
    axes.set_ylabel(f"tokens per second of one user, {variant} / {shown[0].baseline}")
    axes.grid(visible=False, axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=10)
    worst = min(((c, name) for c in shown for name in c.by_category), key=lambda pair: pair[0].by_category[pair[1]])
    ratio = worst[0].by_category[worst[1]]
    title(figure, f"{variant}: every category gains at every load, least {worst[1]} at {_level_label(worst[0])} "
                  f"({ratio:.2f}x)" if ratio > 1.0 else
          f"{variant} loses in {worst[1]} at {_level_label(worst[0])} ({ratio:.2f}x)", _detail(report))
    return figure


def acceptance(report: LoadReport) -> Figure:
    """Conditional acceptance by position, all levels together, one line per variant that drafts."""
    figure, (axes,) = new_figure(8.0, 4.8)
    colours = _colours(report)
    best = (0.0, next(iter(colours)))
    for variant in colours:
        histogram = add_histograms([level.total.accepted_histogram for level in report.levels
                                    if level.variant == variant])
        if sum(histogram) == 0:
            continue
        tau = acceptance_length(histogram)
        best = max(best, (tau, variant))
        reached = [sum(histogram[position:]) for position in range(len(histogram))]
        shown = [p for p, rounds in zip(conditional_acceptance(histogram), reached, strict=False)
                 if rounds >= _MIN_ROUNDS]
        axes.plot(range(1, len(shown) + 1), shown, color=colours[variant], marker=_marker(report, variant),
                  label=f"{variant} (tau {tau:.2f}, {sum(histogram)} rounds)")
    axes.set(xlabel="position in the draft", ylabel="P(accepted | the one before was)", ylim=(0, 1.03))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower left", fontsize=10)
    title(
        figure,
        f"{best[1]}: {best[0]:.2f} tokens per target pass under load",
        f"{best[1]} is {report.variants[best[1]]}; positions reached in at least {_MIN_ROUNDS} rounds; "
        f"{_detail(report)}",
    )
    return figure


def _by_variant(report: LoadReport, mode: str) -> dict[str, list[LoadLevel]]:
    variants: dict[str, list[LoadLevel]] = {}
    for level in report.levels:
        if level.mode == mode:
            variants.setdefault(level.variant, []).append(level)
    return {variant: sorted(levels, key=lambda level: level.level) for variant, levels in variants.items()}


def _colours(report: LoadReport) -> dict[str, str]:
    """Colour by variant: the baseline blue, the first compared variant green."""
    baseline = report.comparisons[0].baseline if report.comparisons else None
    others = iter([BEST_GREEN, WARM_ORANGE, OTHER_GREY, REDDISH_PURPLE, SKY_BLUE] * len(report.variants))
    return {variant: BASELINE_BLUE if variant == baseline else next(others) for variant in report.variants}


def _marker(report: LoadReport, variant: str) -> str:
    return _MARKERS[list(report.variants).index(variant) % len(_MARKERS)]


def _bars(values: Sequence[float], compared: Sequence[LoadComparison | None], what: str) -> np.ndarray | None:
    """Lengths of the error bars below and above; None for a variant that is not compared."""
    if not any(compared):
        return None
    pairs = []
    for value, comparison in zip(values, compared, strict=True):
        if comparison is None:
            pairs.append((0.0, 0.0))
            continue
        interval: Interval = comparison.user_interval if what == "user" else comparison.throughput_interval
        ratio = comparison.user_ratio if what == "user" else comparison.throughput_ratio
        pairs.append((value * (1.0 - interval.low / ratio), value * (interval.high / ratio - 1.0)))
    return np.array(pairs).T


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1.0)


def _logarithmic(axes: Axes, levels: Sequence[float], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(levels)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(label)


def _ttft(level: LoadLevel) -> Quantiles | None:
    return level.total.ttft_s


def _inter_token(level: LoadLevel) -> Quantiles | None:
    return level.total.inter_token_s


def _level_label(comparison: LoadComparison) -> str:
    if comparison.mode == "open":
        return f"{comparison.level:g} requests/s"
    return f"{comparison.level:g} user{'' if comparison.level == 1 else 's'}"


def _format_users(crossover: float) -> str:
    return f"{crossover:.1f}" if crossover < 10 else f"{crossover:.0f}"


def _finding(report: LoadReport) -> str:
    closed = [c for c in report.comparisons if c.mode == "closed"]
    if not closed:
        most = max((level for level in report.levels if level.mode == "closed"),
                   key=lambda level: level.total.tokens_per_s)
        return f"{most.variant}: at most {most.total.tokens_per_s:.0f} tokens/s, at {most.level:g} users"
    variant, baseline = closed[0].variant, closed[0].baseline
    points = sorted((c for c in closed if c.variant == variant), key=lambda c: c.level)
    least, most_users = points[0], points[-1]
    label = (f"{variant}: {least.user_ratio:.2f}x for each of {_level_label(least)}"
             if least.level > 1 else f"{variant}: {least.user_ratio:.2f}x for a single user")
    if report.crossover is None:
        if most_users is least:
            return f"{label}, {least.throughput_ratio:.2f}x in total"
        return f"{label}, still {most_users.throughput_ratio:.2f}x in total at {_level_label(most_users)}"
    if report.crossover <= least.level:
        return f"{variant} is slower than {baseline} in total at every load from {_level_label(least)} on"
    return f"{label}; below {baseline} in total from {_format_users(report.crossover)} users on"


def _latency_finding(report: LoadReport, mode: str) -> str:
    compared = [c for c in report.comparisons if c.mode == mode and c.ttft_p99_ratio is not None]
    if not compared:
        return "Latencies by load"
    worst = max((c for c in compared if c.variant == compared[0].variant), key=lambda c: c.ttft_p99_ratio or 0.0)
    return (f"{worst.variant}: p99 time to first token at most {worst.ttft_p99_ratio:.2f}x that of {worst.baseline} "
            f"(at {_level_label(worst)})")


def _detail(report: LoadReport) -> str:
    spec, place = report.spec, report.environment
    repeats = f", {spec.repeats} interleaved repeats" if spec.repeats > 1 else ""
    return (
        f"{report.model}; {spec.requests} requests per level and variant{repeats}, temperature {spec.temperature:g}, "
        f"at most {spec.max_new_tokens} tokens, 95 % intervals over prompts; load generator on {place.hardware}, "
        f"{place.date[:10]}"
    )
