"""Job rows: a user's verbs, leases, what is observed."""

import threading

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import event

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Job, JobStatus, Progress, StageStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import JobFilter, Jobs, LeaseLost, NewEvent
from eyrie_api.database.outbox import Outbox
from eyrie_api.database.rendering import TIME_CURSOR, decode_cursor, encode_cursor
from eyrie_api.errors import Conflict, InvalidInput, NotFound
from eyrie_api.planning.resolve import derive
from tests.api.samples import NOW, ManualClock, ended, job_body, job_spec, record_metrics, set_stage


def test_a_submitted_job_is_pending_accepted_and_its_first_chore_is_promised(jobs: Jobs, database: Database) -> None:
    job = jobs.submit(derive(job_spec(name="mine")))
    assert (job.status.phase, job.spec.name, job.created_at) == ("Pending", "mine", NOW)
    assert [(one.type, one.status) for one in job.status.conditions] == [("Accepted", "True")]
    assert jobs.get(job.id) == job
    assert [(chore.task, chore.argument) for chore in Outbox(database).pending()] == [("advance_job", job.id)]
    assert [event.reason for event in jobs.events(job.id)] == ["Accepted"]


def test_pages_of_a_list_follow_each_other_without_gap_or_repeat(jobs: Jobs, clock: ManualClock) -> None:
    made = []
    for number in range(7):
        made.append(jobs.submit(derive(job_spec())).id)
        if number % 2:
            clock.pass_(1)  # several jobs share a time: the id decides
    seen: list[str] = []
    cursor = None
    while True:
        page = jobs.list(limit=3, cursor=cursor)
        seen += [job.id for job in page.items]
        if (cursor := page.next_cursor) is None:
            break
    assert sorted(seen) == sorted(made)
    times = [jobs.get(job_id).created_at for job_id in seen]
    assert times == sorted(times, reverse=True)


def test_a_list_is_filtered_by_phase_name_target_and_labels(jobs: Jobs) -> None:
    wanted = jobs.submit(derive(job_spec(name="a", labels={"team": "search", "tier": "1"})))
    jobs.submit(derive(job_spec(name="b", labels={"team": "search"})))
    failed = jobs.submit(derive(job_spec(target={"model": "org/other"})))
    jobs.save_status(failed.id, ended("Failed"))

    def ids(**fields: object) -> list[str]:
        return [job.id for job in jobs.list(JobFilter(**fields)).items]  # type: ignore[arg-type]

    assert ids(name="a") == ids(labels={"team": "search", "tier": "1"}) == [wanted.id]
    assert len(ids(labels={"team": "search"})) == 2
    assert ids(labels={"team": "ads"}) == []
    assert ids(phase="Failed") == ids(target="org/other") == [failed.id]


@given(st.datetimes(timezones=st.just(NOW.tzinfo)), st.text(max_size=70))
def test_a_cursor_says_what_was_put_in(when: object, job_id: str) -> None:
    assert decode_cursor(encode_cursor(when, job_id), TIME_CURSOR) == (when, job_id)  # type: ignore[arg-type]


@given(st.text(max_size=60))
def test_a_foreign_cursor_is_refused_and_never_a_crash(cursor: str) -> None:
    with pytest.raises(InvalidInput, match="next_cursor"):
        decode_cursor(cursor, TIME_CURSOR)


def test_cancel_is_a_wish_that_the_driver_fulfils_and_may_be_repeated(jobs: Jobs, database: Database) -> None:
    job = jobs.submit(derive(job_spec()))
    assert jobs.cancel(job.id).status.phase == "Cancelling"
    assert jobs.cancel(job.id).status.phase == "Cancelling"
    assert jobs.intent(job.id).cancel_requested
    assert len(Outbox(database).pending()) == 2, "asking again promises nothing more"
    jobs.save_status(job.id, ended("Cancelled"))
    assert jobs.cancel(job.id).status.phase == "Cancelled"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_ended_job_cannot_be_cancelled(jobs: Jobs, phase: str) -> None:
    job = jobs.submit(derive(job_spec()))
    jobs.save_status(job.id, ended(phase))  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="has already ended"):
        jobs.cancel(job.id)


def test_retry_goes_on_from_the_failed_stage_and_keeps_the_finished_ones(jobs: Jobs, database: Database) -> None:
    job = jobs.submit(derive(job_spec()))
    set_stage(jobs, job.id, StageStatus(stage="capture", state="Succeeded", attempt=1, finished_at=NOW))
    set_stage(jobs, job.id, StageStatus(stage="train", key="base", state="Failed", attempt=1, reason="LossDiverged",
                                       message="nan", hint="lower it", progress=Progress(done=3)))
    jobs.cancel(job.id)
    jobs.save_status(job.id, ended("Failed"))
    before = len(Outbox(database).pending())
    again = jobs.retry(job.id)
    assert (again.status.phase, again.status.attempt) == ("Pending", 2)
    assert not jobs.intent(job.id).cancel_requested
    assert {one.type for one in again.status.conditions} == set()
    capture, train = again.status.stages
    assert capture.state == "Succeeded"
    assert (train.state, train.reason, train.message, train.progress) == ("Pending", None, None, None)
    assert len(Outbox(database).pending()) == before + 1
    assert jobs.unfinished(10.0) == (job.id,)


def test_a_retry_from_a_stage_starts_with_that_one_and_no_drafter_that_is_served_is_removed(
        jobs: Jobs, database: Database, clock: ManualClock) -> None:
    job = jobs.submit(derive(job_spec()))
    for stage in ("capture", "tune"):
        set_stage(jobs, job.id, StageStatus(stage=stage, state="Succeeded", attempt=1, finished_at=NOW))
    endpoints = Endpoints(database, clock)
    endpoints.create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart")
    endpoints.propose("default", job_id=job.id, checkpoint="c", tree=None, drafter_dir="/d", reason="test")
    jobs.save_status(job.id, ended("Succeeded"))
    with pytest.raises(Conflict, match="serves a drafter"):
        jobs.retry(job.id, "train")
    again = jobs.retry(job.id, "tune")
    assert again.status.restarted_from == "tune"
    assert {stage.stage: stage.state for stage in again.status.stages} == {"capture": "Succeeded", "tune": "Pending"}
    jobs.save_status(job.id, ended("Failed"))
    assert jobs.retry(job.id).status.restarted_from is None


def test_a_job_that_trains_nothing_runs_again_from_stages_that_it_has_and_not_while_its_drafter_serves(
        jobs: Jobs, database: Database, clock: ManualClock) -> None:
    job = jobs.submit(derive(JobSpec.model_validate({"target": {"model": "quickstart"}, "drafters": ["org/head"]})))
    jobs.save_status(job.id, ended("Succeeded"))
    with pytest.raises(Conflict, match="has no stage capture") as refused:
        jobs.retry(job.id, "capture")
    assert "benchmark, tune, prove" in refused.value.hint
    endpoints = Endpoints(database, clock)
    endpoints.create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart")
    endpoints.propose("default", job_id=job.id, checkpoint="head", tree=None, drafter_dir="/d", reason="test")
    with pytest.raises(Conflict, match="serves a drafter"):
        jobs.retry(job.id, "benchmark")
    assert jobs.retry(job.id, "tune").status.restarted_from == "tune"


def test_the_document_as_it_was_sent_is_kept_by_all_ways_and_by_a_retry(jobs: Jobs) -> None:
    spec = job_spec(train={"epochs": 3})
    resolved = spec.model_copy(update={"target": spec.target.model_copy(update={"dtype": "float32"})})
    once = jobs.submit_once(derive(resolved), None, "default", submitted=spec)
    assert isinstance(once, Job)
    for job in (once, jobs.submit(derive(resolved), submitted=spec), jobs.submit(derive(spec))):
        assert jobs.submitted(job.id) == job_body(train={"epochs": 3})
    jobs.save_status(once.id, ended("Failed"))
    jobs.retry(once.id)
    assert jobs.submitted(once.id) == job_body(train={"epochs": 3})
    with pytest.raises(NotFound):
        jobs.submitted("job-none")


def test_a_list_of_jobs_does_not_read_the_documents_that_were_sent(jobs: Jobs, database: Database) -> None:
    jobs.submit(derive(job_spec()))
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert len(jobs.list().items) == 1
    assert not any("submission" in one for one in statements)


def test_retry_is_refused_while_running_and_after_success(jobs: Jobs) -> None:
    job = jobs.submit(derive(job_spec()))
    with pytest.raises(Conflict, match="has not ended"):
        jobs.retry(job.id)
    jobs.save_status(job.id, ended("Succeeded"))
    with pytest.raises(Conflict, match="has succeeded"):
        jobs.retry(job.id)


def test_deleting_an_ended_job_removes_its_rows_and_promises_the_removal_of_its_files(
        jobs: Jobs, database: Database) -> None:
    job = jobs.submit(derive(job_spec(labels={"a": "b"})))
    record_metrics(jobs, job.id, "train", "base", [("loss", 1, 2.0, NOW)])
    jobs.save_status(job.id, ended("Failed"))
    assert jobs.delete(job.id)
    with pytest.raises(NotFound):
        jobs.get(job.id)
    assert Outbox(database).pending()[-1].task == "remove_files"


def test_deleting_a_running_job_cancels_it_first(jobs: Jobs) -> None:
    job = jobs.submit(derive(job_spec()))
    assert not jobs.delete(job.id)
    assert jobs.intent(job.id).cancel_requested
    assert jobs.to_be_deleted() == ()
    jobs.save_status(job.id, ended("Cancelled"))
    assert jobs.to_be_deleted() == (job.id,)
    with pytest.raises(Conflict, match="being deleted"):
        jobs.retry(job.id)


def test_a_job_whose_drafter_serves_cannot_be_deleted_until_another_does(
        jobs: Jobs, database: Database, clock: ManualClock) -> None:
    job = jobs.submit(derive(job_spec()))
    jobs.save_status(job.id, ended("Succeeded"))
    endpoints = Endpoints(database, clock)
    endpoints.create("default", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart")
    revision = endpoints.propose("default", job_id=job.id, checkpoint="c", tree=None, drafter_dir="/d", reason="test")
    with pytest.raises(Conflict, match="'default' serves"):
        jobs.delete(job.id)
    endpoints.activate("default", revision.number)
    with pytest.raises(Conflict, match="'default' serves"):
        jobs.delete(job.id)
    endpoints.roll_back("default")
    endpoints.activate("default", 1)
    assert jobs.delete(job.id)


def test_of_many_drivers_racing_for_a_lease_exactly_one_wins(database: Database) -> None:
    jobs = Jobs(database)
    job_id = jobs.submit(derive(job_spec())).id
    for _ in range(5):
        barrier, won = threading.Barrier(6), []

        def race(owner: str, barrier: threading.Barrier = barrier, won: list[str] = won) -> None:
            barrier.wait()
            if jobs.take_lease(job_id, owner, 60.0):
                won.append(owner)

        threads = [threading.Thread(target=race, args=(f"driver-{number}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert jobs.release_lease(job_id, won[0])


def test_a_lease_passes_on_only_when_it_has_run_out(jobs: Jobs, clock: ManualClock) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    assert jobs.take_lease(job_id, "first", 10.0)
    assert not jobs.take_lease(job_id, "second", 10.0)
    assert jobs.unfinished(10.0) == ()
    clock.pass_(9)
    assert jobs.renew_lease(job_id, "first", 10.0)
    clock.pass_(11)
    assert jobs.unfinished(10.0) == (job_id,)
    assert jobs.take_lease(job_id, "second", 10.0)
    assert not jobs.renew_lease(job_id, "first", 10.0)
    assert not jobs.release_lease(job_id, "first")


def test_a_lease_of_a_clock_that_was_far_ahead_keeps_nobody_waiting(jobs: Jobs, clock: ManualClock) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    clock.pass_(3600)
    assert jobs.take_lease(job_id, "ahead", 10.0)
    clock.pass_(-3600)
    assert jobs.unfinished(10.0) == (job_id,)
    assert jobs.take_lease(job_id, "second", 10.0)
    assert not jobs.renew_lease(job_id, "ahead", 10.0)


def test_a_stale_lease_may_write_neither_status_nor_the_events_that_belong_to_it(
        jobs: Jobs, clock: ManualClock) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    jobs.take_lease(job_id, "first", 10.0)
    jobs.save_status(job_id, JobStatus(phase="Running"), "first", [NewEvent("StageStarted", "m", stage="capture")])
    clock.pass_(11)
    with pytest.raises(LeaseLost):
        jobs.save_status(job_id, ended("Succeeded"), owner="first")
    jobs.take_lease(job_id, "second", 10.0)
    with pytest.raises(LeaseLost):
        jobs.save_status(job_id, ended("Succeeded"), "first", [NewEvent("Succeeded", "m")])
    assert jobs.get(job_id).status.phase == "Running"
    assert [one.reason for one in jobs.events(job_id)] == ["Accepted", "StageStarted"]


def test_an_ended_job_can_no_longer_be_leased(jobs: Jobs) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    jobs.save_status(job_id, ended("Failed"))
    assert not jobs.take_lease(job_id, "late", 10.0)
    assert jobs.unfinished(10.0) == jobs.unfinished() == ()


@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "renew", "release", "wait"]), st.sampled_from("ab")), max_size=25))
def test_leases_behave_as_one_owner_and_a_deadline(jobs: Jobs, clock: ManualClock,
                                                   steps: list[tuple[str, str]]) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    owner, until = None, clock()
    for verb, who in steps:
        held = owner is not None and until >= clock()
        if verb == "wait":
            clock.pass_(6)
        elif verb == "take":
            may = not held or owner == who
            assert jobs.take_lease(job_id, who, 10.0) is may
            if may:
                owner, until = who, clock.now.__class__.fromtimestamp(clock().timestamp() + 10, clock().tzinfo)
        elif verb == "renew":
            may = held and owner == who
            assert jobs.renew_lease(job_id, who, 10.0) is may
            if may:
                until = clock.now.__class__.fromtimestamp(clock().timestamp() + 10, clock().tzinfo)
        else:
            assert jobs.release_lease(job_id, who) is (owner == who)
            owner = None if owner == who else owner


def test_status_keeps_the_progress_that_was_read_from_the_stage(jobs: Jobs) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    set_stage(jobs, job_id, StageStatus(stage="train", key="base", state="Running", progress=Progress(done=5.0)))
    running = StageStatus(stage="train", key="base", state="Running", attempt=1)
    jobs.save_status(job_id, JobStatus(phase="Running", stages=(running,)))
    (stage,) = jobs.get(job_id).status.stages
    assert stage.progress == Progress(done=5.0)
    assert stage.attempt == 1


def test_stages_are_shown_in_the_order_of_the_pipeline(jobs: Jobs) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    for stage, key in (("tune", ""), ("train", "c2"), ("regenerate", ""), ("train", "c1")):
        set_stage(jobs, job_id, StageStatus(stage=stage, key=key))  # type: ignore[arg-type]
    shown = [(one.stage, one.key) for one in jobs.get(job_id).status.stages]
    assert shown == [("regenerate", ""), ("train", "c1"), ("train", "c2"), ("tune", "")]


def test_a_metric_recorded_again_is_replaced_and_series_are_ordered_by_step(jobs: Jobs) -> None:
    job_id = jobs.submit(derive(job_spec())).id
    record_metrics(jobs, job_id, "train", "base", [("loss", 20, 1.0, NOW), ("loss", 10, 2.0, NOW)])
    record_metrics(jobs, job_id, "train", "base", [("loss", 20, 0.5, NOW), ("lr", 10, 0.1, NOW)])
    loss, lr = jobs.metrics(job_id)
    assert [(point.step, point.value) for point in loss.points] == [(10, 2.0), (20, 0.5)]
    assert (lr.name, len(lr.points)) == ("lr", 1)
    assert jobs.metrics(job_id, name="lr") == (lr,)
    assert jobs.metrics(job_id, stage="tune") == ()


@pytest.mark.parametrize("verb", ["get", "cancel", "retry", "delete", "intent", "events", "metrics"])
def test_an_unknown_job_is_not_found_by_any_verb(jobs: Jobs, verb: str) -> None:
    with pytest.raises(NotFound, match="no job 'nope'"):
        getattr(jobs, verb)("nope")
