"""Executes the pure `reconcile` for objects of the cluster and rows of the database.

`handle_event` receives objects from the watches, `poll` finds changed rows; both only put keys into the queue. A worker
takes a key, reads the object from its cache and the row from the database, calls `reconcile` and executes the actions.
The cache holds the object of the latest event. A write carries the resourceVersion it was planned for: if the object
has changed since, the API server rejects the write, and the event of the change triggers a new plan.

After a restart every object is reconciled once, and nothing is written where the status is correct: 1,000 objects cost
the reads of 1,000 jobs and as many writes as there are differences. Rows of objects that wait for a quota are compared
in the same pass; those of objects that were deleted meanwhile are found by `resync`.

Jobs are found by the id in the status, checked against the uid in the job's labels. Submission is idempotent by uid
(`eyrie_api.database.idempotency`): an operator killed between submission and status update receives the same job again,
and two operators cannot both submit. Jobs posted to the REST API, and endpoints without an object, get a mirror object
where a mirror namespace is configured.

Where endpoints run on the cluster, endpoint rows are keys as well, reconciled by the same workers (`endpoints`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from eyrie_api.access.roles import Principal
from eyrie_api.access.scope import DEFAULT_PROJECT, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.model import API_VERSION
from eyrie_api.contract.read_rules import EndpointRules
from eyrie_api.contract.resources import FINALIZER, NAME_LABEL, NAMESPACE_LABEL
from eyrie_api.contract.status import Endpoint, Job
from eyrie_api.database import endpoint_names
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency, Once
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.quotas import PriorityClassRefused, QuotaReached, WaitingObjects
from eyrie_api.errors import EyrieError, Forbidden, InvalidInput, NotFound, Transient
from eyrie_api.planning import preflight, spec_policy
from eyrie_api.planning.placement import read_profile
from eyrie_api.planning.published_drafters import with_drafters_of_jobs
from eyrie_api.planning.resolve import replicas_of
from eyrie_api.settings import Settings
from eyrie_operator.cluster import reconcile as act
from eyrie_operator.cluster.client import Cluster, ClusterConflict, ClusterRejected, Object
from eyrie_operator.cluster.endpoints import EndpointReconciler
from eyrie_operator.cluster.leases import NotLeader
from eyrie_operator.cluster.reconcile import (
    JobHistory,
    orphaned,
    reconcile_endpoint,
    reconcile_job,
    refuse_endpoint,
    refuse_job,
    wait_for_quota,
)
from eyrie_operator.cluster.resources import (
    EndpointResource,
    Identity,
    JobResource,
    KubernetesEvent,
    applied_uid,
    mirror_of,
    mirror_of_endpoint,
    read_endpoint,
    read_job,
)
from eyrie_operator.cluster.workqueue import Telemetry, Workqueue
from eyrie_operator.conditions import is_over
from eyrie_operator.manifests.deployment import Owner
from eyrie_operator.unscheduled import waiting_pods
from eyrie_pipelines.runner import RUN_LABEL, STAGE_LABEL

log = logging.getLogger(__name__)

Kind = Literal["DrafterJob", "DraftEndpoint"]
KINDS: tuple[Kind, ...] = ("DrafterJob", "DraftEndpoint")
Key = tuple[Kind | Literal["Endpoint"], str, str]
"""Kind, namespace, name. An Endpoint is a row and has no namespace."""

_ROUTE = "kubernetes/drafterjobs"
_FULL_CHECK_S = 15.0
"""Requeue delay of an object whose project has reached a quota."""

_NEVER_EXPIRES_S = 10 * 365 * 24 * 3600.0
_OVERLAP = timedelta(seconds=10)
"""Race: several machines stamp rows before they commit, so a row can appear with an earlier time. Each poll reads this
much of the previous interval again."""


class Controller:
    """The controller of one operator. Several worker threads share it; the queue gives a key to one thread at a
    time."""

    def __init__(self, settings: Settings, database: Database, cluster: Cluster, telemetry: Telemetry, *,
                 mirror_namespace: str | None = None, namespaces: Sequence[str] = (),
                 runs_namespace: str | None = None, projects: Mapping[str, str] | None = None, clock: Clock = utc_now,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        """`projects` maps namespaces to the project of their objects; other namespaces belong to `default`.
        `runs_namespace` is that of the runs' pods: see `program.Options`."""
        self._settings, self._cluster, self._telemetry, self._clock = settings, cluster, telemetry, clock
        self._database = database
        self._idempotency = Idempotency(database, _NEVER_EXPIRES_S, clock)
        self._jobs, self._endpoints = Jobs(database, clock, self._idempotency), Endpoints(database, clock)
        self._waiting = WaitingObjects(database)
        self._mirror_namespace, self._namespaces = mirror_namespace, tuple(namespaces)
        self._projects = dict(projects or {})
        self._endpoint_reconciler: EndpointReconciler | None = None
        profile = self._profile = None if settings.cluster_profile is None else read_profile(settings.cluster_profile)
        if profile is not None and profile.serving is not None:
            self._endpoint_reconciler = EndpointReconciler(
                settings, profile, profile.serving, database, cluster, self._owner, clock)
        self.queue: Workqueue[Key] = Workqueue(monotonic)
        self._objects: dict[Key, Object] = {}
        self._key_of: dict[str, Key | None] = {}
        """By job id, the object that shows it; None: posted to the REST API, without a mirror."""

        self._rows_seen: dict[str, datetime] = {}
        self._polled = clock() - _OVERLAP
        self._monotonic = monotonic
        runs_in = runs_namespace or (profile.kubeflow.namespace if profile is not None else None)
        self._runs_in: tuple[str | None, ...] = (runs_in,) if runs_in else self._namespaces or (None,)
        self._unlisted: set[str | None] = set()
        """Namespaces whose pods this operator may not list."""

    # Events.

    def handle_event(self, kind: Kind, event: str, raw: Object) -> None:
        """An object exists, has changed, or (event DELETED) was deleted."""
        metadata = raw["metadata"]
        key: Key = (kind, metadata["namespace"], metadata["name"])
        if event == "DELETED":
            self._objects.pop(key, None)
        else:
            self._cache_object(key, raw)
        self.queue.add(key)

    def resync(self) -> None:
        """Enqueue every object, in case an event was lost or a row deleted."""
        for key in tuple(self._objects):
            self.queue.add(key)
        if self._mirror_namespace is not None:
            for job_id in self._jobs.unfinished():
                self._keys_for(job_id)
        if self._endpoint_reconciler is not None:
            self._endpoint_reconciler.cache.discover()  # an API may have been installed since
            for endpoint in self._endpoints.list().items:
                self.queue.add(("Endpoint", "", endpoint.name))
        # Delete the rows of waiting objects that were deleted while no operator watched. Those of existing objects are
        # corrected by their reconciliation.
        unseen = [row for row in self._waiting.all() if ("DrafterJob", row.namespace, row.name) not in self._objects]
        if unseen:
            for row in orphaned(unseen, {each["metadata"]["uid"] for each in self._list_watched("DrafterJob")}):
                self._waiting.remove(row)

    def poll(self) -> None:
        """Enqueue the objects of rows that changed since the last poll."""
        now = self._clock()
        changed = dict(self._jobs.changed_since(self._polled - _OVERLAP))
        endpoints = self._endpoints.list().items
        for endpoint in endpoints:
            keys = self._keys_named(endpoint.name)
            if self._endpoint_reconciler is not None:
                keys = (*keys, ("Endpoint", "", endpoint.name))
            self._see_row(f"endpoint/{endpoint.name}", endpoint.updated_at, keys)
        for job_id, updated_at in changed.items():
            if self._rows_seen.get(job_id) != updated_at:
                self._see_row(job_id, updated_at, self._keys_for(job_id))
        self._polled = now
        if self._mirror_namespace is not None:
            self._mirror_endpoints(endpoints, self._mirror_namespace)

    def sweep(self) -> None:
        """Enqueue endpoints whose objects in the cluster have changed."""
        if self._endpoint_reconciler is not None:
            for name in self._endpoint_reconciler.sweep():
                self.queue.add(("Endpoint", "", name))
                for key in self._keys_named(name):  # a deleted DraftEndpoint waits until its objects are gone
                    self.queue.add(key)

    def observe_pods(self) -> None:
        """Record which pods of runs do not start, for the drivers of their jobs (`unscheduled`)."""
        if self._profile is None:
            return
        pods: list[Object] = []
        for namespace in self._runs_in:
            if namespace in self._unlisted:
                continue
            try:
                pods += self._cluster.list_all("v1", "Pod", namespace, labelled=f"{RUN_LABEL},{STAGE_LABEL}",
                                               fields="status.phase=Pending")
            except ClusterRejected as refused:
                log.warning("pods that wait are not shown: this operator may not list pods in %s: %s",
                            namespace or "all namespaces", refused)
                self._unlisted.add(namespace)
        self._cluster.check()
        self._jobs.record_waiting_pods(waiting_pods(pods))

    def _see_row(self, row: str, updated_at: datetime, keys: tuple[Key, ...]) -> None:
        if self._rows_seen.get(row) != updated_at:
            self._rows_seen[row] = updated_at
            for key in keys:
                self.queue.add(key)

    def _keys_named(self, name: str) -> tuple[Key, ...]:
        return tuple(key for key in tuple(self._objects) if key[0] == "DraftEndpoint" and key[2] == name)

    def _keys_for(self, job_id: str) -> tuple[Key, ...]:
        """The key of a job's object; creates the mirror of a job posted to the REST API."""
        if job_id not in self._key_of:
            try:
                job = self._jobs.get(job_id)
            except NotFound:
                return ()
            labels = job.spec.labels
            if applied_uid(job) is not None:
                self._key_of[job_id] = ("DrafterJob", labels.get(NAMESPACE_LABEL, ""), labels.get(NAME_LABEL, ""))
            elif self._mirror_namespace is None:
                self._key_of[job_id] = None
            else:
                mirror: Key = ("DrafterJob", self._mirror_namespace, job_id)
                if not is_over(job.status.conditions) and mirror not in self._objects:
                    try:
                        raw = self._cluster.get(API_VERSION, *mirror)
                    except NotFound:
                        raw = self._cluster.apply(mirror_of(job, self._mirror_namespace))
                    self._cache_object(mirror, raw)
                self._key_of[job_id] = mirror  # after the mirror exists: an error is retried by the next poll
        key = self._key_of[job_id]
        return () if key is None else (key,)

    def _list_watched(self, kind: Kind) -> Iterator[Object]:
        """All objects of the watched namespaces. Race: events may lag, most of all after the start."""
        for watched in self._namespaces or (None,):
            yield from self._cluster.list_all(API_VERSION, kind, watched)

    def _mirror_endpoints(self, endpoints: Sequence[Endpoint], namespace: str) -> None:
        """Create a mirror for each endpoint that is on and has no object in any watched namespace."""
        missing = [each for each in endpoints if each.desired == "on" and not self._entitled_keys(each.name)
                   and ("DraftEndpoint", namespace, each.name) not in self._objects]
        if not missing:
            return
        # Listing avoids a mirror for an endpoint that was applied.
        existing = {(each["metadata"]["name"], each["metadata"]["namespace"])
                    for each in self._list_watched("DraftEndpoint")}
        for endpoint in missing:
            project = self._endpoints.project_of(endpoint.name)
            if not any(name == endpoint.name and (where == namespace or self._project_at(where) == project)
                       for name, where in existing):
                self._apply_mirror(endpoint, namespace)

    def _apply_mirror(self, endpoint: Endpoint, namespace: str) -> None:
        serving = self._endpoints.serving(endpoint.name)
        shown = mirror_of_endpoint(endpoint, serving.target, serving.serve, namespace)
        self._cache_object(("DraftEndpoint", namespace, endpoint.name), self._cluster.apply(shown, force=True))

    def _owner(self, namespace: str, name: str, now: Owner | None) -> Owner | None:
        """The owner of an endpoint's objects; the current one while no event of its DraftEndpoint has arrived."""
        key: Key = ("DraftEndpoint", namespace, name)
        raw = self._objects.get(key)
        if raw is None:
            return now
        resource = read_endpoint(raw, self._mirror_namespace)
        first = min(self._entitled_keys(name), key=self._age, default=None)
        if resource.keep_outside or first != key:
            return None
        return Owner(uid=resource.identity.uid, name=name)

    # Reconciling.

    def process_next(self) -> bool:
        """Reconcile the next key, waiting for one; False when the queue is closed."""
        key = self.queue.take()
        if key is None:
            return False
        began = self._monotonic()
        try:
            self._reconcile(key)
            self.queue.forget(key)
        except NotLeader:
            log.info("%s %s/%s: this operator no longer leads", *key)
        except ClusterConflict as conflict:
            # Race: the object changed after it was cached. The event of that change is expected; if it is lost, the
            # delayed retry reads the change.
            log.info("%s %s/%s: %s", *key, conflict.message)
            self.queue.failed(key)
        except Exception as error:  # an error of one object must not end the worker
            reason = error.reason if isinstance(error, EyrieError) else type(error).__name__
            self._telemetry.errors.labels(key[0], reason).inc()
            delay_s = self.queue.failed(key)
            log.warning("%s %s/%s: %s; retrying in %.1f s", *key, error, delay_s,
                        exc_info=None if isinstance(error, EyrieError) else error)
        finally:
            self.queue.done(key)
            self._telemetry.reconciled.labels(key[0]).inc()
            self._telemetry.seconds.labels(key[0]).observe(self._monotonic() - began)
        return True

    def _reconcile(self, key: Key) -> None:
        if key[0] == "Endpoint":
            again_s = self._endpoint_reconciler.reconcile(key[2]) if self._endpoint_reconciler is not None else None
            if again_s is not None:
                self.queue.add_after(key, again_s)
            return
        raw = self._objects.get(key)
        if raw is None:
            if key[0] == "DrafterJob" and (gone := self._waiting.find(*key[1:])) is not None:
                self._waiting.remove(gone)
            return
        if key[0] == "DrafterJob":
            resource = read_job(raw, self._mirror_namespace)
            job = self._find_job(resource)
            if job is not None:
                self._key_of[job.id] = key
            self._execute(key, resource, reconcile_job(resource, job, self._memory(resource, job), self._clock()))
        else:
            endpoint = read_endpoint(raw, self._mirror_namespace)
            try:
                row = self._endpoints.get(endpoint.identity.name)
            except NotFound:
                row = None
            # Who has the name, if not this object. Other projects' namespaces are not disclosed.
            keys, taken_by = self._entitled_keys(key[2]), None
            first = min(keys, key=self._age, default=None)
            if first != key and not (first is None and key not in self._objects):  # it may have been deleted meanwhile
                taken_by = f"{first[1]}/{first[2]}" if first is not None and key in keys else "another project"
            serve = None if row is None else self._endpoints.serving(row.name).serve
            existing = () if self._endpoint_reconciler is None else self._endpoint_reconciler.cache.known(key[2])
            self._execute(key, endpoint, reconcile_endpoint(
                endpoint, row, self._clock(), taken_by, serve, existing))
            if self._endpoint_reconciler is not None:  # the owner of its objects may have changed
                self.queue.add(("Endpoint", "", key[2]))

    def _find_job(self, resource: JobResource) -> Job | None:
        uid = resource.identity.uid
        # Race: the id of a submitted job may not be in the status yet, or the operator was killed before it wrote it.
        # The claim shows that there is a job, which would otherwise run on when the object is suspended or deleted.
        job_id = resource.job_id or self._submitted_as(uid)
        if job_id is None:
            return None
        try:
            job = self._jobs.get(job_id)
        except NotFound:
            return None
        mine = resource.mirrored if applied_uid(job) is None else applied_uid(job) == uid
        return job if mine else None

    def _entitled_keys(self, name: str) -> tuple[Key, ...]:
        """The DraftEndpoints of that name that may change the row: objects in namespaces of the project that owns the
        name, and the row's mirror. While the name is free, all."""
        project = self._endpoints.project_of(name)
        return tuple(key for key in self._keys_named(name) if project is None or self._project_at(key[1]) == project
                     or ((raw := self._objects.get(key)) is not None
                         and read_endpoint(raw, self._mirror_namespace).mirrored))

    def _age(self, key: Key) -> tuple[str, str]:
        """Sort key: creation time, then namespace."""
        raw = self._objects.get(key)
        return ("" if raw is None else raw["metadata"].get("creationTimestamp", ""), key[1])

    def _memory(self, resource: JobResource, job: Job | None) -> JobHistory:
        """Read only where it affects the decision: these are additional queries."""
        waiting = self._waiting.find(resource.identity.namespace, resource.identity.name)
        if job is None:
            known = resource.job_id is not None and not resource.mirrored and not resource.deleting
            return JobHistory(deleted=known and self._submitted_as(resource.identity.uid) is not None, waiting=waiting)
        endpoints = self._endpoints.list().items if resource.deleting else ()
        served_by = next((endpoint.name for endpoint in endpoints for revision in endpoint.revisions
                          if revision.job_id == job.id and revision.number in (
                              endpoint.active_revision, endpoint.candidate_revision)), None)
        return JobHistory(served_by=served_by, waiting=waiting)

    def _submitted_as(self, uid: str) -> str | None:
        """The job that was submitted for the object; None when there was none."""
        replay = self._idempotency.find(Once(uid, _ROUTE, uid))
        return None if replay is None else str(replay["id"])

    def _execute(self, key: Key, resource: JobResource | EndpointResource, actions: act.Actions) -> None:
        """Execute actions in order. A key whose row or object changed is enqueued again at once."""
        moved = False
        for action in actions:
            if moved and isinstance(action, KubernetesEvent | act.UpdateStatus):
                continue  # planned for the state before the change
            if isinstance(action, act.CreateJob):
                assert isinstance(resource, JobResource)
                refused = self._submit(action, resource)
                self._execute(key, resource, refused)
                moved = moved or not refused
            else:
                try:
                    moved = self._execute_one(key, action, resource.identity) or moved
                except (QuotaReached, PriorityClassRefused, InvalidInput) as refusal:
                    if isinstance(action, act.ChangeJob) and isinstance(refusal, QuotaReached):
                        project = self._jobs.project_of(action.job_id)
                        self._execute(key, resource, self._wait(resource.identity, project, refusal))
                        return
                    if not isinstance(resource, EndpointResource):
                        raise
                    refused = refuse_endpoint(resource, refusal.reason, str(refusal), self._clock())
                    self._execute(key, resource, (*refused, act.RequeueAfter(_FULL_CHECK_S)))
                    return
        if moved:
            self.queue.add(key)

    def _execute_one(self, key: Key, action: act.Action, identity: Identity) -> bool:
        """Execute one action; returns whether it changed the object or its row."""
        match action:
            case act.SetFinalizer():
                others = [each for each in self._objects[key]["metadata"].get("finalizers") or [] if each != FINALIZER]
                finalizers = [*others, FINALIZER] if action.held else others
                self._cache_object(key, self._cluster.set_finalizers(identity, finalizers))
            case act.Annotate():
                self._cache_object(key, self._cluster.annotate(identity, action.name, action.value))
            case act.DeleteResource():
                log.info("%s %s/%s: deleting: %s", *key, action.why)
                self._cluster.delete(API_VERSION, identity.kind, identity.namespace, identity.name, identity.uid)
                return False  # the event of the deletion follows; until then the cached object would be deleted again
            case act.UpdateMirror():
                self._apply_mirror(self._endpoints.get(identity.name), identity.namespace)
            case act.UpdateStatus():
                self._cache_object(key, self._cluster.write_status(identity, action.status))
                return False
            case KubernetesEvent():
                self._cluster.post_event(identity, action, self._clock())
                return False
            case act.RequeueAfter():
                self.queue.add_after(key, action.after_s)
                return False
            case act.RecordWaiting():
                self._waiting.record(action.waiting)
                return False
            case act.RemoveWaiting():
                self._waiting.remove(action.waiting)
                return False
            case act.ChangeJob():
                if action.change == "delete":
                    return self._jobs.delete(action.job_id)  # not deleted before it has stopped: looked at again later
                change: Callable[[str], object] = self._jobs.cancel if action.change == "cancel" else self._jobs.retry
                change(action.job_id)
            case act.CreateEndpoint():
                project = self._project_at(identity.namespace)
                rules = spec_policy.check_target(action.target, self._settings, self._belongs_to(project))
                self._endpoints.create(identity.name, action.target, action.serve, _model_name(action.target.model),
                                       project, replicas_of(action.serve, self._profile),
                                       reads=EndpointRules(rules=rules), checked=True)
            case act.UpdateServing():
                target = self._endpoints.serving(identity.name).target
                is_on = self._endpoints.get(identity.name).desired == "on"
                self._endpoints.create(identity.name, target, action.serve, _model_name(target.model),
                                       num_replicas=replicas_of(action.serve, self._profile), checked=is_on)
                # It does not affect the status, which can be written in the same pass with the current generation.
                return False
            case act.SetDesired():
                self._endpoints.set_desired(identity.name, action.desired, checked=True)
            case _:
                raise TypeError(f"unknown action {type(action).__name__}")
        return True

    def _submit(self, action: act.CreateJob, resource: JobResource) -> act.Actions:
        """Submit once per uid; returns the actions that report a rejection, if any."""
        once, project = Once(action.key, _ROUTE, action.key), self._project_at(resource.identity.namespace)
        try:
            done: Job | dict[str, Any] | None = self._idempotency.find(once)
            if done is None:
                spec = endpoint_names.with_project_endpoint(action.spec, project)
                # The same checks as for a REST caller with access to this project only, in namespaces without a project
                # too: who may create objects there is not an administrator of the installation.
                viewed = Jobs(self._database, scope=_viewer_of(project))
                spec = with_drafters_of_jobs(spec, viewed.get, self._settings.home)
                rules = spec_policy.check(spec, self._settings, self._belongs_to(project))
                done = self._jobs.submit_once(preflight.check(spec, self._settings, rules), once, project,
                                              None if resource.spec is None else resource.spec.job)
        except QuotaReached as full:  # not an error of the spec: retried when the project may have capacity
            refused = refuse_job(resource, full.reason, str(full), self._clock(), over=False)
            return (*self._wait(resource.identity, project, full), *refused)
        except Transient:
            raise
        except EyrieError as error:
            return refuse_job(resource, error.reason, str(error), self._clock(), over=True)
        job_id = done.id if isinstance(done, Job) else str(done["id"])
        try:
            self._jobs.get(job_id)
        except NotFound:
            return (act.DeleteResource(f"its job {job_id} was deleted at the REST API"),)
        return ()

    def _wait(self, identity: Identity, project: str, full: QuotaReached) -> act.Actions:
        stored = self._waiting.find(identity.namespace, identity.name)
        return (*wait_for_quota(identity, project, full, stored, self._clock()), act.RequeueAfter(_FULL_CHECK_S))

    def _project_at(self, namespace: str) -> str:
        return self._projects.get(namespace, DEFAULT_PROJECT)

    def _belongs_to(self, project: str) -> spec_policy.IsMine:
        """Whether objects of this project may reference a path under EYRIE_HOME: what the project's viewers may
        read."""
        scope = _viewer_of(project)
        jobs, endpoints = Jobs(self._database, scope=scope), Endpoints(self._database, scope=scope)

        def is_mine(kind: str, name: str) -> bool:
            try:
                (jobs if kind == "jobs" else endpoints).get(name)
            except (NotFound, Forbidden):
                return False
            return True

        return is_mine

    def _cache_object(self, key: Key, raw: Object) -> None:
        """Cache an object unless a newer version is cached. Race: responses to our writes arrive before older
        events."""
        def version(each: Object) -> int:  # documented as comparable since Kubernetes 1.35; with etcd always an integer
            text = str(each["metadata"].get("resourceVersion", "0"))
            return int(text) if text.isdigit() else 0

        known = self._objects.get(key)
        if known is None or known["metadata"]["uid"] != raw["metadata"]["uid"] or version(raw) >= version(known):
            self._objects[key] = raw


def _viewer_of(project: str) -> Scope:
    return Scope(Principal(subject="kubernetes", roles={project: "viewer"}), project)


def _model_name(model: str) -> str:
    """The model name for clients: the last part of a path, or the Hub id."""
    return Path(model).name if Path(model).is_absolute() else model
