"""Each rule of the operator campaign finds its violation, and nothing in what is right."""

from typing import Any

from benchmarks.campaigns.operator_rules import broken_endpoints, broken_jobs
from eyrie_api.contract.status import Endpoint, Job, JobStatus
from tests.api.samples import NOW, ended, job_spec


def row(job_id: str = "job-1", uid: str | None = "u1", status: JobStatus | None = None) -> Job:
    labels = {} if uid is None else {"kubernetes-uid": uid}
    return Job(id=job_id, created_at=NOW, updated_at=NOW, spec=job_spec(labels=labels), status=status or JobStatus())


def shown(job: Job, **metadata: Any) -> dict[str, Any]:
    status = {**job.status.model_dump(mode="json"), "job_id": job.id}
    return {"metadata": {"name": "mine", "uid": "u1", **metadata}, "status": status}


def endpoint(**changes: Any) -> Endpoint:
    return Endpoint(name="chat", target="t", url=None, model="m", active_revision=None, candidate_revision=1,
                    updated_at=NOW).model_copy(update=changes)


def draft(name: str = "chat", candidate: int | None = 1) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"candidate_revision": candidate}}


def rules(found: Any) -> list[str]:
    return [rule for rule, _facts in found]


def test_objects_that_show_their_rows_break_nothing() -> None:
    live, over = row(), row("job-2", None, ended("Succeeded"))
    assert not rules(broken_jobs([shown(live)], [live, over]))
    assert not rules(broken_endpoints([draft()], [endpoint()], {"chat": 3}))
    assert not rules(broken_endpoints([], [endpoint(desired="off")], {}))


def test_two_jobs_of_one_uid_are_found() -> None:
    assert rules(broken_jobs([shown(row())], [row(), row("job-2", status=ended("Failed"))])) == ["no uid has two jobs"]


def test_an_object_without_a_job_or_with_an_old_status_is_found() -> None:
    assert rules(broken_jobs([shown(row())], [])) == ["an object has its job"]
    assert rules(broken_jobs([shown(row())], [row(status=ended("Succeeded"))])) == ["an object shows its row"]


def test_an_object_that_was_suspended_before_it_had_a_job_breaks_nothing_and_one_that_forgot_its_job_does() -> None:
    suspended = {"metadata": {"name": "mine", "uid": "u1"}, "status": {"phase": "Suspended"}}
    assert not rules(broken_jobs([suspended], [row(uid="u2", status=ended("Succeeded"))]))
    assert "an object has its job" in rules(broken_jobs([suspended], [row(status=ended("Succeeded"))]))


def test_a_live_job_without_an_object_and_an_object_that_is_held_are_found() -> None:
    assert rules(broken_jobs([], [row()])) == ["a job that has not ended has an object"]
    held = shown(row(), deletionTimestamp="2026-01-01T00:00:00Z")
    assert rules(broken_jobs([held], [row()])) == ["an object that was deleted is gone"]


def test_endpoints_without_their_objects_and_objects_of_nobody_are_found() -> None:
    assert rules(broken_endpoints([], [endpoint()], {})) == [
        "an endpoint that is on has its Deployment and Service", "an endpoint that is on has a DraftEndpoint"]
    assert rules(broken_endpoints([draft()], [endpoint(desired="off")], {"chat": 1})) == [
        "an endpoint that is off has no Deployment or Service"]
    assert rules(broken_endpoints([draft(candidate=2)], [endpoint()], {"chat": 1})) == ["a DraftEndpoint shows its row"]
    assert rules(broken_endpoints([draft("other")], [], {"gone": 1})) == [
        "no Deployment or Service belongs to nobody", "a DraftEndpoint has its row"]
