"""A simulated cluster that serves: an applied DraftEndpoint, its row and its Kubernetes objects, driven by the real
`cluster.reconcile`, `endpoints.plan`, `manifests.rollout` and `manifests.objects`.

The world holds the objects of an API server and one row. Between two steps pods become available, crash and recover,
deletions end, canaries get answers, jobs propose revisions, users roll back, switch off, edit and delete objects. A
step may be killed before any write to the server or to the row, as `cluster.endpoints` may be; the next operator has
nothing but objects and row. `settle` lets the world do its part and expects the steady state, a step that has nothing
to write, and nothing left of an endpoint whose DraftEndpoint was deleted, unless a job was promoted to it afterwards.
"""

import copy
import random
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from benchmarks.campaigns.model_endpoint_row import TAU, EndpointRow
from benchmarks.campaigns.model_plane import POLICY, START, Killed, expect
from eyrie_api.contract.resources import FINALIZER, OUTSIDE_ANNOTATION
from eyrie_api.contract.status import Endpoint
from eyrie_operator.cluster import reconcile as resources
from eyrie_operator.cluster.objects import difference, is_applied, with_digest
from eyrie_operator.cluster.resources import KubernetesEvent, read_endpoint
from eyrie_operator.endpoints import plan as act
from eyrie_operator.endpoints.engine_metrics import EngineCounters
from eyrie_operator.endpoints.plan import plan_endpoint
from eyrie_operator.manifests.deployment import (
    ENDPOINT_LABEL,
    REVISION_LABEL,
    DrafterFiles,
    EndpointDeployment,
    Manifest,
    Owner,
    StoredDrafter,
)
from eyrie_operator.manifests.objects import render_endpoint
from eyrie_operator.manifests.rollout import (
    CRASHES,
    RolloutState,
    apply_plan,
    current_state,
    observe_endpoint,
    obsolete_objects,
    policy_on_cluster,
)
from eyrie_workers.sglang.checkpoints import DrafterCheckpoint
from tests.operator.manifests.samples import deployment, rich, steady_state

NAME = "default"
MAX_PROPOSALS = 6
_FILES = {number: DrafterFiles(DrafterCheckpoint(f"/drafters/{number}", 8192),
                               StoredDrafter(f"jobs/j{number}/stages/train/a", "checkpoints/c"), f"sha256:{number}")
          for number in range(1, 40)}
_DEPLOYMENTS = (deployment(drafters=_FILES), rich(drafters=_FILES, key_secret=None))
_DECISIONS_FIRST = (act.Reject, act.RollBack, act.CloseWindow, act.ReportDrift, act.ProposeNoDrafter)
Key = tuple[str, str]


class RolloutWorld(EndpointRow):
    """One applied DraftEndpoint on a cluster with or without a Gateway."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(START)
        self.rng, self.kill_chance = rng, 0.05
        self.spec: EndpointDeployment = rng.choice(_DEPLOYMENTS)
        self.objects: dict[Key, dict[str, Any]] = {}
        self.pods: dict[int, str] = {}
        """State of the pods of each workload: starting, available, crashing, unschedulable."""

        self.windows: dict[int, tuple[float, float, datetime]] = {}
        """Rounds, tokens and beginning by revision: counters of engines, and their baseline."""

        self.answers: tuple[datetime | None, int, int] = (None, 0, 0)
        """Of the canary's step that began then: answered, failed."""

        self.refused = {number for number in range(2, 9) if rng.random() < 0.1}
        """Revisions whose workload the API server refuses."""

        self.resource: dict[str, Any] | None = {
            "spec": {"target": {"model": "quickstart"}, "desired": "on"}, "status": {},
            "metadata": {"name": NAME, "namespace": "team", "uid": "u-1", "generation": 1, "annotations": {},
                         "finalizers": []}}
        self.kept = self.deleted = self.used_later = False
        self.steps = self.kills = self.writes = self.made = self.proposals = 0

    # The operator.

    def look(self) -> None:
        """One step for the DraftEndpoint or for the endpoint, perhaps killed."""
        self.steps += 1
        try:
            if self.rng.random() < 0.3:
                self.look_at_resource()
            else:
                self.look_at_endpoint()
        except Killed:
            self.kills += 1

    def _write(self) -> None:
        if self.rng.random() < self.kill_chance:
            raise Killed
        self.writes += 1

    def look_at_resource(self) -> None:
        """As `cluster.controller` does it."""
        if self.resource is None:
            return
        found = resources.reconcile_endpoint(
            read_endpoint(self.resource, "mirrors"), self.endpoint, self.now, existing=self._live_objects())
        for action in found:
            if isinstance(action, resources.RequeueAfter | resources.UpdateServing):
                continue
            self._write()
            metadata = self.resource["metadata"]
            if isinstance(action, resources.SetFinalizer) and action.held:
                expect("deletionTimestamp" not in metadata, "no finalizer is added to what is being deleted")
                metadata["finalizers"] = [FINALIZER]
            elif isinstance(action, resources.SetFinalizer):
                metadata["finalizers"] = []
                self._collect()
                return
            elif isinstance(action, resources.CreateEndpoint):
                self.create_endpoint()
            elif isinstance(action, resources.SetDesired):
                assert self.endpoint is not None
                self.endpoint = self.endpoint.model_copy(update={"desired": action.desired})
            elif isinstance(action, resources.UpdateStatus):
                self.resource["status"] = copy.deepcopy(action.status)
            else:
                expect(isinstance(action, KubernetesEvent), "an applied endpoint needs no other action",
                       action=action)

    def look_at_endpoint(self) -> None:
        """As `cluster.endpoints` does it."""
        row = self.endpoint
        if row is None:
            return
        objects = self._reported()
        if row.desired == "off":
            seen = observe_endpoint(objects, replicas=1)
            plan_endpoint(row, act.ServePolicy(), seen, self.now)
            self._delete_obsolete(())
            return
        spec = replace(self.spec, owner=self._owner())
        current = current_state(objects)
        seen, canary = observe_endpoint(objects, replicas=spec.replicas), current.canary
        if canary is not None:
            if self.answers[0] != canary.since:
                self.answers = (canary.since, 0, 0)
            canary = replace(canary, answered=self.answers[1], errors=self.answers[2])
        seen = replace(seen, canary=canary, engines=tuple(self._with_window(one) for one in seen.engines))
        plan = plan_endpoint(row, policy_on_cluster(POLICY, spec), seen, self.now)
        for action in plan.actions:
            if isinstance(action, _DECISIONS_FIRST):
                self._write()
                if isinstance(action, act.CloseWindow):
                    self.windows[action.revision] = (0.0, 0.0, self.now)
                self.record(action)
        wanted, refused = apply_plan(current, plan, self.now), None
        if row.candidate_revision in self.refused and row.candidate_revision in wanted.engines:
            refused = row.candidate_revision  # found when it is applied: what was rendered before it is there then
        manifests = render_endpoint(row, spec, wanted)
        if not self._apply(manifests, refused):
            self._write()
            assert refused is not None
            self.record(act.Reject(refused, "ClusterRejected", "refused"))
            return
        self._delete_obsolete(manifests)
        for action in plan.actions:
            if isinstance(action, act.Activate | act.ShareRoute):
                self._write()
                if isinstance(action, act.Activate):
                    expect(current_state(self.objects.values()).serving == action.revision,
                           "a revision is activated when the Service selects it", revision=action.revision)
                    self.record(action)
                else:
                    self._change(action.revision, state="canary")
        self._check_rejected()

    def _apply(self, manifests: tuple[Manifest, ...], refused: int | None) -> bool:
        """Apply what differs; False where the server refuses the workload of a revision."""
        for manifest in map(with_digest, manifests):
            key = (manifest["kind"], manifest["metadata"]["name"])
            there = self.objects.get(key)
            if there is not None and is_applied(manifest, there) and difference(manifest, there) is None:
                continue
            if refused is not None and manifest["metadata"]["labels"].get(REVISION_LABEL) == str(refused):
                return False
            self._write()
            self._store(key, manifest, there)
            self.check()
        return True

    def _store(self, key: Key, manifest: Manifest, there: dict[str, Any] | None) -> None:
        self.made += 1
        before = None if there is None else there["metadata"]
        metadata = {**manifest["metadata"], "uid": before["uid"] if before else f"o-{self.made}",
                    "generation": before["generation"] + 1 if before else 1,
                    "creationTimestamp": before["creationTimestamp"] if before else self.now.isoformat()}
        if before is not None and "deletionTimestamp" in before:
            metadata["deletionTimestamp"] = before["deletionTimestamp"]
        self.objects[key] = {**manifest, "metadata": metadata}
        if key[0] == "Deployment" and there is None:
            revision = int(manifest["metadata"]["labels"][REVISION_LABEL])
            self.pods[revision], self.windows[revision] = "starting", (0.0, 0.0, self.now)

    def _delete_obsolete(self, manifests: tuple[Manifest, ...]) -> None:
        for there in obsolete_objects(NAME, list(self.objects.values()), manifests):
            kind, name = there["kind"], there["metadata"]["name"]
            if "deletionTimestamp" in there["metadata"]:
                continue
            self._write()
            revision = there["metadata"]["labels"].get(REVISION_LABEL)
            if kind == "Deployment" and self.endpoint is not None and self.endpoint.desired == "on":
                expect(current_state(self.objects.values()).serving != int(revision),
                       "no engine is deleted while the Service selects it", revision=revision)
            there["metadata"]["deletionTimestamp"] = self.now.isoformat()
            if self.rng.random() < 0.5:
                self._end_deletion((kind, name))

    def _end_deletion(self, key: Key) -> None:
        gone = self.objects.pop(key)
        if key[0] == "Deployment":
            self.pods.pop(int(gone["metadata"]["labels"][REVISION_LABEL]), None)

    def _owner(self) -> Owner | None:
        """As the controller says it: none for an endpoint that outlives its DraftEndpoint."""
        if self.resource is None or self.resource["metadata"]["annotations"].get(OUTSIDE_ANNOTATION) == "keep":
            return None
        return Owner("u-1", NAME)

    def _collect(self) -> None:
        """Remove the DraftEndpoint, and what it owns, as the garbage collector does."""
        metadata = self.resource["metadata"] if self.resource is not None else {}
        if "deletionTimestamp" not in metadata or metadata["finalizers"]:
            return
        self.resource = None
        for key, one in list(self.objects.items()):
            if any(owner["uid"] == "u-1" for owner in one["metadata"].get("ownerReferences", ())):
                expect(not self.kept, "what a kept endpoint serves with is not collected", key=key)
                self._end_deletion(key)

    # Observation.

    def _live_objects(self) -> list[dict[str, Any]]:
        return [one for one in self.objects.values() if one["metadata"]["labels"].get(ENDPOINT_LABEL) == NAME]

    def _reported(self) -> list[dict[str, Any]]:
        """The objects with the statuses that a cluster gives them, and pods."""
        reported: list[dict[str, Any]] = []
        for one in self.objects.values():
            if one["kind"] != "Deployment":
                reported.append(one)
                continue
            state = self.pods[int(one["metadata"]["labels"][REVISION_LABEL])]
            reported.append({**one, "status": {"observedGeneration": one["metadata"]["generation"],
                                               "availableReplicas": self.spec.replicas * (state == "available")}})
            statuses: list[dict[str, Any]] = []
            if state == "crashing":
                statuses = [{"name": "engine", "restartCount": CRASHES,
                             "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
            reported.append({"apiVersion": "v1", "kind": "Pod", "status": {"containerStatuses": statuses},
                             "metadata": {"name": "pod", "labels": one["metadata"]["labels"],
                                          "creationTimestamp": one["metadata"]["creationTimestamp"]}})
        return reported

    def _with_window(self, engine: act.ObservedEngine) -> act.ObservedEngine:
        if engine.state != "healthy":
            return engine
        rounds, tokens, since = self.windows[engine.revision]
        return replace(engine, window=EngineCounters(rounds, tokens), window_since=since)

    # What the world does.

    def change(self) -> None:
        """One thing happens that the operator did not cause."""
        rng = self.rng
        self.now += timedelta(seconds=rng.choice((1.0, 5.0, 40.0)))
        kind = rng.randrange(12)
        if kind < 5 and self.pods:
            self._progress(rng.choice(list(self.pods)))
        elif kind < 7:
            since, answered, errors = self.answers
            self.answers = (since, answered + rng.randrange(8), errors + (rng.random() < 0.1))
        elif kind == 7:
            for key in [key for key, one in self.objects.items() if "deletionTimestamp" in one["metadata"]]:
                self._end_deletion(key)
        elif kind == 8 and self.endpoint is not None and self.proposals < MAX_PROPOSALS:
            self.proposals += 1
            self.used_later = self.used_later or self.resource is None
            self.propose(f"job-{self.proposals}", None)
        elif kind == 9 and self.endpoint is not None and rng.random() < 0.3:
            self.used_later = self.used_later or self.resource is None
            self.roll_back("RolledBack")
        elif kind == 10 and self.objects and rng.random() < 0.2:
            self._end_deletion(rng.choice(list(self.objects)))  # by a user
        elif kind == 11 and self.resource is not None and rng.random() < 0.3:
            self._edit(self.resource)

    def _edit(self, resource: dict[str, Any]) -> None:
        metadata = resource["metadata"]
        if self.rng.random() < 0.8:
            resource["spec"]["desired"] = self.rng.choice(("on", "on", "off"))
            metadata["generation"] += 1
            return
        if self.rng.random() < 0.3:
            metadata["annotations"][OUTSIDE_ANNOTATION] = "keep"
        self.kept = OUTSIDE_ANNOTATION in metadata["annotations"]  # also if it is annotated while it waits
        if not self.deleted:
            self.deleted = True
            metadata["deletionTimestamp"] = self.now.isoformat()
            self._collect()

    def _progress(self, revision: int) -> None:
        state = self.pods[revision]
        if state == "available" and self.rng.random() < 0.9:
            rounds = float(self.rng.randrange(300))
            had, tokens, since = self.windows[revision]
            self.windows[revision] = (had + rounds, tokens + rounds * TAU * self.rng.choices((1.0, 0.2), (8, 1))[0],
                                      since)
            return
        self.pods[revision] = self.rng.choices(("available", "crashing", "starting"), (6, 1, 1))[0]

    # Rules.

    def check(self) -> None:
        """The rules of every state."""
        if self.endpoint is None:
            expect(not self.objects, "without a row there are no objects")
            return
        states = [one.number for one in self.endpoint.revisions if one.state == "active"]
        expect(states in ([], [self.endpoint.active_revision]), "one revision is active", states=states)

    def _check_rejected(self) -> None:
        """After a whole step: no revision that failed has a workload or gets requests."""
        assert self.endpoint is not None
        current = current_state([one for one in self.objects.values() if "deletionTimestamp" not in one["metadata"]])
        led = {*current.engines, current.serving, current.canary.revision if current.canary is not None else None}
        failed = {one.number for one in self.endpoint.revisions if one.state == "rejected"} & led
        expect(not failed - {self.endpoint.active_revision, self.endpoint.candidate_revision},
               "no revision that failed serves", failed=failed, current=current)

    def settle(self) -> None:
        """Pods become available, deletions end, nothing is killed: everything is as the row says, and stays so."""
        self.kill_chance = 0.0
        for _ in range(60):
            self.now += timedelta(seconds=70)
            self.pods = dict.fromkeys(self.pods, "available")
            since, answered, errors = self.answers
            self.answers = (since, answered + 20, errors)
            for key in [key for key, one in self.objects.items() if "deletionTimestamp" in one["metadata"]]:
                self._end_deletion(key)
            self.look_at_resource()
            self.look_at_endpoint()
            self.check()
        before = self.writes
        self.look_at_resource()
        self.look_at_endpoint()
        expect(self.writes == before, "a settled endpoint has nothing to write")
        self._check_settled(self.endpoint)

    def _check_settled(self, row: Endpoint | None) -> None:
        expect(self.resource is None or not self.deleted, "a deleted DraftEndpoint is released", raw=self.resource)
        if row is None:
            expect(self.deleted and not self.objects, "an applied endpoint has a row")
            return
        if self.resource is not None:
            expect(row.desired == self.resource["spec"]["desired"], "the row is on or off as its object says", row=row)
        elif not self.kept and not self.used_later:
            expect(row.desired == "off", "an endpoint whose object was deleted is off", row=row)
        current = current_state(self.objects.values())
        if row.desired == "off":
            expect(not self.objects, "an endpoint that is off leaves no object", objects=list(self.objects))
            expect(current == RolloutState(), "off is off")
            return
        owners = {owner["uid"] for one in self.objects.values() for owner in one["metadata"].get("ownerReferences", ())}
        expect(self.resource is not None or not owners, "a kept endpoint is owned by nobody", owners=owners)
        expect(row.candidate_revision is None, "each candidate is activated or rejected", row=row)
        expect(current == steady_state(row), "the objects are those of the active revision", current=current, row=row)
        expect(row.active_revision is not None or row.revisions[-1].checkpoint is None,
               "without a drafter that becomes healthy the target alone is tried", row=row)
