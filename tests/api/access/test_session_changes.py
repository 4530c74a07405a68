"""What a session of the console may administer: what the key it was exchanged for may, from a page of this server."""

import logging
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from eyrie_api.access.browser_sign_in import CHANGE_HEADER, COOKIE, RECENT_S
from eyrie_api.access.scope import Scope
from eyrie_api.contract.access import Action, ApiKey, CreateMember, CreateProject, Role
from eyrie_api.database.audit import Audit
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.http.authentication import LOCAL
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings

TOKEN = "installation-token-of-this-test"
SECRET_KEY = "RahLQyDPWTlDGcTJXVxnDZ6d7tM9y0w8iQ3mC6VtGZk="
PAGE = {"accept": "text/html"}
HERE = "https://console.example"
ISSUER = "https://issuer.example"
KEYS, PROJECTS, WEBHOOKS = "/v1alpha1/keys", "/v1alpha1/projects", "/v1alpha1/webhooks"
MEMBER = {"kind": "group", "value": "engineers", "role": "viewer", "issuer": ISSUER}


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    for name in ("team", "other"):
        Projects(database).create(CreateProject(name=name))
    guarded = settings.model_copy(update={"token": TOKEN, "secret_key": SECRET_KEY, "webhooks_allow_private": True})
    return TestClient(create_app(guarded, database=database), base_url=HERE)


def new_key(database: Database, project: str | None, role: Role = "admin", **more: Any) -> tuple[ApiKey, str]:
    scope = Scope(LOCAL, project)
    return ApiKeys(database, scope=scope).create(name="mine", role=role, everywhere=project is None, **more)


def change_of(client: httpx.Client, secret: str) -> dict[str, str]:
    """The header of a page after signing in with a key."""
    client.cookies.clear()
    client.post("/console/sign-in", headers={"authorization": f"Bearer {secret}"}).raise_for_status()
    found = re.search(r'<meta name="eyrie-change" content="([^"]+)">', client.get("/", headers=PAGE).text)
    assert found is not None
    return {CHANGE_HEADER: found[1], "content-type": "application/json"}


def changes(database: Database, project: str) -> list[tuple[str, str, Any]]:
    """A request for each change that the admin of a project may make, on things of that project."""
    key, _ = new_key(database, project, "viewer")
    member = Projects(database).add_member(project, CreateMember(kind="subject", value="ada", role="viewer"), ISSUER)
    members = f"{PROJECTS}/{project}/members"
    return [("POST", KEYS + f"?project={project}", {"name": "made", "role": "viewer"}),
            ("POST", f"{KEYS}/{key.id}/rotate", None), ("POST", members, MEMBER),
            ("DELETE", f"{members}/{member.id}", None),
            ("POST", WEBHOOKS + f"?project={project}", {"url": "http://127.0.0.1:9/x"})]


def statuses(client: httpx.Client, asked: list[tuple[str, str, Any]], headers: dict[str, str]) -> set[int]:
    return {client.request(method, path, json=body, headers=headers).status_code for method, path, body in asked}


def test_a_session_of_a_projects_admin_administers_that_project_and_is_named_in_the_audit(
        client: httpx.Client, database: Database) -> None:
    key, secret = new_key(database, "team")
    change, asked = change_of(client, secret), changes(database, "team")
    assert statuses(client, asked, change | {"origin": HERE}) <= {201, 204}
    made = client.get(WEBHOOKS, headers={"authorization": f"Bearer {secret}"}).json()["items"][0]["id"]
    assert client.post(f"{WEBHOOKS}/{made}/ping", headers=change).status_code == 202
    assert client.delete(f"{WEBHOOKS}/{made}", headers=change).status_code == 204
    assert client.post(f"{KEYS}/{key.id}/revoke", headers=change).status_code == 200
    done = {one.verb for one in Audit(database).read().items if one.actor == f"key:{key.id}" and one.outcome == "done"}
    assert done == {"key.create", "key.rotate", "key.revoke", "member.add", "member.remove", "webhook.create",
                    "webhook.ping", "webhook.delete"}


def test_projects_and_quotas_take_a_session_with_a_role_in_all_projects(client: httpx.Client,
                                                                       database: Database) -> None:
    asked = [("POST", PROJECTS, {"name": "new"}), ("PUT", f"{PROJECTS}/team/quotas", {"max_jobs": 3})]
    assert statuses(client, asked, change_of(client, new_key(database, "team")[1])) == {403}
    assert statuses(client, asked, change_of(client, new_key(database, None)[1])) == {200, 201}
    assert Projects(database).get("team").quotas.max_jobs == 3
    assert Projects(database).exists("new")


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_a_session_of_a_viewer_or_an_operator_administers_nothing(client: httpx.Client, database: Database,
                                                                 role: Role) -> None:
    asked = [*changes(database, "team"), ("POST", PROJECTS, {"name": "new"}),
             ("PUT", f"{PROJECTS}/team/quotas", {"max_jobs": 3})]
    assert statuses(client, asked, change_of(client, new_key(database, "team", role)[1])) == {403}


def test_without_the_pages_token_or_from_another_origin_or_in_another_project_nothing_is_changed(
        client: httpx.Client, database: Database) -> None:
    _, secret = new_key(database, "team")
    change, own, others = change_of(client, secret), changes(database, "team"), changes(database, "other")
    before = [one for one in Audit(database).read().items if one.outcome == "done"]
    assert statuses(client, own, {"content-type": "application/json"}) == {401}
    assert statuses(client, own, change | {CHANGE_HEADER: "1.x"}) == {401}
    for origin in ("https://evil.example", "null"):
        assert statuses(client, own, change | {"origin": origin}) == {403}
    assert statuses(client, others, change) == {404}
    assert [one for one in Audit(database).read().items if one.outcome == "done"] == before


def test_a_session_may_no_more_than_the_scopes_of_its_key_and_its_keys_may_no_more(
        client: httpx.Client, database: Database) -> None:
    scopes: frozenset[Action] = frozenset({"jobs:read", "keys:write"})
    change = change_of(client, new_key(database, "team", scopes=scopes)[1])
    members = f"{PROJECTS}/team/members"
    assert client.post(members, json=MEMBER, headers=change).status_code == 403
    assert client.post(KEYS, json={"name": "x", "role": "viewer"}, headers=change).status_code == 422
    narrow = {"name": "x", "role": "viewer", "scopes": ["jobs:read"]}
    assert client.post(KEYS, json=narrow, headers=change).status_code == 201


def test_a_key_made_with_a_key_ends_no_later_than_that_one(client: httpx.Client, database: Database) -> None:
    ends = datetime.now(UTC) + timedelta(days=2)
    _, secret = new_key(database, "team", expires_at=ends)
    lasting, _ = new_key(database, "team", "viewer")
    for headers in (change_of(client, secret), {"authorization": f"Bearer {secret}"}):
        made = client.post(KEYS, json={"name": "x", "role": "viewer"}, headers=headers)
        assert made.status_code == 201
        assert datetime.fromisoformat(made.json()["key"]["expires_at"]) == ends, "the default is shortened"
        for days in (3, None):
            refused = client.post(KEYS, json={"name": "x", "role": "viewer", "expires_in_days": days}, headers=headers)
            assert refused.status_code == 422
            assert "ends at" in refused.json()["detail"]
        assert client.post(f"{KEYS}/{lasting.id}/rotate", headers=headers).status_code == 422
    assert client.post(KEYS + "?project=team", json={"name": "x", "expires_in_days": None},
                       headers={"authorization": f"Bearer {TOKEN}"}).status_code == 201


def test_keys_and_members_are_made_within_a_quarter_of_an_hour_of_signing_in_and_the_rest_later_too(
        client: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    key, secret = new_key(database, "team")
    change, asked = change_of(client, secret), changes(database, "team")
    authenticator: Any = client.app.state.authenticator  # type: ignore[attr-defined]
    later = datetime.now(UTC) + timedelta(seconds=RECENT_S)
    monkeypatch.setattr(authenticator, "_clock", lambda: later)
    assert [client.request(method, path, json=body, headers=change).status_code for method, path, body in asked] == [
        401, 401, 401, 204, 201]
    refused = client.post(KEYS, json={"name": "x"}, headers=change)
    assert "within the last 15 minutes" in refused.json()["detail"]
    assert "sign in again" in refused.json()["hint"]
    assert client.post(KEYS, json={"name": "x"}, headers=change | {"authorization": "Basic eA=="}).status_code == 401
    assert (f"key:{key.id}", "key.create") in {(one.actor, one.verb) for one in Audit(database).read().items
                                               if one.outcome == "refused: 401"}
    assert "takes a sign-in" in client.get("/console/admin", headers=PAGE).text
    assert client.post("/console/sign-in", headers=change).status_code == 401, "a session does not sign in by itself"
    assert client.post(KEYS, json={"name": "x"}, headers=change_of(client, secret)).status_code == 201


def test_a_cookie_that_is_replaced_keeps_its_time_of_signing_in(
        client: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    change = change_of(client, new_key(database, "team")[1])
    first = client.cookies[COOKIE]
    later = datetime.now(UTC) + timedelta(hours=2)
    monkeypatch.setattr(client.app.state.authenticator, "_clock", lambda: later)  # type: ignore[attr-defined]
    client.get("/", headers=PAGE)
    assert client.cookies[COOKIE] != first
    assert client.post(KEYS, json={"name": "x"}, headers=change).status_code == 401


def test_signing_out_to_sign_in_again_leads_back_to_a_page_of_this_server_alone(client: httpx.Client) -> None:
    for to, taken in (("/console/admin", "/console/admin"), ("//evil.example", "/"), ("https://evil.example", "/")):
        client.post("/console/sign-in", headers={"authorization": f"Bearer {TOKEN}"}).raise_for_status()
        page = client.get("/console/sign-out", params={"to": to}, headers=PAGE).text
        assert f'<button type="button" data-sign-out="{taken}">' in page


def test_the_secret_of_a_new_key_is_in_the_answer_and_in_no_log_page_or_audit_row(
        client: httpx.Client, database: Database, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    change = change_of(client, new_key(database, "team")[1])
    made = client.post(KEYS, json={"name": "x", "role": "viewer"}, headers=change).json()
    assert client.get("/v1alpha1/whoami", headers={"authorization": f"Bearer {made['secret']}"}).status_code == 200
    shown = client.get("/console/admin", headers=PAGE).text
    assert made["key"]["id"] in shown
    for text in (caplog.text, shown, str(Audit(database).read())):
        assert made["secret"] not in text
