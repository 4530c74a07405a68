"""Endpoint rows: candidates, what activates and rejects them, the way back; and the results they are promoted from."""

from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.read_rules import EndpointRules, ReadRules
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Condition, Revision
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.outbox import Outbox
from eyrie_api.database.results import ResultFilter, Results
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from eyrie_api.decisions.promotion import decide
from eyrie_api.errors import Conflict, NotFound
from eyrie_api.planning.resolve import derive
from tests.api.samples import NOW, ManualClock, benchmark_report, job_spec

TARGET = TargetSpec(model="quickstart")


@pytest.fixture
def endpoints(database: Database, clock: ManualClock) -> Endpoints:
    made = Endpoints(database, clock)
    made.create("default", TARGET, EndpointServeSpec(port=9000), "quickstart")
    return made


def propose(endpoints: Endpoints, drafter: str, **more: object) -> Revision:
    return endpoints.propose("default", job_id="j", checkpoint=drafter, tree=DraftTreeShape(),
                             drafter_dir=f"/d/{drafter}", reason="test", **more)  # type: ignore[arg-type]


def test_a_new_endpoint_aims_at_the_bare_target(endpoints: Endpoints, database: Database) -> None:
    made = endpoints.get("default")
    assert (made.active_revision, made.candidate_revision, made.desired) == (None, 1, "on")
    assert made.revisions[0].checkpoint is None
    assert endpoints.serving("default").serve.port == 9000
    assert [(one.task, one.argument) for one in Outbox(database).pending()] == [("reconcile_endpoint", "default")]


def test_making_it_again_finds_it_and_another_target_is_refused(endpoints: Endpoints) -> None:
    assert endpoints.create("default", TARGET, EndpointServeSpec(), "quickstart") == endpoints.get("default")
    with pytest.raises(Conflict, match="serves another target: model 'quickstart', not"):
        endpoints.create("default", TargetSpec(model="org/other"), EndpointServeSpec(), "x")


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
    result = seen.revisions[-1]
    assert (result.state, result.reason, result.rejected_reason) == (
        "rejected", "test", "HealthTimeout: not healthy within 60 s")


def test_proposing_what_is_candidate_or_active_already_makes_no_new_revision(endpoints: Endpoints) -> None:
    first = propose(endpoints, "a")
    assert propose(endpoints, "a") == first
    endpoints.activate("default", first.number)
    assert propose(endpoints, "a").number == first.number
    assert endpoints.get("default").candidate_revision is None
    assert propose(endpoints, "b").number == first.number + 1


def test_rolling_back_aims_at_the_revision_before_and_ends_at_the_bare_target(endpoints: Endpoints) -> None:
    with pytest.raises(Conflict, match="no active revision"):
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


def states(endpoints: Endpoints) -> list[str]:
    return [one.state for one in endpoints.get("default").revisions]


def test_a_revision_says_what_became_of_it(endpoints: Endpoints) -> None:
    assert states(endpoints) == ["proposed"]
    propose(endpoints, "a")
    assert states(endpoints) == ["retired", "proposed"]  # the bare target gave way before it was tried
    endpoints.canary("default", 2, 0.2)
    assert states(endpoints)[-1] == "canary"
    endpoints.activate("default", 2)
    propose(endpoints, "b")
    endpoints.activate("default", 3)
    assert states(endpoints) == ["retired", "retired", "active"]
    endpoints.roll_back("default", reason="AcceptanceCollapsed", message="tau fell", actor="watch")
    assert states(endpoints) == ["retired", "retired", "active"]  # it serves until the earlier one is up
    endpoints.activate("default", 2)
    seen = endpoints.get("default").revisions
    assert (seen[2].state, seen[2].rejected_reason) == ("rolled-back", "AcceptanceCollapsed: tau fell")
    assert seen[1].state == "active"


def test_a_fallback_that_fails_leaves_the_active_revision_unblamed(endpoints: Endpoints) -> None:
    endpoints.activate("default", propose(endpoints, "a").number)
    endpoints.roll_back("default")
    endpoints.reject("default", 1, "EngineDied", "no memory")
    endpoints.activate("default", propose(endpoints, "b").number)
    assert states(endpoints) == ["rejected", "retired", "active"]


def test_rolling_back_passes_over_revisions_that_were_given_up(endpoints: Endpoints) -> None:
    endpoints.activate("default", propose(endpoints, "a").number)
    endpoints.reject("default", propose(endpoints, "b").number, "EngineDied", "x")
    endpoints.activate("default", propose(endpoints, "c").number)
    assert endpoints.roll_back("default").candidate_revision == 2
    # Whoever insists may have a rejected one tried again; it has to prove itself like a new one.
    assert endpoints.roll_back("default", 3).revisions[2].state == "proposed"


def test_an_operating_map_is_another_revision_than_its_drafter_with_one_tree(endpoints: Endpoints) -> None:
    one = DrafterUse(drafter_dir="/d/a", setting=Setting(tree=DraftTreeShape()))
    points = (OperatingPoint(concurrency=1, setting=one.setting, speedup=2.0, tokens_per_s=9.0, measured=True),)
    both = [endpoints.propose("default", job_id="j", checkpoint="a", use=use, reason="test").number
            for use in (one, one, one.model_copy(update={"map": OperatingMap(points=points)}))]
    assert both == [2, 2, 3]
    seen = endpoints.get("default").revisions[2]
    assert (seen.use.map, seen.tree, seen.drafter_dir) == (OperatingMap(points=points), DraftTreeShape(), "/d/a")


def test_a_promotion_repeated_after_a_kill_adds_no_second_revision_even_if_the_first_was_rejected(
        endpoints: Endpoints) -> None:
    def promote(attempt: int) -> int:
        return endpoints.propose("default", job_id="j", checkpoint="a", drafter_dir="/d/a", reason="test",
                                 once=f"proposed/j/{attempt}").number

    assert promote(1) == 2
    endpoints.reject("default", 2, "EngineDied", "x")
    assert promote(1) == 2
    assert endpoints.get("default").candidate_revision is None
    assert promote(2) == 3


def test_the_job_promoted_last_says_how_it_is_served_but_the_port_stays(endpoints: Endpoints) -> None:
    endpoints.create("default", TARGET, EndpointServeSpec(port=1, max_concurrency=3, record_prompts=9), "quickstart")
    serve = endpoints.serving("default").serve
    assert (serve.port, serve.max_concurrency, serve.record_prompts) == (9000, 3, 9)


def test_an_endpoint_keeps_the_rules_it_was_made_with_and_without_any_has_the_strictest(endpoints: Endpoints) -> None:
    home, reads = Path("/home/eyrie"), ReadRules(home="/home/eyrie", places=("jobs/data",))

    def rules(job_id: str | None = None) -> ReadRules | None:
        return endpoints.serving("default").rules(home, job_id)

    def make(reads: ReadRules | None) -> None:
        endpoints.create("default", TARGET, EndpointServeSpec(), "quickstart", reads=EndpointRules(rules=reads))

    assert rules() == ReadRules(home="/home/eyrie")
    assert rules("j") == ReadRules(home="/home/eyrie", places=("jobs/j",))
    make(reads)
    assert rules("j") == ReadRules(home="/home/eyrie", places=("jobs/data", "jobs/j"))
    make(None)
    endpoints.create("default", TARGET, EndpointServeSpec(), "quickstart")
    assert rules() == reads
    endpoints.create("free", TARGET, EndpointServeSpec(), "quickstart", reads=EndpointRules(rules=None))
    assert endpoints.serving("free").rules(home, "j") is None


@pytest.fixture
def histories(database: Database, clock: ManualClock) -> Histories:
    return Histories(database, clock)


def test_every_change_is_in_the_history_with_who_made_it_and_why(endpoints: Endpoints, histories: Histories) -> None:
    propose(endpoints, "a", speedup=2.5, tau=3.0)
    endpoints.canary("default", 2, 0.2)
    endpoints.activate("default", 2, figures={"answered": 5.0, "tau": None})
    endpoints.activate("default", 2)  # reported twice by the reconciler
    endpoints.set_desired("default", "off")
    endpoints.set_desired("default", "off")
    endpoints.set_desired("default", "on")
    endpoints.roll_back("default", actor="watch", reason="AcceptanceCollapsed", message="tau fell")
    endpoints.reject("default", 1, "EngineDied", "no memory")
    result = histories.read("default").items
    assert [(one.kind, one.revision, one.actor) for one in result] == [
        ("created", 1, "policy"), ("proposed", 2, "policy"), ("canary", 2, "watch"), ("activated", 2, "watch"),
        ("off", 2, "person"), ("on", 2, "person"), ("rolled-back", 2, "watch"), ("rejected", 1, "watch")]
    assert result[1].figures == {"speedup": 2.5, "tau": 3.0}
    assert result[3].figures == {"answered": 5.0}
    assert (result[6].reason, result[6].message) == ("AcceptanceCollapsed", "to revision 1: tau fell")


def test_a_decision_is_kept_once_with_its_checks_even_where_nothing_serves(histories: Histories) -> None:
    decision = decide(PromotionPolicy(), benchmark_report("a-step-1", {"chat": (2.0,)}), None, ("chat",))
    for attempt in (1, 1, 2):
        histories.record_decision("nowhere", decision, job_id="job-1", attempt=attempt)
    result = histories.read("nowhere").items
    assert [(one.kind, one.reason, one.message) for one in result] == [
        ("decided", "ChecksFailed", "not proven in the serving engine")] * 2
    assert result[0].figures["suite:chat"] == 2.0
    assert result[0].data == {"decision": decision.model_dump(mode="json")}


def test_history_is_read_page_by_page_and_by_kind(endpoints: Endpoints, histories: Histories) -> None:
    for drafter in "abc":
        propose(endpoints, drafter)
    last = histories.read("default", limit=2)
    assert [one.revision for one in last.items] == [3, 4]
    first = histories.read("default", limit=2, before=last.next_before)
    assert [one.revision for one in first.items] == [1, 2]
    assert first.next_before is None
    assert [one.revision for one in histories.read("default", kind="created").items] == [1]
    assert histories.read("default", kind="drift").items == ()
    with pytest.raises(NotFound):
        histories.read("elsewhere")


def test_the_watch_remembers_windows_since_activation_and_since_drift_was_reported(
        endpoints: Endpoints, histories: Histories) -> None:
    histories.record_window("default", 1, 1.0, 200, None)
    endpoints.activate("default", 1)
    assert histories.watched("default", 1).windows == ()
    for tau in (2.0, 1.5):
        histories.record_window("default", 1, tau, 200, 3.0)
    seen = histories.watched("default", 1)
    assert (seen.windows, seen.drift_reported) == ((2.0, 1.5), False)
    for _ in range(2):
        histories.record("default", "drift", "TrafficDrifted", "x", once=f"drift/1/{seen.last_window}", revision=1)
    assert len(histories.read("default", kind="drift").items) == 1
    histories.record_window("default", 1, 2.9, 200, 3.0)
    seen = histories.watched("default", 1)
    assert (seen.windows, seen.drift_reported) == ((2.9,), True)
    histories.record_window("default", 1, None, 0.0, None, requests=90.0, seconds=60.0)
    assert histories.watched("default", 1).windows == (2.9,), "it has no acceptance"


def test_only_the_latest_windows_are_kept(
        endpoints: Endpoints, histories: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.database.endpoint_history.KEPT_WINDOWS", 3)
    for number in range(5):
        histories.record_window("default", 1, float(number), 200, None)
    kept = histories.read("default", kind="window").items
    assert [one.figures["tau"] for one in kept] == [2.0, 3.0, 4.0]
    assert len(histories.read("default", kind="created").items) == 1


def test_windows_of_requests_alone_replace_each_other_and_none_with_acceptance(
        endpoints: Endpoints, histories: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.database.endpoint_history.KEPT_WINDOWS", 3)
    for tau in (2.0, 3.0):
        histories.record_window("default", 1, tau, 200, 3.0)
    for requests in range(5):
        histories.record_window("default", 2, None, 0.0, None, requests=float(requests), seconds=60.0)
    kept = histories.read("default", kind="window").items
    assert [(one.figures.get("tau"), one.figures.get("requests")) for one in kept] == [
        (2.0, None), (3.0, None), (None, 4.0)]


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
    job_id = jobs.submit(derive(job_spec())).id
    for checkpoint, speedup in (("base-step-1", 1.5), ("base-step-2", 2.0), ("base-step-2", 2.5)):
        report = benchmark_report(checkpoint, {"chat": (speedup,)})
        results.record(MeasuredCheckpoint(job_id, "eagle3", "quickstart", False, report), f"/d/{checkpoint}")
    tuned = benchmark_report("base-step-2", {"chat": (3.0,)})
    results.record(MeasuredCheckpoint(job_id, "eagle3", "quickstart", True, tuned), "/d/base-step-2")
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


def test_sglang_has_ten_minutes_to_become_healthy_by_default() -> None:
    assert EndpointServeSpec().healthy_within_s == 60.0
    sglang = EndpointServeSpec(engine=EngineSpec(kind="sglang"))
    assert sglang.healthy_within_s == 600.0
    assert sglang.model_copy(update={"health_timeout_s": 90.0}).healthy_within_s == 90.0
    assert EndpointServeSpec.model_validate(sglang.model_dump(mode="json")).healthy_within_s == 600.0
