"""The pages of administration: what the REST API shows the same caller, no secret, and no button."""

from html import unescape
from re import sub

import httpx
import pytest

from eyrie_api.access.keys import SecretKeys
from eyrie_api.access.scope import Scope
from eyrie_api.contract.access import Action, CreateMember, CreateProject, CreateWebhook, Quotas, Role
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.database.webhooks import Webhooks
from eyrie_api.http.authentication import LOCAL
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.api.access.harness import SECRET_KEY
from tests.api.samples import job_body

DATABASES = ("sqlite",)
TOKEN = "installation-token-of-this-test"
ISSUER = "https://issuer.example"
ADMIN, AUDIT, TEAM = "/console/admin", "/console/admin/audit", "/console/admin/projects/team"
NO_PERMISSION = "No permission"


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    for name in ("team", "other"):
        Projects(database).create(CreateProject(name=name, quotas=Quotas(max_jobs=1, max_gpus=8)))
    return TestClient(create_app(settings.model_copy(update={"token": TOKEN}), database=database),
                      base_url="https://console.example")


def within(project: str) -> Scope:
    return Scope(LOCAL, project)


def signed_in(client: httpx.Client, database: Database, role: Role, scopes: frozenset[Action] | None = None,
              project: str = "team") -> httpx.Client:
    _, secret = ApiKeys(database, scope=within(project)).create(name="mine", role=role, scopes=scopes)
    client.cookies.clear()
    client.post("/console/sign-in", headers={"authorization": f"Bearer {secret}"}).raise_for_status()
    return client


def text_of(client: httpx.Client, path: str) -> str:
    page = client.get(path, headers={"accept": "text/html"})
    assert page.status_code == 200, page.text
    assert "unsafe" not in page.headers["content-security-policy"]
    return " ".join(unescape(sub(r"<[^>]+>", " ", page.text)).split())


def test_an_admin_of_a_project_sees_all_of_it_and_nothing_of_another(client: httpx.Client, database: Database) -> None:
    scope = within("team")
    key, secret = ApiKeys(database, scope=scope).create(name="nightly", role="operator")
    ApiKeys(database, scope=scope).revoke(key.id)
    ApiKeys(database, scope=within("other")).create(name="theirs", role="viewer")
    Projects(database).add_member("team", CreateMember(kind="group", value="researchers", role="operator"), ISSUER)
    hooks = Webhooks(database, scope=scope, keys=SecretKeys((SECRET_KEY,)), allow_private=True)
    hook, signing = hooks.create(CreateWebhook(url="http://127.0.0.1:9/arrivals"))
    hooks.ping(hook.id)
    signed_in(client, database, "admin")
    shown = text_of(client, ADMIN)
    for words in ("team 0 of 1 0 0 of 8 0 no limit", f"nightly {key.id} team operator Revoked", "mine", "Active",
                  "last used", "http://127.0.0.1:9/arrivals", "On Pending ping", f"eyrie webhooks delete {hook.id}",
                  "No permission to create projects"):
        assert words in shown, words
    for hidden in ("other ", "theirs", secret, signing, NO_PERMISSION + ": your role", f"eyrie keys revoke {key.id}"):
        assert hidden not in shown, hidden
    shown = text_of(client, TEAM)
    assert "GPUs that jobs request at one time 0 8" in shown
    assert "group operator https://issuer.example 1" in shown
    assert "key.revoke" in text_of(client, AUDIT)
    assert "No permission to set quotas" in text_of(client, TEAM)
    page = client.get(ADMIN).text
    assert 'data-path="/v1alpha1/keys"' in page
    assert 'data-path="/v1alpha1/projects"' not in page
    assert 'data-path="/v1alpha1/projects/team/quotas"' not in client.get(TEAM).text


def test_a_cookie_alone_changes_nothing_and_lists_nothing_by_rest(client: httpx.Client,
                                                                       database: Database) -> None:
    signed_in(client, database, "admin")
    assert "mine" in text_of(client, ADMIN)
    assert client.get("/v1alpha1/keys").json()["items"] == []
    assert client.get("/v1alpha1/audit").json()["items"] == []
    assert client.post("/v1alpha1/keys", json={"name": "more"}).status_code == 401


def test_a_used_up_quota_is_marked(client: httpx.Client, database: Database) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "eyrie-project": "team"}
    assert client.post("/v1alpha1/jobs", json=job_body(), headers=headers).status_code == 202
    signed_in(client, database, "viewer")
    assert "jobs that have not ended Used up 1 1" in text_of(client, TEAM)


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_who_is_no_admin_sees_quotas_a_word_about_the_rest_and_no_link(
        client: httpx.Client, database: Database, role: Role) -> None:
    signed_in(client, database, role)
    assert "Administration" not in text_of(client, "/")
    shown = text_of(client, ADMIN)
    assert "0 of 1" in shown
    assert shown.count(NO_PERMISSION) == 3, "projects, keys and webhooks"
    assert "mine" not in shown
    assert text_of(client, TEAM).count(NO_PERMISSION) == 2, "quotas and members"
    assert NO_PERMISSION in text_of(client, AUDIT)
    assert "<button" not in client.get(ADMIN).text + client.get(TEAM).text


def test_another_projects_viewer_gets_the_same_answer_as_for_none(client: httpx.Client, database: Database) -> None:
    signed_in(client, database, "viewer", project="other")
    assert client.get(TEAM).status_code == client.get("/console/admin/projects/never").status_code == 404
    assert "team" not in text_of(client, ADMIN)


def test_the_page_shows_no_more_than_the_scopes_of_a_key(client: httpx.Client, database: Database) -> None:
    signed_in(client, database, "admin", frozenset({"jobs:read", "audit:read"}))
    shown = text_of(client, ADMIN)
    assert shown.count(NO_PERMISSION) == 3
    assert NO_PERMISSION in text_of(client, TEAM)
    assert NO_PERMISSION not in text_of(client, AUDIT)


def test_the_audit_is_paged_newest_first(client: httpx.Client, database: Database) -> None:
    keys = ApiKeys(database, scope=within("team"))
    made = [keys.create(name=f"k{number}", role="viewer")[0].id for number in range(70)]
    signed_in(client, database, "admin")
    page = client.get(AUDIT)
    assert page.text.index(f"key/{made[69]}") < page.text.index(f"key/{made[68]}")
    assert f"key/{made[5]}" not in page.text
    older = page.text.partition(f'href="{AUDIT}?before=')[2].partition('"')[0]
    assert f"key/{made[5]}" in text_of(client, f"{AUDIT}?before={older}")
    assert "Nothing older." in text_of(client, f"{AUDIT}?before=1")


def test_without_a_token_an_empty_installation_says_so_in_each_section(settings: Settings, database: Database) -> None:
    from starlette.testclient import TestClient

    local = TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")
    shown = text_of(local, ADMIN)
    assert "default" in shown
    assert "No API key yet." in shown
    assert "No webhook yet." in shown
    assert "No member yet" in text_of(local, "/console/admin/projects/default")
    assert "Nothing has been changed or refused yet." in text_of(local, AUDIT)
    assert "Administration" in text_of(local, "/")
