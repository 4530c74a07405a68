"""Two projects that know nothing of each other, with one of everything in each, on one real server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from eyrie_api.access.roles import Principal
from eyrie_api.access.scope import Scope
from eyrie_api.contract.resources import WaitingObject
from eyrie_api.contract.status import StageStatus
from eyrie_api.database.engine import Database
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from eyrie_api.http.control import Control
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.conftest import Running, serving
from tests.api.samples import (
    NOW,
    benchmark_report,
    ended,
    finish_stage,
    job_spec,
    planned,
    record_event,
    record_metrics,
    set_stage,
)

TOKEN = "the-installation-s-own-token"
SECRET_KEY = "c2VjcmV0LWtleS1vZi10aGUtdGVzdHMtMDEyMzQ1Njc="
"""A Fernet key."""
KEYS, PROJECTS, JOBS, ENDPOINTS, WEBHOOKS = (
    f"/v1alpha1/{what}" for what in ("keys", "projects", "jobs", "endpoints", "webhooks"))


@dataclass(frozen=True)
class Tenant:
    """A project, the key of its admin, and the ids of what is in it."""

    project: str
    secret: str
    ids: dict[str, str]
    """Path parameter of a route -> this project's object."""


@dataclass(frozen=True)
class Harness:
    """The server and who is on it."""

    server: Running
    http: httpx.Client
    a: Tenant
    b: Tenant

    def ask(self, secret: str, method: str, path: str, **options: Any) -> httpx.Response:
        """A request with a bearer token; of the stream of a page, up to its first part."""
        headers = {"Authorization": f"Bearer {secret}"} | options.pop("headers", {})
        if path.partition("?")[0].endswith("/live"):
            with self.http.stream(method, path, headers=headers, **options) as answer:
                text = "" if answer.is_success else answer.read().decode()
                for line in answer.iter_lines() if answer.is_success else ():
                    text += line
                    if line.startswith('data: "'):  # not a heartbeat
                        break
                return httpx.Response(answer.status_code, text=text)
        return self.http.request(method, path, headers=headers, **options)


def as_admin_of(control: Control, project: str) -> Control:
    """The control plane as the project's admin sees it."""
    return control.within(Scope(Principal(subject="user:boss", roles={project: "admin"})))


@contextmanager
def two_projects(settings: Settings, database: Database) -> Iterator[Harness]:
    """A harness, for as long as the context lasts."""
    closed = settings.model_copy(update={"token": TOKEN, "webhooks_allow_private": True, "secret_key": SECRET_KEY})
    with (serving(closed, database) as server,
          httpx.Client(base_url=server.url, timeout=30.0, trust_env=False) as http):
        a, b = (_tenant(server, http, project) for project in ("north", "south"))
        yield Harness(server, http, a, b)


def _tenant(server: Running, http: httpx.Client, project: str) -> Tenant:
    control, settings = server.control, server.control.settings
    headers = {"Authorization": f"Bearer {TOKEN}"}
    made = http.post(PROJECTS, json={"name": project}, headers=headers)
    assert made.status_code == 201, made.text
    made = http.post(KEYS, json={"name": "ci", "role": "admin"},
                     headers=headers | {"Eyrie-Project": project})
    assert made.status_code == 201, made.text
    member = http.post(f"{PROJECTS}/{project}/members", headers=headers, json={
        "kind": "subject", "value": f"{project}-person", "role": "viewer", "issuer": "https://issuer.example"})
    assert member.status_code == 201, member.text
    hook = http.post(WEBHOOKS, json={"url": f"http://127.0.0.1:9/{project}"},
                     headers=headers | {"Eyrie-Project": project})
    assert hook.status_code == 201, hook.text

    spec = job_spec(name=f"{project}-job", serve={"endpoint": f"{project}-endpoint"})
    job_id = control.jobs.submit(planned(spec), project=project).id
    key = f"{project}-c1-step-1"
    set_stage(control.jobs, job_id, StageStatus(stage="benchmark", key=key, state="Succeeded", started_at=NOW))
    record_event(control.jobs, job_id, "Noted", f"a word of {project}")
    record_metrics(control.jobs, job_id, "benchmark", key, [("loss", 1, 0.5, NOW)])
    directory = settings.stage_dir(job_id, "benchmark", key)
    benchmarked = benchmark_report(key, {"chat": (1.5,)})
    finish_stage(directory, "benchmark", benchmarked, {"cells.bin": project.encode()}, job_id)
    (directory / "log.txt").write_text(f"printed by {project}\n")
    control.results.record(MeasuredCheckpoint(job_id, "eagle3", "quickstart", True, benchmarked), str(directory))
    control.jobs.save_status(job_id, ended("Succeeded"))
    endpoint = f"{project}-endpoint"
    control.endpoints.create(endpoint, derive(spec).target, derive(spec).endpoint_serve, "quickstart")
    control.endpoints.activate(endpoint, 1)
    control.endpoints.propose(endpoint, job_id=job_id, checkpoint=benchmarked.checkpoint, reason="better",
                              drafter_dir=str(directory))
    control.endpoints.activate(endpoint, 2)
    control.histories.record_window(endpoint, 2, 2.5, 100.0, None)
    control.waiting.record(WaitingObject(
        namespace=f"{project}-jobs", name="night", uid=f"uid-{project}", project=project, reason="QuotaReached",
        message=f"project {project!r} is full", hint="wait", since=NOW))
    return Tenant(project, made.json()["secret"], {
        "job_id": job_id, "name": endpoint, "key_id": made.json()["key"]["id"], "project": project,
        "member_id": str(member.json()["id"]), "stage": "benchmark", "path": "cells.bin", "key": key,
        "webhook_id": hook.json()["webhook"]["id"]})
