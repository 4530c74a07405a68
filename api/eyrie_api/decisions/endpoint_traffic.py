"""What the latest entries of an endpoint's history say of it now. Pure.

An entry is of the past, so each has a rule for how long it holds. A window holds until another revision is activated;
a canary's share while that revision is the candidate; drift until another revision is activated, a window has recovered
from it (`drift_below`), or retraining was started.
"""

from collections.abc import Iterable
from datetime import timedelta

from eyrie_api.contract.endpoints import EndpointTraffic, HistoryEntry, HistoryKind, LiveCanary, LiveDrift, LiveWindow
from eyrie_api.contract.status import Endpoint

KINDS: tuple[HistoryKind, ...] = ("activated", "window", "canary", "drift", "retraining")
"""The kinds that are read, the latest entry of each."""

_Latest = dict[HistoryKind, HistoryEntry]


def traffic_of(endpoints: Iterable[Endpoint], latest: Iterable[HistoryEntry]) -> tuple[EndpointTraffic, ...]:
    """The traffic of each endpoint. `latest` has at most one entry of each kind and endpoint."""
    by_endpoint: dict[str, _Latest] = {}
    for entry in latest:
        by_endpoint.setdefault(entry.endpoint, {})[entry.kind] = entry
    traffic = []
    for endpoint in endpoints:
        entries = by_endpoint.get(endpoint.name, {}) if endpoint.desired == "on" else {}
        traffic.append(EndpointTraffic(
            endpoint=endpoint.name, revision=endpoint.active_revision, window=_window(endpoint, entries),
            canary=_canary(endpoint, entries), drift=_drift(endpoint, entries)))
    return tuple(traffic)


def _of_active(endpoint: Endpoint, latest: _Latest, kind: HistoryKind) -> HistoryEntry | None:
    """The latest entry of that kind, if it is of the revision that serves, since its activation."""
    entry, activated = latest.get(kind), latest.get("activated")
    if entry is None or entry.revision != endpoint.active_revision:
        return None
    return entry if activated is None or entry.id > activated.id else None


def _window(endpoint: Endpoint, latest: _Latest) -> LiveWindow | None:
    entry = _of_active(endpoint, latest, "window")
    if entry is None:
        return None
    seconds, requests, tokens, rounds = (
        entry.figures.get(name) for name in ("seconds", "requests", "tokens", "rounds"))
    return LiveWindow(
        tau=entry.figures.get("tau"), proven_tau=entry.figures.get("proven_tau"), until=entry.time,
        since=None if seconds is None else entry.time - timedelta(seconds=seconds),
        requests_per_s=None if seconds is None or requests is None else requests / seconds,
        tokens_per_s=None if seconds is None or tokens is None else tokens / seconds,
        accepted_per_round=tuple(accepted / rounds for accepted in entry.accepted_tokens) if rounds else ())


def _canary(endpoint: Endpoint, latest: _Latest) -> LiveCanary | None:
    entry = latest.get("canary")
    candidate = endpoint.revision(endpoint.candidate_revision)
    if entry is None or candidate is None or candidate.state != "canary" or entry.revision != candidate.number:
        return None
    return LiveCanary(revision=candidate.number, share=entry.figures["share"], since=entry.time)


def _drift(endpoint: Endpoint, latest: _Latest) -> LiveDrift | None:
    entry, window, started = _of_active(endpoint, latest, "drift"), latest.get("window"), latest.get("retraining")
    if entry is None or (started is not None and started.id > entry.id):
        return None
    if window is not None and window.id > entry.id:
        tau = window.figures.get("tau")
        if tau is not None and tau >= window.figures.get("drift_below", 0.0):
            return None
    return LiveDrift(since=entry.time, message=entry.message, has_job="job" in entry.data)
