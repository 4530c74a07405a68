"""People sign in to the console at the OIDC issuer: code flow with PKCE. The issuer is a double (`issuer`)."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from starlette.testclient import TestClient

from eyrie_api.access.browser_sign_in import (
    CHANGE_HEADER,
    COOKIE,
    PENDING_COOKIE,
    PENDING_S,
    RECENT_S,
    SESSION_S,
    USER_SESSION,
    BrowserSignIn,
    local_path,
)
from eyrie_api.access.keys import SecretKeys
from eyrie_api.access.oidc import Claims, Issuer
from eyrie_api.database.engine import Database
from eyrie_api.errors import InvalidInput, Unauthorized
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.api.access.issuer import AUDIENCE, IssuerDouble, issuing
from tests.api.samples import job_body

PAGE = {"accept": "text/html"}
HERE = "https://console.example"
KEY = "a" * 43 + "="


@pytest.fixture
def issuer() -> Iterator[IssuerDouble]:
    with issuing() as made:
        yield made


def signing_in(settings: Settings, issuer: IssuerDouble, **more: object) -> Settings:
    return settings.model_copy(update={
        "oidc_issuer": issuer.url, "oidc_audience": AUDIENCE, "oidc_client_id": "eyrie-console",
        "oidc_admin_group": "platform", "secret_key": KEY, **more})


@pytest.fixture
def console(settings: Settings, database: Database, issuer: IssuerDouble) -> TestClient:
    return TestClient(create_app(signing_in(settings, issuer), database=database), base_url=HERE)


def at_issuer(console: TestClient, to: str = "/") -> str:
    """The URL that the issuer sends the browser back to."""
    begun = console.get("/console/oidc/start", params={"to": to}, follow_redirects=False)
    assert begun.status_code == 303
    back = httpx.get(begun.headers["location"], trust_env=False)
    assert back.status_code == 302
    return str(back.headers["location"])


def sign_in(console: TestClient, to: str = "/") -> httpx.Response:
    return console.get(at_issuer(console, to), headers=PAGE, follow_redirects=False)


def test_somebody_who_signs_in_at_the_issuer_sees_what_their_groups_may_see_and_works_with_it(
        console: TestClient, issuer: IssuerDouble) -> None:
    issuer.signed_in = {"sub": "ada", "groups": ["platform"]}
    asked = console.get("/console/new", headers=PAGE)
    assert asked.status_code == 401
    link = re.search(r'href="(/console/oidc/start[^"]*)"', asked.text)
    assert link is not None
    assert dict(parse_qsl(urlsplit(link[1]).query)) == {"to": "/console/new"}
    done = sign_in(console, "/console/new")
    assert done.status_code == 200
    assert 'content="0; url=/console/new"' in done.text
    given = next(one for one in done.headers.get_list("set-cookie") if one.startswith(COOKIE))
    assert {"HttpOnly", "SameSite=Strict", "Secure"} <= set(given.split("; "))
    assert "ada" not in given
    page = console.get("/console/new", headers=PAGE)
    assert page.status_code == 200
    assert f"user:{issuer.url}#ada" in page.text
    change = re.search(r'name="eyrie-change" content="([^"]+)"', page.text)
    assert change is not None
    assert console.post("/v1alpha1/jobs", json=job_body()).status_code == 401  # a cookie alone changes nothing
    made = console.post("/v1alpha1/jobs", json=job_body(), headers={CHANGE_HEADER: change[1]})
    assert made.status_code == 202
    key = console.post("/v1alpha1/keys", json={"name": "k"}, headers={CHANGE_HEADER: change[1]})
    assert key.status_code == 201
    assert key.json()["key"]["created_by"] == f"user:{issuer.url}#ada"  # ends with their membership


def test_somebody_who_signed_in_a_while_ago_makes_no_key_until_they_sign_in_again(
        console: TestClient, issuer: IssuerDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.now(UTC)
    monkeypatch.setattr("eyrie_api.http.console.pages.utc_now", lambda: now - timedelta(seconds=RECENT_S))
    issuer.signed_in = {"sub": "ada", "groups": ["platform"]}

    def made() -> int:
        page = console.get("/console/admin", headers=PAGE).text
        change = re.search(r'name="eyrie-change" content="([^"]+)"', page)
        assert change is not None
        answer = console.post("/v1alpha1/keys", json={"name": "k"}, headers={CHANGE_HEADER: change[1]})
        assert ("takes a sign-in" in page) == (answer.status_code == 401)
        return answer.status_code

    sign_in(console)
    assert made() == 401
    monkeypatch.setattr("eyrie_api.http.console.pages.utc_now", lambda: now)
    sign_in(console)
    assert made() == 201


def test_somebody_without_a_role_sees_nothing_of_anybody(console: TestClient, issuer: IssuerDouble) -> None:
    issuer.signed_in = {"sub": "eve", "groups": []}
    sign_in(console)
    assert console.get("/v1alpha1/jobs").json()["items"] == []
    assert console.get("/v1alpha1/whoami").json()["roles"] == {}


def test_a_registration_with_a_secret_sends_it_and_pkce_too(
        settings: Settings, database: Database, issuer: IssuerDouble) -> None:
    issuer.client_secret = "of-the-registration"
    wrong = TestClient(create_app(signing_in(settings, issuer), database=database), base_url=HERE)
    refused = sign_in(wrong)
    assert refused.status_code == 401
    assert "invalid_client" in refused.text
    right = signing_in(settings, issuer, oidc_client_secret="of-the-registration")
    assert sign_in(TestClient(create_app(right, database=database), base_url=HERE)).status_code == 200


def test_the_answer_of_another_attempt_is_refused(console: TestClient, issuer: IssuerDouble) -> None:
    back = at_issuer(console)
    for forged in (back.replace("state=", "state=x"), re.sub(r"code=[^&]*", "code=none", back)):
        assert console.get(forged, follow_redirects=False).status_code == 401
        at_issuer(console)  # every attempt has a cookie of its own
    console.cookies.clear()
    assert console.get(back, follow_redirects=False).status_code == 401


@pytest.mark.parametrize("wrong", [{"aud": AUDIENCE}, {"nonce": "another"}, {"azp": "another"}, {"exp": 1},
                                   {"iss": "https://other.example"}])
def test_an_id_token_for_another_client_or_attempt_is_refused(
        console: TestClient, issuer: IssuerDouble, wrong: dict[str, object]) -> None:
    issuer.signed_in = wrong
    done = sign_in(console)
    assert done.status_code == 401
    assert not any(one.startswith(COOKIE) for one in done.headers.get_list("set-cookie"))


def test_a_refusal_and_an_absence_of_the_issuer_are_shown_with_what_to_do(
        console: TestClient, issuer: IssuerDouble) -> None:
    refused = console.get("/console/oidc/callback", params={"error": "access_denied"})
    assert refused.status_code == 401
    assert "access_denied" in refused.text
    issuer.is_away = True
    away = console.get("/console/oidc/start", follow_redirects=False)
    assert away.status_code == 503
    assert issuer.url in away.json()["detail"]


def test_without_a_registration_there_is_no_link_and_no_route(settings: Settings, database: Database) -> None:
    console = TestClient(create_app(settings.model_copy(update={"token": "t" * 32}), database=database), base_url=HERE)
    assert "/console/oidc/start" not in console.get("/", headers=PAGE).text
    assert console.get("/console/oidc/start").status_code == 404


def test_each_cookie_is_good_for_its_own_purpose_and_time(issuer: IssuerDouble) -> None:
    made = BrowserSignIn(Issuer(issuer.url, AUDIENCE), "eyrie-console", None, "openid", SecretKeys((KEY,)))
    ada = Claims("ada", frozenset({"a", "b"}))
    cookie = made.session_of(ada, 1000.0)
    assert made.claims_of(cookie, 1000.0 + SESSION_S - 1) == ada
    _, pending = made.start(f"{HERE}/console/oidc/callback", "/", 1000.0)
    change = made.change_token("user:ada", 1000.0)
    made.check_change(change, "user:ada", 1001.0)
    for wrong in (pending, change, cookie[:-8], cookie[:40] + cookie[41:], ""):
        with pytest.raises(Unauthorized):
            made.claims_of(USER_SESSION + wrong.removeprefix(USER_SESSION), 1001.0)
    with pytest.raises(Unauthorized, match="expired"):
        made.claims_of(cookie, 1000.0 + SESSION_S)
    with pytest.raises(Unauthorized, match="page of this server"):
        made.check_change(change, "user:eve", 1001.0)
    with pytest.raises(Unauthorized, match="expired"):
        made.finish(pending, f"{HERE}/console/oidc/callback", "c", "s", 1000.0 + PENDING_S)
    with pytest.raises(Unauthorized, match="300 groups"):
        made.session_of(Claims("ada", frozenset(f"group-number-{number}" for number in range(300))), 1000.0)


@pytest.mark.parametrize(("given", "taken"), [
    ("/console/jobs/a?x=1", "/console/jobs/a?x=1"), ("//evil.example", "/"), ("https://evil.example", "/"),
    ("/\\evil.example", "/"), ("", "/"), ("/a\nb", "/"), ("/" + "a" * 1000, "/"),
])
def test_after_signing_in_a_browser_goes_to_a_page_of_this_server_alone(given: str, taken: str) -> None:
    assert local_path(given) == taken


@pytest.mark.parametrize(("changes", "named"), [({"oidc_issuer": None}, "EYRIE_OIDC_ISSUER"),
                                                 ({"database_url": "postgresql://nowhere/x", "secret_key": None},
                                                  "EYRIE_SECRET_KEY")])
def test_a_registration_needs_an_issuer_and_a_key_for_cookies(
        settings: Settings, database: Database, issuer: IssuerDouble, changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        create_app(signing_in(settings, issuer, **changes), database=database)


def test_the_pending_cookie_goes_to_the_callback_alone(console: TestClient) -> None:
    begun = console.get("/console/oidc/start", follow_redirects=False)
    (cookie,) = (one for one in begun.headers.get_list("set-cookie") if one.startswith(PENDING_COOKIE))
    assert {"HttpOnly", "Path=/console/oidc/callback", "SameSite=lax", "Secure"} <= set(cookie.split("; "))
