"""The figure of an endpoint's canaries: each share of the requests that a revision was given, and its outcome. Pure.

A canary is the steps of one revision, in order, and its end: activated, rejected, or given up for another candidate.
What a step counted is in the entry that ends it (`HistoryEntry.figures`). Acceptance is over all rounds of a canary so
far, since a step alone may have few.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eyrie_api.figures.themes import INK
from eyrie_api.figures.vega_lite import Row, figure, rounded, series, tips
from eyrie_api.v1alpha1.endpoints import HistoryEntry, HistoryKind
from eyrie_api.v1alpha1.figures import Figure
from eyrie_api.v1alpha1.status import Endpoint

KINDS: tuple[HistoryKind, ...] = ("canary", "activated", "rejected")
"""Entries that it is drawn from."""

_MOST_CANARIES = 6  # more rows than a screen has


@dataclass
class Canary:
    """One canary of a revision."""

    revision: int
    steps: list[HistoryEntry] = field(default_factory=list)
    end: HistoryEntry | None = None


def canaries_of(entries: Iterable[HistoryEntry]) -> list[Canary]:
    """The canaries in entries of KINDS, in the order in which they began."""
    found: list[Canary] = []
    running: dict[int | None, Canary] = {}
    for entry in sorted(entries, key=lambda one: one.id):
        last = running.get(entry.revision)
        if entry.kind != "canary":
            if last is not None:
                last.end = entry
                del running[entry.revision]
        elif last is None or _share(entry) < _share(last.steps[-1]):
            assert entry.revision is not None
            running[entry.revision] = Canary(entry.revision, [entry])
            found.append(running[entry.revision])
        elif _share(entry) > _share(last.steps[-1]):  # equal: recorded again after a crash
            last.steps.append(entry)
    return found


def canary(endpoint: Endpoint, found: Sequence[Canary]) -> Figure:
    """The latest canaries, of which there are some."""
    shown = found[-_MOST_CANARIES:]
    rows = [row for one in shown for row in _rows(endpoint, one, found)]
    y = {"field": "step", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 220}}
    share: Row = {"width": 130, "height": {"step": 30},
                  "mark": {"type": "bar", "tooltip": True},
                  "encoding": {"y": y, "x": {"field": "share", "type": "quantitative", "title": "share of the requests",
                                             "scale": {"domain": [0, 1]}, "axis": {"format": "%", "tickCount": 3}},
                               "color": series("verdict", rows) | {"legend": None}, "tooltip": tips(rows)}}
    body = share | {"width": 520}
    if any(row["tau"] is not None for row in rows):
        body = {"columns": 2, "concat": [share, _acceptance(rows, y)]}
    return figure("canary", _title(endpoint, shown[-1]),
                  "Each share of the requests that a new revision was given before all of them; a point is the "
                  "acceptance length of its rounds until then with the interval by which the watch judges (three "
                  "standard errors), a tick the proven one.", rows, body, (shown[-1].end or shown[-1].steps[-1]).time)


def _acceptance(rows: list[Row], y: Row) -> Row:
    known = {"filter": "datum.tau !== null"}

    def across(name: str) -> Row:
        # All layers name the axis, and none reaches its frame.
        return {"field": name, "type": "quantitative", "title": "acceptance length tau",
                "scale": {"zero": False, "padding": 8}, "axis": {"tickCount": 4}}

    return {"width": 130, "height": {"step": 30}, "layer": [
        {"mark": {"type": "tick", "thickness": 3, "size": 20, "style": INK},
         "encoding": {"y": y, "x": across("proven_tau")}},
        {"transform": [known], "mark": {"type": "rule", "strokeWidth": 2},
         "encoding": {"y": y, "x": across("tau_low"), "x2": {"field": "tau_high"}}},
        {"transform": [known], "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
         "encoding": {"y": y, "x": across("tau"), "color": series("verdict", rows) | {"legend": None},
                      "tooltip": tips(rows)}}]}


def _rows(endpoint: Endpoint, one: Canary, all_of_them: Sequence[Canary]) -> list[Row]:
    same = [other for other in all_of_them if other.revision == one.revision]
    again = f", time {same.index(one) + 1}" if len(same) > 1 else ""
    proven = next((rev.tau for rev in endpoint.revisions if rev.number == one.revision), None)
    ends = [*one.steps[1:], one.end]
    rows = []
    for step, end in zip(one.steps, ends, strict=True):
        verdict = _verdict(endpoint, one, end)
        counted = {} if end is None else end.figures
        rows.append({
            "step": f"revision {one.revision}{again}, {_share(step):.0%}: {verdict}", "time": step.time.isoformat(),
            "revision": one.revision, "share": _share(step), "verdict": verdict,
            "seconds": None if end is None else rounded((end.time - step.time).total_seconds()),
            **{name: rounded(counted.get(name)) for name in ("answered", "errors", "tau", "tau_low", "tau_high")},
            "proven_tau": rounded(proven),
            "finding": f"{end.reason}: {end.message}" if end is not None and end.kind == "rejected" else ""})
    return rows


def _verdict(endpoint: Endpoint, one: Canary, end: HistoryEntry | None) -> str:
    if end is not None:
        return "rejected" if end.kind == "rejected" else "passed"
    return "now" if _is_running(endpoint, one) else "given up"


def _is_running(endpoint: Endpoint, one: Canary) -> bool:
    return one.end is None and endpoint.desired == "on" and endpoint.candidate_revision == one.revision


def _title(endpoint: Endpoint, last: Canary) -> str:
    name, share = f"Revision {last.revision}", f"{_share(last.steps[-1]):.0%} of the requests"
    if last.end is None:
        return f"{name} {'gets' if _is_running(endpoint, last) else 'was given up at'} {share}"
    if last.end.kind == "rejected":
        return f"{name} was rejected at {share}: {last.end.reason}"
    return f"{name} passed its canary in {len(last.steps)} step{'s' if len(last.steps) > 1 else ''}"


def _share(entry: HistoryEntry) -> float:
    return entry.figures["share"]
