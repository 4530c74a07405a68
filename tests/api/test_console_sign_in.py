"""The console where requests need a token: a key is exchanged for a cookie, which reads; with what a page of this
server has in its text it also does what the key may."""

import re
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.access.browser_sign_in import (
    CHANGE_HEADER,
    COOKIE,
    LIFETIME_S,
    RENEWED_AFTER_S,
    create_cookie,
    is_due,
    signed_in_at,
    verify_cookie,
)
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import ApiKeys
from eyrie_api.errors import Unauthorized
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import job_body, job_spec

DATABASES = ("sqlite",)  # pages have no SQL of their own: what they read is tested on both elsewhere

TOKEN = "installation-token-of-this-test"
PAGE = {"accept": "text/html"}
DIGEST = "ab" * 32


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    return TestClient(create_app(settings.model_copy(update={"token": TOKEN}), database=database),
                      base_url="https://console.example")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def key_of(database: Database, role: str = "operator") -> tuple[str, str]:
    key, secret = ApiKeys(database).create(name="k", role=role, everywhere=True)  # type: ignore[arg-type]
    return key.id, secret


def test_a_page_asks_for_a_key_and_its_script_and_style_need_none(client: httpx.Client) -> None:
    page = client.get("/", headers=PAGE)
    assert page.status_code == 401
    assert 'id="sign-in"' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/console/static/console.js").status_code == 200
    for path, headers in (("/", {}), ("/v1alpha1/jobs", PAGE)):  # programs get a problem document
        answer = client.get(path, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (401, "urn:eyrie:problem:Unauthorized")


def test_a_key_is_exchanged_for_a_cookie_that_reads_and_changes_nothing(client: httpx.Client,
                                                                       database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec(name="nightly")))
    key_id, secret = key_of(database)
    answer = client.post("/console/sign-in", headers=bearer(secret))
    assert answer.status_code == 204
    given = answer.headers["set-cookie"]
    for attribute in ("HttpOnly", "SameSite=Strict", "Secure", "Path=/", f"Max-Age={LIFETIME_S}"):
        assert attribute in given
    assert secret not in given
    page = client.get("/", headers=PAGE)
    assert page.status_code == 200
    assert "nightly" in page.text
    assert f"key:{key_id}" in page.text
    assert client.get(f"/v1alpha1/jobs/{job.id}/curves").status_code == 200  # as the page's script asks
    assert client.get("/v1alpha1/keys").json()["items"] == [], "not even what its key may administer"
    for method, path in (("POST", f"/v1alpha1/jobs/{job.id}/cancel"), ("DELETE", f"/v1alpha1/jobs/{job.id}"),
                         ("POST", "/console/sign-in")):
        assert client.request(method, path).status_code == 401
    assert client.post("/v1alpha1/jobs", json=job_body()).status_code == 401
    assert client.get("/", headers=PAGE | {"origin": "https://evil.example"}).status_code == 403


def test_signing_out_takes_the_token_of_a_page_and_a_link_does_not_sign_out(
        client: httpx.Client, database: Database) -> None:
    change = change_of(signed_in(client, key_of(database)[1]))
    for refused in (client.get("/console/sign-out"), client.post("/console/sign-out"),
                    client.post("/console/sign-out", headers=change | {"origin": "https://evil.example"})):
        assert "set-cookie" not in refused.headers
        assert client.get("/", headers=PAGE).status_code == 200
    assert client.post("/console/sign-out", headers=change).status_code == 204
    assert client.get("/", headers=PAGE).status_code == 401


def change_of(client: httpx.Client) -> dict[str, str]:
    """The header that the page's script sends with a change."""
    found = re.search(r'<meta name="eyrie-change" content="([^"]+)">', client.get("/", headers=PAGE).text)
    assert found is not None
    return {CHANGE_HEADER: found[1], "content-type": "application/json"}


def signed_in(client: httpx.Client, secret: str) -> httpx.Client:
    client.cookies.clear()
    client.post("/console/sign-in", headers=bearer(secret)).raise_for_status()
    return client


def test_a_page_cancels_and_deletes_with_its_token_and_a_request_without_it_does_not(
        client: httpx.Client, database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec(name="nightly")))
    path, (key_id, secret) = f"/v1alpha1/jobs/{job.id}", key_of(database)
    change = change_of(signed_in(client, secret))
    page = client.get(f"/console/jobs/{job.id}", headers=PAGE).text
    assert f'data-method="POST" data-path="{path}/cancel"' in page
    assert 'data-method="DELETE"' not in page, "a job that runs is cancelled first"
    assert client.post(path + "/cancel", headers={"content-type": "application/json"}).status_code == 401
    for origin in ("https://evil.example", "null"):
        assert client.post(path + "/cancel", headers=change | {"origin": origin}).status_code == 403
    assert client.post(path + "/cancel", headers=change | {"origin": "https://console.example"}).status_code == 202
    assert client.delete(path, headers=change).status_code in (202, 204)
    audited = client.get("/v1alpha1/audit", headers=bearer(TOKEN)).json()["items"]
    assert {line["actor"] for line in audited if job.id in line["object"] and line["outcome"] == "done"} == {
        f"key:{key_id}"}


def test_a_viewers_page_has_no_buttons_and_its_session_may_not_change(client: httpx.Client,
                                                                     database: Database) -> None:
    job = Jobs(database).submit(derive(job_spec()))
    change = change_of(signed_in(client, key_of(database, "viewer")[1]))
    assert "data-path=" not in client.get(f"/console/jobs/{job.id}", headers=PAGE).text, "no button that changes a job"
    assert client.post(f"/v1alpha1/jobs/{job.id}/cancel", headers=change).status_code == 403


def test_a_pages_token_is_of_its_key_and_ends(client: httpx.Client, database: Database,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    job = Jobs(database).submit(derive(job_spec()))
    path = f"/v1alpha1/jobs/{job.id}/cancel"
    of_another = change_of(signed_in(client, key_of(database)[1]))
    own = change_of(signed_in(client, key_of(database)[1]))
    cookie = client.cookies[COOKIE].partition(".")[2]
    for made_up in (of_another, own | {CHANGE_HEADER: "x"}, own | {CHANGE_HEADER: cookie}):
        assert client.post(path, headers=made_up).status_code == 401
    later = datetime.now(UTC) + timedelta(seconds=LIFETIME_S)
    monkeypatch.setattr(client.app.state.authenticator, "_clock", lambda: later)  # type: ignore[attr-defined]
    assert client.post(path, headers=own).status_code == 401


def test_a_cookie_is_no_bearer_token_and_a_key_is_no_cookie(client: httpx.Client, database: Database) -> None:
    _, secret = key_of(database)
    given = client.post("/console/sign-in", headers=bearer(secret)).headers["set-cookie"]
    cookie = given.split(";")[0].partition("=")[2]
    assert client.get("/", headers=PAGE).status_code == 200  # both are cached now
    client.cookies.clear()
    assert client.post("/console/sign-in", headers=bearer(cookie)).status_code == 401
    assert client.get("/", headers=PAGE | {"cookie": f"{COOKIE}={secret}"}).status_code == 401


def test_a_cookie_ends_with_its_key(client: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.http.authentication.CACHED_S", 0.0)
    key_id, secret = key_of(database, "viewer")
    client.post("/console/sign-in", headers=bearer(secret)).raise_for_status()
    assert client.get("/", headers=PAGE).status_code == 200
    ApiKeys(database).revoke(key_id)
    assert client.get("/", headers=PAGE).status_code == 401


def test_the_installations_token_signs_in_too_and_wrong_ones_do_not(client: httpx.Client) -> None:
    refused = client.post("/console/sign-in", headers=bearer("wrong"))
    assert refused.status_code == 401
    assert refused.json()["hint"]
    assert client.post("/console/sign-in", headers=bearer(TOKEN)).status_code == 204
    assert client.get("/", headers=PAGE).status_code == 200


@pytest.mark.parametrize("cookie", [
    "", "x", "token.1.2.3", f"token.1.99999999999.{'0' * 64}", f"nobody.1.99999999999.{'a' * 64}"])
def test_a_made_up_cookie_is_refused(client: httpx.Client, cookie: str) -> None:
    assert client.get("/", headers=PAGE | {"cookie": f"{COOKIE}={cookie}"}).status_code == 401


def test_on_loopback_without_a_token_nobody_signs_in(settings: Settings, database: Database) -> None:
    from starlette.testclient import TestClient

    local = TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")
    assert local.get("/", headers=PAGE).status_code == 200
    answer = local.post("/console/sign-in")
    assert answer.status_code == 204
    assert "set-cookie" not in answer.headers


def test_a_cookie_in_use_is_replaced_after_an_hour_and_expires_after_eight(
        settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    now = datetime.now(UTC)
    app = create_app(settings.model_copy(update={"token": TOKEN}), database=database)
    monkeypatch.setattr(app.state.authenticator, "_clock", lambda: now)
    client = TestClient(app, base_url="http://console.example")
    first = client.post("/console/sign-in", headers=bearer(TOKEN)).headers["set-cookie"]
    assert "Secure" not in first
    assert "set-cookie" not in client.get("/", headers=PAGE).headers
    now += timedelta(seconds=RENEWED_AFTER_S)
    second = client.get("/", headers=PAGE).headers["set-cookie"]
    assert second != first
    now += timedelta(seconds=LIFETIME_S + 1)
    app.state.authenticator._principals.clear()
    assert client.get("/", headers=PAGE).status_code == 401


@given(st.text(max_size=200))
def test_no_text_but_the_cookie_is_one(text: str) -> None:
    with pytest.raises(Unauthorized):
        verify_cookie(text, lambda _: DIGEST, 0.0)


def test_a_cookie_is_of_its_credential_and_time() -> None:
    cookie = create_cookie("abc", DIGEST, 1000.0)
    assert verify_cookie(cookie, {"abc": DIGEST}.get, 1000.0 + LIFETIME_S - 1) == "abc"
    assert not is_due(cookie, 1000.0 + RENEWED_AFTER_S - 1)
    assert is_due(cookie, 1000.0 + RENEWED_AFTER_S)
    renewed = create_cookie("abc", DIGEST, 5000.0, signed_in_at(cookie))
    assert verify_cookie(renewed, {"abc": DIGEST}.get, 5000.0 + LIFETIME_S - 1) == "abc"
    assert signed_in_at(renewed) == 1000
    for changed in (cookie.replace("abc", "abd"), cookie.replace(".", ".1", 1), cookie[:-1] + "0" if cookie[-1] != "0"
                    else cookie[:-1] + "1"):
        with pytest.raises(Unauthorized):
            verify_cookie(changed, lambda _: DIGEST, 1000.0)
    with pytest.raises(Unauthorized, match="expired"):
        verify_cookie(cookie, {"abc": DIGEST}.get, 1000.0 + LIFETIME_S)
    with pytest.raises(Unauthorized):
        verify_cookie(cookie, {"abc": "cd" * 32}.get, 1000.0)
