"""Cookies of the console: proof that their browser held an API key, or the installation's token, a while ago. Pure.

    <key id or "token">.<time of signing in>.<expiry, both seconds since the epoch>.<HMAC-SHA256 over the three>

The HMAC's key is the SHA-256 of the credential's secret, which the server has stored and nobody else has: no session is
stored, every replica verifies every cookie, and a revoked key's cookies end with it. A cookie is no API key: the key
cannot be computed from it. Who reads the stored digests can make cookies, and has read the database already.

A browser sends the cookie with every request, whichever page made it. It is therefore accepted for reading alone; a
change needs a second proof, which a page of this server has in its text and sends as the header `CHANGE_HEADER`:

    <expiry>.<HMAC-SHA256 over credential and expiry, of another form than the cookie's>

Whoever copies a cookie can load a page and has that proof too. What would outlast the session (a key, a member) is
therefore made only within `RECENT_S` of signing in, which takes the credential itself; a cookie that is replaced while
it is used keeps its time of signing in.
"""

import hashlib
import hmac
import re
from collections.abc import Callable

from eyrie_api.errors import Unauthorized

COOKIE, CHANGE_HEADER = "eyrie_session", "eyrie-change"
LIFETIME_S, RENEWED_AFTER_S, RECENT_S = 8 * 3600, 3600, 900
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
    found = _FORM.fullmatch(cookie)
    digest = digest_of(found[1]) if found else None
    if found is None or digest is None or not hmac.compare_digest(_sign(cookie.rpartition(".")[0], digest), found[4]):
        raise Unauthorized("the session is not valid here", "sign in again")
    if int(found[3]) <= now_s:
        raise Unauthorized("the session has expired", "sign in again")
    return found[1]


def create_change_token(credential: str, digest: str, now_s: float) -> str:
    """What a page of a signed-in browser sends with a change; valid for `LIFETIME_S`."""
    expiry = int(now_s) + LIFETIME_S
    return f"{expiry}.{_sign(f'change {credential}.{expiry}', digest)}"


def verify_change_token(token: str, credential: str, digest: str, now_s: float) -> None:
    """Raises Unauthorized for a token that is not of this credential, or has expired."""
    found = _CHANGE_FORM.fullmatch(token)
    if found is None or not hmac.compare_digest(_sign(f"change {credential}.{found[1]}", digest), found[2]):
        raise Unauthorized("a session changes something only from a page of this server", "load the page again")
    if int(found[1]) <= now_s:
        raise Unauthorized("the page is too old to change something", "load the page again")


def is_due(cookie: str, now_s: float) -> bool:
    """Whether a valid cookie is so old that it should be replaced."""
    return int(cookie.split(".")[2]) - LIFETIME_S + RENEWED_AFTER_S <= now_s


def signed_in_at(cookie: str) -> int:
    """When the holder of a valid cookie signed in, in seconds since the epoch."""
    return int(cookie.split(".")[1])


def _sign(body: str, digest: str) -> str:
    return hmac.new(bytes.fromhex(digest), f"eyrie console {body}".encode(), hashlib.sha256).hexdigest()
