"""A simulated cluster: applied DrafterJobs and their rows, driven by the real `cluster.reconcile`.

The world holds the objects of an API server and the rows of a database. Between two steps users suspend, resume, delete
and cancel, rows progress as the driver of jobs would write them, jobs are deleted at the REST API, and the project's
quota has room or none. A step may be killed before any of its actions; the next operator starts with an empty memory
and the objects as they are.
"""

import copy
import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from benchmarks.campaigns.model_plane import START, Killed, expect
from eyrie_api.contract.resources import FINALIZER, OUTSIDE_ANNOTATION, WaitingObject
from eyrie_api.contract.status import Condition, Job, JobStatus
from eyrie_api.database.quotas import QuotaReached
from eyrie_operator.cluster import reconcile as act
from eyrie_operator.cluster.resources import SUSPENDED_ANNOTATION, JobResource, KubernetesEvent, applied_uid, read_job
from eyrie_operator.conditions import is_over, is_true, observe, remove

BODY = {"target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]}}
TTL_S = 300
FULL = QuotaReached("project 'default' has 1 jobs that have not ended, and may have no more", "wait")
NO_OBJECT: dict[str, Any] = {"metadata": {"annotations": {}}}


@dataclass
class Row:
    """A job's row."""

    job: Job
    cancel: bool = False
    delete: bool = False


@dataclass
class Suspension:
    """What the user asked of an object, to compare the end with."""

    suspended: bool = False
    deleted: bool = False
    kept: bool = False
    """It was deleted with the annotation that keeps the job."""

    cancelled_by_user: bool = False


@dataclass
class Cluster:
    """What survives a kill of the operator."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)
    """Job by uid: the idempotency keys."""

    events: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """By name of the Event: uid, reason, message."""

    waiting: dict[str, WaitingObject] = field(default_factory=dict)
    """By name of the object: the rows of those that wait for a quota."""


class ResourceWorld:
    """Three applied DrafterJobs."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, START
        self.cluster = Cluster()
        self.asked: dict[str, Suspension] = {}
        self.kill_chance = 0.05
        self.has_room = rng.random() < 0.5
        self.steps = self.kills = 0
        self.memory: dict[str, str] = {}
        """Job by uid, as the operator remembers it until it is killed."""

        for number in range(3):
            self._apply(f"job-{number}")

    def _apply(self, name: str) -> None:
        uid = f"uid-{name}"
        spec: dict[str, Any] = {"job": BODY}
        if self.rng.random() < 0.3:
            spec["ttl_seconds_after_finished"] = TTL_S
        self.cluster.objects[uid] = {
            "apiVersion": "eyrie.dev/v1alpha1", "kind": "DrafterJob", "spec": spec,
            "metadata": {"name": name, "namespace": "team", "uid": uid, "generation": 1, "resourceVersion": "1",
                         "annotations": {}, "labels": {}}}
        self.asked[uid] = Suspension()

    # The operator.

    def look(self) -> None:
        """One pass over one object, perhaps killed."""
        self.steps += 1
        if self.cluster.objects:
            try:
                self._pass(self.rng.choice(list(self.cluster.objects)))
            except Killed:
                self.kills += 1
                self.memory.clear()

    def _pass(self, uid: str) -> None:
        raw = self.cluster.objects.get(uid)
        if raw is None:
            return
        resource = read_job(raw, "mirrors")
        row = self._find(resource.job_id or self.memory.get(uid) or self.cluster.claims.get(uid), uid)
        known = row is None and resource.job_id is not None and not resource.deleting
        history = act.JobHistory(deleted=known and uid in self.cluster.claims,
                                 waiting=self.cluster.waiting.get(resource.identity.name))
        moved = False
        for action in act.reconcile_job(resource, None if row is None else row.job, history, self.now):
            if moved and isinstance(action, KubernetesEvent | act.UpdateStatus):
                continue
            self._maybe_kill()
            if self._is_refused(uid, action):
                self._wait(resource, is_submitted=isinstance(action, act.ChangeJob))
                return
            moved = self._execute(uid, action) or moved

    def _maybe_kill(self) -> None:
        if self.rng.random() < self.kill_chance:
            raise Killed

    def _is_refused(self, uid: str, action: act.Action) -> bool:
        is_new = isinstance(action, act.CreateJob) and uid not in self.cluster.claims
        is_retry = isinstance(action, act.ChangeJob) and action.change == "retry"
        return not self.has_room and (is_new or is_retry)

    def _wait(self, resource: JobResource, *, is_submitted: bool) -> None:
        stored = self.cluster.waiting.get(resource.identity.name)
        actions = act.wait_for_quota(resource.identity, "default", FULL, stored, self.now)
        if not is_submitted:
            actions += act.refuse_job(resource, FULL.reason, str(FULL), self.now, over=False)
        for action in actions:
            self._maybe_kill()
            self._execute(resource.identity.uid, action)

    def _find(self, job_id: str | None, uid: str) -> Row | None:
        row = None if job_id is None else self.cluster.rows.get(job_id)
        return row if row is not None and applied_uid(row.job) == uid else None

    def _execute(self, uid: str, action: act.Action) -> bool:
        raw = self.cluster.objects.get(uid)
        if raw is None:
            return False
        metadata = raw["metadata"]
        if isinstance(action, act.SetFinalizer) and action.held:
            expect("deletionTimestamp" not in metadata, "no finalizer is added to an object that is being deleted")
            metadata["finalizers"] = [FINALIZER]
        elif isinstance(action, act.SetFinalizer):
            metadata["finalizers"] = []
            self._collect(uid)
        elif isinstance(action, act.Annotate):
            metadata["annotations"] = {**metadata["annotations"], action.name: action.value}
            if action.value is None:
                del metadata["annotations"][action.name]
        elif isinstance(action, act.DeleteResource):
            self._delete(uid)
        elif isinstance(action, act.UpdateStatus):
            raw["status"] = copy.deepcopy(action.status)
            return False
        elif isinstance(action, KubernetesEvent):
            self.cluster.events.setdefault(action.name, (uid, action.reason, action.message))
            return False
        elif isinstance(action, act.RecordWaiting):
            expect(self.cluster.waiting.get(metadata["name"]) != action.waiting, "a row is written when it differs")
            self.cluster.waiting[metadata["name"]] = action.waiting
            return False
        elif isinstance(action, act.RemoveWaiting):
            self.cluster.waiting.pop(metadata["name"], None)
            return False
        elif isinstance(action, act.RequeueAfter):
            expect(action.after_s > 0, "a requeue is in the future")
            return False
        else:
            self._change_row(uid, action)
        return True

    def _change_row(self, uid: str, action: act.Action) -> None:
        rows = self.cluster.rows
        if isinstance(action, act.CreateJob):
            expect(action.key == uid, "an object's job is submitted with its uid as key")
            if uid in self.cluster.claims:
                self.memory[uid] = self.cluster.claims[uid]
                if self.cluster.claims[uid] not in rows:
                    self._delete(uid)
                return
            job_id = self.cluster.claims[uid] = self.memory[uid] = f"row-{uid}"
            accepted = Condition(type="Accepted", status="True", reason="JobAccepted", last_transition_time=self.now)
            rows[job_id] = Row(Job(id=job_id, created_at=self.now, updated_at=self.now, spec=action.spec,
                                   status=JobStatus(conditions=(accepted,), attempt=1, observed_generation=1)))
        elif isinstance(action, act.ChangeJob) and action.change == "cancel":
            row = rows[action.job_id]
            expect(not is_over(row.job.status.conditions), "only a job that runs is cancelled")
            self._cancel(row)
        elif isinstance(action, act.ChangeJob) and action.change == "retry":
            row = rows[action.job_id]
            expect(is_true(row.job.status.conditions, "Cancelled"), "only a cancelled job is resumed")
            expect(not self.asked[uid].cancelled_by_user, "a job that a user cancelled is not resumed", uid=uid)
            self._retry(row)
        elif isinstance(action, act.ChangeJob):
            expect(self.asked[uid].deleted, "a job is deleted with its object only", uid=uid)
            row = rows[action.job_id]
            if is_over(row.job.status.conditions):
                del rows[action.job_id]
            else:
                row.delete = True
                self._cancel(row)
        else:
            raise TypeError(f"unexpected action {action}")

    def _delete(self, uid: str) -> None:
        raw = self.cluster.objects.get(uid)
        if raw is not None:
            raw["metadata"]["deletionTimestamp"] = self.now.isoformat()
            self._collect(uid)

    def _collect(self, uid: str) -> None:
        metadata = self.cluster.objects[uid]["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            del self.cluster.objects[uid]
            self.memory.pop(uid, None)

    # Rows, as the repository and the driver of jobs write them.

    def _cancel(self, row: Row) -> None:
        row.cancel = True
        self._store(row, row.job.status.model_copy(update={"phase": "Cancelling"}))

    def _retry(self, row: Row) -> None:
        status = row.job.status
        row.cancel = False
        self._store(row, status.model_copy(update={
            "attempt": status.attempt + 1, "phase": "Pending", "finished_at": None,
            "conditions": remove(status.conditions, "Succeeded", "Failed", "Cancelled")}))

    def _store(self, row: Row, status: JobStatus) -> None:
        row.job = row.job.model_copy(update={"status": status, "updated_at": self.now})

    def _drive(self, row: Row) -> None:
        status = row.job.status
        if is_over(status.conditions):
            if row.delete:
                self.cluster.rows.pop(row.job.id, None)
            return
        if row.cancel:
            self._end(row, "Cancelled", "Requested")
        elif self.rng.random() < 0.2:
            self._end(row, *self.rng.choice((("Succeeded", "Completed"), ("Failed", "LossDiverged"))))
        else:
            trained = observe(status.conditions, "Trained", self.rng.choice(("Unknown", "True")), "Seen", "", self.now)
            self._store(row, status.model_copy(update={"phase": "Running", "conditions": trained}))

    def _end(self, row: Row, kind: str, reason: str) -> None:
        status = row.job.status
        ended = observe(status.conditions, kind, "True", reason, "", self.now)
        self._store(row, status.model_copy(update={"phase": kind, "conditions": ended, "finished_at": self.now}))

    # What users and the database do.

    def change(self) -> None:
        """One thing happens that the operator did not cause."""
        self.now += timedelta(seconds=self.rng.choice((1, 10, 60)))
        if self.rng.random() < 0.03:
            self.has_room = not self.has_room
        kind = self.rng.randrange(10)
        rows = list(self.cluster.rows.values())
        if kind < 5 and rows:
            self._drive(self.rng.choice(rows))
        elif kind == 5 and rows and self.rng.random() < 0.2:
            row = self.rng.choice(rows)
            uid = applied_uid(row.job)
            if not is_over(row.job.status.conditions) and not row.cancel and uid is not None:
                # Suspended and cancelled at once: whichever request came first decides.
                annotations = self.cluster.objects.get(uid, NO_OBJECT)["metadata"]["annotations"]
                marked = annotations.get(SUSPENDED_ANNOTATION)
                self.asked[uid].cancelled_by_user = marked != str(row.job.status.attempt)
                self._cancel(row)
        elif kind == 6 and rows and self.rng.random() < 0.05:
            row = self.rng.choice(rows)
            if is_over(row.job.status.conditions):
                del self.cluster.rows[row.job.id]
        elif self.cluster.objects:
            self._edit(self.rng.choice(list(self.cluster.objects)), kind)

    def _edit(self, uid: str, kind: int) -> None:
        metadata, spec = self.cluster.objects[uid]["metadata"], self.cluster.objects[uid]["spec"]
        if kind in (7, 8) and self.rng.random() < 0.3:
            spec["suspend"] = self.asked[uid].suspended = not spec.get("suspend", False)
            metadata["generation"] += 1
        elif kind == 9 and self.rng.random() < 0.05:
            self.asked[uid].deleted = True
            if self.rng.random() < 0.3:
                metadata["annotations"][OUTSIDE_ANNOTATION] = "keep"
            self.asked[uid].kept = OUTSIDE_ANNOTATION in metadata["annotations"]  # or since its time to live is over
            self._delete(uid)

    # Rules.

    def check(self) -> None:
        """The rules of every state."""
        per_uid: dict[str | None, int] = {}
        for row in self.cluster.rows.values():
            uid = applied_uid(row.job)
            per_uid[uid] = per_uid.get(uid, 0) + 1
        expect(all(count == 1 for count in per_uid.values()), "an object has one job", found=per_uid)
        for uid, raw in self.cluster.objects.items():
            metadata = raw["metadata"]
            held = metadata.get("finalizers")
            expect(bool(held) or uid not in self.cluster.claims, "an object with a job is held", uid=uid)

    def settle(self) -> None:
        """Users stop, rows end, the operator is not killed: objects show their rows, and deleted ones are gone. First
        without room, then with it."""
        self.kill_chance, self.has_room = 0.0, False
        for _ in range(2):  # a write to the object is followed by another pass
            for uid in list(self.cluster.objects):
                self._pass(uid)
        self._resync()
        expect(set(self.cluster.waiting) == self._unaccepted(), "objects that wait have a row, and no others",
               rows=self.cluster.waiting, objects=self.cluster.objects)
        self.has_room = True
        for _ in range(60):
            self.now += timedelta(seconds=1)
            for row in list(self.cluster.rows.values()):
                self._drive(row)
            for uid in list(self.cluster.objects):
                self._pass(uid)
            self.check()
        self._resync()
        expect(not self.cluster.waiting, "no object waits while there is room", rows=self.cluster.waiting)
        for uid, raw in self.cluster.objects.items():
            self._check_settled(uid, raw)
        for row in self.cluster.rows.values():
            expect(not row.delete, "a job to be deleted is deleted", job=row.job.id)
            asked = self.asked[str(applied_uid(row.job))]
            expect(not asked.deleted or asked.kept, "a deleted object leaves no job behind", job=row.job.id)

    def _resync(self) -> None:
        for one in act.orphaned(self.cluster.waiting.values(), self.cluster.objects):
            del self.cluster.waiting[one.name]

    def _unaccepted(self) -> set[str]:
        """Objects without a job, or with one to be resumed, that are neither suspended nor being deleted."""
        names = set()
        for uid, raw in self.cluster.objects.items():
            metadata, row = raw["metadata"], self._find(self.cluster.claims.get(uid), uid)
            marked = metadata["annotations"].get(SUSPENDED_ANNOTATION)
            resumes = row is not None and is_true(row.job.status.conditions, "Cancelled") and marked == str(
                row.job.status.attempt)
            is_due = resumes or (row is None and uid not in self.cluster.claims)
            if is_due and "deletionTimestamp" not in metadata and not raw["spec"].get("suspend"):
                names.add(metadata["name"])
        return names

    def _check_settled(self, uid: str, raw: dict[str, Any]) -> None:
        expect(not self.asked[uid].deleted, "a deleted object is released", uid=uid, raw=raw)
        row = self._find(self.cluster.claims.get(uid), uid)
        suspended = self.asked[uid].suspended
        if row is None:
            expect(suspended, "an object without a job is suspended before its submission", uid=uid, raw=raw)
            return
        conditions = row.job.status.conditions
        shown = {one["type"]: (one["status"], one["reason"]) for one in raw["status"]["conditions"]}
        for condition in conditions:
            expect(shown.get(condition.type) == (condition.status, condition.reason),
                   "the status shows the row", uid=uid, shown=shown, condition=condition)
            texts = [message for of, reason, message in self.cluster.events.values()
                     if of == uid and reason == condition.reason and message.startswith(f"{condition.type}=")]
            expect(bool(texts), "the last transition of each condition has its Event", uid=uid, condition=condition)
        cancelled = is_true(conditions, "Cancelled")
        expect(suspended or not cancelled or self.asked[uid].cancelled_by_user,
               "a job that was only suspended runs again when it is resumed", uid=uid, conditions=conditions)
