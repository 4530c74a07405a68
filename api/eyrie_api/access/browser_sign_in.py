"""Sign-in of people at the OIDC issuer: authorization code flow with PKCE, for the console.

The rules are those of OpenID Connect Core 1.0, sections 3.1.2 and 3.1.3, RFC 7636 (S256 only) and RFC 9700, section
2.1. Nothing is stored: both cookies are encrypted with the keys of EYRIE_SECRET_KEY, and each says what it is for.

- `PENDING_COOKIE` holds state, nonce and code verifier while the browser is at the issuer. It is SameSite=Lax, because
  the issuer's redirect comes from another site.
- the session's cookie holds subject and groups. Roles are looked up in the database with each request; groups are the
  issuer's at the time of signing in, which is why the session ends after an hour. Signing in again takes one click, and
  no password while the issuer's own session is valid.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlencode

import httpx

from eyrie_api.access.keys import SecretKeys, SecretUnreadable
from eyrie_api.access.oidc import Claims, Issuer, IssuerUnavailable
from eyrie_api.errors import InvalidInput, Unauthorized
from eyrie_api.settings import Settings

PENDING_COOKIE = "eyrie_sign_in"
PENDING_S, SESSION_S, CHANGE_S = 600, 3600, 3600
USER_SESSION = "user."
"""Prefix of a user's session cookie; those of keys begin with the key's id."""

_MOST_COOKIE_BYTES = 3800  # RFC 6265, section 6.1: browsers keep 4096 bytes, name and attributes included
_TIMEOUT_S = 10.0

Purpose = Literal["pending", "session", "change"]


class BrowserSignIn:
    """The flow of one issuer and one client registration."""

    def __init__(self, issuer: Issuer, client_id: str, client_secret: str | None, scopes: str,
                 keys: SecretKeys) -> None:
        self.issuer, self._client_id, self._client_secret = issuer, client_id, client_secret
        self._scopes, self._keys = scopes, keys

    @classmethod
    def of(cls, settings: Settings, issuer: Issuer | None, keys: SecretKeys) -> "BrowserSignIn | None":
        """None without EYRIE_OIDC_CLIENT_ID. Raises InvalidInput for one without an issuer or a key for cookies."""
        if settings.oidc_client_id is None:
            return None
        if issuer is None:
            raise InvalidInput("EYRIE_OIDC_CLIENT_ID is set and EYRIE_OIDC_ISSUER is not", "set the issuer too")
        if not keys:
            raise InvalidInput("EYRIE_OIDC_CLIENT_ID is set and EYRIE_SECRET_KEY is not: cookies of people who sign in "
                               "are encrypted with it", "set the same EYRIE_SECRET_KEY on every server")
        return cls(issuer, settings.oidc_client_id, settings.oidc_client_secret, settings.oidc_scopes, keys)

    def start(self, redirect_uri: str, to: str, now_s: float) -> tuple[str, str]:
        """The issuer's URL to send the browser to, and the value of `PENDING_COOKIE`. Raises IssuerUnavailable.

        to   path of this server to go to afterwards
        """
        pending = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
        challenge = base64.urlsafe_b64encode(hashlib.sha256(pending["verifier"].encode()).digest()).rstrip(b"=")
        query = {"response_type": "code", "client_id": self._client_id, "redirect_uri": redirect_uri,
                 "scope": self._scopes, "state": pending["state"], "nonce": pending["nonce"],
                 "code_challenge": challenge.decode(), "code_challenge_method": "S256"}
        url = self.issuer.endpoint("authorization_endpoint")
        return (f"{url}{'&' if '?' in url else '?'}{urlencode(query)}",
                self._seal("pending", now_s + PENDING_S, **pending, to=local_path(to)))

    def finish(self, pending_cookie: str, redirect_uri: str, code: str, state: str, now_s: float) -> tuple[Claims, str]:
        """The identity of the user, and the path to go to. Raises Unauthorized, or IssuerUnavailable."""
        pending = self._open("pending", pending_cookie, now_s)
        if not secrets.compare_digest(str(pending["state"]).encode(), state.encode()):
            raise Unauthorized("the answer of the issuer belongs to another attempt to sign in", "sign in again")
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri,
                "code_verifier": str(pending["verifier"]), "client_id": self._client_id}
        credentials = httpx.BasicAuth(self._client_id, self._client_secret) if self._client_secret else httpx.Auth()
        try:
            with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False) as http:
                answer = http.post(self.issuer.endpoint("token_endpoint"), data=form, auth=credentials,
                                   headers={"accept": "application/json"})
            answered = answer.json() if answer.status_code < 500 else None
        except (httpx.HTTPError, ValueError) as error:
            raise _away(self.issuer.url, type(error).__name__) from None
        if not isinstance(answered, dict):
            raise _away(self.issuer.url, f"status {answer.status_code}")
        if not isinstance(answered.get("id_token"), str):
            # The issuer's message may contain the code; the error code of RFC 6749, section 5.2, does not.
            raise Unauthorized(f"the issuer gave no id_token (status {answer.status_code}, "
                               f"error {str(answered.get('error', 'none'))[:60]!r})",
                               "sign in again; if it stays, check EYRIE_OIDC_CLIENT_ID, its secret, and that the "
                               f"registration allows {redirect_uri}")
        claims = self.issuer.verify_id_token(answered["id_token"], self._client_id, str(pending["nonce"]))
        return claims, str(pending["to"])

    def session_of(self, claims: Claims, now_s: float) -> str:
        """The session's cookie. Raises Unauthorized for groups that do not fit into one."""
        cookie = USER_SESSION + self._seal("session", now_s + SESSION_S, subject=claims.subject,
                                           groups=sorted(claims.groups))
        if len(cookie) > _MOST_COOKIE_BYTES:
            raise Unauthorized(f"the issuer names {len(claims.groups)} groups, which do not fit into a cookie",
                               "have the issuer name only the groups that have a role here")
        return cookie

    def claims_of(self, cookie: str, now_s: float) -> Claims:
        """The identity in a session's cookie. Raises Unauthorized."""
        session = self._open("session", cookie.removeprefix(USER_SESSION), now_s)
        return Claims(str(session["subject"]), frozenset(map(str, session["groups"])))

    def signed_in_at(self, cookie: str, now_s: float) -> int:
        """When the user of a session's cookie signed in, in seconds since the epoch. Raises Unauthorized."""
        return int(self._open("session", cookie.removeprefix(USER_SESSION), now_s)["until"]) - SESSION_S

    def change_token(self, subject: str, now_s: float) -> str:
        """What a page of this user sends with a change."""
        return self._seal("change", now_s + CHANGE_S, subject=subject)

    def check_change(self, token: str, subject: str, now_s: float) -> None:
        """Raises Unauthorized for a token that is not of this user's pages, or has expired."""
        if self._open("change", token, now_s)["subject"] != subject:
            raise Unauthorized("a session changes something only from a page of this server", "load the page again")

    def _seal(self, purpose: Purpose, expiry_s: float, **values: Any) -> str:
        return self._keys.encrypt(json.dumps({"for": purpose, "until": int(expiry_s), **values}))

    def _open(self, purpose: Purpose, sealed: str, now_s: float) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(self._keys.decrypt(sealed, "a browser", "sign in again"))
        except (SecretUnreadable, ValueError):
            raise Unauthorized("the session is not valid here", "sign in again") from None
        if not isinstance(content, dict) or content.get("for") != purpose:
            raise Unauthorized("the session is not valid here", "sign in again")
        if content["until"] <= now_s:
            raise Unauthorized("the session has expired", "sign in again")
        return content


def local_path(path: str) -> str:
    """A path of this server; `/` in place of anything that a browser would take for another one."""
    plain = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if plain and path.isprintable() and len(path) < 1000 else "/"


def _away(issuer: str, why: str) -> IssuerUnavailable:
    return IssuerUnavailable(f"the OIDC issuer {issuer} does not answer ({why})", "sign in again in a while")


COOKIE, CHANGE_HEADER = "eyrie_session", "eyrie-change"
LIFETIME_S, RENEWED_AFTER_S, RECENT_S = 8 * 3600, 3600, 900
# Cookies of the console: proof that their browser held an API key, or the installation's token, a while ago. Pure.
#
#     <key id or "token">.<time of signing in>.<expiry, both seconds since the epoch>.<HMAC-SHA256 over the three>
#
# The HMAC's key is the SHA-256 of the credential's secret, which the server has stored and nobody else has: no session
# is stored, every replica verifies every cookie, and a revoked key's cookies end with it. A cookie is no API key: the
# key cannot be computed from it. Who reads the stored digests can make cookies, and has read the database already.
#
# A browser sends the cookie with every request, whichever page made it. It is therefore accepted for reading alone; a
# change needs a second proof, which a page of this server has in its text and sends as the header `CHANGE_HEADER`:
#
#     <expiry>.<HMAC-SHA256 over credential and expiry, of another form than the cookie's>
#
# Whoever copies a cookie can load a page and has that proof too. What would outlast the session (a key, a member) is
# therefore made only within `RECENT_S` of signing in, which takes the credential itself; a cookie that is replaced
# while it is used keeps its time of signing in.

INSTALLATION_TOKEN = "token"
"""In place of a key's id."""

_CHANGE_FORM = re.compile(r"([0-9]{1,12})\.([0-9a-f]{64})")
_FORM = re.compile(r"([0-9A-Za-z]{1,12})\.([0-9]{1,12})\.([0-9]{1,12})\.([0-9a-f]{64})")


def create_cookie(credential: str, digest: str, now_s: float, signed_in_s: float | None = None) -> str:
    """A cookie for `LIFETIME_S`.

    credential    the key's id, or `INSTALLATION_TOKEN`
    digest        SHA-256 of its secret, in hex
    signed_in_s   of the cookie that this one replaces; None for one that is given at signing in
    """
    body = f"{credential}.{int(now_s if signed_in_s is None else signed_in_s)}.{int(now_s) + LIFETIME_S}"
    return f"{body}.{_sign(body, digest)}"


def verify_cookie(cookie: str, digest_of: Callable[[str], str | None], now_s: float) -> str:
    """The credential of a valid cookie. Raises Unauthorized.

    digest_of   the digest of a credential's secret; None for one that is unknown or has ended
    """
    match = _FORM.fullmatch(cookie)
    digest = digest_of(match[1]) if match else None
    if match is None or digest is None or not hmac.compare_digest(_sign(cookie.rpartition(".")[0], digest), match[4]):
        raise Unauthorized("the session is not valid here", "sign in again")
    if int(match[3]) <= now_s:
        raise Unauthorized("the session has expired", "sign in again")
    return match[1]


def create_change_token(credential: str, digest: str, now_s: float) -> str:
    """What a page of a signed-in browser sends with a change; valid for `LIFETIME_S`."""
    expiry = int(now_s) + LIFETIME_S
    return f"{expiry}.{_sign(f'change {credential}.{expiry}', digest)}"


def verify_change_token(token: str, credential: str, digest: str, now_s: float) -> None:
    """Raises Unauthorized for a token that is not of this credential, or has expired."""
    match = _CHANGE_FORM.fullmatch(token)
    if match is None or not hmac.compare_digest(_sign(f"change {credential}.{match[1]}", digest), match[2]):
        raise Unauthorized("a session changes something only from a page of this server", "load the page again")
    if int(match[1]) <= now_s:
        raise Unauthorized("the page is too old to change something", "load the page again")


def is_due(cookie: str, now_s: float) -> bool:
    """Whether a valid cookie is so old that it should be replaced."""
    return int(cookie.split(".")[2]) - LIFETIME_S + RENEWED_AFTER_S <= now_s


def signed_in_at(cookie: str) -> int:
    """When the holder of a valid cookie signed in, in seconds since the epoch."""
    return int(cookie.split(".")[1])


def _sign(body: str, digest: str) -> str:
    return hmac.new(bytes.fromhex(digest), f"eyrie console {body}".encode(), hashlib.sha256).hexdigest()
