"""The heart of the operator, with plain values. `benchmarks/campaigns/model.py` plays it against a simulated world."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.promotion import DriftSpec
from eyrie_api.contract.records import Failure, WaitingPod
from eyrie_api.contract.reports import CaptureReport, LayerChoice, PromotionDecision
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.contract.stages import Manifest
from eyrie_api.contract.status import Condition, JobStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_operator.conditions import find, is_over, is_true, observe, observe_recording
from eyrie_operator.jobs.observation import changes
from eyrie_operator.jobs.reconcile import (
    MAX_STARTS,
    Decide,
    ObservedJob,
    ObservedServing,
    ObservedStage,
    Promote,
    StartRun,
    StopRun,
    reconcile,
)
from eyrie_operator.unscheduled import GRACE
from eyrie_pipelines.runner import ObservedRun, RunFailed

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SPEC = JobSpec(target=TargetSpec(model="quickstart"), data=DataSpec(sources=(DataSource(path="quickstart"),)))
YES = PromotionDecision(promote=True, verdict="promote", reasons=("faster everywhere",))
NO = PromotionDecision(promote=False, verdict="no-drafter", reasons=("chat: 0.90x, below the required 1.05x",))


def seen(**known: Any) -> ObservedJob:
    return ObservedJob(**({"attempt": 1, "previous": JobStatus()} | known))


def manifest(stage: str = "capture") -> Manifest:
    report = CaptureReport(source="reference", rows=1, tokens=1, supervised_tokens=1, bytes=1,
                           bytes_per_token=1.0, shards=1,
                           layers=LayerChoice(aux_layers=(1,), reason="r"), hidden_size=1, codec="float32", seconds=1.0,
                           tokens_per_s=1.0)
    return Manifest.model_validate({"stage": stage, "job_id": "j", "spec_digest": "sha256:" + "0" * 64,
                                    "code_version": "0", "started_at": NOW.isoformat(), "finished_at": NOW.isoformat(),
                                    "files": (), "report": report})


def reason_of(status: JobStatus, kind: str) -> str | None:
    found = find(status.conditions, kind)
    return None if found is None else found.reason


def test_a_new_job_starts_a_run() -> None:
    plan = reconcile(SPEC, seen(), NOW)
    assert plan.actions == (StartRun(1),)
    assert plan.status.phase == "Pending"


def test_a_new_job_waits_in_line_while_no_place_is_free() -> None:
    plan = reconcile(SPEC, seen(has_capacity=False), NOW)
    assert plan.actions == ()
    assert reason_of(plan.status, "Accepted") == "Queued"


def test_a_living_run_is_left_alone_and_its_stages_are_reported() -> None:
    stages = (ObservedStage("regenerate", started_at=NOW, manifest=manifest()),
              ObservedStage("capture", started_at=NOW), ObservedStage("train", "base"))
    plan = reconcile(SPEC, seen(run=ObservedRun("running", 1, 1, "r"), stages=stages), NOW)
    assert plan.actions == ()
    assert plan.status.phase == "Running"
    assert [one.state for one in plan.status.stages] == ["Succeeded", "Running", "Pending"]
    assert is_true(plan.status.conditions, "Regenerated")
    assert not is_true(plan.status.conditions, "Captured")
    assert plan.status.run_id == "r"


def test_a_stage_that_is_being_tried_again_is_running_not_failed() -> None:
    failure = Failure(reason="Transient", message="refused", transient=True, exit_code=75, time=NOW)
    stages = (ObservedStage("regenerate", started_at=NOW, failure=failure),)
    plan = reconcile(SPEC, seen(run=ObservedRun("running", 1, 1), stages=stages), NOW)
    assert plan.status.stages[0].state == "Running"


def test_a_failed_stage_has_ended_when_it_failed() -> None:
    failure = Failure(reason="NoUsableData", message="refused", exit_code=65, time=NOW)
    stages = (ObservedStage("regenerate", started_at=NOW - timedelta(seconds=8), failure=failure),)
    failed = ObservedRun("failed", 1, 1, failure=RunFailed("regenerate", "", "NoUsableData", "refused"))
    one = reconcile(SPEC, seen(run=failed, stages=stages), NOW + timedelta(hours=1)).status.stages[0]
    assert (one.state, one.finished_at) == ("Failed", NOW)


def test_training_is_not_reported_as_done_before_every_candidate_is() -> None:
    done = [ObservedStage(stage, started_at=NOW, manifest=manifest()) for stage in ("regenerate", "capture")]
    one = ObservedStage("train", "a", started_at=NOW, manifest=manifest())
    running = ObservedRun("running", 1, 1)
    plan = reconcile(SPEC, seen(run=running, stages=(*done, one, ObservedStage("train", "b"))), NOW)
    assert reason_of(plan.status, "Trained") == "Running"
    plan = reconcile(SPEC, seen(run=ObservedRun("running", 1, 1), stages=(*done, one)), NOW)
    assert is_true(plan.status.conditions, "Trained")


def test_a_job_that_trains_nothing_is_benchmarked_without_conditions_of_training() -> None:
    spec = JobSpec.model_validate({"target": {"model": "quickstart"}, "drafters": ["org/head"]})
    measured = ObservedStage("benchmark", "head", started_at=NOW, manifest=manifest())
    running = ObservedRun("running", 1, 1)
    plan = reconcile(spec, seen(run=running, stages=(measured, ObservedStage("tune", started_at=NOW))), NOW)
    assert is_true(plan.status.conditions, "Benchmarked")
    assert reason_of(plan.status, "Tuned") == "Running"
    assert not {"Regenerated", "Captured", "Trained"} & {each.type for each in plan.status.conditions}


def test_a_run_that_vanished_is_started_again_but_not_forever() -> None:
    assert reconcile(SPEC, seen(run=ObservedRun("gone", 1, 1)), NOW).actions == (StartRun(1),)
    plan = reconcile(SPEC, seen(run=ObservedRun("gone", 1, MAX_STARTS)), NOW)
    assert plan.actions == ()
    assert reason_of(plan.status, "Failed") == "RunKeepsDying"


@pytest.mark.parametrize(("starts", "stuck_s", "last_s", "expected"), [
    (1, 1, 1, "now"), (2, 3, 3, "later"), (2, 5, 5, "now"),
    (5, 100, 39, "later"), (5, 100, 40, "now"),  # five starts within 100 s that something outside ended
    (4, 900, 900, "now"), (5, 300, 0, "never"), (9, 299, 61, "now"),
    (9, -86_400, -86_400, "now"), (20, -86_400, -86_400, "never"),  # the clock was set back by a day
])
def test_a_run_that_dies_is_started_again_after_growing_pauses_and_fails_after_five_starts_in_five_minutes(
        starts: int, stuck_s: int, last_s: int, expected: str) -> None:
    run = ObservedRun("gone", 1, starts, since=NOW - timedelta(seconds=stuck_s),
                      started_at=NOW - timedelta(seconds=last_s), last_words="Killed")
    plan = reconcile(SPEC, seen(run=run), NOW)
    assert plan.actions == ((StartRun(1),) if expected == "now" else ())
    assert reason_of(plan.status, "Failed") == ("RunKeepsDying" if expected == "never" else None)
    assert reason_of(plan.status, "Accepted") == ("RunDied" if expected == "later" else "JobAccepted")


def test_a_run_that_keeps_dying_is_reported_with_the_end_of_its_log() -> None:
    run = ObservedRun("gone", 1, MAX_STARTS, last_words="ModuleNotFoundError: No module named 'kfp'")
    plan = reconcile(SPEC, seen(run=run), NOW)
    (failed,) = [one for one in plan.status.conditions if one.type == "Failed"]
    assert "its log ends with: ModuleNotFoundError: No module named 'kfp'" in failed.message


def test_orphans_of_a_dead_leader_are_ended_before_the_run_is_started_again() -> None:
    assert reconcile(SPEC, seen(run=ObservedRun("gone", 1, 1, leftovers=True)), NOW).actions == (StopRun(),)
    result = RunFailed("train", "base", "LossDiverged", "loss was nan")
    failed = ObservedRun("failed", 1, 1, failure=result, leftovers=True)
    assert reconcile(SPEC, seen(run=failed), NOW).actions == (StopRun(),)


def test_a_failed_run_fails_the_job_with_the_stages_own_words() -> None:
    failed = RunFailed("train", "base", "LossDiverged", "loss was nan at step 3", "lower train.learning_rate")
    plan = reconcile(SPEC, seen(run=ObservedRun("failed", 1, 1, failure=failed)), NOW)
    assert plan.actions == ()
    assert plan.status.phase == "Failed"
    for kind in ("Failed", "Trained", "Succeeded"):
        found = find(plan.status.conditions, kind)
        assert found is not None
        assert found.reason == "LossDiverged"
        assert "lower train.learning_rate" in found.message


def test_a_retried_job_starts_a_run_of_the_next_attempt() -> None:
    over = reconcile(SPEC, seen(run=ObservedRun("failed", 1, 1)), NOW).status
    plan = reconcile(SPEC, seen(attempt=2, previous=over, run=ObservedRun("failed", 1, 1)), NOW)
    assert plan.actions == (StartRun(2),)
    assert not is_over(plan.status.conditions)
    assert plan.status.finished_at is None


@pytest.mark.parametrize("wish", ["cancel_requested", "delete_requested"])
def test_cancelling_stops_what_lives_and_only_then_says_cancelled(wish: str) -> None:
    plan = reconcile(SPEC, seen(run=ObservedRun("running", 1, 1), **{wish: True}), NOW)
    assert plan.actions == (StopRun(),)
    assert plan.status.phase == "Cancelling"
    plan = reconcile(SPEC, seen(run=ObservedRun("gone", 1, 1, leftovers=True), **{wish: True}), NOW)
    assert plan.actions == (StopRun(),)
    plan = reconcile(SPEC, seen(run=ObservedRun("gone", 1, 1), **{wish: True}), NOW)
    assert plan.actions == ()
    assert plan.status.phase == "Cancelled"
    assert plan.status.finished_at == NOW


def test_a_finished_pipeline_is_decided_then_promoted_then_watched_until_it_serves() -> None:
    run = ObservedRun("succeeded", 1, 1)
    assert reconcile(SPEC, seen(run=run), NOW).actions == (Decide(),)
    assert reconcile(SPEC, seen(run=run, decision=YES), NOW).actions == (Promote("default"),)
    waiting = reconcile(SPEC, seen(run=run, decision=YES, serving=ObservedServing("deploying")), NOW)
    assert waiting.actions == ()
    assert not is_over(waiting.status.conditions)
    done = reconcile(SPEC, seen(run=run, decision=YES, serving=ObservedServing("serving")), NOW)
    assert done.actions == ()
    assert done.status.phase == "Succeeded"
    assert is_true(done.status.conditions, "Serving")


def test_a_drafter_that_is_not_faster_does_not_serve_but_the_target_alone_does() -> None:
    run = ObservedRun("succeeded", 1, 1)
    assert reconcile(SPEC, seen(run=run, decision=NO), NOW).actions == (Promote("default"),)
    plan = reconcile(SPEC, seen(run=run, decision=NO, serving=ObservedServing("serving")), NOW)
    assert plan.actions == ()
    assert plan.status.phase == "Succeeded"
    assert reason_of(plan.status, "Promoted") == "NotFaster"


@pytest.mark.parametrize("verdict", ["keep-incumbent", "awaits-approval"])
def test_what_serves_is_left_alone_when_the_candidate_may_not_replace_it(verdict: str) -> None:
    decision = PromotionDecision(promote=False, verdict=verdict, reasons=("r",))  # type: ignore[arg-type]
    plan = reconcile(SPEC, seen(run=ObservedRun("succeeded", 1, 1), decision=decision), NOW)
    assert plan.actions == ()
    assert plan.status.phase == "Succeeded"


def test_without_serving_the_decision_is_the_end() -> None:
    spec = SPEC.model_copy(update={"serve": ServeSpec(enabled=False)})
    assert reconcile(spec, seen(run=ObservedRun("succeeded", 1, 1), decision=YES), NOW).status.phase == "Succeeded"


def test_a_job_does_not_wait_for_an_endpoint_that_a_user_switched_off() -> None:
    serving = ObservedServing("off", "Off", "the endpoint is switched off: revision 2 starts when it is switched on")
    plan = reconcile(SPEC, seen(run=ObservedRun("succeeded", 1, 1), decision=YES, serving=serving), NOW)
    assert plan.status.phase == "Succeeded"
    assert reason_of(plan.status, "Serving") == "Off"


def test_a_rolled_back_engine_fails_the_job_with_its_reason() -> None:
    serving = ObservedServing("rolled-back", "HealthTimeout", "not healthy after 60 s")
    plan = reconcile(SPEC, seen(run=ObservedRun("succeeded", 1, 1), decision=YES, serving=serving), NOW)
    assert reason_of(plan.status, "Failed") == "HealthTimeout"
    assert reason_of(plan.status, "Serving") == "HealthTimeout"


def test_a_job_that_is_over_stays_as_it_is_and_ends_leftovers_only() -> None:
    over = reconcile(SPEC, seen(run=ObservedRun("failed", 1, 1)), NOW).status
    later = NOW + timedelta(hours=1)
    again = reconcile(SPEC, seen(previous=over, run=ObservedRun("failed", 1, 1)), later)
    assert again.actions == ()
    assert again.status == over
    assert reconcile(SPEC, seen(previous=over, run=ObservedRun("running", 1, 1)), later).actions == (StopRun(),)


def test_a_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    later = NOW + timedelta(minutes=1)
    once = observe((), "Trained", "Unknown", "Running", "1 of 2", NOW)
    same = observe(once, "Trained", "Unknown", "Running", "2 of 2", later)
    assert same[0].last_transition_time == NOW
    assert same[0].message == "2 of 2"
    changed: tuple[Condition, ...] = observe(same, "Trained", "True", "Finished", "", later)
    assert changed[0].last_transition_time == later


def test_an_endpoint_says_from_the_first_day_whether_its_requests_are_kept_to_retrain_on() -> None:
    nothing, log = DriftSpec(), DriftSpec(traffic_file="s3://log/*.jsonl")
    kept = [find(observe_recording((), drift, prompts, NOW), "Recording")
            for drift, prompts in ((nothing, 0), (nothing, 5), (log, 0), (DriftSpec(action="ignore"), 0))]
    assert [condition and (condition.status, condition.reason) for condition in kept] == [
        ("False", "NothingRecorded"), ("True", "Recorded"), ("True", "Recorded"), None]


def no_node(stage: str = "train", since: datetime = NOW) -> WaitingPod:
    return WaitingPod.model_validate({"run_id": "r", "stage": stage, "reason": "WaitingForNodes", "since": since,
                                      "message": "no node fits: 0/3 nodes", "hint": "scale the pool up"})


def test_a_stage_whose_pod_has_no_node_waits_with_reason_and_hint_after_a_grace_and_says_so_once() -> None:
    stages = (ObservedStage("regenerate", started_at=NOW, manifest=manifest()), ObservedStage("capture"))
    before = seen(run=ObservedRun("running", 1, 1), stages=stages, waiting_pods=(no_node("capture"),))
    early = reconcile(SPEC, before, NOW + timedelta(seconds=59))
    assert early.status.stages[1].reason is None
    late = reconcile(SPEC, replace(before, previous=early.status), NOW + GRACE)
    assert late.actions == ()
    assert (late.status.phase, late.status.stages[1].state) == ("Running", "Pending")
    assert (late.status.stages[1].reason, late.status.stages[1].message, late.status.stages[1].hint) == (
        "WaitingForNodes", "no node fits: 0/3 nodes", "scale the pool up")
    captured = find(late.status.conditions, "Captured")
    assert captured is not None
    assert (captured.status, captured.reason) == ("Unknown", "WaitingForNodes")
    [event] = changes(early.status, late.status)
    assert (event.reason, event.type, event.stage) == ("WaitingForNodes", "Warning", "capture")
    assert event.message == "capture: no node fits: 0/3 nodes; hint: scale the pool up"
    changed = (no_node("capture").model_copy(update={"message": "no node fits: 0/4 nodes"}),)
    again = reconcile(SPEC, replace(before, previous=late.status, waiting_pods=changed), NOW + 2 * GRACE)
    assert again.status.stages[1].message == "no node fits: 0/4 nodes"
    assert list(changes(late.status, again.status)) == []


def test_the_reason_goes_away_when_the_pod_has_a_node_and_the_stage_then_runs() -> None:
    waits = seen(run=ObservedRun("running", 1, 1), stages=(ObservedStage("regenerate"),),
                 waiting_pods=(no_node("regenerate"),))
    held = reconcile(SPEC, waits, NOW + GRACE).status
    pulling = reconcile(SPEC, replace(waits, previous=held, waiting_pods=()), NOW + 2 * GRACE).status
    assert (pulling.stages[0].state, pulling.stages[0].reason) == ("Pending", None)
    assert find(pulling.conditions, "Regenerated") is None
    started = (ObservedStage("regenerate", started_at=NOW + 2 * GRACE),)
    # What the operator saw before the start may still be recorded.
    running = reconcile(SPEC, replace(waits, previous=pulling, stages=started), NOW + 3 * GRACE).status
    assert (running.stages[0].state, running.stages[0].reason) == ("Running", None)
    assert reason_of(running, "Regenerated") == "Running"


def test_a_running_stage_whose_pod_was_evicted_and_finds_no_node_has_the_reason() -> None:
    stages = (ObservedStage("regenerate", started_at=NOW - timedelta(hours=1)),)
    plan = reconcile(SPEC, seen(run=ObservedRun("running", 1, 1), stages=stages,
                                waiting_pods=(no_node("regenerate"),)), NOW + GRACE)
    assert (plan.status.stages[0].state, plan.status.stages[0].reason) == ("Running", "WaitingForNodes")


def test_a_job_that_ended_while_a_pod_waited_keeps_its_own_reasons() -> None:
    failed = RunFailed("regenerate", "", "TargetNotFound", "no model there", "correct target.model")
    plan = reconcile(SPEC, seen(run=ObservedRun("failed", 1, 1, failure=failed), stages=(ObservedStage("regenerate"),),
                                waiting_pods=(no_node("regenerate"),)), NOW + GRACE)
    assert plan.status.stages[0].reason is None
    assert reason_of(plan.status, "Regenerated") == "TargetNotFound"
