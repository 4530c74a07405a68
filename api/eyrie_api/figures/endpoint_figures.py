"""The figures of an endpoint: live acceptance over time, and by position; its canaries. Pure.

All are drawn from its history: windows of acceptance, with the acceptance lengths at which the watch acted then, and
the changes of what served. A window is marked at its end. Figures as `figures.job_figures` has them.

A canary is the steps of one revision, in order, and its end: activated, rejected, or given up for another candidate.
What a step counted is in the entry that ends it (`HistoryEntry.figures`). Acceptance is over all rounds of a canary so
far, since a step alone may have few.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest

from eyrie_api.contract.endpoints import HistoryEntry, HistoryKind
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.figures import AbsentFigure, Figure, FigureList, FigureName, FigureSummary
from eyrie_api.contract.status import Endpoint
from eyrie_api.errors import NotFound
from eyrie_api.figures.vega_lite import INK, Row, dashes, figure, layer, layered, number, points, rounded, series, tips

MARKED: tuple[HistoryKind, ...] = ("activated", "rolled-back", "drift")
"""Entries that are marked in the figure over time."""

CANARY_KINDS: tuple[HistoryKind, ...] = ("canary", "activated", "rejected")
"""Entries that the figure of canaries is drawn from."""

_MOST_CANARIES = 6  # more rows than a screen has

CHANGES = tuple(dict.fromkeys((*MARKED, *CANARY_KINDS)))
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
    marked = [entry for entry in seen.changes if entry.kind in MARKED]
    figures = [acceptance(seen.windows, marked)] if seen.windows else []
    counted = [entry for entry in seen.windows if entry.accepted_tokens]
    if counted:
        figures.append(acceptance_by_position(counted))
    canaries = canaries_of(entry for entry in seen.changes if entry.kind in CANARY_KINDS)
    return (*figures, canary(seen.endpoint, canaries)) if canaries else tuple(figures)


def list_figures(seen: Watched) -> FigureList:
    """Every figure there is data for, and why there are no others."""
    figures = figures_of(seen)
    names: set[str] = {shown.name for shown in figures}
    absent: list[tuple[FigureName, str]] = [("acceptance", _why_no_windows(seen))]
    if seen.engine == "sglang":
        absent.append(("acceptance-by-position", "acceptance by position is not known where SGLang serves: its metrics "
                       "count accepted tokens without their positions"))
    elif seen.windows:
        absent.append(("acceptance-by-position", "acceptance by position is not known of these windows: no draft token "
                       "was accepted"))
    absent.append(("canary", "no canary yet: a new revision gets a share of the requests first "
                   "(promotion.canary.shares) while another one serves; on a cluster a Gateway has to divide them"))
    return FigureList(
        items=tuple(FigureSummary(name=shown.name, title=shown.title, caption=shown.caption, rows=shown.rows,
                                  changed_at=shown.changed_at) for shown in figures),
        absent=tuple(AbsentFigure(name=name, reason=reason) for name, reason in absent if name not in names))


def figure_of(seen: Watched, name: str) -> Figure:
    """One figure by name. Raises NotFound with the reason when there is no data for it."""
    shown = next((candidate for candidate in figures_of(seen) if candidate.name == name), None)
    if shown is None:
        reason = next((candidate.reason for candidate in list_figures(seen).absent if candidate.name == name),
                      "an endpoint has the figures acceptance, acceptance-by-position and canary")
        raise NotFound(f"endpoint {seen.endpoint.name!r} has no figure {name!r}", reason)
    return shown


def _why_no_windows(seen: Watched) -> str:
    active = seen.endpoint.revision(seen.endpoint.active_revision)
    if active is None:
        return "no acceptance is measured: nothing serves yet"
    if active.use.setting.method == "off":
        return "no acceptance is measured: the target serves without a drafter"
    points = () if active.use.map is None else active.use.map.points
    if active.tau is None or (seen.engine == "sglang" and any(point.setting.method == "off" for point in points)):
        why = ("it was promoted without a proven acceptance length" if active.tau is None else
               "its operating map stops drafting under load, which SGLang does not count apart")
        return f"no acceptance is watched of revision {active.number}: {why}"
    return ("no window of acceptance has closed yet: one closes when it has enough rounds for a mean and has lasted "
            "promotion.drift.window_s")


def acceptance(windows: Sequence[HistoryEntry], changes: Iterable[HistoryEntry]) -> Figure:
    """Acceptance length of every window, what it is held against, and the changes of what served. There are windows."""
    first, last = windows[0], windows[-1]
    since = first.time - max(_LEAD, (last.time - first.time) / 10)
    shown = sorted((*windows, *(change for change in changes if change.time >= since)),
                   key=lambda entry: (entry.time, entry.id))
    apart = (shown[-1].time - shown[0].time) / _MOST_LABELS
    rows: list[Row] = []
    labelled = None  # the last mark with a label of its own; those that are too close to it have theirs in it
    for entry in shown:
        figures = entry.figures if entry.kind == "window" else {}
        rows.append({"time": entry.time.isoformat(), "what": entry.kind, "revision": entry.revision,
                     **{name: rounded(figures.get(name)) for name in ("tau", "rounds", *_LIMITS)},
                     "label": f"{_named(entry)} {entry.kind}"})
        if entry.kind != "window" and labelled is not None and entry.time - labelled[0] < apart:
            labelled[1]["label"] += f", {rows[-1]['label']}"
            rows[-1]["label"] = ""
        elif entry.kind != "window":
            labelled = entry.time, rows[-1]
    x = {"field": "time", "type": "temporal", "title": None, "axis": {"labelOverlap": True}}
    timed_tips = [tip | ({"type": "temporal", "format": "%Y-%m-%d %H:%M:%S"} if tip["field"] == "time" else {})
                  for tip in tips(rows)]
    measured, marked = "datum.what === 'window'", "datum.what !== 'window'"
    # A revision that serves again begins another line.
    in_time = {"sort": [{"field": "time"}]}
    stretches = [{"filter": measured}, {"window": [{"op": "lag", "field": "revision", "as": "before"}]} | in_time,
                 {"calculate": "datum.revision === datum.before ? 0 : 1", "as": "begins"},
                 {"window": [{"op": "sum", "field": "begins", "as": "stretch"}]} | in_time]
    each = {"field": "stretch", "type": "nominal"}
    colour = series("revision", [row for row in rows if row["what"] == "window"]) | {
        "legend": {"labelExpr": "'revision ' + datum.label"}}
    # Of limits alone: dashes tell the three apart, and all are in the colour of text.
    names = f"{_LIMITS}[datum.label]".replace('"', "'")
    limit = {"field": "limit", "type": "nominal", "title": None, "sort": None,
             "scale": {"domain": list(_LIMITS), "range": dashes(3)},
             "legend": {"orient": "top", "columns": 1, "symbolType": "stroke", "symbolSize": 500, "labelExpr": names}}
    limits = {"transform": [*stretches, {"fold": list(_LIMITS), "as": ["limit", "bound"]},
                            {"filter": "datum.bound !== null"}]} | layer(
        "line", {"x": x, "y": number("bound", None), "detail": each, "strokeDash": limit},
        interpolate="step-before", strokeWidth=1.5, style=INK)
    line = {"transform": stretches} | layer("line", {
        "x": x, "y": number("tau", None), "detail": each, "color": colour | {"legend": None}}, strokeWidth=1.5)
    layers = [limits, line, layer("point", {
        "x": x, "y": number("tau", "acceptance length tau"), "color": colour, "shape": colour, "tooltip": timed_tips},
        measured, filled=True, size=45, opacity=1)]
    if any(row["what"] != "window" for row in rows):
        layers += [layer("rule", {"x": x}, marked, strokeWidth=1.5),
                   layer("text", {"x": x, "y": {"value": 0}, "text": {"field": "label"}, "tooltip": timed_tips}, marked,
                         angle=270, align="right", dy=8, dx=-4, fontSize=11)]
    proven = last.figures.get("proven_tau")
    against = "" if proven is None else f", proven {proven:.2f}"
    return figure("acceptance", f"Acceptance length now {last.figures['tau']:.2f} ({_named(last)}{against})",
                  "Mean tokens per target pass in each window of traffic, the bonus token included, by revision; "
                  "vertical lines are promotions, rollbacks and reports of drift.", rows, layered(layers), last.time)


def _named(entry: HistoryEntry) -> str:
    return "" if entry.revision is None else f"revision {entry.revision}"


def acceptance_by_position(windows: Sequence[HistoryEntry]) -> Figure:
    """Acceptance at each position of the draft: of every revision, and of the latest window. All count positions."""
    last = windows[-1]
    by_revision: dict[int | None, list[HistoryEntry]] = {}
    for window in windows:
        by_revision.setdefault(window.revision, []).append(window)
    rows = []
    for of_revision in by_revision.values():
        rows += _positions(f"{_named(of_revision[0])}, {len(of_revision)} windows", of_revision)
    if len(by_revision[last.revision]) > 1:
        rows += _positions(f"{_named(last)}, latest window", [last])
    x = {"field": "position", "type": "ordinal", "title": "position in the draft", "axis": {"labelAngle": 0}}
    y = {"field": "acceptance", "type": "quantitative", "title": "accepted, given that the one before was",
         "scale": {"domain": [0, 1]}, "axis": {"format": "%"}}
    colour = series("series", rows) | {"legend": {"columns": 1}}
    now = 100 * _positions("", [last])[0]["acceptance"]
    return figure("acceptance-by-position", f"Acceptance at position 1 now {now:.0f} % ({_named(last)})",
                  "Share of the draft tokens at a position that were accepted, of those whose predecessor was; where "
                  "an operating map drafts less under load, positions beyond its depth count as not accepted.", rows,
                  layered([layer("line", {"x": x, "y": y, "color": colour | {"legend": None}}, strokeWidth=1.5),
                           points(rows, {"x": x, "y": y}, colour)]), last.time)


def _positions(name: str, windows: Sequence[HistoryEntry]) -> list[Row]:
    accepted = [sum(counts) for counts in zip_longest(*(window.accepted_tokens for window in windows), fillvalue=0.0)]
    before = [sum(window.figures["rounds"] for window in windows), *accepted]
    return [{"series": name, "position": position, "tokens": rounded(reached), "accepted": rounded(count),
             "acceptance": rounded(count / reached)}
            for position, (reached, count) in enumerate(zip(before, accepted, strict=False), start=1) if reached]


@dataclass
class Canary:
    revision: int
    steps: list[HistoryEntry] = field(default_factory=list)
    end: HistoryEntry | None = None


def canaries_of(entries: Iterable[HistoryEntry]) -> list[Canary]:
    """The canaries in entries of CANARY_KINDS, in the order in which they began."""
    canaries: list[Canary] = []
    running: dict[int | None, Canary] = {}
    for entry in sorted(entries, key=lambda entry: entry.id):
        last = running.get(entry.revision)
        if entry.kind != "canary":
            if last is not None:
                last.end = entry
                del running[entry.revision]
        elif last is None or _share(entry) < _share(last.steps[-1]):
            assert entry.revision is not None
            running[entry.revision] = Canary(entry.revision, [entry])
            canaries.append(running[entry.revision])
        elif _share(entry) > _share(last.steps[-1]):  # equal: recorded again after a crash
            last.steps.append(entry)
    return canaries


def canary(endpoint: Endpoint, canaries: Sequence[Canary]) -> Figure:
    """The latest canaries, of which there are some."""
    shown = canaries[-_MOST_CANARIES:]
    rows = [row for each in shown for row in _canary_rows(endpoint, each, canaries)]
    y = {"field": "step", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 220}}
    x = {"field": "share", "type": "quantitative", "title": "share of the requests", "scale": {"domain": [0, 1]},
         "axis": {"format": "%", "tickCount": 3}}
    share = {"width": 130, "height": {"step": 30}} | layer("bar", {
        "y": y, "x": x, "color": series("verdict", rows) | {"legend": None}, "tooltip": tips(rows)}, tooltip=True)
    body = share | {"width": 520}
    if any(row["tau"] is not None for row in rows):
        body = {"columns": 2, "concat": [share, _canary_acceptance(rows, y)]}
    last = shown[-1]
    name, portion = f"Revision {last.revision}", f"{_share(last.steps[-1]):.0%} of the requests"
    if last.end is None:
        title = f"{name} {'gets' if _is_running(endpoint, last) else 'was given up at'} {portion}"
    elif last.end.kind == "rejected":
        title = f"{name} was rejected at {portion}: {last.end.reason}"
    else:
        title = f"{name} passed its canary in {len(last.steps)} step{'s' if len(last.steps) > 1 else ''}"
    return figure("canary", title,
                  "Each share of the requests that a new revision was given before all of them; a point is the "
                  "acceptance length of its rounds until then with the interval by which the watch judges (three "
                  "standard errors), a tick the proven one.", rows, body, (last.end or last.steps[-1]).time)


def _canary_acceptance(rows: list[Row], y: Row) -> Row:
    def across(name: str) -> Row:
        # All layers name the axis, and none reaches its frame.
        return {"field": name, "type": "quantitative", "title": "acceptance length tau",
                "scale": {"zero": False, "padding": 8}, "axis": {"tickCount": 4}}

    return {"width": 130, "height": {"step": 30}, "layer": [
        layer("tick", {"y": y, "x": across("proven_tau")}, thickness=3, size=20, style=INK),
        layer("rule", {"y": y, "x": across("tau_low"), "x2": {"field": "tau_high"}}, "datum.tau !== null",
              strokeWidth=2),
        layer("point", {"y": y, "x": across("tau"), "color": series("verdict", rows) | {"legend": None},
                        "tooltip": tips(rows)}, "datum.tau !== null", filled=True, size=70, opacity=1)]}


def _canary_rows(endpoint: Endpoint, shown: Canary, all_of_them: Sequence[Canary]) -> list[Row]:
    same = [other for other in all_of_them if other.revision == shown.revision]
    again = f", time {same.index(shown) + 1}" if len(same) > 1 else ""
    proven = next((rev.tau for rev in endpoint.revisions if rev.number == shown.revision), None)
    ends = [*shown.steps[1:], shown.end]
    rows = []
    for step, end in zip(shown.steps, ends, strict=True):
        if end is not None:
            verdict = "rejected" if end.kind == "rejected" else "passed"
        else:
            verdict = "now" if _is_running(endpoint, shown) else "given up"
        counted = {} if end is None else end.figures
        rows.append({
            "step": f"revision {shown.revision}{again}, {_share(step):.0%}: {verdict}", "time": step.time.isoformat(),
            "revision": shown.revision, "share": _share(step), "verdict": verdict,
            "seconds": None if end is None else rounded((end.time - step.time).total_seconds()),
            **{name: rounded(counted.get(name)) for name in ("answered", "errors", "tau", "tau_low", "tau_high")},
            "proven_tau": rounded(proven),
            "finding": f"{end.reason}: {end.message}" if end is not None and end.kind == "rejected" else ""})
    return rows


def _is_running(endpoint: Endpoint, shown: Canary) -> bool:
    return shown.end is None and endpoint.desired == "on" and endpoint.candidate_revision == shown.revision


def _share(entry: HistoryEntry) -> float:
    return entry.figures["share"]
