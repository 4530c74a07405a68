"""What engines in pods have counted since something began: an acceptance window, a trial's share.

Counters live in the engines and begin with each process. Where a window began is written on the revision's workload, as
what each process had counted then; so an operator that starts anew goes on with the window its predecessor began. A
pod is asked by its own address, which the operator's pod reaches; from outside a cluster it may not be reachable, and
then no window closes, and a trial goes on by time alone.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import httpx

from eyrie_operator.endpoints.engine_metrics import Counts, EngineCounters, read_metrics
from eyrie_operator.manifests.names import GROUP, REVISION_LABEL, ROLE_LABEL, SERVER

log = logging.getLogger(__name__)

WINDOW_BASELINE, CANARY_BASELINE = f"{GROUP}/window", f"{GROUP}/trial-begun"
"""Annotations of a revision's workload."""

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class CounterBaseline:
    """When something began, and what the engines had counted by then."""

    since: datetime
    counts: Counts

    def dump(self) -> str:
        """As an annotation."""
        return json.dumps({"since": self.since.isoformat(),
                           "counts": {name: asdict(one) for name, one in self.counts.items()}}, sort_keys=True)


def read_baseline(workload: Mapping[str, Any], annotation: str) -> CounterBaseline | None:
    """What an annotation says; None without one, or when it is not ours."""
    text = (workload["metadata"].get("annotations") or {}).get(annotation)
    if text is None:
        return None
    try:
        found = json.loads(text)
        return CounterBaseline(datetime.fromisoformat(found["since"]),
                               {name: EngineCounters(**one) for name, one in found["counts"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def scrape_engines(objects: Iterable[Mapping[str, Any]], revision: int, port: int) -> Counts:
    """What each engine process of a revision has counted; those that do not answer are left out."""
    found: dict[str, EngineCounters] = {}
    with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
        for pod in objects:
            labels = pod["metadata"].get("labels", {})
            if pod["kind"] != "Pod" or labels.get(REVISION_LABEL) != str(revision) or labels.get(ROLE_LABEL) != SERVER:
                continue
            status = pod.get("status", {})
            address, containers = status.get("podIP"), status.get("containerStatuses", ())
            if address is None or not all(one.get("ready") for one in containers):
                continue
            restarts = sum(one.get("restartCount", 0) for one in containers)
            host = f"[{address}]" if ":" in address else address
            try:
                answer = client.get(f"http://{host}:{port}/metrics")
                found[f"{pod['metadata']['uid']}/{restarts}"] = read_metrics(answer.raise_for_status().text)
            except (httpx.HTTPError, ValueError) as error:
                log.debug("pod %s: %s", pod["metadata"]["name"], error)
    return found
