"""The cluster runtime: endpoints as Deployments and Services. The leader reconciles every endpoint row.

One step: observe the row and its objects, call the pure `plan_endpoint`, derive the desired state
(`rollout.apply_plan`), apply what differs, delete obsolete objects, record decisions. It may be killed at any line. A
rejection is recorded before the revision's objects are deleted, and an activation after the Service selects the
revision: the next step, of whichever operator leads then, finds either half and completes the other.

Nothing is written when nothing has changed (`manifest_diff`), neither to the cluster nor to the database, and an
endpoint without changes causes no list request of its own (`object_cache`). Every write checks the fence first, also
those to the database.

Counters start at zero with each engine process. Where a window began is an annotation of the revision's workload. Pods
are read at their own IPs, which the operator's pod can reach; an operator outside the cluster may not, and then no
window closes, and a canary advances by time alone.

An error is shown in the conditions: a candidate that cannot be deployed is rejected while the serving revision
continues; for a revision that serves already, the existing objects stay as they are. Objects whose endpoint has no row
are not touched: this may be another database.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.cluster import ClusterProfile, ServingSpec
from eyrie_api.contract.placement import S3Work
from eyrie_api.contract.status import Endpoint
from eyrie_api.database.endpoints import Serving
from eyrie_api.database.engine import Database
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, Conflict, EyrieError, NotFound, Transient
from eyrie_api.settings import Settings
from eyrie_operator.cluster.client import Cluster, ClusterRejected, Object
from eyrie_operator.cluster.deployments import Deployments
from eyrie_operator.cluster.objects import APPLIED, ObjectCache, difference, is_applied, with_digest
from eyrie_operator.conditions import Conditions, find, observe, observe_recording
from eyrie_operator.endpoints import plan as act
from eyrie_operator.endpoints.engine_metrics import Counts, EngineCounters, Window, increase, read_metrics
from eyrie_operator.endpoints.plan import (
    EndpointPlan,
    ObservedCanary,
    ObservedEndpoint,
    ObservedEngine,
    ServePolicy,
    damaged_drafter,
    plan_endpoint,
)
from eyrie_operator.endpoints.records import EndpointRecords
from eyrie_operator.manifests.deployment import (
    ENDPOINT_LABEL,
    GROUP,
    OWNER_KIND,
    REVISION_LABEL,
    EndpointDeployment,
    Manifest,
    Owner,
    Undeployable,
)
from eyrie_operator.manifests.objects import base_url, render_endpoint
from eyrie_operator.manifests.rollout import (
    WORKLOAD,
    RolloutState,
    apply_plan,
    current_state,
    drafter_failure,
    observe_endpoint,
    obsolete_objects,
    policy_on_cluster,
)

log = logging.getLogger(__name__)

WINDOW, _CANARY_WINDOW = f"{GROUP}/window", f"{GROUP}/trial-begun"
"""Annotations of a revision's workload: where its acceptance window began, and its canary's share."""

_SCRAPE_TIMEOUT_S = 2.0

PROGRESSING_S, STEADY_S = 2.0, 15.0
"""Seconds until the next step while a revision starts, and otherwise (then only acceptance is observed). Changes of
objects and rows trigger a step earlier."""

OwnerOf = Callable[[str, str, Owner | None], Owner | None]
"""(namespace, name, current owner) -> the DraftEndpoint that owns the objects. Returns the current owner while no event
of a DraftEndpoint has arrived."""


@dataclass(frozen=True)
class _Snapshot:
    """One endpoint with its objects, as of one step."""

    endpoint: Endpoint
    serving: Serving
    objects: tuple[Object, ...]
    now: datetime

    @property
    def name(self) -> str:
        return self.endpoint.name

    def workload(self, revision: int) -> Object | None:
        return next((each for each in self.objects if each["kind"] == WORKLOAD
                     and each["metadata"]["labels"].get(REVISION_LABEL) == str(revision)), None)


class EndpointReconciler:
    """Reconciles a cluster's endpoints. Threads may share it; the workqueue gives an endpoint to one thread at a
    time."""

    def __init__(self, settings: Settings, profile: ClusterProfile, given: ServingSpec, database: Database,
                 cluster: Cluster, owner_of: OwnerOf, clock: Clock = utc_now) -> None:
        self._home, self._given, self._cluster, self._clock = settings.home, given, cluster, clock
        self._owner_of = owner_of
        work = given.placement.work or profile.stages.work
        self._records = EndpointRecords(settings, database, clock,
                                        Path(profile.home) / "jobs" if isinstance(work, S3Work) else None)
        self._deployments = Deployments(settings, profile, given)
        self.cache = ObjectCache(cluster, given.namespace)
        self._versions: dict[str, tuple[str, ...]] = {}
        self._defaulted: dict[tuple[str, str], str] = {}
        """Objects that the server stores differently from their manifest (defaulted or mutated), with the applied
        digest."""

    # When to reconcile.

    def sweep(self) -> tuple[str, ...]:
        """List all objects; returns the endpoints whose objects changed since the last call. Raises
        ClusterUnavailable."""
        self.cache.sweep()
        before, self._versions = self._versions, self.cache.versions()
        names = {*before, *self._versions}
        return tuple(sorted(name for name in names if before.get(name) != self._versions.get(name)))

    # One step.

    def reconcile(self, name: str) -> float | None:
        """One step of one endpoint; returns seconds until the next one, or None for an endpoint without a row."""
        try:
            endpoint, serving = self._records.endpoints.get(name), self._records.endpoints.serving(name)
        except NotFound:
            return None
        snapshot = _Snapshot(endpoint, serving, self.cache.of(name), self._clock())
        if endpoint.desired == "off":
            seen = observe_endpoint(snapshot.objects, replicas=1)
            plan = plan_endpoint(endpoint, ServePolicy(), seen, snapshot.now)
            moved = self._delete_obsolete(snapshot, ())
            moved = self._save_status(snapshot, plan, endpoint.conditions, None) or moved
            return PROGRESSING_S if moved else STEADY_S
        owners = [owner for each in snapshot.objects for owner in each["metadata"].get("ownerReferences", ())
                  if each["kind"] != "Pod" and owner["kind"] == OWNER_KIND]  # all objects have the same
        owner = self._owner_of(self._given.namespace, name,
                               Owner(uid=owners[0]["uid"], name=owners[0]["name"]) if owners else None)
        try:
            deployment = self._deployments.of(endpoint, serving, served=self.cache.served, owner=owner)
        except Transient:
            raise
        except EyrieError as error:
            return self._report_error(snapshot, error, self._reject(snapshot, error, endpoint.conditions)[0])
        policy = policy_on_cluster(self._records.policy(endpoint, serving), deployment)
        seen = self._observe(snapshot, deployment)
        return self._execute(snapshot, deployment, plan_endpoint(endpoint, policy, seen, snapshot.now), seen)

    def _execute(self, snapshot: _Snapshot, deployment: EndpointDeployment, plan: EndpointPlan,
                 seen: ObservedEndpoint) -> float:
        conditions, moved = snapshot.endpoint.conditions, False
        for action in plan.actions:  # rejections: recorded before the objects are deleted
            if isinstance(action, act.Reject | act.RollBack | act.CloseWindow | act.ReportDrift | act.ProposeNoDrafter):
                conditions, moved = self._record(action, snapshot, conditions, seen), True
        wanted = apply_plan(current_state(snapshot.objects), plan, snapshot.now)
        try:
            manifests, refusal, left = self._render(snapshot, deployment, wanted)
            refused, applied = self._apply(snapshot, manifests)
        except (Transient, Conflict):  # not the leader any more, or the object changed: the next step retries
            raise
        except EyrieError as error:
            return self._report_error(snapshot, error, conditions)
        refused, moved = refused or refusal, moved or applied
        if refused is not None:
            conditions, moved = self._reject(snapshot, refused, conditions)
            if not moved:
                return self._report_error(snapshot, refused, conditions)
        else:
            moved = self._delete_obsolete(snapshot, manifests, left) or moved
            for action in plan.actions:  # activations: recorded after the Service selects the revision
                if isinstance(action, act.Activate | act.ShareRoute):
                    conditions, moved = self._record(action, snapshot, conditions, seen), True
        conditions = _complete(snapshot, deployment, conditions)
        conditions = observe_recording(  # no gateway of Eyrie's records there
            conditions, self._records.policy(snapshot.endpoint, snapshot.serving).drift, 0, snapshot.now)
        workload = snapshot.workload(snapshot.endpoint.active_revision or 0)
        if plan.serving == "True" and deployment.replicas > 1 and workload is not None:
            available = workload.get("status", {}).get("availableReplicas", 0)
            plan = replace(plan, message=f"{plan.message}; {available} of {deployment.replicas} replicas are available")
        # The URL for clients: the gateway's hostname if it has one, else the Service's.
        gateway, url = deployment.cluster.gateway, base_url(snapshot.name, deployment.cluster.namespace)
        if gateway is not None and deployment.route_api is not None and gateway.hostnames:
            url = f"http://{gateway.hostnames[0]}/v1"
        moved = self._save_status(snapshot, plan, conditions, url) or moved
        if moved:
            return 0.0
        return STEADY_S if plan.serving == "True" and snapshot.endpoint.candidate_revision is None else PROGRESSING_S

    def _report_error(self, snapshot: _Snapshot, error: EyrieError, conditions: Conditions) -> float:
        """Leave the objects as they are, and report the error in the condition Serving."""
        seen = observe_endpoint(snapshot.objects, replicas=1)
        routed = seen.engine(seen.routed)
        message = f"existing objects are unchanged: {error}" if snapshot.objects else str(error)
        healthy = routed is not None and routed.state == "healthy"
        plan = EndpointPlan((), "True" if healthy else "False", error.reason, message)
        self._save_status(snapshot, plan, conditions, None)
        log.warning("endpoint %s: %s", snapshot.name, error)
        return STEADY_S

    def _reject(self, snapshot: _Snapshot, error: EyrieError, conditions: Conditions) -> tuple[Conditions, bool]:
        """Reject the candidate; returns the conditions and whether it was rejected. The target without a drafter is not
        rejected while nothing else serves: it is retried until the cause is removed."""
        endpoint = snapshot.endpoint
        candidate = endpoint.revision(endpoint.candidate_revision)
        if candidate is None or (endpoint.active_revision is None and candidate.use.setting.method == "off"):
            return conditions, False
        self._cluster.check()
        return self._records.reject_candidate(error, endpoint, conditions), True

    # Observation.

    def _observe(self, snapshot: _Snapshot, deployment: EndpointDeployment) -> ObservedEndpoint:
        seen = observe_endpoint(snapshot.objects, replicas=deployment.replicas)
        canary = seen.canary
        if canary is not None and canary.revision == snapshot.endpoint.candidate_revision:
            canary = self._with_answers(snapshot, deployment, canary)
        watched = self._records.watched(snapshot.endpoint)
        engines = tuple(self._with_window(snapshot, deployment, engine) for engine in seen.engines)
        return replace(seen, canary=canary, engines=engines, windows=watched.windows,
                       drift_reported=watched.drift_reported,
                       drafter_damage=self._drafter_damage(snapshot, deployment, seen))

    def _drafter_damage(self, snapshot: _Snapshot, deployment: EndpointDeployment, seen: ObservedEndpoint) -> str:
        active = snapshot.endpoint.revision(snapshot.endpoint.active_revision)
        engine = None if active is None else seen.engine(active.number)
        if active is None or (engine is not None and engine.state == "healthy"):
            return ""
        found = drafter_failure(snapshot.objects, active.number)
        job = self._records.promoted_from(snapshot.endpoint, active.number)
        try:
            self._deployments.with_drafter(deployment, active, None if job is None else job.spec)
        except (ArtifactMissing, ArtifactCorrupt) as error:
            found = found or error.message
        except EyrieError:
            pass  # reported where its objects are rendered
        return damaged_drafter(found) if found else ""

    def _with_window(self, snapshot: _Snapshot, deployment: EndpointDeployment,
                     engine: ObservedEngine) -> ObservedEngine:
        serving_or_canary = engine.revision in (snapshot.endpoint.active_revision, snapshot.endpoint.candidate_revision)
        workload = snapshot.workload(engine.revision)
        if engine.state != "healthy" or not serving_or_canary or workload is None:
            return engine
        counts = scrape_engines(snapshot.objects, engine.revision, deployment.cluster.port)
        if not counts:
            return engine
        began = _read_window(workload, WINDOW)
        if began is None:
            began = Window(since=snapshot.now, counts=dict(counts))
            self._write_window(snapshot, workload, WINDOW, began)
        return replace(engine, window=increase(counts, began.counts), window_since=began.since, counted=counts)

    def _with_answers(self, snapshot: _Snapshot, deployment: EndpointDeployment,
                      canary: ObservedCanary) -> ObservedCanary:
        """The canary with its answered and failed requests since it has its share."""
        workload = snapshot.workload(canary.revision)
        counts = scrape_engines(snapshot.objects, canary.revision, deployment.cluster.port)
        if workload is None or not counts:
            return canary
        began = _read_window(workload, _CANARY_WINDOW)
        if began is None or began.since != canary.since:
            self._write_window(snapshot, workload, _CANARY_WINDOW, Window(since=canary.since, counts=dict(counts)))
            return canary
        total = increase(counts, began.counts)
        return replace(canary, answered=int(total.answered), errors=int(total.failed))

    def _write_window(self, snapshot: _Snapshot, workload: Object, annotation: str, began: Window) -> None:
        metadata = workload["metadata"]
        self.cache.invalidate(snapshot.name)
        self._cluster.merge(workload["apiVersion"], workload["kind"], metadata["namespace"], metadata["name"],
                            {"metadata": {"annotations": {annotation: began.model_dump_json()}}})

    # Actions.

    def _record(self, action: act.EndpointAction, snapshot: _Snapshot, conditions: Conditions,
                seen: ObservedEndpoint) -> Conditions:
        self._cluster.check()
        if isinstance(action, act.CloseWindow):
            # The new window's baseline is written first. Killed in between, this window is lost; in the other order it
            # would be recorded twice, and one bad hour would count as drift.
            workload, engine = snapshot.workload(action.revision), seen.engine(action.revision)
            if workload is not None and engine is not None:
                self._write_window(snapshot, workload, WINDOW, next_window(
                    _read_window(workload, WINDOW), engine.counted, snapshot.objects, snapshot.now))
        return self._records.record(action, snapshot.endpoint, conditions,
                                    self._home.absolute() / "endpoints" / snapshot.name,
                                    lambda number: base_url(snapshot.name, self._given.namespace, number))

    def _render(self, snapshot: _Snapshot, deployment: EndpointDeployment,
                wanted: RolloutState) -> tuple[tuple[Manifest, ...], EyrieError | None, set[int]]:
        """The manifests, the error that excludes the candidate, and the revisions whose objects stay as they are.

        Raises the errors of other revisions, unless there is a candidate that goes ahead: it may be the way out."""
        candidate, refusal, left = snapshot.endpoint.candidate_revision, None, dict[int, EyrieError]()
        for revision in snapshot.endpoint.revisions:
            if revision.number not in wanted.engines:
                continue
            job = self._records.promoted_from(snapshot.endpoint, revision.number)
            try:
                deployment = self._deployments.with_drafter(deployment, revision, None if job is None else job.spec)
                render_endpoint(snapshot.endpoint, deployment, RolloutState(engines=(revision.number,)))
            except Transient:
                raise
            except EyrieError as error:
                if revision.number != candidate:
                    left[revision.number] = error
                    continue
                refusal = error
                wanted = replace(
                    wanted, engines=tuple(number for number in wanted.engines if number != candidate),
                    serving=None if wanted.serving == candidate else wanted.serving,
                    canary=None if wanted.canary is not None and wanted.canary.revision == candidate else wanted.canary)
        for reason in left.values():
            if refusal is not None or candidate not in wanted.engines:
                raise reason
            log.warning("endpoint %s: %s", snapshot.name, reason)
        engines = tuple(number for number in wanted.engines if number not in left)
        return render_endpoint(snapshot.endpoint, deployment, replace(wanted, engines=engines)), refusal, set(left)

    def _apply(self, snapshot: _Snapshot, manifests: Iterable[Manifest]) -> tuple[EyrieError | None, bool]:
        """Apply what differs. Returns the server's rejection of the candidate's objects, if any, and whether anything
        was written. Raises other rejections.
        """
        applied, existing = False, {(each["kind"], each["metadata"]["name"]): each for each in snapshot.objects}
        candidate = str(snapshot.endpoint.candidate_revision)
        for manifest in map(with_digest, manifests):
            key = (manifest["kind"], manifest["metadata"]["name"])
            there = existing.get(key)
            applied_digest = manifest["metadata"]["annotations"][APPLIED]
            if there is not None and is_applied(manifest, there) and (
                    self._defaulted.get(key) == applied_digest or difference(manifest, there) is None):
                continue
            if there is None:
                self._refuse_to_take_over(manifest)
            self.cache.invalidate(snapshot.name)
            try:
                written = self._cluster.apply(manifest, force=True)
            except ClusterRejected as refused:
                if manifest["metadata"]["labels"].get(REVISION_LABEL) == candidate:
                    return refused, applied
                raise
            applied = True
            where = difference(manifest, written)
            if where is not None:
                log.warning("%s %s: the server stores %s differently from the manifest", *key, where)
                self._defaulted[key] = applied_digest
            log.info("endpoint %s: applied %s %s", snapshot.name, *key)
        return None, applied

    def _refuse_to_take_over(self, manifest: Manifest) -> None:
        """Raises Undeployable when an object of that name exists and does not belong to the endpoint."""
        metadata = manifest["metadata"]
        try:
            there = self._cluster.get(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])
        except NotFound:
            return
        label = (there["metadata"].get("labels") or {}).get(ENDPOINT_LABEL)
        if label != metadata["labels"][ENDPOINT_LABEL]:
            raise Undeployable(f"{manifest['kind']} {metadata['name']} in namespace {metadata['namespace']} "
                               "exists and does not belong to this endpoint", "delete it, or rename the endpoint")

    def _delete_obsolete(self, snapshot: _Snapshot, manifests: Iterable[Manifest],
                         left: Collection[int] = ()) -> bool:
        """Delete objects that are not rendered any more, except those of the revisions in `left`; returns whether any
        were deleted."""
        obsolete = [each for each in obsolete_objects(snapshot.name, snapshot.objects, manifests)
                    if "deletionTimestamp" not in each["metadata"]
                    and each["metadata"]["labels"].get(REVISION_LABEL) not in map(str, left)]
        for each in obsolete:
            kind, name = each["kind"], each["metadata"]["name"]
            self.cache.invalidate(snapshot.name)
            self._cluster.delete(each["apiVersion"], kind, self._given.namespace, name, each["metadata"]["uid"])
            log.info("endpoint %s: deleted %s %s", snapshot.name, kind, name)
        return bool(obsolete)

    def _save_status(self, snapshot: _Snapshot, plan: EndpointPlan, conditions: Conditions, url: str | None) -> bool:
        conditions = observe(conditions, "Serving", plan.serving, plan.reason, plan.message, snapshot.now)
        if conditions == snapshot.endpoint.conditions and url in (None, snapshot.endpoint.url):
            return False
        self._cluster.check()
        return self._records.save_status(snapshot.endpoint, conditions, url)


def _complete(snapshot: _Snapshot, deployment: EndpointDeployment, conditions: Conditions) -> Conditions:
    """The condition Complete: configured features that this cluster lacks. None of them prevents serving."""
    missing = list(deployment.left_out())
    if snapshot.serving.serve.record_prompts:
        missing.append("serve.record_prompts has no effect on a cluster: set promotion.drift.traffic_file to a log of "
                       "your gateway")
    if missing:
        return observe(conditions, "Complete", "False", "FeatureUnavailable", "; ".join(missing), snapshot.now)
    if find(conditions, "Complete") is not None:
        return observe(conditions, "Complete", "True", "AllAvailable", "", snapshot.now)
    return conditions


def _read_window(workload: Mapping[str, Any], annotation: str) -> Window | None:
    """None when it is absent or invalid."""
    try:
        return Window.model_validate_json((workload["metadata"].get("annotations") or {})[annotation])
    except (KeyError, ValueError):
        return None


def next_window(began: Window | None, counted: Counts, objects: Iterable[Mapping[str, Any]],
                now: datetime) -> Window:
    """The window after one that is closed. Pure. A process that did not respond was not judged either, and keeps where
    it began; one that has ended is left out."""
    there = {_process_of(each) for each in objects if each["kind"] == "Pod"}
    kept = {process: counts for process, counts in (began.counts if began else {}).items() if process in there}
    return Window(since=now, counts=kept | dict(counted))


def scrape_engines(objects: Iterable[Mapping[str, Any]], revision: int, port: int) -> Counts:
    """Counters of each engine process of a revision; processes that do not respond are left out."""
    counts: dict[str, EngineCounters] = {}
    with httpx.Client(trust_env=False, timeout=_SCRAPE_TIMEOUT_S) as client:
        for pod in objects:
            if pod["kind"] != "Pod" or pod["metadata"].get("labels", {}).get(REVISION_LABEL) != str(revision):
                continue
            status = pod.get("status", {})
            address, containers = status.get("podIP"), status.get("containerStatuses", ())
            if address is None or not all(container.get("ready") for container in containers):
                continue
            host = f"[{address}]" if ":" in address else address
            try:
                response = client.get(f"http://{host}:{port}/metrics")
                counts[_process_of(pod)] = read_metrics(response.raise_for_status().text)
            except (httpx.HTTPError, ValueError) as error:
                log.debug("pod %s: %s", pod["metadata"]["name"], error)
    return counts


def _process_of(pod: Mapping[str, Any]) -> str:
    """Names the engine process of a pod; another one after a restart of its containers."""
    restarts = sum(status.get("restartCount", 0) for status in pod.get("status", {}).get("containerStatuses", ()))
    return f"{pod['metadata']['uid']}/{restarts}"
