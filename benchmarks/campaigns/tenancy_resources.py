"""Custom resources of another project's namespaces: part of `benchmarks.campaigns.tenancy`.

The operator's controller runs over the campaign's database and a double of the API server. South, whose namespace is
mapped to its project, and a namespace that is mapped to none apply objects with everything that their owner may write:
north's names, ids and target, labels and annotations of mirrors, a status that names north's job; they suspend, switch
off and delete them. Rules: no row and no file of north changes, and no status that is written has a word of north.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from benchmarks.campaigns.report import Campaign
from eyrie_api.contract.model import API_VERSION
from eyrie_api.contract.resources import (
    FINALIZER,
    JOB_ID_ANNOTATION,
    NAME_LABEL,
    NAMESPACE_LABEL,
    OUTSIDE_ANNOTATION,
    UID_LABEL,
)
from eyrie_api.database.engine import Database
from eyrie_api.settings import Settings
from eyrie_operator.cluster.client import Cluster
from eyrie_operator.cluster.controller import Controller, Kind
from eyrie_operator.cluster.resources import MIRRORED, ORIGIN_LABEL, SUSPENDED_ANNOTATION
from eyrie_operator.cluster.workqueue import Telemetry
from tests.api.access.harness import Harness
from tests.api.samples import job_body
from tests.operator.cluster.apiserver import CORE, ApiServer, serving

MIN_STEPS, MAX_STEPS = 40, 500
"""Jobs that are accepted for south make later steps slower."""

MAX_PASSES = 100

PROJECTS = {"north-jobs": "north", "south-jobs": "south"}
_FOREIGN = ("south-jobs", "unmapped")


def apply_objects(campaign: Campaign, settings: Settings, database: Database, harness: Harness,
                  words: Collection[str], state: Callable[[], frozenset[str]], until_s: float,
                  projects: Mapping[str, str] = PROJECTS) -> dict[str, Any]:
    """Apply, change and delete objects until the campaign is `until_s` old, at least MIN_STEPS times."""
    rng, counted, server = random.Random(campaign.seed), Counter[str](), ApiServer((*CORE, API_VERSION))
    with pytest.MonkeyPatch.context() as patch, serving(server, settings.home.parent, patch):
        telemetry = Telemetry()
        controller = Controller(settings, database, Cluster(counted=telemetry.count_write), telemetry,
                                mirror_namespace="eyrie", projects=projects)
        before, steps = state(), 0
        while steps < MIN_STEPS or (campaign.elapsed_s < until_s and steps < MAX_STEPS):
            steps += 1
            kind: Kind = "DrafterJob" if rng.random() < 0.5 else "DraftEndpoint"
            raw = _forged(rng, kind, harness, steps)
            metadata = raw["metadata"]
            path = f"/apis/{API_VERSION}/namespaces/{metadata['namespace']}/{kind.lower()}s/{metadata['name']}"
            server.put(path, raw)
            controller.handle_event(kind, rng.choice(("ADDED", "MODIFIED")), server.objects[path])
            for _ in range(MAX_PASSES):
                if len(controller.queue):
                    controller.process_next()
            if len(controller.queue):
                campaign.add_finding("an object is not reconciled without a pause", object=raw)
                break
            status = server.objects.get(path, {}).get("status", {})
            reasons = sorted({one["reason"] for one in status.get("conditions", ()) if "reason" in one})
            counted[f"{kind}: {', '.join(reasons) or 'no condition'}"] += 1
            written = "" if status == raw.get("status") else str(status)
            if found := [word for word in words if word in written]:
                campaign.add_finding("nothing of another project is read", object=raw, status=status, words=found)
            if (after := state()) != before:
                campaign.add_finding("nothing of the project is changed", object=raw, rows=sorted(after ^ before)[:4])
                before = after
    return {"objects applied": steps, "their conditions": dict(sorted(counted.items()))}


def _forged(rng: random.Random, kind: Kind, harness: Harness, number: int) -> dict[str, Any]:
    """An object of another namespace that claims to be north's."""
    north, south = harness.a.ids, harness.b.ids
    namespace, job_id = rng.choice(_FOREIGN), rng.choice((north["job_id"], north["job_id"], south["job_id"], "job-x"))
    labels = {ORIGIN_LABEL: MIRRORED, UID_LABEL: "uid-north", NAME_LABEL: "night", NAMESPACE_LABEL: "north-jobs"}
    annotations = {JOB_ID_ANNOTATION: job_id, SUSPENDED_ANNOTATION: rng.choice(("1", "2")), OUTSIDE_ANNOTATION: "keep"}
    # Not the id of north's job: an object of that name leaves rows of south with it, which would count as north's.
    names = (north["name"] if kind == "DraftEndpoint" else "night", f"own-{number}")
    metadata = {"name": rng.choice(names), "namespace": namespace,
                "uid": rng.choice((f"uid-{number}", "uid-north")), "generation": rng.randrange(1, 4),
                "resourceVersion": "1", "creationTimestamp": "2020-01-01T00:00:00Z",
                "finalizers": [FINALIZER] if rng.random() < 0.7 else [],
                "labels": {name: value for name, value in labels.items() if rng.random() < 0.5},
                "annotations": {name: value for name, value in annotations.items() if rng.random() < 0.5}}
    if rng.random() < 0.3:
        metadata["deletionTimestamp"] = "2020-01-02T00:00:00Z"
    serve = {"endpoint": rng.choice((north["name"], south["name"], f"own-{number}"))}
    if kind == "DrafterJob":
        claims = {"labels": labels} if rng.random() < 0.2 else {}  # labels that only the operator may write
        spec: dict[str, Any] = {"job": job_body(**claims, serve=serve), "suspend": rng.random() < 0.4}
    else:
        spec = {"target": {"model": rng.choice(("quickstart", "org/other"))}, "desired": rng.choice(("on", "off")),
                "serve": {**serve, "replicas": rng.choice((1, 77))}}
    status = {"job_id": job_id, "conditions": []} if rng.random() < 0.5 else {}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec, "status": status}
