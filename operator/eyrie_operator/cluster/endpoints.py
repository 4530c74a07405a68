"""World 1: endpoints on a cluster, as Deployments and Services. The leader tends every endpoint row.

One step: look at the row and at what stands of it, ask the pure `plan_endpoint` what to do, let `rollout.apply_plan`
say what should stand then, apply what differs, delete what is obsolete_objects, write down what was decided. It may be
killed at any line: what is given up is written down before its objects go, what serves is written down after the
Service leads there, and the next step, of whichever operator leads then, finds either half and does the other.

Nothing is written when nothing has changed (`unchanged`), to the cluster or to rows, and nothing is listed per endpoint
at rest (`standing`). Every write asks the fence first, those to rows included.

What cannot be served is told in the conditions: a candidate that cannot be is rejected and what served goes on; for one
that serves already, what stands is left as it is. Objects of a name without a row are nobody's business here: the
database may be another one.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.endpoints import Serving
from eyrie_api.database.engine import Database
from eyrie_api.errors import Conflict, EyrieError, NotFound, Transient
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.cluster import ClusterProfile, ServingSpec
from eyrie_api.v1alpha1.status import Endpoint
from eyrie_operator.cluster.apply import Cluster, ClusterRejected, Object
from eyrie_operator.cluster.deployments import Deployments
from eyrie_operator.cluster.manifest_diff import difference, is_applied, with_digest
from eyrie_operator.cluster.metric_windows import (
    CANARY_BASELINE,
    WINDOW_BASELINE,
    CounterBaseline,
    read_baseline,
    scrape_engines,
)
from eyrie_operator.cluster.object_cache import ObjectCache
from eyrie_operator.conditions import Conditions, find, observe
from eyrie_operator.endpoints.engine_metrics import grown
from eyrie_operator.endpoints.plan import plan_endpoint
from eyrie_operator.endpoints.records import EndpointRecords
from eyrie_operator.endpoints.state import (
    Activate,
    CloseWindow,
    EndpointAction,
    EndpointPlan,
    ObservedEndpoint,
    ObservedEngine,
    ProposeNoDrafter,
    Reject,
    ReportDrift,
    RollBack,
    ServePolicy,
    ShareRoute,
)
from eyrie_operator.manifests.deployment import EndpointDeployment, Owner, Undeployable
from eyrie_operator.manifests.endpoint import render_endpoint
from eyrie_operator.manifests.names import ENDPOINT_LABEL, REVISION_LABEL, Manifest
from eyrie_operator.manifests.observed import observe_endpoint
from eyrie_operator.manifests.rollout import (
    WORKLOADS,
    RolloutState,
    apply_plan,
    current_state,
    obsolete_objects,
    policy_on_cluster,
)
from eyrie_operator.manifests.traffic import base_url

log = logging.getLogger(__name__)

UNDER_WAY_S, AT_REST_S = 2.0, 15.0
"""How soon to look again while something is coming up, and while nothing is: then only acceptance is watched. What
changes in the cluster or in a row shows earlier, by the sweep."""

OwnerOf = Callable[[str, str, Owner | None], Owner | None]
"""The DraftEndpoint of that namespace and name, when it is to own the objects; the third, who owns them now, when
nothing has been heard of one yet."""


@dataclass(frozen=True)
class _Look:
    """One endpoint at one moment."""

    endpoint: Endpoint
    serving: Serving
    objects: tuple[Object, ...]
    now: datetime

    @property
    def name(self) -> str:
        return self.endpoint.name

    def workload(self, revision: int) -> Object | None:
        return next((one for one in self.objects if one["kind"] in WORKLOADS
                     and one["metadata"]["labels"].get(REVISION_LABEL) == str(revision)), None)


class EndpointReconciler:
    """The one who tends a cluster's endpoints. Several threads may, none the same endpoint."""

    def __init__(self, settings: Settings, profile: ClusterProfile, given: ServingSpec, database: Database,
                 cluster: Cluster, owner_of: OwnerOf, clock: Clock = utc_now) -> None:
        self._home, self._given, self._cluster, self._clock = settings.home, given, cluster, clock
        self._owner_of = owner_of
        self._records = EndpointRecords(settings, database, clock)
        self._deployments = Deployments(settings, profile, given)
        self.standing = ObjectCache(cluster, given.namespace)
        self._versions: dict[str, tuple[str, ...]] = {}
        self._settled: dict[tuple[str, str], str] = {}
        """Objects that the server keeps otherwise than we write them, with the digest they were applied under."""

    # When to look.

    def sweep(self) -> tuple[str, ...]:
        """List what stands; the endpoints whose objects have changed since the last time. Raises ClusterUnavailable."""
        self.standing.sweep()
        before, self._versions = self._versions, self.standing.versions()
        names = {*before, *self._versions}
        return tuple(sorted(name for name in names if before.get(name) != self._versions.get(name)))

    def discover(self) -> None:
        """Ask again what the server has: an API may have been installed since. Raises ClusterUnavailable."""
        self.standing.discover()

    # One step.

    def tend(self, name: str) -> float | None:
        """One step of one endpoint; in how many seconds to look again, None for one that has no row."""
        try:
            endpoint, serving = self._records.endpoints.get(name), self._records.endpoints.serving(name)
        except NotFound:
            return None
        look = _Look(endpoint, serving, self.standing.of(name), self._clock())
        if endpoint.desired == "off":
            return self._switch_off(look)
        owner = self._owner_of(self._given.namespace, name, _owner_now(look.objects))
        try:
            deployment = self._deployments.of(endpoint, serving, served=self.standing.served, owner=owner)
        except Transient:
            raise
        except EyrieError as error:
            return self._stuck(look, error, self._refuse(look, error, endpoint.conditions)[0])
        policy = policy_on_cluster(self._records.policy(endpoint, serving), deployment)
        plan = plan_endpoint(endpoint, policy, self._see(look, deployment), look.now)
        return self._carry_out(look, deployment, plan)

    def _switch_off(self, look: _Look) -> float:
        seen = observe_endpoint(look.name, look.objects, replicas=1)
        plan = plan_endpoint(look.endpoint, ServePolicy(), seen, look.now)
        moved = self._clear(look, ())
        moved = self._tell(look, plan, look.endpoint.conditions, None) or moved
        return UNDER_WAY_S if moved else AT_REST_S

    def _carry_out(self, look: _Look, deployment: EndpointDeployment, plan: EndpointPlan) -> float:
        conditions, moved = look.endpoint.conditions, False
        for action in plan.actions:  # what is given up: before its objects go
            if isinstance(action, Reject | RollBack | CloseWindow | ReportDrift | ProposeNoDrafter):
                conditions, moved = self._record(action, look, conditions), True
        wanted = apply_plan(current_state(look.name, look.objects), plan, look.now)
        try:
            manifests, refusal = self._render(look, deployment, wanted)
            refused, applied = self._apply(look, manifests)
        except (Transient, Conflict):  # another leads, or was faster: looked at again
            raise
        except EyrieError as error:
            return self._stuck(look, error, conditions)
        refused, moved = refused or refusal, moved or applied
        if refused is not None:
            conditions, moved = self._refuse(look, refused, conditions)
            if not moved:
                return self._stuck(look, refused, conditions)
        else:
            moved = self._clear(look, manifests) or moved
            for action in plan.actions:  # what serves: after it does
                if isinstance(action, Activate | ShareRoute):
                    conditions, moved = self._record(action, look, conditions), True
        conditions = _lacking(look, deployment, conditions)
        plan = replace(plan, message=plan.message + _replica_words(look, deployment, plan))
        moved = self._tell(look, plan, conditions, _url(look.name, deployment)) or moved
        if moved:
            return 0.0
        return AT_REST_S if plan.serving == "True" and look.endpoint.candidate_revision is None else UNDER_WAY_S

    def _stuck(self, look: _Look, error: EyrieError, conditions: Conditions) -> float:
        """What stands is left as it is; the words say what keeps it from being changed."""
        seen = observe_endpoint(look.name, look.objects, replicas=1)
        serves = seen.engine(seen.routed)
        words = f"what stands is left as it is: {error}" if look.objects else str(error)
        healthy = serves is not None and serves.state == "healthy"
        plan = EndpointPlan((), "True" if healthy else "False", error.reason, words)
        self._tell(look, plan, conditions, None)
        log.warning("endpoint %s: %s", look.name, error)
        return AT_REST_S

    def _refuse(self, look: _Look, error: EyrieError, conditions: Conditions) -> tuple[Conditions, bool]:
        """Give the candidate up; whether that was done. Not where there is nothing else: the bare target, with nothing
        serving, waits for whoever hints it."""
        endpoint = look.endpoint
        candidate = next((one for one in endpoint.revisions if one.number == endpoint.candidate_revision), None)
        if candidate is None or (endpoint.active_revision is None and candidate.use.setting.method == "off"):
            return conditions, False
        self._cluster.check()
        return self._records.refuse(error, endpoint, conditions), True

    # Looking.

    def _see(self, look: _Look, deployment: EndpointDeployment) -> ObservedEndpoint:
        stands = current_state(look.name, look.objects)
        answers = (0, 0)
        if stands.trial is not None and stands.trial.revision == look.endpoint.candidate_revision:
            answers = self._answers(look, deployment, stands.trial.revision, stands.trial.since)
        seen = observe_endpoint(look.name, look.objects, replicas=deployment.replicas, answers=answers)
        watched = self._records.watched(look.endpoint)
        drafting = {one.number for one in look.endpoint.revisions if one.use.setting.method != "off"}
        engines = tuple(self._with_window(look, deployment, one) if one.revision in drafting else one
                        for one in seen.engines)
        return replace(seen, engines=engines, windows=watched.windows, drift_reported=watched.drift_told)

    def _with_window(self, look: _Look, deployment: EndpointDeployment, engine: ObservedEngine) -> ObservedEngine:
        serves_or_tries = engine.revision in (look.endpoint.active_revision, look.endpoint.candidate_revision)
        workload = look.workload(engine.revision)
        if engine.state != "healthy" or not serves_or_tries or workload is None:
            return engine
        counts = scrape_engines(look.objects, engine.revision, deployment.port)
        if not counts:
            return engine
        began = read_baseline(workload, WINDOW_BASELINE)
        if began is None:
            began = CounterBaseline(look.now, counts)
            self._note(look, workload, WINDOW_BASELINE, began)
        total = grown(counts, began.counts)
        return replace(engine, window_rounds=total.rounds, window_tokens=total.tokens, window_since=began.since)

    def _answers(self, look: _Look, deployment: EndpointDeployment, revision: int, since: datetime) -> tuple[int, int]:
        """Answered and failed requests of the revision on trial since it has its share."""
        workload = look.workload(revision)
        counts = scrape_engines(look.objects, revision, deployment.port)
        if workload is None or not counts:
            return 0, 0
        began = read_baseline(workload, CANARY_BASELINE)
        if began is None or began.since != since:
            self._note(look, workload, CANARY_BASELINE, CounterBaseline(since, counts))
            return 0, 0
        total = grown(counts, began.counts)
        return int(total.answered), int(total.failed)

    def _note(self, look: _Look, workload: Object, annotation: str, began: CounterBaseline) -> None:
        metadata = workload["metadata"]
        self.standing.touched(look.name)
        self._cluster.merge(workload["apiVersion"], workload["kind"], metadata["namespace"], metadata["name"],
                            {"metadata": {"annotations": {annotation: began.dump()}}})

    # Doing.

    def _record(self, action: EndpointAction, look: _Look, conditions: Conditions) -> Conditions:
        self._cluster.check()
        if isinstance(action, CloseWindow):
            # The new window first: one recorded twice would make drift of a single bad hour.
            workload = look.workload(action.revision)
            if workload is not None:
                counts = scrape_engines(look.objects, action.revision, self._given.port)
                self._note(look, workload, WINDOW_BASELINE, CounterBaseline(look.now, counts))
        return self._records.record(action, look.endpoint, conditions,
                                    self._home.absolute() / "endpoints" / look.name)

    def _render(self, look: _Look, deployment: EndpointDeployment,
                wanted: RolloutState) -> tuple[tuple[Manifest, ...], EyrieError | None]:
        """The manifests, and why the candidate is not among them. Raises what is wrong with the others."""
        candidate, refusal = look.endpoint.candidate_revision, None
        for revision in look.endpoint.revisions:
            if revision.number not in wanted.engines:
                continue
            job = self._records.promoted_from(look.endpoint, revision.number)
            try:
                deployment = self._deployments.with_drafter(deployment, revision, None if job is None else job.spec)
                render_endpoint(look.endpoint, deployment, RolloutState(engines=(revision.number,)))
            except Transient:
                raise
            except EyrieError as error:
                if revision.number != candidate:
                    raise
                refusal = error
                wanted = _without(wanted, candidate)
        return render_endpoint(look.endpoint, deployment, wanted), refusal

    def _apply(self, look: _Look, manifests: Iterable[Manifest]) -> tuple[EyrieError | None, bool]:
        """Apply what differs: why the server refuses the candidate's objects, if it does; whether anything was written.

        Raises other refusals.
        """
        applied, found = False, {(one["kind"], one["metadata"]["name"]): one for one in look.objects}
        candidate = str(look.endpoint.candidate_revision)
        for manifest in map(with_digest, manifests):
            key = (manifest["kind"], manifest["metadata"]["name"])
            there = found.get(key)
            if there is not None and self._is_right(key, manifest, there):
                continue
            if there is None:
                self._refuse_to_take_over(manifest)
            self.standing.touched(look.name)
            try:
                written = self._cluster.apply(manifest, force=True)
            except ClusterRejected as refused:
                if manifest["metadata"]["labels"].get(REVISION_LABEL) == candidate:
                    return refused, applied
                raise
            applied = True
            where = difference(manifest, written)
            if where is not None:
                log.warning("%s %s: the server keeps %s otherwise than it was written", *key, where)
                self._settled[key] = manifest["metadata"]["annotations"]["eyrie.dev/applied"]
            log.info("endpoint %s: applied %s %s", look.name, *key)
        return None, applied

    def _is_right(self, key: tuple[str, str], manifest: Manifest, there: Object) -> bool:
        if not is_applied(manifest, there):
            return False
        settled = self._settled.get(key) == manifest["metadata"]["annotations"]["eyrie.dev/applied"]
        return settled or difference(manifest, there) is None

    def _refuse_to_take_over(self, manifest: Manifest) -> None:
        """An object of that name which is not the endpoint's is somebody's. Raises Undeployable."""
        metadata = manifest["metadata"]
        try:
            there = self._cluster.get(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])
        except NotFound:
            return
        label = (there["metadata"].get("labels") or {}).get(ENDPOINT_LABEL)
        if label != metadata["labels"][ENDPOINT_LABEL]:
            raise Undeployable(f"{manifest['kind']} {metadata['name']} in namespace {metadata['namespace']} is there "
                               "already and is not this endpoint's", "remove it, or give the endpoint another name")

    def _clear(self, look: _Look, manifests: Iterable[Manifest]) -> bool:
        """Delete what is not rendered any more; whether anything was."""
        gone = obsolete_objects(look.name, look.objects, manifests)
        uids = {(one["kind"], one["metadata"]["name"]): one["metadata"] for one in look.objects}
        deleted = False
        for one in gone:
            metadata = uids[(one.kind, one.name)]
            if "deletionTimestamp" in metadata:
                continue  # on its way
            self.standing.touched(look.name)
            self._cluster.delete(one.api_version, one.kind, self._given.namespace, one.name, metadata["uid"])
            log.info("endpoint %s: deleted %s %s", look.name, one.kind, one.name)
            deleted = True
        return deleted

    def _tell(self, look: _Look, plan: EndpointPlan, conditions: Conditions, url: str | None) -> bool:
        conditions = observe(conditions, "Serving", plan.serving, plan.reason, plan.message, look.now)
        if conditions == look.endpoint.conditions and url in (None, look.endpoint.url):
            return False
        self._cluster.check()
        return self._records.show(look.endpoint, conditions, url)


def _without(wanted: RolloutState, revision: int | None) -> RolloutState:
    return replace(wanted, engines=tuple(one for one in wanted.engines if one != revision),
                   serving=None if wanted.serving == revision else wanted.serving,
                   trial=None if wanted.trial is not None and wanted.trial.revision == revision else wanted.trial)


def _owner_now(objects: Iterable[Object]) -> Owner | None:
    """Of the first object that has one: they all have the same."""
    owners = (owner for one in objects for owner in one["metadata"].get("ownerReferences", ())
              if one["kind"] != "Pod" and owner["kind"] == Owner.kind)
    return next((Owner(uid=one["uid"], name=one["name"], api_version=one["apiVersion"]) for one in owners), None)


def _lacking(look: _Look, deployment: EndpointDeployment, conditions: Conditions) -> Conditions:
    """What was asked for and this cluster has not: told as a condition, since nothing of it stops serving."""
    missing = list(deployment.left_out())
    if look.serving.serve.record_prompts:
        missing.append("serve.record_prompts keeps nothing on a cluster: give promotion.drift.traffic_file a log of "
                       "your gateway's")
    if missing:
        return observe(conditions, "Complete", "False", "ClusterLacks", "; ".join(missing), look.now)
    if find(conditions, "Complete") is not None:
        return observe(conditions, "Complete", "True", "ClusterHas", "", look.now)
    return conditions


def _replica_words(look: _Look, deployment: EndpointDeployment, plan: EndpointPlan) -> str:
    """How many of several replicas answer."""
    workload = look.workload(look.endpoint.active_revision or 0)
    if plan.serving != "True" or deployment.replicas == 1 or workload is None:
        return ""
    status = workload.get("status", {})
    answering = status.get("availableReplicas", status.get("readyReplicas", 0))
    return f"; {answering} of {deployment.replicas} replicas answer"


def _url(name: str, deployment: EndpointDeployment) -> str:
    """For clients: by the gateway's name where it has one, else inside the cluster."""
    gateway = deployment.gateway
    if gateway is not None and deployment.route_api is not None and gateway.hostnames:
        return f"http://{gateway.hostnames[0]}/v1"
    return base_url(name, deployment.namespace)
