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
from tests.api.access.receiver import receiving
from tests.api.access.world import TOKEN, World, two_projects

DATABASES = ("sqlite",)


@pytest.fixture
def world(settings: Settings, database: Database) -> Iterator[World]:
    with two_projects(settings, database) as made:
        yield made


def run(world: World, *words: str, token: str = TOKEN, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(words), env={"EYRIE_TOKEN": token, "EYRIE_SERVER": world.server.url,
                                                       "COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def as_json(world: World, *words: str, token: str = TOKEN) -> Any:
    return json.loads(run(world, *words, "--json", token=token).stdout)


def test_a_key_is_made_used_rotated_and_revoked(world: World) -> None:
    shown = run(world, "keys", "create", "ci", "--project", "north", "--role", "viewer", "--scope", "jobs:read")
    secret = shown.stdout.strip()
    assert secret.startswith("eyk_")
    assert "shown this once" in shown.stderr
    assert as_json(world, "whoami", token=secret)["roles"] == {"north": "viewer"}
    assert "narrowed to jobs:read" in run(world, "whoami", token=secret).stdout
    jobs = as_json(world, "jobs", token=secret)["items"]
    assert [job["spec"]["name"] for job in jobs] == ["north-job"]
    key_id = as_json(world, "whoami", token=secret)["subject"].removeprefix("key:")
    assert key_id in run(world, "keys", "list", "--project", "north").stdout
    fresh = as_json(world, "keys", "rotate", key_id)
    assert fresh["key"]["role"] == "viewer"
    assert as_json(world, "whoami", token=fresh["secret"])["roles"] == {"north": "viewer"}
    run(world, "keys", "revoke", fresh["key"]["id"])
    assert "revoked" in run(world, "keys", "list").stdout
    refused = run(world, "keys", "create", "x", "--role", "boss", code=65)
    assert "viewer, operator, admin" in refused.output
    run(world, "keys", "revoke", "nothing", code=66)


def test_projects_members_and_quotas(world: World) -> None:
    run(world, "projects", "create", "west", "--description", "for the walk")
    assert "2 of 5" not in run(world, "projects", "list").stdout
    assert as_json(world, "projects", "quotas", "west", "--jobs", "5")["quotas"]["max_jobs"] == 5
    assert "0 of 5" in run(world, "projects", "list").stdout
    added = as_json(world, "projects", "add-member", "west", "--role", "operator", "--group", "engineers",
                    "--issuer", "https://issuer.example")
    assert "engineers" in run(world, "projects", "members", "west").stdout
    run(world, "projects", "remove-member", "west", str(added["id"]))
    assert run(world, "projects", "members", "west").stdout.strip() == "No members yet."
    run(world, "projects", "add-member", "west", "--role", "operator", code=65)


def test_the_audit_says_who_did_it(world: World) -> None:
    run(world, "projects", "create", "west")
    shown = run(world, "audit", "--verb", "project.create", "--limit", "1")
    assert "project/west" in shown.stdout
    assert "--before" in shown.stderr
    assert {one["actor"] for one in as_json(world, "audit", "--verb", "project.create")["items"]} == {"token"}


def test_a_webhook_is_made_pinged_and_deleted(world: World) -> None:
    with receiving() as receiver:
        made = as_json(world, "webhooks", "create", receiver.url, "--event", "job.failed", "--project", "south")
        webhook = made["webhook"]["id"]
        assert made["secret"].startswith("whsec_")
        assert receiver.url in run(world, "webhooks", "list", "--project", "south").stdout
        run(world, "webhooks", "ping", webhook)
        listed = as_json(world, "webhooks", "deliveries", webhook)["items"]
        assert [one["event"] for one in listed] == ["ping"]
        assert "pending" in run(world, "webhooks", "deliveries", webhook).stdout
        run(world, "webhooks", "delete", webhook)
    run(world, "webhooks", "ping", webhook, code=66)
    run(world, "webhooks", "create", "http://169.254.169.254/x", code=65)


def test_the_client_works_in_the_project_it_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(world.server.url, TOKEN, project="south") as client:
        assert [job.spec.name for job in client.jobs().items] == ["south-job"]
    monkeypatch.setenv("EYRIE_PROJECT", "north")
    with Client(world.server.url, TOKEN) as client:
        assert [job.spec.name for job in client.jobs().items] == ["north-job"]
        assert client.whoami().project == "north"
