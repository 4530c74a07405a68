"""The figures of an endpoint: live acceptance over time, and by position; its canaries (`canary_figure`). Pure.

All are drawn from its history: windows of acceptance, with the acceptance lengths at which the watch acted then, and
the changes of what served. A window is marked at its end. Figures as `figures.job_figures` has them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest

from eyrie_api.errors import NotFound
from eyrie_api.figures import canary_figure
from eyrie_api.figures.themes import DASHES, INK, SOLID
from eyrie_api.figures.vega_lite import OWN_LEGENDS, Row, figure, number, rounded, series, tips
from eyrie_api.v1alpha1.endpoints import HistoryEntry, HistoryKind
from eyrie_api.v1alpha1.engine import EngineKind
from eyrie_api.v1alpha1.figures import AbsentFigure, Figure, FigureList, FigureName, FigureSummary
from eyrie_api.v1alpha1.status import Endpoint, Revision

MARKED: tuple[HistoryKind, ...] = ("activated", "rolled-back", "drift")
"""Entries that are marked in the figure over time."""

CHANGES = tuple(dict.fromkeys((*MARKED, *canary_figure.KINDS)))
"""Entries that the figures are drawn from, besides the windows."""

_LIMITS = {"proven_tau": "proven", "drift_below": "drift is reported below", "rollback_below": "rolled back below"}
_MOST_LABELS = 24  # side by side in the width of a figure; on a phone they touch
_LEAD = timedelta(minutes=5)
"""Marks this long before the first window are drawn: what it watches was activated before it."""


@dataclass(frozen=True)
class Watched:
    """What the figures are drawn from."""

    endpoint: Endpoint
    engine: EngineKind
    windows: Sequence[HistoryEntry]
    """Oldest first."""

    changes: Sequence[HistoryEntry]
    """Entries of the kinds in CHANGES, in any order."""


def figures_of(seen: Watched) -> tuple[Figure, ...]:
    """Every figure there is data for."""
    marked = [one for one in seen.changes if one.kind in MARKED]
    found = [acceptance(seen.windows, marked)] if seen.windows else []
    counted = [one for one in seen.windows if _accepted(one)]
    if counted:
        found.append(acceptance_by_position(counted))
    canaries = canary_figure.canaries_of(one for one in seen.changes if one.kind in canary_figure.KINDS)
    return (*found, canary_figure.canary(seen.endpoint, canaries)) if canaries else tuple(found)


def list_figures(seen: Watched) -> FigureList:
    """Every figure there is data for, and why there are no others."""
    found = figures_of(seen)
    names: set[str] = {one.name for one in found}
    absent: list[tuple[FigureName, str]] = [("acceptance", _why_no_windows(seen))]
    if seen.engine == "sglang":
        absent.append(("acceptance-by-position", "acceptance by position is not known where SGLang serves: its metrics "
                       "count accepted tokens without their positions"))
    elif seen.windows:
        absent.append(("acceptance-by-position", "acceptance by position is not known of these windows: no draft token "
                       "was accepted, or an earlier version recorded them"))
    absent.append(("canary", "no canary yet: a new revision gets a share of the requests first "
                   "(promotion.canary.shares) while another one serves; on a cluster a Gateway has to divide them"))
    return FigureList(
        items=tuple(FigureSummary(name=one.name, title=one.title, caption=one.caption, rows=one.rows,
                                  changed_at=one.changed_at) for one in found),
        absent=tuple(AbsentFigure(name=name, reason=reason) for name, reason in absent if name not in names))


def figure_of(seen: Watched, name: str) -> Figure:
    """One figure by name. Raises NotFound with the reason when there is no data for it."""
    found = next((one for one in figures_of(seen) if one.name == name), None)
    if found is None:
        reason = next((one.reason for one in list_figures(seen).absent if one.name == name),
                      "an endpoint has the figures acceptance, acceptance-by-position and canary")
        raise NotFound(f"endpoint {seen.endpoint.name!r} has no figure {name!r}", reason)
    return found


def _why_no_windows(seen: Watched) -> str:
    active = next((one for one in seen.endpoint.revisions if one.number == seen.endpoint.active_revision), None)
    if active is None:
        return "no acceptance is measured: nothing serves yet"
    if active.use.setting.method == "off":
        return "no acceptance is measured: the target serves without a drafter"
    if active.tau is None or (seen.engine == "sglang" and _switches_off(active)):
        why = ("it was promoted without a proven acceptance length" if active.tau is None else
               "its operating map stops drafting under load, which SGLang does not count apart")
        return f"no acceptance is watched of revision {active.number}: {why}"
    return ("no window of acceptance has closed yet: one closes when it has enough rounds for a mean and has lasted "
            "promotion.drift.window_s")


def _switches_off(revision: Revision) -> bool:
    points = () if revision.use.map is None else revision.use.map.points
    return any(point.setting.method == "off" for point in points)


def acceptance(windows: Sequence[HistoryEntry], changes: Iterable[HistoryEntry]) -> Figure:
    """Acceptance length of every window, what it is held against, and the changes of what served. There are windows."""
    first, last = windows[0], windows[-1]
    since = first.time - max(_LEAD, (last.time - first.time) / 10)
    shown = sorted((*windows, *(one for one in changes if one.time >= since)), key=lambda one: (one.time, one.id))
    apart = (shown[-1].time - shown[0].time) / _MOST_LABELS
    rows = [_row(one) for one in shown]
    _join_labels([(one, row) for one, row in zip(shown, rows, strict=True) if one.kind != "window"], apart)
    x = {"field": "time", "type": "temporal", "title": None, "axis": {"labelOverlap": True}}
    measured, marked = {"filter": "datum.what === 'window'"}, {"filter": "datum.what !== 'window'"}
    # A revision that serves again begins another line.
    in_time = [{"field": "time"}]
    stretches = [measured, {"window": [{"op": "lag", "field": "revision", "as": "before"}], "sort": in_time},
                 {"calculate": "datum.revision === datum.before ? 0 : 1", "as": "begins"},
                 {"window": [{"op": "sum", "field": "begins", "as": "stretch"}], "sort": in_time}]
    each = {"field": "stretch", "type": "nominal"}
    colour = series("revision", [row for row in rows if row["what"] == "window"]) | {
        "legend": {"labelExpr": "'revision ' + datum.label"}}
    # Of limits alone: dashes tell the three apart, and all are in the colour of text.
    names = f"{_LIMITS}[datum.label]".replace('"', "'")
    limits: Row = {
        "transform": [*stretches, {"fold": list(_LIMITS), "as": ["limit", "bound"]},
                      {"filter": "datum.bound !== null"}],
        "mark": {"type": "line", "interpolate": "step-before", "strokeWidth": 1.5, "style": INK},
        "encoding": {"x": x, "y": number("bound", None), "detail": each,
                     "strokeDash": {"field": "limit", "type": "nominal", "title": None, "sort": None,
                                    "scale": {"domain": list(_LIMITS),
                                              "range": [list(pattern or SOLID) for _, pattern in DASHES[:3]]},
                                    "legend": {"orient": "top", "columns": 1, "symbolType": "stroke", "symbolSize": 500,
                                               "labelExpr": names}}}}
    line: Row = {"transform": stretches, "mark": {"type": "line", "strokeWidth": 1.5},
                 "encoding": {"x": x, "y": number("tau", None), "detail": each, "color": colour | {"legend": None}}}
    points: Row = {"transform": [measured], "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
                   "encoding": {"x": x, "y": number("tau", "acceptance length tau"), "color": colour, "shape": colour,
                                "tooltip": _timed_tips(rows)}}
    layers = [limits, line, points]
    if any(row["what"] != "window" for row in rows):
        layers += [{"transform": [marked], "mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": {"x": x}},
                   {"transform": [marked], "mark": {"type": "text", "angle": 270, "align": "right", "dy": 8, "dx": -4,
                                                    "fontSize": 11},
                    "encoding": {"x": x, "y": {"value": 0}, "text": {"field": "label"},
                                 "tooltip": _timed_tips(rows)}}]
    proven = last.figures.get("proven_tau")
    against = "" if proven is None else f", proven {proven:.2f}"
    return figure("acceptance", f"Acceptance length now {last.figures['tau']:.2f} ({_named(last)}{against})",
                  "Mean tokens per target pass in each window of traffic, the bonus token included, by revision; "
                  "vertical lines are promotions, rollbacks and reports of drift.", rows,
                  {"width": 520, "height": 280, "layer": layers, "resolve": OWN_LEGENDS}, last.time)


def _row(entry: HistoryEntry) -> Row:
    figures = entry.figures if entry.kind == "window" else {}
    names = ("tau", "rounds", *_LIMITS)
    return {"time": entry.time.isoformat(), "what": entry.kind, "revision": entry.revision,
            **{name: rounded(figures.get(name)) for name in names}, "label": f"{_named(entry)} {entry.kind}"}


def _join_labels(marks: Sequence[tuple[HistoryEntry, Row]], apart: timedelta) -> None:
    """One label for marks that are too close for a label each."""
    held = None
    for entry, row in marks:
        if held is not None and entry.time - held[0].time < apart:
            held[1]["label"] += f", {row['label']}"
            row["label"] = ""
        else:
            held = entry, row


def _named(entry: HistoryEntry) -> str:
    return "" if entry.revision is None else f"revision {entry.revision}"


def _timed_tips(rows: Iterable[Row]) -> list[Row]:
    return [one | ({"type": "temporal", "format": "%Y-%m-%d %H:%M:%S"} if one["field"] == "time" else {})
            for one in tips(rows)]


def acceptance_by_position(windows: Sequence[HistoryEntry]) -> Figure:
    """Acceptance at each position of the draft: of every revision, and of the latest window. All count positions."""
    last = windows[-1]
    by_revision: dict[int | None, list[HistoryEntry]] = {}
    for one in windows:
        by_revision.setdefault(one.revision, []).append(one)
    rows = []
    for of_revision in by_revision.values():
        rows += _positions(f"{_named(of_revision[0])}, {len(of_revision)} windows", of_revision)
    if len(by_revision[last.revision]) > 1:
        rows += _positions(f"{_named(last)}, latest window", [last])
    x = {"field": "position", "type": "ordinal", "title": "position in the draft", "axis": {"labelAngle": 0}}
    y = {"field": "acceptance", "type": "quantitative", "title": "accepted, given that the one before was",
         "scale": {"domain": [0, 1]}, "axis": {"format": "%"}}
    colour = series("series", rows) | {"legend": {"columns": 1}}
    line: Row = {"mark": {"type": "line", "strokeWidth": 1.5},
                 "encoding": {"x": x, "y": y, "color": colour | {"legend": None}}}
    points: Row = {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                   "encoding": {"x": x, "y": y, "color": colour, "shape": colour, "tooltip": tips(rows)}}
    now = 100 * _positions("", [last])[0]["acceptance"]
    return figure("acceptance-by-position", f"Acceptance at position 1 now {now:.0f} % ({_named(last)})",
                  "Share of the draft tokens at a position that were accepted, of those whose predecessor was; where "
                  "an operating map drafts less under load, positions beyond its depth count as not accepted.", rows,
                  {"width": 520, "height": 280, "layer": [line, points], "resolve": OWN_LEGENDS}, last.time)


def _accepted(window: HistoryEntry) -> tuple[float, ...]:
    """Draft tokens accepted at each position; empty where the engine does not say."""
    found: list[float] = []
    while (count := window.figures.get(f"accepted/{len(found) + 1}")) is not None:
        found.append(count)
    return tuple(found)


def _positions(name: str, windows: Sequence[HistoryEntry]) -> list[Row]:
    accepted = [sum(counts) for counts in zip_longest(*map(_accepted, windows), fillvalue=0.0)]
    before = [sum(one.figures["rounds"] for one in windows), *accepted]
    return [{"series": name, "position": position, "tokens": rounded(reached), "accepted": rounded(count),
             "acceptance": rounded(count / reached)}
            for position, (reached, count) in enumerate(zip(before, accepted, strict=False), start=1) if reached]
