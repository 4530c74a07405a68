"""The command's verbs about access, against a real server that demands a token."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from eyrie_api.cli.commands import app
from eyrie_api.client import Client
from eyrie_api.database.engine import Database
from eyrie_api.settings import Settings
from tests.api.access.harness import TOKEN, Harness, two_projects
from tests.api.access.receiver import receiving

DATABASES = ("sqlite",)


@pytest.fixture
def harness(settings: Settings, database: Database) -> Iterator[Harness]:
    with two_projects(settings, database) as made:
        yield made


def run(harness: Harness, *words: str, token: str = TOKEN, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(words), env={"EYRIE_TOKEN": token, "EYRIE_SERVER": harness.server.url,
                                                       "COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def as_json(harness: Harness, *words: str, token: str = TOKEN) -> Any:
    return json.loads(run(harness, *words, "--json", token=token).stdout)


def test_a_key_is_made_used_rotated_and_revoked(harness: Harness) -> None:
    shown = run(harness, "keys", "create", "ci", "--project", "north", "--role", "viewer", "--scope", "jobs:read")
    secret = shown.stdout.strip()
    assert secret.startswith("eyk_")
    assert "shown only once" in shown.stderr
    assert as_json(harness, "whoami", token=secret)["roles"] == {"north": "viewer"}
    assert "narrowed to jobs:read" in run(harness, "whoami", token=secret).stdout
    jobs = as_json(harness, "jobs", token=secret)["items"]
    assert [job["spec"]["name"] for job in jobs] == ["north-job"]
    key_id = as_json(harness, "whoami", token=secret)["subject"].removeprefix("key:")
    assert key_id in run(harness, "keys", "list", "--project", "north").stdout
    fresh = as_json(harness, "keys", "rotate", key_id)
    assert fresh["key"]["role"] == "viewer"
    assert as_json(harness, "whoami", token=fresh["secret"])["roles"] == {"north": "viewer"}
    run(harness, "keys", "revoke", fresh["key"]["id"])
    assert "revoked" in run(harness, "keys", "list").stdout
    refused = run(harness, "keys", "create", "x", "--role", "boss", code=65)
    assert "viewer, operator, admin" in refused.output
    run(harness, "keys", "revoke", "nothing", code=66)


def test_projects_members_and_quotas(harness: Harness) -> None:
    run(harness, "projects", "create", "west", "--description", "for the walk")
    assert "2 of 5" not in run(harness, "projects", "list").stdout
    assert as_json(harness, "projects", "quotas", "west", "--jobs", "5")["quotas"]["max_jobs"] == 5
    assert "0 of 5" in run(harness, "projects", "list").stdout
    limited = as_json(harness, "projects", "quotas", "west", "--gpus", "16", "--replicas", "6", "--priority-class",
                      "batch", "--priority-class", "low")["quotas"]
    assert (limited["max_gpus"], limited["max_replicas"], limited["priority_classes"]) == (16, 6, ["batch", "low"])
    shown = run(harness, "projects", "list").stdout
    assert all(one in shown for one in ("0 of 16", "0 of 6", "batch, low"))
    run(harness, "projects", "quotas", "west", "--priority-class", "Not A Name", code=65)
    added = as_json(harness, "projects", "add-member", "west", "--role", "operator", "--group", "engineers",
                    "--issuer", "https://issuer.example")
    assert "engineers" in run(harness, "projects", "members", "west").stdout
    run(harness, "projects", "remove-member", "west", str(added["id"]))
    assert run(harness, "projects", "members", "west").stdout.strip() == "No members yet."
    run(harness, "projects", "add-member", "west", "--role", "operator", code=65)


def test_the_audit_says_who_did_it(harness: Harness) -> None:
    run(harness, "projects", "create", "west")
    shown = run(harness, "audit", "--verb", "project.create", "--limit", "1")
    assert "project/west" in shown.stdout
    assert "--before" in shown.stderr
    assert {one["actor"] for one in as_json(harness, "audit", "--verb", "project.create")["items"]} == {"token"}


def test_a_webhook_is_made_pinged_and_deleted(harness: Harness) -> None:
    with receiving() as receiver:
        made = as_json(harness, "webhooks", "create", receiver.url, "--event", "job.failed", "--project", "south")
        webhook = made["webhook"]["id"]
        assert made["secret"].startswith("whsec_")
        assert receiver.url in run(harness, "webhooks", "list", "--project", "south").stdout
        run(harness, "webhooks", "ping", webhook)
        listed = as_json(harness, "webhooks", "deliveries", webhook)["items"]
        assert [one["event"] for one in listed] == ["ping"]
        assert "pending" in run(harness, "webhooks", "deliveries", webhook).stdout
        rotated = as_json(harness, "webhooks", "rotate", webhook)
        assert rotated["secret"].startswith("whsec_")
        assert rotated["secret"] != made["secret"]
        assert run(harness, "webhooks", "rotate", webhook).stdout.startswith("whsec_")
        run(harness, "webhooks", "delete", webhook)
    run(harness, "webhooks", "ping", webhook, code=66)
    run(harness, "webhooks", "create", "http://169.254.169.254/x", code=65)


def test_the_client_works_in_the_project_it_is_given(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(harness.server.url, TOKEN, project="south") as client:
        assert [job.spec.name for job in client.jobs().items] == ["south-job"]
    monkeypatch.setenv("EYRIE_PROJECT", "north")
    with Client(harness.server.url, TOKEN) as client:
        assert [job.spec.name for job in client.jobs().items] == ["north-job"]
        assert client.whoami().project == "north"
