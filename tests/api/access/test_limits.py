"""Quotas and rate limits: what is too much is refused with words and when to come again."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from eyrie_api.access import limits
from eyrie_api.access.limits import Buckets, LocalBuckets, SharedBuckets
from eyrie_api.access.roles import Principal
from eyrie_api.access.scope import Scope
from eyrie_api.contract.access import Quotas
from eyrie_api.contract.resolved import Demand
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Job
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency, Once
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import Projects
from eyrie_api.database.quotas import PriorityClassRefused, QuotaReached
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.access.harness import JOBS, PROJECTS, TOKEN, two_projects
from tests.api.access.test_oidc import Elapsed
from tests.api.conftest import Running, serving
from tests.api.samples import ManualClock, ended, job_body, job_spec
from tests.servers.redis import Redis
from tests.waiting import wait_for

ADMIN = Scope(Principal(subject="user:boss", roles={"default": "admin"}))


def allowed(buckets: Buckets, asked: int, per_minute: int) -> int:
    async def ask() -> int:
        return sum([await buckets.take("one", per_minute) == 0.0 for _ in range(asked)])

    return asyncio.run(ask())


def test_a_bucket_holds_ten_seconds_worth_and_fills_steadily() -> None:
    elapsed = Elapsed()
    buckets = LocalBuckets(elapsed)
    assert allowed(buckets, 100, 60) == 10
    elapsed.now += 3
    assert allowed(buckets, 100, 60) == 3
    elapsed.now += 3600
    assert allowed(buckets, 100, 60) == 10
    assert 0 < asyncio.run(buckets.take("one", 60)) <= 1
    assert asyncio.run(buckets.take("another", 60)) == 0


def test_servers_on_one_redis_share_their_buckets_and_go_on_without_it(
        redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_TIMEOUT_S", 60.0)  # a server that waits for less would use buckets of its own

    async def share() -> int:
        servers = [SharedBuckets(redis.url) for _ in range(2)]
        return sum([await server.take("shared", 1) == 0.0 for _ in range(20) for server in servers])

    assert asyncio.run(share()) == 1, "one request a minute, whichever server is asked"
    away = SharedBuckets("redis://127.0.0.1:1/0", Elapsed())
    assert allowed(away, 100, 60) == 10


def test_a_caller_and_a_project_that_ask_too_often_get_a_retry_after(
        settings: Settings, database: Database) -> None:
    with two_projects(settings.model_copy(update={"rate_limit_per_minute": 72}), database) as harness:
        path = f"{PROJECTS}/south/quotas"
        assert harness.ask(TOKEN, "PUT", path, json={"requests_per_minute": 1}).status_code == 200
        answers = [harness.ask(harness.a.secret, "GET", JOBS) for _ in range(100)]
        refused = [one for one in answers if one.status_code == 429]
        assert refused
        assert int(refused[0].headers["retry-after"]) >= 1
        assert refused[0].json()["type"].endswith("RateLimited")
        assert harness.ask(harness.b.secret, "GET", JOBS).status_code == 200, "another caller is not held up"

        def limited() -> str:
            answer = harness.ask(harness.b.secret, "GET", JOBS)
            return str(answer.json()["detail"]) if answer.status_code == 429 else ""

        # What a project may is remembered for some seconds.
        assert "project 'south'" in wait_for(limited, "the project's limit counts", every_s=0.5)


def test_nothing_is_limited_on_loopback_without_a_token(settings: Settings, server: Running) -> None:
    assert settings.token is None
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        assert {http.get("/version").status_code for _ in range(50)} == {200}


def accepted_at_once(number: int, submit: Callable[[], str]) -> list[str]:
    """The ids of jobs submitted by so many threads together, less those that a quota refused."""
    accepted: list[str] = []

    def try_one() -> None:
        with suppress(QuotaReached):
            accepted.append(submit())

    threads = [threading.Thread(target=try_one) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return accepted



def test_a_project_may_have_so_many_jobs_at_once(database: Database, clock: ManualClock) -> None:
    Projects(database, clock).set_quotas("default", Quotas(max_jobs=2))
    jobs = Jobs(database, clock, scope=ADMIN)
    accepted = accepted_at_once(6, lambda: jobs.submit(derive(job_spec())).id)
    assert len(accepted) == 2, "not even when all come at once"
    Jobs(database, clock).save_status(accepted[0], ended("Failed"))
    assert jobs.submit(derive(job_spec())).id
    with pytest.raises(QuotaReached, match="2 jobs"):
        jobs.submit(derive(job_spec()))
    with pytest.raises(QuotaReached, match="2 jobs"):
        jobs.retry(accepted[0])
    assert Projects(database, clock).get("default").live_jobs == 2


def test_a_project_may_have_so_many_endpoints_and_is_refused_before_it_trains(
        database: Database, clock: ManualClock) -> None:
    Projects(database, clock).set_quotas("default", Quotas(max_endpoints=1))
    jobs, endpoints = Jobs(database, clock, scope=ADMIN), Endpoints(database, clock, ADMIN)
    endpoints.create("one", TargetSpec(model="m"), EndpointServeSpec(), "m")
    assert jobs.submit(derive(job_spec(serve={"endpoint": "one"}))).id, "to the one there is"
    assert jobs.submit(derive(job_spec(serve={"endpoint": "two", "enabled": False}))).id
    with pytest.raises(QuotaReached, match="1 endpoints"):
        jobs.submit(derive(job_spec(serve={"endpoint": "three"})))
    with pytest.raises(QuotaReached):
        endpoints.create("two", TargetSpec(model="m"), EndpointServeSpec(), "m")
    endpoints.set_desired("one", "off")
    endpoints.create("two", TargetSpec(model="m"), EndpointServeSpec(), "m")
    with pytest.raises(QuotaReached):
        endpoints.set_desired("one", "on")


def test_a_repeated_submission_gets_its_job_although_the_quota_is_used_up_now(
        database: Database, clock: ManualClock) -> None:
    Projects(database, clock).set_quotas("default", Quotas(max_jobs=1))
    jobs = Jobs(database, clock, scope=ADMIN, idempotency=Idempotency(database, 60.0, clock))
    first = jobs.submit_once(derive(job_spec()), Once("k", "r", "d"), "default")
    again = jobs.submit_once(derive(job_spec()), Once("k", "r", "d"), "default")
    assert isinstance(first, Job)
    assert isinstance(again, dict)
    assert again["id"] == first.id
    with pytest.raises(QuotaReached):
        jobs.submit_once(derive(job_spec()), Once("another", "r", "d"), "default")


def test_a_projects_jobs_may_request_so_many_gpus_at_one_time(database: Database, clock: ManualClock) -> None:
    projects = Projects(database, clock)
    projects.set_quotas("default", Quotas(max_gpus=8))
    jobs = Jobs(database, clock, scope=ADMIN)

    def submit() -> str:
        return jobs.submit_once(derive(job_spec(), demand=Demand(num_gpus=3)), None, "default").id  # type: ignore[union-attr]

    accepted = accepted_at_once(5, submit)
    assert len(accepted) == 2, "not even when all come at once"
    assert projects.get("default").live_gpus == 6
    with pytest.raises(QuotaReached, match=r"requests 3 GPUs .* 'default' may have 8 .* and has 6") as refused:
        jobs.submit(derive(job_spec(), demand=Demand(num_gpus=3)))
    assert "placement.*.num_gpus" in refused.value.hint
    assert "administrator of the installation: eyrie projects quotas default --gpus" in refused.value.hint
    assert jobs.submit(derive(job_spec(), demand=Demand(num_gpus=2))).id
    assert jobs.submit(derive(job_spec())).id, "on CPUs"
    Jobs(database, clock).save_status(accepted[0], ended("Failed"))
    assert jobs.submit(derive(job_spec(), demand=Demand(num_gpus=1))).id
    with pytest.raises(QuotaReached, match="requests 3 GPUs"):
        jobs.retry(accepted[0])
    projects.set_quotas("default", Quotas(max_gpus=9))
    assert jobs.retry(accepted[0]).id


def test_a_projects_endpoints_may_have_so_many_replicas_together(database: Database, clock: ManualClock) -> None:
    projects = Projects(database, clock)
    projects.set_quotas("default", Quotas(max_replicas=4))
    jobs, endpoints = Jobs(database, clock, scope=ADMIN), Endpoints(database, clock, ADMIN)

    def create(name: str, num_replicas: int) -> None:
        endpoints.create(name, TargetSpec(model="m"), EndpointServeSpec(), "m", num_replicas=num_replicas)

    create("one", 3)
    assert projects.get("default").live_replicas == 3
    with pytest.raises(QuotaReached, match=r"'two' is 2; project 'default' may have 4 .* others have 3") as refused:
        create("two", 2)
    assert "eyrie projects quotas default --replicas" in refused.value.hint
    with pytest.raises(QuotaReached):
        jobs.submit(derive(job_spec(serve={"endpoint": "two"}), demand=Demand(num_replicas=2)))
    assert jobs.submit(derive(job_spec(serve={"endpoint": "two", "enabled": False}), demand=Demand(num_replicas=2))).id
    create("one", 4)
    with pytest.raises(QuotaReached, match="is 5"):
        create("one", 5)
    endpoints.set_desired("one", "off")
    create("two", 2)
    with pytest.raises(QuotaReached, match="'one' is 4"):
        endpoints.set_desired("one", "on")
    projects.set_quotas("default", Quotas(max_replicas=1))
    assert endpoints.set_desired("two", "on").desired == "on", "one that is on keeps what it has"
    create("two", 1)


def test_jobs_and_endpoints_name_only_priority_classes_of_their_project(database: Database, clock: ManualClock) -> None:
    projects = Projects(database, clock)
    jobs, endpoints = Jobs(database, clock, scope=ADMIN), Endpoints(database, clock, ADMIN)
    urgent = {"priority_class": "urgent"}
    for placement in ({"every": urgent}, {"stages": {"train": urgent}}):
        old = jobs.submit(derive(job_spec(placement=placement))).id
        Jobs(database, clock).save_status(old, ended("Failed"))
        changed = projects.set_quotas("default", Quotas(priority_classes=("batch", "low")))
        assert changed.quotas.priority_classes == ("batch", "low")
        with pytest.raises(PriorityClassRefused, match=r"is 'urgent'; .* may use batch, low") as refused:
            jobs.submit(derive(job_spec(placement=placement)))
        assert "eyrie projects quotas default --priority-class" in refused.value.hint
        with pytest.raises(PriorityClassRefused):
            jobs.retry(old)
        assert jobs.submit(derive(job_spec(placement={"every": {"priority_class": "batch"}}))).id
        assert jobs.submit(derive(job_spec())).id
        projects.set_quotas("default", Quotas(priority_classes=()))
        with pytest.raises(PriorityClassRefused, match="may use none"):
            jobs.submit(derive(job_spec(placement=placement)))
        projects.set_quotas("default", Quotas())
    serve = EndpointServeSpec.model_validate({"placement": urgent})
    projects.set_quotas("default", Quotas(priority_classes=("batch",)))
    with pytest.raises(PriorityClassRefused, match=r"serve\.placement\.priority_class"):
        endpoints.create("one", TargetSpec(model="m"), serve, "m")
    with pytest.raises(PriorityClassRefused, match=r"serve\.placement\.priority_class"):
        jobs.submit(derive(job_spec(serve={"placement": urgent})))


def test_rest_answers_what_exceeds_a_quota_with_field_value_rule_and_remedy(
        settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYRIE_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # counted as two GPUs, on any machine
    with serving(settings.model_copy(update={"token": TOKEN}), database) as server, httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
        quotas = {"max_gpus": 1, "max_replicas": 3, "priority_classes": ["batch"]}
        answer = http.put(f"{PROJECTS}/default/quotas", json=quotas)
        assert answer.status_code == 200
        assert {name: answer.json()["quotas"][name] for name in quotas} == quotas
        refused = http.post(JOBS, json=job_body(placement={"every": {"num_gpus": 2}}))
        assert (refused.status_code, refused.json()["type"]) == (429, "urn:eyrie:problem:QuotaReached")
        assert "2 GPUs" in refused.json()["detail"]
        refused = http.post(JOBS, json=job_body(placement={"every": {"priority_class": "urgent"}}))
        assert (refused.status_code, refused.json()["type"]) == (403, "urn:eyrie:problem:PriorityClassRefused")
        assert http.post(JOBS, json=job_body(placement={"every": {"num_gpus": 1}})).status_code == 202
        used = http.get(f"{PROJECTS}/default").json()
        assert (used["live_gpus"], used["live_replicas"]) == (1, 0)
