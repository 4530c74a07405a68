"""What a person should look at: with plain values, by REST, on the first page and by `eyrie alerts`."""

import re
from datetime import timedelta
from html import escape, unescape
from typing import Any

import httpx
import pytest

from eyrie_api.access.roles import Principal
from eyrie_api.access.scope import Scope
from eyrie_api.cli.tables import alerts_view
from eyrie_api.contract.access import CreateProject, Quotas
from eyrie_api.contract.alerts import AlertItem
from eyrie_api.contract.endpoints import EndpointTraffic, LiveDrift
from eyrie_api.contract.reports import PromotionDecision
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Condition, Endpoint, Job, JobStatus, Revision, StageStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.jobs import Jobs
from eyrie_api.decisions.alerts import ExhaustedQuota, alerts_of
from eyrie_api.errors import DiskFull
from eyrie_api.http.routes.alerts import read_alerts
from eyrie_api.planning.resolve import derive
from tests.api.conftest import Running
from tests.api.samples import NOW, job_spec, set_stage
from tests.api.test_cli_tables import rendered
from tests.api.test_waiting import waiting

LATER = NOW + timedelta(hours=1)


def needed(*given: Any, **more: Any) -> tuple[AlertItem, ...]:
    return alerts_of(*given, **more).items


def job(name: str, created_at: Any = NOW, *, status: JobStatus | None = None, **fields: Any) -> Job:
    spec = job_spec(name=name, serve={"endpoint": "chat"}, **fields)
    return Job(id=f"job-{name}", spec=spec, status=status or JobStatus(), created_at=created_at, updated_at=created_at)


def decided(verdict: Any) -> JobStatus:
    return JobStatus(phase="Succeeded", decision=PromotionDecision(promote=verdict == "promote", verdict=verdict,
                                                                   reasons=("tau is too low",)))


def served(*job_ids: str | None, conditions: tuple[Condition, ...] = (), **fields: Any) -> Endpoint:
    revisions = tuple(Revision(number=number, job_id=job_id, checkpoint="c", tree=None, drafter_dir=None,
                               created_at=NOW, reason="test") for number, job_id in enumerate(job_ids, start=1))
    return Endpoint.model_validate({"name": "chat", "target": "t", "url": None, "model": "m", "active_revision": 1,
                                    "revisions": revisions, "conditions": conditions, "updated_at": NOW, **fields})


def titles(found: tuple[AlertItem, ...]) -> list[str]:
    return [one.title for one in found]


@pytest.mark.parametrize("verdict", ["keep-incumbent", "no-drafter"])
def test_a_refused_promotion_needs_a_person_until_it_is_followed_up(verdict: Any) -> None:
    refused = job("night", status=decided(verdict))
    (item,) = needed([refused], [served(None)])
    assert (item.title, item.link) == (f"Job night was not promoted: {verdict}", "/console/jobs/job-night")
    assert (item.kind, item.job_id, item.message) == ("not-promoted", "job-night", "tau is too low")
    assert item.hint.startswith("run it again with changes")
    assert "eyrie endpoints promote chat --job job-night" in item.hint
    assert needed([job("again", LATER), refused], [served(None)]) == (), "a newer job for the endpoint"
    elsewhere = job("other", LATER).model_copy(update={"spec": job_spec(serve={"endpoint": "other"})})
    assert len(needed([elsewhere, refused], [served(None)])) == 1
    assert needed([refused], [served(None, "job-night")]) == (), "served by hand"
    unwanted = job("measured", status=decided(verdict), promotion={"mode": "never"})
    assert needed([unwanted], [served(None)]) == ()


def test_a_decision_that_waits_is_shown_until_the_drafter_is_served() -> None:
    waits = job("night", status=decided("awaits-approval"))
    (item,) = needed([waits], [served(None)])
    assert item.title == "Job night waits for a decision"
    assert item.hint == "eyrie endpoints promote chat --job job-night"
    assert needed([waits], [served(None, "job-night")]) == ()
    assert needed([job("won", status=decided("promote"))], []) == ()


def test_a_revision_that_was_given_up_needs_a_person_until_another_is_tried() -> None:
    given_up = Condition(type="RolledBack", status="True", reason="CanaryFailed", message="revision 2: 2 failed",
                         last_transition_time=NOW)
    (item,) = needed([], [served(None, conditions=(given_up,))])
    assert item.title == "Endpoint chat gave up a revision: CanaryFailed"
    assert (item.kind, item.endpoint, item.since) == ("revision-given-up", "chat", NOW)
    assert item.message == "revision 2: 2 failed"
    assert "eyrie endpoints promote chat --job JOB" in item.hint
    assert needed([], [served(None, None, conditions=(given_up,), candidate_revision=2)]) == ()
    assert needed([job("again", LATER)], [served(None, conditions=(given_up,))]) == ()
    assert needed([], [served(None, conditions=(given_up,), desired="off")]) == ()
    over = given_up.model_copy(update={"status": "False"})
    assert needed([], [served(None, conditions=(over,))]) == ()


@pytest.mark.parametrize(("has_job", "hint"), [(True, "start the job that the history offers"),
                                               (False, "train a drafter on recent traffic")])
def test_drift_needs_a_person_until_a_newer_job_trains_for_the_endpoint(has_job: bool, hint: str) -> None:
    drifting = EndpointTraffic(endpoint="chat", revision=1,
                               drift=LiveDrift(since=NOW, message="stayed low", has_job=has_job))
    (item,) = needed([], [served(None)], [drifting])
    assert (item.title, item.link) == ("Endpoint chat: the traffic has drifted", "/console/endpoints/chat")
    assert (item.message, item.since) == ("stayed low", NOW)
    assert item.hint.startswith(hint)
    assert needed([job("again", LATER)], [served(None)], [drifting]) == ()
    assert needed([], [served(None, None, candidate_revision=2)], [drifting]) == (), "another one is tried"


def test_jobs_that_wait_for_another_are_one_item_and_a_used_up_quota_says_how_to_raise_it() -> None:
    queued = Condition(type="Accepted", status="True", reason="Queued", message="x", last_transition_time=NOW)
    waits = [job(name, LATER, status=JobStatus(conditions=(queued,))) for name in ("b", "a")]
    assert titles(needed(waits[1:], [])) == ["Job a waits for a running job to end"]
    (item,) = needed(waits, [])
    assert (item.title, item.link) == ("2 jobs wait for a running job to end", "/console/jobs/job-a")
    (quota,) = needed([], [], used_up=[ExhaustedQuota("team", "GPUs", 8, 8)])
    assert quota.title == "Project team has used up its quota: 8 of 8 GPUs"
    assert "eyrie projects quotas team --gpus N" in quota.hint
    assert (quota.kind, quota.project) == ("quota-used-up", "team")


def test_a_job_or_an_endpoint_that_no_node_fits_needs_a_person_and_one_in_a_queue_does_not() -> None:
    def held(reason: str) -> Job:
        stage = StageStatus(stage="train", key="base", reason=reason, message="no node fits", hint="scale the pool up")
        return job("night", status=JobStatus(phase="Running", stages=(stage,)))

    (item,) = needed([held("WaitingForNodes")], [])
    assert (item.title, item.link) == ("Job night waits for a node in train", "/console/jobs/job-night")
    assert (item.message, item.hint) == ("no node fits", "scale the pool up")
    assert needed([held("WaitingForQueue")], []) == ()
    (item,) = needed([held("WaitingForContainers")], [])
    assert (item.kind, item.title) == ("waiting-for-containers", "Job night has a pod that cannot start in train")
    serving = Condition(type="Serving", status="Unknown", reason="WaitingForNodes", message="no node fits; hint: x",
                        last_transition_time=NOW)
    (item,) = needed([], [served(None, conditions=(serving,))])
    assert (item.title, item.message, item.hint) == ("Endpoint chat: WaitingForNodes", "no node fits", "x")


def test_a_failed_job_has_message_and_hint_of_its_stage_or_of_its_condition() -> None:
    stage = StageStatus(stage="train", state="Failed", message="loss was nan", hint="lower the learning rate")
    (item,) = needed([job("night", status=JobStatus(phase="Failed", stages=(stage,), finished_at=LATER))], [])
    assert (item.kind, item.title, item.since) == ("job-failed", "Job night failed in train", LATER)
    assert (item.message, item.hint) == ("loss was nan", "lower the learning rate")
    ended = Condition(type="Failed", status="True", reason="RunLost", message="its run is gone; hint: retry it",
                      last_transition_time=NOW)
    (item,) = needed([job("night", status=JobStatus(phase="Failed", conditions=(ended,)))], [])
    assert (item.title, item.message, item.hint) == ("Job night failed", "its run is gone", "retry it")


def test_a_full_disk_comes_first_with_its_hint() -> None:
    item, _ = needed([], [], used_up=[ExhaustedQuota("team", "jobs", 1, 1)],
                     full_disk=DiskFull("it is full", "free space"))
    assert (item.kind, item.message, item.hint, item.link) == ("disk-full", "it is full", "free space", "/")


def unwell(server: Running, project: str) -> None:
    """A project with one of everything that rows alone can say: a job that failed, one that waits for a decision, an
    endpoint that does not serve, a used-up quota, a DrafterJob that waits."""
    control = server.control
    control.projects.create(CreateProject(name=project))
    mine = Jobs(control.database, scope=Scope(Principal(subject="user:x", roles={project: "admin"}), project))
    for name, status in (("broken", JobStatus(phase="Failed", stages=())), ("measured", decided("awaits-approval"))):
        made = mine.submit(derive(job_spec(name=f"{project}-{name}", serve={"endpoint": f"{project}-chat"})))
        control.jobs.save_status(made.id, status)
        if name == "broken":
            set_stage(control.jobs, made.id, StageStatus(stage="train", state="Failed", reason="LossDiverged",
                                                        message=f"{project}: <nan>", hint="lower the learning rate"))
    control.endpoints.create(f"{project}-chat", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny", project)
    Endpoints(control.database).observe(f"{project}-chat", conditions=(Condition(
        type="Serving", status="False", reason="EngineFailed", message="exit 1", last_transition_time=NOW),))
    control.waiting.record(waiting(project, project=project, namespace=project))
    mine.submit(derive(job_spec(name=f"{project}-runs", serve={"endpoint": f"{project}-chat"})))
    control.projects.set_quotas(project, Quotas(max_jobs=1))


def test_route_client_and_page_have_the_same_items(server: Running) -> None:
    unwell(server, "north")
    listed = server.client.alerts()
    assert [one.kind for one in listed.items] == [
        "endpoint-not-serving", "awaits-approval", "job-failed", "quota-used-up", "waiting-for-quota"]
    page = httpx.get(server.url).text
    section = page.split('<section aria-labelledby="attention"')[1].split("</section>")[0]
    rows = section.split("<li>")[1:]
    assert len(rows) == len(listed.items)
    for row, one in zip(rows, listed.items, strict=True):
        assert f'<a href="{escape(one.link)}">{escape(one.title)}</a>' in row
        text = unescape(re.sub(r"<(?!nan)[^>]+>", "", row))
        assert one.message in text
        assert f"hint: {one.hint}" in text or not one.hint
        assert (f'since <time datetime="{one.since.isoformat()}"' in row) if one.since else "since" not in text


def test_another_projects_items_are_not_answered(server: Running) -> None:
    for project in ("north", "south"):
        unwell(server, project)

    def seen_by(project: str, asked: str | None = None) -> str:
        scope = Scope(Principal(subject="user:x", roles={project: "viewer"}), asked)
        answer = read_alerts(server.control.within(scope))
        assert len(answer.items) == 10 if (project, asked) == ("*", None) else 5
        return answer.model_dump_json()

    assert "south" not in seen_by("north")
    assert "north" not in seen_by("south")
    assert "south" not in seen_by("*", "north")
    assert {"north", "south"} <= set(re.findall("north|south", seen_by("*")))


def test_the_command_prints_title_message_age_and_hint_of_each() -> None:
    drifting = EndpointTraffic(endpoint="chat", revision=1, drift=LiveDrift(since=NOW, message="low", has_job=False))
    items = needed([], [served(None)], [drifting], [ExhaustedQuota("team", "GPUs", 8, 8)])
    lines = rendered(alerts_view(items, LATER)).splitlines()
    assert [line.rstrip() for line in lines[:3]] == [
        "Endpoint chat: the traffic has drifted", "  low (1h00m ago)", "  hint: train a drafter on recent traffic"]
    assert len([line for line in lines if line.startswith("  hint: ")]) == 2
    assert rendered(alerts_view((), LATER)).strip() == "Nothing needs a person."
