"""Increases of engines' counters since the start of an acceptance window or of a canary's share.

Counters start at zero with each engine process. The baseline of a window, the counters of each process at its start, is
an annotation of the revision's workload: a restarted operator continues the window of its predecessor. Pods are read at
their own IPs, which the operator's pod can reach; an operator outside the cluster may not, and then no window closes,
and a canary advances by time alone.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import httpx

from eyrie_operator.endpoints.engine_metrics import Counts, EngineCounters, read_metrics
from eyrie_operator.manifests.deployment import GROUP, REVISION_LABEL, ROLE_LABEL, SERVER

log = logging.getLogger(__name__)

WINDOW_BASELINE, CANARY_BASELINE = f"{GROUP}/window", f"{GROUP}/trial-begun"
"""Annotations of a revision's workload."""

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class CounterBaseline:
    """A start time, and the engines' counters at that time."""

    since: datetime
    counts: Counts

    def dump(self) -> str:
        """As the value of an annotation."""
        counts = {process: asdict(counters) for process, counters in self.counts.items()}
        return json.dumps({"since": self.since.isoformat(), "counts": counts}, sort_keys=True)


def read_baseline(workload: Mapping[str, Any], annotation: str) -> CounterBaseline | None:
    """Parse an annotation; None when it is absent or invalid."""
    text = (workload["metadata"].get("annotations") or {}).get(annotation)
    if text is None:
        return None
    try:
        value = json.loads(text)
        return CounterBaseline(datetime.fromisoformat(value["since"]),
                               {name: EngineCounters(**counters | {"accepted": tuple(counters.get("accepted", ()))})
                                for name, counters in value["counts"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def process_of(pod: Mapping[str, Any]) -> str:
    """Names the engine process of a pod; another one after a restart of its containers."""
    restarts = sum(one.get("restartCount", 0) for one in pod.get("status", {}).get("containerStatuses", ()))
    return f"{pod['metadata']['uid']}/{restarts}"


def next_baseline(began: CounterBaseline | None, counted: Counts, objects: Iterable[Mapping[str, Any]],
                  now: datetime) -> CounterBaseline:
    """Where the window after one that is closed begins. Pure. A process that did not respond was not judged either, and
    keeps where it began; one that has ended is left out."""
    there = {process_of(one) for one in objects if one["kind"] == "Pod"}
    kept = {process: counts for process, counts in (began.counts if began else {}).items() if process in there}
    return CounterBaseline(now, kept | dict(counted))


def scrape_engines(objects: Iterable[Mapping[str, Any]], revision: int, port: int) -> Counts:
    """Counters of each engine process of a revision; processes that do not respond are left out."""
    counts: dict[str, EngineCounters] = {}
    with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
        for pod in objects:
            labels = pod["metadata"].get("labels", {})
            if pod["kind"] != "Pod" or labels.get(REVISION_LABEL) != str(revision) or labels.get(ROLE_LABEL) != SERVER:
                continue
            status = pod.get("status", {})
            address, containers = status.get("podIP"), status.get("containerStatuses", ())
            if address is None or not all(one.get("ready") for one in containers):
                continue
            host = f"[{address}]" if ":" in address else address
            try:
                response = client.get(f"http://{host}:{port}/metrics")
                counts[process_of(pod)] = read_metrics(response.raise_for_status().text)
            except (httpx.HTTPError, ValueError) as error:
                log.debug("pod %s: %s", pod["metadata"]["name"], error)
    return counts
