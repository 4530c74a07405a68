"""Endpoint rows: candidates, what activates and rejects them, the way back; and the results they are promoted from."""

import pytest

from eyrie_api.database import Database
from eyrie_api.endpoints import Endpoints
from eyrie_api.errors import Conflict, NotFound
from eyrie_api.jobs import Jobs
from eyrie_api.leaderboard import Measured
from eyrie_api.outbox import Outbox
from eyrie_api.results import ResultFilter, Results
from eyrie_api.v1alpha1.job import DraftTreeShape, ServeSpec, TargetSpec
from eyrie_api.v1alpha1.status import Condition, Revision
from tests.api.samples import NOW, ManualClock, benchmark_report, job_spec

TARGET = TargetSpec(model="quickstart")


@pytest.fixture
def endpoints(database: Database, clock: ManualClock) -> Endpoints:
    made = Endpoints(database, clock)
    made.create("default", TARGET, ServeSpec(port=9000), "quickstart")
    return made


def propose(endpoints: Endpoints, drafter: str, **more: object) -> Revision:
    return endpoints.propose("default", job_id="j", checkpoint=drafter, tree=DraftTreeShape(),
                             drafter_dir=f"/d/{drafter}", reason="test", **more)  # type: ignore[arg-type]


def test_a_new_endpoint_aims_at_the_bare_target(endpoints: Endpoints, database: Database) -> None:
    made = endpoints.get("default")
    assert (made.active_revision, made.candidate_revision, made.desired) == (None, 1, "on")
    assert made.revisions[0].checkpoint is None
    assert endpoints.serving("default").serve.port == 9000
    assert [(one.task, one.argument) for one in Outbox(database).pending()] == [("tend_endpoint", "default")]


def test_making_it_again_finds_it_and_another_target_is_refused(endpoints: Endpoints) -> None:
    assert endpoints.create("default", TARGET, ServeSpec(), "quickstart") == endpoints.get("default")
    with pytest.raises(Conflict, match="serves target 'quickstart'"):
        endpoints.create("default", TargetSpec(model="org/other"), ServeSpec(), "x")


def test_a_proposal_leaves_the_active_revision_alone_until_it_is_activated(endpoints: Endpoints) -> None:
    endpoints.activate("default", 1, "http://127.0.0.1:1/v1")
    revision = propose(endpoints, "a", speedup=2.5, tau=3.0)
    seen = endpoints.get("default")
    assert (seen.active_revision, seen.candidate_revision) == (1, revision.number)
    seen = endpoints.activate("default", revision.number)
    assert (seen.active_revision, seen.candidate_revision, seen.url) == (2, None, "http://127.0.0.1:1/v1")


def test_a_rejected_candidate_leaves_the_active_one_and_its_reason_in_the_history(endpoints: Endpoints) -> None:
    endpoints.activate("default", 1)
    revision = propose(endpoints, "a")
    seen = endpoints.reject("default", revision.number, "HealthTimeout", "not healthy within 60 s")
    assert (seen.active_revision, seen.candidate_revision) == (1, None)
    told = seen.revisions[-1]
    assert (told.state, told.reason, told.rejected_reason) == (
        "rejected", "test", "HealthTimeout: not healthy within 60 s")


def test_proposing_what_is_candidate_or_active_already_makes_no_new_revision(endpoints: Endpoints) -> None:
    first = propose(endpoints, "a")
    assert propose(endpoints, "a") == first
    endpoints.activate("default", first.number)
    assert propose(endpoints, "a").number == first.number
    assert endpoints.get("default").candidate_revision is None
    assert propose(endpoints, "b").number == first.number + 1


def test_rolling_back_aims_at_the_revision_before_and_ends_at_the_bare_target(endpoints: Endpoints) -> None:
    with pytest.raises(Conflict, match="nothing active"):
        endpoints.roll_back("default")
    for drafter in ("a", "b"):
        endpoints.activate("default", propose(endpoints, drafter).number)
    assert endpoints.roll_back("default").candidate_revision == 2
    endpoints.activate("default", 2)
    assert endpoints.roll_back("default").candidate_revision == 1
    endpoints.activate("default", 1)
    with pytest.raises(Conflict, match="first revision"):
        endpoints.roll_back("default")
    assert endpoints.roll_back("default", 3).candidate_revision == 3
    with pytest.raises(NotFound, match="no revision 9"):
        endpoints.roll_back("default", 9)


def test_off_keeps_name_url_and_history_and_a_promotion_switches_it_on(endpoints: Endpoints) -> None:
    endpoints.activate("default", 1, "http://x/v1")
    seen = endpoints.set_desired("default", "off")
    assert (seen.desired, seen.url, len(seen.revisions)) == ("off", "http://x/v1", 1)
    propose(endpoints, "a")
    assert endpoints.get("default").desired == "on"


def test_observed_conditions_are_shown(endpoints: Endpoints) -> None:
    condition = Condition(type="Serving", status="True", reason="Healthy", last_transition_time=NOW)
    endpoints.observe("default", url="http://y/v1", conditions=(condition,))
    assert endpoints.list().items[0].conditions == (condition,)


@pytest.mark.parametrize("verb", ["get", "serving", "roll_back"])
def test_an_unknown_endpoint_is_not_found(endpoints: Endpoints, verb: str) -> None:
    with pytest.raises(NotFound):
        getattr(endpoints, verb)("nope")


def test_results_are_ranked_filtered_and_replaced_when_recorded_again(jobs: Jobs, database: Database) -> None:
    results = Results(database)
    job_id = jobs.submit(job_spec()).id
    for checkpoint, speedup in (("base-step-1", 1.5), ("base-step-2", 2.0), ("base-step-2", 2.5)):
        report = benchmark_report(checkpoint, {"chat": (speedup,)})
        results.record(Measured(job_id, "eagle3", "quickstart", False, report), f"/d/{checkpoint}")
    tuned = benchmark_report("base-step-2", {"chat": (3.0,)})
    results.record(Measured(job_id, "eagle3", "quickstart", True, tuned), "/d/base-step-2")
    board = results.leaderboard()
    assert [(one.rank, one.checkpoint, one.tuned, one.speedup) for one in board] == [
        (1, "base-step-2", True, 3.0), (2, "base-step-2", False, 2.5), (3, "base-step-1", False, 1.5)]
    assert len(results.leaderboard(ResultFilter(tuned=False))) == 2
    assert results.leaderboard(ResultFilter(target="other")) == ()
    assert len(results.leaderboard(limit=1)) == 1
    assert results.find(job_id).measured.report == tuned
    assert results.find(job_id, "base-step-1").drafter_dir == "/d/base-step-1"
    with pytest.raises(NotFound, match="'base-step-9'"):
        results.find(job_id, "base-step-9")
