"""Tokens of an OIDC issuer: what is right is let in, and everything that is not quite right is refused."""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization

from eyrie_api.access.oidc import Issuer, IssuerUnavailable
from eyrie_api.clock import utc_now
from eyrie_api.database.engine import Database
from eyrie_api.errors import InvalidInput, Unauthorized
from eyrie_api.settings import Settings
from tests.api.access.issuer import AUDIENCE, IssuerDouble, ec_key, issuing, rsa_key
from tests.api.conftest import serving
from tests.api.samples import job_body

DATABASES = ("sqlite",)


@pytest.fixture
def double() -> Iterator[IssuerDouble]:
    with issuing() as made:
        yield made


class Elapsed:
    """A clock that advances only when the test advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_token_signed_by_the_issuer_says_who_it_is(double: IssuerDouble) -> None:
    issuer = Issuer(double.url, AUDIENCE)
    for kid, algorithm in (("rsa-1", "RS256"), ("ec-1", "ES256")):
        claims = issuer.verify(double.token(kid=kid, algorithm=algorithm))
        assert (claims.subject, claims.groups) == ("ada", frozenset({"engineers"}))
    assert issuer.verify(double.token(aud=["other", AUDIENCE], groups="one")).groups == {"one"}
    assert issuer.verify(double.token(groups=None)).groups == frozenset()
    assert double.asked == 1, "its keys are kept"


def test_everything_that_is_not_quite_right_is_refused(double: IssuerDouble) -> None:
    issuer, now = Issuer(double.url, AUDIENCE, leeway_s=30.0), int(utc_now().timestamp())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"iss": "https://elsewhere.example"}, "Invalid issuer"), ({"iss": double.url + "/"}, "Invalid issuer"),
        ({"aud": "another"}, "Audience"), ({"aud": []}, '"aud" claim'), ({"aud": None}, '"aud" claim'),
        ({"exp": now - 31}, "has expired"), ({"exp": None}, '"exp" claim'), ({"nbf": now + 60}, r"\(nbf\)"),
        ({"iat": now + 60}, r"\(iat\)"), ({"iat": None}, '"iat" claim'), ({"sub": None}, '"sub" claim'),
        ({"iss": None}, '"iss" claim'), ({"kid": "unknown", "key": rsa_key()}, "key that the issuer does not list"),
        ({"key": rsa_key(1)}, "Signature verification failed"),
        ({"kid": "ec-1", "algorithm": "RS256", "key": rsa_key()}, "key is not for RS256"),
        ({"kid": "rsa-1", "algorithm": "ES256", "key": ec_key()}, "key is not for ES256"),
        ({"algorithm": "RS512"}, "'RS512' is not one of"), ({"algorithm": "PS256"}, "'PS256' is not one of")]
    for changes, says in wrong:
        with pytest.raises(Unauthorized, match=says):
            issuer.verify(double.token(**changes))
    assert issuer.verify(double.token(exp=now - 5)).subject == "ada", "clocks differ"


def test_tokens_without_a_signature_or_signed_with_the_public_key_are_refused(double: IssuerDouble) -> None:
    issuer = Issuer(double.url, AUDIENCE)
    whole = double.token()
    body = whole.split(".")[1]
    pem = rsa_key().public_key().public_bytes(serialization.Encoding.PEM,
                                              serialization.PublicFormat.SubjectPublicKeyInfo)
    for algorithm in ("none", "None", "HS256"):
        head = base64.urlsafe_b64encode(json.dumps({"alg": algorithm, "kid": "rsa-1"}).encode()).decode().rstrip("=")
        with pytest.raises(Unauthorized):
            issuer.verify(f"{head}.{body}.")
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"rsa-1"}').decode().rstrip("=")
    mac = base64.urlsafe_b64encode(hmac.new(pem, f"{head}.{body}".encode(), hashlib.sha256).digest()).decode()
    for token in (f"{head}.{body}.{mac.rstrip('=')}", whole[:-4] + "AAAA", "a.b.c", "..", whole + "."):
        with pytest.raises(Unauthorized) as caught:
            issuer.verify(token)
        assert body not in str(caught.value)


def test_a_rotated_key_is_found_and_a_flood_of_unknown_ones_does_not_reach_the_issuer(double: IssuerDouble) -> None:
    elapsed = Elapsed()
    issuer = Issuer(double.url, AUDIENCE, elapsed=elapsed)
    issuer.verify(double.token())
    double.keys = {"rsa-2": rsa_key(2)}
    for _ in range(20):
        with pytest.raises(Unauthorized):
            issuer.verify(double.token(kid="rsa-2"))
    assert double.asked == 1
    elapsed.now += 11
    assert issuer.verify(double.token(kid="rsa-2")).subject == "ada"
    assert double.asked == 2
    with pytest.raises(Unauthorized):
        issuer.verify(double.token(kid="rsa-1", key=rsa_key()))


def test_an_issuer_that_is_away_is_waited_for_and_its_known_keys_go_on(double: IssuerDouble) -> None:
    elapsed = Elapsed()
    issuer, token = Issuer(double.url, AUDIENCE, elapsed=elapsed), double.token()
    double.is_away = True
    with pytest.raises(IssuerUnavailable):
        issuer.verify(token)
    double.is_away = False
    elapsed.now += 11
    assert issuer.verify(token).subject == "ada"
    double.is_away = True
    elapsed.now += 3600
    assert issuer.verify(token).subject == "ada"


def test_an_issuer_that_could_be_overheard_or_names_no_audience_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidInput, match="https"):
        Issuer("http://issuer.example", AUDIENCE)
    with pytest.raises(InvalidInput, match="EYRIE_OIDC_AUDIENCE"):
        Issuer.of(Settings(oidc_issuer="https://issuer.example"))


def test_members_and_groups_have_their_roles_on_the_server(settings: Settings, database: Database,
                                                           double: IssuerDouble) -> None:
    closed = settings.model_copy(update={"oidc_issuer": double.url, "oidc_audience": AUDIENCE,
                                         "oidc_admin_group": "platform", "token": None})
    with serving(closed, database) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        def ask(method: str, path: str, token: str, **options: Any) -> httpx.Response:
            return http.request(method, "/v1alpha1" + path, headers={"Authorization": f"Bearer {token}"}, **options)

        assert http.get("/v1alpha1/jobs").status_code == 401, "on loopback too, once there is an issuer"
        root = double.token(sub="root", groups=["platform"])
        assert ask("GET", "/whoami", root).json()["roles"] == {"*": "admin"}
        ada = double.token()
        assert ask("GET", "/whoami", ada).json() == {
            "subject": f"user:{double.url}#ada", "roles": {}, "scopes": None, "project": None}
        assert ask("GET", "/jobs", ada).json()["items"] == []
        for project, kind, value, role in (("search", "group", "engineers", "viewer"),
                                           ("search", "subject", "bob", "operator"),
                                           ("chat", "subject", "bob", "admin")):
            ask("POST", "/projects", root, json={"name": project})
            added = ask("POST", f"/projects/{project}/members", root,
                        json={"kind": kind, "value": value, "role": role})
            assert added.status_code == 201, added.text
        ada, bob = double.token(exp=int(utc_now().timestamp()) + 301), double.token(sub="bob")
        assert ask("GET", "/whoami", ada).json()["roles"] == {"search": "viewer"}
        assert ask("GET", "/whoami", bob).json()["roles"] == {"search": "operator", "chat": "admin"}
        assert ask("POST", "/jobs", ada, json=job_body()).status_code == 403
        unsaid = ask("POST", "/jobs", bob, json=job_body())
        assert unsaid.status_code == 422
        assert "Eyrie-Project" in unsaid.text
        made = ask("POST", "/jobs?project=search", bob, json=job_body())
        assert made.status_code == 202, made.text
        assert made.json()["spec"]["serve"]["endpoint"] == "search"
        assert [job["id"] for job in ask("GET", "/jobs", ada).json()["items"]] == [made.json()["id"]]
