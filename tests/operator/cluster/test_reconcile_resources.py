"""What a DrafterJob or DraftEndpoint needs next: plain values in, actions out."""

import json
from datetime import timedelta
from typing import Any

import pytest

from eyrie_api.contract.resources import JOB_ID_ANNOTATION, OUTSIDE_ANNOTATION, UID_LABEL, WaitingObject
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Endpoint, Job
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.quotas import QuotaReached
from eyrie_operator.cluster.reconcile import (
    Actions,
    Annotate,
    ChangeJob,
    CreateEndpoint,
    CreateJob,
    DeleteResource,
    JobHistory,
    RecordWaiting,
    RemoveWaiting,
    RequeueAfter,
    SetDesired,
    SetFinalizer,
    UpdateMirror,
    UpdateServing,
    UpdateStatus,
    orphaned,
    reconcile_endpoint,
    reconcile_job,
    refuse_job,
    wait_for_quota,
)
from eyrie_operator.cluster.resources import (
    MIRRORED,
    ORIGIN_LABEL,
    SUSPENDED_ANNOTATION,
    EndpointResource,
    JobResource,
    KubernetesEvent,
    mirror_of,
    mirror_of_endpoint,
    read_endpoint,
    read_job,
)
from tests.operator.cluster.objects import NOW, UID, cancelled, conditions, drafter_job, job, projected, succeeded

RELEASED = (SetFinalizer(held=False),)
WORKLOADS = [{"kind": "Deployment", "metadata": {}}]


def seen_job(raw: dict[str, Any], mirrors: str = "team") -> JobResource:
    return read_job(raw, mirrors)


def seen_endpoint(raw: dict[str, Any], mirrors: str = "team") -> EndpointResource:
    return read_endpoint(raw, mirrors)


def look(raw: dict[str, Any], row: Job | None, history: JobHistory | None = None) -> Actions:
    return reconcile_job(seen_job(raw), row, history or JobHistory(), NOW)


def settled(raw: dict[str, Any], row: Job) -> dict[str, Any]:
    """The object after its status has been written."""
    return {**raw, "status": projected(look(raw, row))}


def test_an_applied_object_is_held_and_submitted_with_its_uid_as_key_and_label() -> None:
    hold, create = look(drafter_job(held=False), None)
    assert hold == SetFinalizer(held=True)
    assert isinstance(create, CreateJob)
    assert create.key == UID
    assert create.spec.labels == {UID_LABEL: UID, "kubernetes-namespace": "team", "kubernetes-name": "mine"}
    assert look(drafter_job(), None) == (create,), "a change of the object would lead to another pass at once"


def test_a_status_that_is_right_already_is_not_written_again() -> None:
    raw = settled(drafter_job(), job())
    assert look(raw, job()) == ()


def test_a_status_whose_conditions_the_server_keeps_in_another_order_is_not_written_again() -> None:
    raw, row = drafter_job(), job("Running", ("Accepted", "True", "JobAccepted"), ("Trained", "Unknown", "Running"))
    status = projected(look(raw, row))
    assert len(status["conditions"]) > 1
    assert look({**raw, "status": {**status, "conditions": status["conditions"][::-1]}}, row) == ()


def test_a_change_is_written_once_with_one_event_per_changed_condition() -> None:
    raw = settled(drafter_job(), job())
    actions = look(raw, job("Running", ("Trained", "Unknown", "Running")))
    assert [one.reason for one in actions if isinstance(one, KubernetesEvent)] == ["Running"]
    assert isinstance(actions[-1], UpdateStatus)
    assert conditions(actions)["Trained"] == ("Unknown", "Running")


def test_events_of_the_same_transition_have_the_same_name() -> None:
    first = [one for one in look(drafter_job(), succeeded()) if isinstance(one, KubernetesEvent)]
    again = [one for one in look(drafter_job(), succeeded()) if isinstance(one, KubernetesEvent)]
    assert first == again
    assert len({one.name for one in first}) == len(first) == 2


def test_times_are_whole_seconds_in_utc_and_generations_are_the_objects() -> None:
    status = projected(look(drafter_job(generation=4), succeeded()))
    assert status["observedGeneration"] == 4
    assert status["conditions"][1] == {
        "type": "Succeeded", "status": "True", "reason": "Completed", "observedGeneration": 4,
        "lastTransitionTime": "2026-11-21T11:00:00Z"}


def test_empty_words_are_left_out_since_old_servers_make_nulls_of_them() -> None:
    assert '""' not in json.dumps(projected(look(drafter_job(), succeeded())))


def test_what_the_contract_refuses_is_reported_as_an_end_and_not_submitted() -> None:
    raw = drafter_job()
    raw["spec"]["job"]["benchmark"] = {"tree": {"num_steps": 5, "top_k": 1, "num_draft_tokens": 9}}
    actions = look(raw, None)
    assert not any(isinstance(one, CreateJob) for one in actions)
    assert conditions(actions) == {"Accepted": ("False", "InvalidSpec"), "Succeeded": ("False", "InvalidSpec"),
                                "Failed": ("True", "InvalidSpec")}
    assert "spec.job.benchmark.tree" in projected(actions)["conditions"][0]["message"]
    assert look({**raw, "status": projected(actions)}, None) == ()


def test_what_was_refused_is_submitted_only_after_the_object_changed() -> None:
    refused = projected(refuse_job(seen_job(drafter_job()), "TargetNotFound", "no such model", NOW, over=True))
    assert look(drafter_job(status=refused), None) == ()
    assert any(isinstance(one, CreateJob) for one in look(drafter_job(status=refused, generation=2), None))


FULL = QuotaReached("project 'search' has 2 jobs", "wait until one ends")


def wait(stored: WaitingObject | None = None, later_s: float = 0.0, refusal: QuotaReached = FULL) -> Actions:
    now = NOW + timedelta(seconds=later_s)
    return wait_for_quota(seen_job(drafter_job()).identity, "search", refusal, stored, now)


def written(actions: Actions) -> WaitingObject:
    (action,) = actions
    assert isinstance(action, RecordWaiting)
    return action.waiting


def test_an_object_without_room_is_recorded_once_and_again_when_its_words_differ_and_keeps_its_time() -> None:
    first = written(wait())
    assert first == WaitingObject(namespace="team", name="mine", uid=UID, project="search", reason="QuotaReached",
                                  message="project 'search' has 2 jobs", hint="wait until one ends", since=NOW)
    assert wait(first, later_s=15.0) == ()
    fewer = written(wait(first, later_s=30.0, refusal=QuotaReached("project 'search' has 1 jobs", "wait")))
    assert (fewer.message, fewer.since) == ("project 'search' has 1 jobs", NOW)
    older = first.model_copy(update={"uid": "uid-of-another-object"})
    assert written(wait(older, later_s=60.0)).since == NOW + timedelta(seconds=60)


def test_a_row_among_those_that_wait_is_removed_when_the_object_is_accepted_suspended_refused_or_deleted() -> None:
    row = written(wait())
    history = JobHistory(waiting=row)
    refused = projected(refuse_job(seen_job(drafter_job()), "TargetNotFound", "no such model", NOW, over=True))
    invalid = drafter_job()
    invalid["spec"]["job"] = {}
    for raw, found in ((drafter_job(), job()), (drafter_job(suspend=True), None), (invalid, None),
                       (drafter_job(status=refused), None), (drafter_job(deleting=True), None)):
        assert look(raw, found, history)[0] == RemoveWaiting(row), raw
        assert RemoveWaiting(row) not in look(raw, found)
    assert not any(isinstance(one, RemoveWaiting) for one in look(drafter_job(), None, history)), "to be submitted"
    resumed = drafter_job(annotations={SUSPENDED_ANNOTATION: "1"})
    assert RemoveWaiting(row) not in look(resumed, cancelled(), history), "to be resumed"


def test_rows_of_objects_that_do_not_exist_are_orphaned() -> None:
    row = written(wait())
    assert orphaned([row], {UID}) == ()
    assert orphaned([row], {"uid-of-another-object"}) == (row,)


def test_an_object_applied_suspended_waits_without_a_job() -> None:
    actions = look(drafter_job(suspend=True), None)
    assert conditions(actions) == {"Accepted": ("False", "Suspended"), "Suspended": ("True", "Suspended")}
    resumed = look(drafter_job(status=projected(actions)), None)
    assert any(isinstance(one, CreateJob) for one in resumed)


def test_suspending_marks_the_attempt_before_it_cancels() -> None:
    actions = look(drafter_job(suspend=True), job(attempt=2))
    assert actions[:2] == (Annotate(SUSPENDED_ANNOTATION, "2"), ChangeJob("cancel", "job-abc"))
    assert conditions(actions)["Suspended"] == ("False", "Stopping")


def test_a_suspended_job_is_resumed_as_another_attempt_and_the_mark_taken_away() -> None:
    marked = {SUSPENDED_ANNOTATION: "1"}
    stopped = look(drafter_job(suspend=True, annotations=marked), cancelled())
    assert conditions(stopped)["Suspended"] == ("True", "Suspended")
    assert projected(stopped)["phase"] == "Suspended"
    assert ChangeJob("retry", "job-abc") in look(drafter_job(annotations=marked), cancelled())
    assert Annotate(SUSPENDED_ANNOTATION, None) in look(drafter_job(annotations=marked), job(attempt=2))


def test_a_job_that_a_person_cancelled_is_not_resumed() -> None:
    assert not any(isinstance(one, ChangeJob) for one in look(drafter_job(), cancelled()))
    assert not any(isinstance(one, ChangeJob)
                   for one in look(drafter_job(annotations={SUSPENDED_ANNOTATION: "1"}), cancelled(attempt=2)))


def test_suspending_what_has_succeeded_changes_nothing() -> None:
    actions = look(drafter_job(suspend=True), succeeded())
    assert not any(isinstance(one, ChangeJob | Annotate) for one in actions)
    assert projected(actions)["phase"] == "Succeeded"


@pytest.mark.parametrize(("ago_s", "left_s"), [(59.0, 1.0), (10.0, 50.0)])
def test_an_ended_object_is_looked_at_again_when_its_time_is_up(ago_s: float, left_s: float) -> None:
    raw = settled(drafter_job(ttl_seconds_after_finished=60), succeeded(ago_s))
    assert look(raw, succeeded(ago_s)) == (RequeueAfter(left_s),)


def test_an_object_whose_time_is_up_goes_and_leaves_its_job() -> None:
    keep, delete = look(drafter_job(ttl_seconds_after_finished=60), succeeded(60.0))
    assert keep == Annotate(OUTSIDE_ANNOTATION, "keep")
    assert isinstance(delete, DeleteResource)
    assert look(drafter_job(deleting=True, annotations={OUTSIDE_ANNOTATION: "keep"}), succeeded()) == RELEASED


def test_a_running_job_has_no_time_to_live() -> None:
    assert not any(isinstance(one, DeleteResource | RequeueAfter)
                   for one in look(drafter_job(ttl_seconds_after_finished=0), job()))


def test_deleting_an_object_ends_its_job_first_and_releases_it_when_the_record_is_gone() -> None:
    waiting = look(drafter_job(deleting=True), job())
    assert ChangeJob("delete", "job-abc") in waiting
    assert not any(isinstance(one, SetFinalizer) for one in waiting)
    assert look(drafter_job(deleting=True), None) == RELEASED
    assert look(drafter_job(deleting=True, held=False), None) == ()


def test_an_object_whose_drafter_serves_is_held_and_says_how_to_go_on() -> None:
    actions = look(drafter_job(deleting=True), succeeded(), JobHistory(served_by="support"))
    assert not any(isinstance(one, ChangeJob | SetFinalizer) for one in actions)
    assert conditions(actions)["Deleted"] == ("False", "EndpointServes")
    assert "support" in projected(actions)["conditions"][-1]["message"]


def test_an_object_whose_job_was_deleted_elsewhere_goes_too() -> None:
    gone = drafter_job(status={"job_id": "job-abc"})
    assert isinstance(look(gone, None, JobHistory(deleted=True))[0], DeleteResource)


def test_a_database_that_never_had_the_job_empties_no_cluster() -> None:
    actions = look(drafter_job(status={"job_id": "job-abc"}), None)
    assert not any(isinstance(one, DeleteResource | CreateJob) for one in actions)
    assert conditions(actions)["Accepted"] == ("False", "JobUnknown")


def test_a_mirror_is_the_job_it_shows_and_goes_with_it() -> None:
    posted = job(labels={})
    raw = mirror_of(posted, "team")
    raw["metadata"] |= {"uid": UID, "generation": 1, "resourceVersion": "1"}
    assert seen_job(raw).mirrored
    assert seen_job(raw).spec is not None
    assert seen_job(raw).spec.job == posted.spec  # type: ignore[union-attr]
    assert projected(look(raw, posted))["job_id"] == posted.id
    assert isinstance(look(raw, None)[0], DeleteResource)


def test_a_copy_of_a_mirror_under_another_name_is_no_mirror() -> None:
    raw = drafter_job(labels={ORIGIN_LABEL: MIRRORED}, annotations={JOB_ID_ANNOTATION: "job-abc"})
    assert not seen_job(raw).mirrored


def test_a_mirror_outside_the_mirror_namespace_is_forged() -> None:
    posted = job(labels={})
    raw = mirror_of(posted, "team")
    raw["metadata"] |= {"uid": UID, "generation": 1, "resourceVersion": "1"}
    assert not seen_job(raw, "eyrie").mirrored
    assert not read_job(raw, None).mirrored
    assert seen_endpoint(mirrored(endpoint(), EndpointServeSpec(endpoint="support"))).mirrored
    assert not seen_endpoint(mirrored(endpoint(), EndpointServeSpec(endpoint="support")), "eyrie").mirrored


def draft_endpoint(**spec: Any) -> dict[str, Any]:
    raw = drafter_job(name="support")
    return {**raw, "kind": "DraftEndpoint", "spec": {"target": {"model": "quickstart"}, **spec}}


def endpoint(**changes: Any) -> Endpoint:
    return Endpoint.model_validate({
        "name": "support", "target": "quickstart", "url": "http://127.0.0.1:1/v1", "model": "quickstart",
        "active_revision": 1, "updated_at": NOW} | changes)


def test_an_applied_endpoint_is_made_under_the_objects_own_name() -> None:
    raw = draft_endpoint(serve={"endpoint": "another"})
    _, create = reconcile_endpoint(seen_endpoint({**raw, "metadata": {**raw["metadata"], "finalizers": []}}), None,
                                   NOW)
    assert isinstance(create, CreateEndpoint)
    assert create.serve.endpoint == "support"


def test_an_endpoint_is_switched_as_its_object_says_and_off_before_it_is_let_go() -> None:
    off = reconcile_endpoint(seen_endpoint(draft_endpoint(desired="off")), endpoint(), NOW)
    assert SetDesired("off") in off
    deleting = draft_endpoint()
    deleting["metadata"]["deletionTimestamp"] = "2026-11-21T11:59:00Z"
    assert SetDesired("off") in reconcile_endpoint(seen_endpoint(deleting), endpoint(), NOW)
    assert reconcile_endpoint(seen_endpoint(deleting), endpoint(desired="off"), NOW) == RELEASED


def test_an_endpoint_of_another_target_is_refused_and_left_alone() -> None:
    actions = reconcile_endpoint(seen_endpoint(draft_endpoint()), endpoint(target="other"), NOW)
    assert conditions(actions) == {"Accepted": ("False", "TargetDiffers")}
    assert not any(isinstance(one, SetDesired | CreateEndpoint) for one in actions)


def test_of_two_endpoints_of_one_name_the_younger_is_refused_and_switches_nothing() -> None:
    off = seen_endpoint(draft_endpoint(desired="off"))
    actions = reconcile_endpoint(off, endpoint(), NOW, "other/support")
    assert conditions(actions) == {"Accepted": ("False", "NameTaken")}
    deleting = draft_endpoint()
    deleting["metadata"]["deletionTimestamp"] = "2026-11-21T11:59:00Z"
    assert reconcile_endpoint(seen_endpoint(deleting), endpoint(), NOW, "other/support") == RELEASED


def test_an_endpoint_s_status_shows_url_and_revisions_and_is_written_once() -> None:
    row = endpoint(revisions=[{"number": 1, "job_id": None, "checkpoint": None, "tree": None, "drafter_dir": None,
                               "created_at": NOW - timedelta(hours=1), "reason": "bare", "state": "active"}])
    raw = draft_endpoint()
    actions = reconcile_endpoint(seen_endpoint(raw), row, NOW)
    assert projected(actions)["url"] == "http://127.0.0.1:1/v1"
    assert projected(actions)["revisions"][0]["setting"] == "off"
    later = NOW + timedelta(minutes=5)
    assert reconcile_endpoint(seen_endpoint({**raw, "status": projected(actions)}), row, later) == ()


def test_an_edited_object_says_how_its_endpoint_is_served_until_a_promotion_says_otherwise() -> None:
    raw, row = draft_endpoint(serve={"endpoint": "support", "replicas": 3}), endpoint()
    served = EndpointServeSpec(endpoint="support", port=4711)
    actions = reconcile_endpoint(seen_endpoint(raw), row, NOW, serve=served)
    wanted = EndpointServeSpec(endpoint="support", port=4711, replicas=3)
    assert UpdateServing(wanted) in actions
    assert projected(actions)["observedGeneration"] == 1
    seen = seen_endpoint({**raw, "status": projected(actions)})
    assert reconcile_endpoint(seen, row, NOW, serve=wanted) == ()
    promoted = wanted.model_copy(update={"replicas": None})
    assert reconcile_endpoint(seen, row, NOW, serve=promoted) == ()


def mirrored(row: Endpoint, serve: EndpointServeSpec, **spec: Any) -> dict[str, Any]:
    """The mirror of a row as the API server has it, with a spec that somebody has changed."""
    raw = mirror_of_endpoint(row, TargetSpec(model=row.target), serve, "team")
    made = draft_endpoint()["metadata"] | raw["metadata"]
    return {**raw, "metadata": made, "spec": {**raw["spec"], **spec}}


def test_a_mirrored_endpoint_shows_its_row_and_switches_nothing_by_itself() -> None:
    serve = EndpointServeSpec(endpoint="support")
    raw, off = mirrored(endpoint(), serve), endpoint(desired="off")
    first = reconcile_endpoint(seen_endpoint(raw), endpoint(), NOW, serve=serve)
    assert not any(isinstance(one, SetDesired | UpdateServing | UpdateMirror) for one in first)
    actions = reconcile_endpoint(seen_endpoint(raw), off, NOW, serve=serve)
    assert UpdateMirror() in actions
    assert not any(isinstance(one, SetDesired) for one in actions)


def test_what_somebody_writes_to_a_mirrored_endpoint_counts_once() -> None:
    serve = EndpointServeSpec(endpoint="support")
    raw = mirrored(endpoint(), serve, desired="off")
    actions = reconcile_endpoint(seen_endpoint(raw), endpoint(), NOW, serve=serve)
    assert SetDesired("off") in actions
    done = reconcile_endpoint(seen_endpoint(raw), endpoint(desired="off"), NOW, serve=serve)
    assert UpdateMirror() in done
    with_digest = mirrored(endpoint(desired="off"), serve)
    later = reconcile_endpoint(seen_endpoint(with_digest), endpoint(), NOW, serve=serve)
    assert UpdateMirror() in later
    assert not any(isinstance(one, SetDesired) for one in later)


def test_a_mirror_without_a_row_makes_none() -> None:
    raw = mirrored(endpoint(), EndpointServeSpec(endpoint="support"))
    actions = reconcile_endpoint(seen_endpoint(raw), None, NOW)
    assert conditions(actions) == {"Accepted": ("False", "EndpointUnknown")}
    assert not any(isinstance(one, CreateEndpoint) for one in actions)


def test_an_endpoint_is_let_go_when_its_objects_are_gone() -> None:
    deleting = draft_endpoint()
    deleting["metadata"]["deletionTimestamp"] = "2026-11-21T11:59:00Z"
    off = endpoint(desired="off")
    waits = reconcile_endpoint(seen_endpoint(deleting), off, NOW, existing=WORKLOADS)
    assert [type(one) for one in waits] == [RequeueAfter]
    assert reconcile_endpoint(seen_endpoint(deleting), off, NOW) == RELEASED


def test_an_endpoint_that_is_kept_is_let_go_when_nothing_of_it_would_be_taken_along() -> None:
    kept = draft_endpoint()
    kept["metadata"] |= {"deletionTimestamp": "2026-11-21T11:59:00Z", "annotations": {OUTSIDE_ANNOTATION: "keep"}}
    owned = [{"kind": "Deployment", "metadata": {"ownerReferences": [{"uid": kept["metadata"]["uid"]}]}}]
    waits = reconcile_endpoint(seen_endpoint(kept), endpoint(), NOW, existing=owned)
    assert [type(one) for one in waits] == [RequeueAfter]
    assert reconcile_endpoint(seen_endpoint(kept), endpoint(), NOW, existing=WORKLOADS) == RELEASED
