"""Bearer tokens of one OIDC issuer, verified here: signature, issuer, audience, times. No login, no client secret.

The issuer is found by its discovery document, its keys by `jwks_uri`. Both are kept, and fetched again when they are
old or a token names a key that is not among them (the issuer has rotated), but not more often than every few seconds:
made-up key ids must not become requests to the issuer. While the issuer is away its last keys go on being used.

Signed with RS256 or ES256, and nothing else: never `none`, never an HMAC, whose key would be the public one. The rules
are those of OpenID Connect Core 1.0, section 3.1.3.7, as far as they are about an access by bearer token.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt

from eyrie_api.errors import InvalidInput, Transient, Unauthorized
from eyrie_api.settings import Settings, is_loopback_host

log = logging.getLogger(__name__)

ALGORITHMS = {"RS256": "RSA", "ES256": "EC"}
"""Algorithm -> type of its key."""

_DISCOVERY = "/.well-known/openid-configuration"
_REQUIRED = ["iss", "sub", "aud", "exp", "iat"]
_KEPT_S, _ASKED_AGAIN_S = 600.0, 10.0
_TIMEOUT_S = 5.0


class IssuerAway(Transient):
    """The OIDC issuer does not answer, and none of its keys is known."""

    reason = "IssuerAway"


@dataclass(frozen=True)
class Claims:
    """What a verified token says of its bearer."""

    subject: str
    groups: frozenset[str]


class Issuer:
    """One issuer and its keys. `elapsed` is a clock that only goes forward."""

    def __init__(self, url: str, audience: str, *, groups_claim: str = "groups", admin_group: str | None = None,
                 leeway_s: float = 30.0, elapsed: Callable[[], float] = time.monotonic) -> None:
        _require_https(url, "EYRIE_OIDC_ISSUER")
        self.url, self.admin_group = url, admin_group
        self._audience, self._groups_claim, self._leeway_s = audience, groups_claim, leeway_s
        self._elapsed, self._lock = elapsed, threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._asked_at: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Issuer | None":
        """The issuer the settings name, if any. Raises InvalidInput when they name half of one."""
        if settings.oidc_issuer is None:
            return None
        if settings.oidc_audience is None:
            raise InvalidInput("EYRIE_OIDC_ISSUER is set and EYRIE_OIDC_AUDIENCE is not: any token of the issuer, "
                               "whomever it was made for, would be let in", "set the audience that is this server's")
        return cls(settings.oidc_issuer, settings.oidc_audience, groups_claim=settings.oidc_groups_claim,
                   admin_group=settings.oidc_admin_group, leeway_s=settings.oidc_leeway_s)

    def verify(self, token: str) -> Claims:
        """What the token says, if all of it is right. Raises Unauthorized, or IssuerAway."""
        try:
            header = jwt.get_unverified_header(token)
            key = self._key(str(header.get("kid", "")), str(header.get("alg", "")))
            found: dict[str, Any] = jwt.decode(
                token, key.key, algorithms=[str(header["alg"])], audience=self._audience, issuer=self.url,
                leeway=self._leeway_s, options={"require": _REQUIRED})
        except jwt.PyJWTError as error:
            # The message of the library names claims and never holds the token.
            raise Unauthorized(f"the OIDC token is refused: {error}", "get a new one from the issuer") from None
        groups = found.get(self._groups_claim, ())
        groups = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else ()
        return Claims(str(found["sub"]), frozenset(str(one) for one in groups))

    def _key(self, key_id: str, algorithm: str) -> jwt.PyJWK:
        if algorithm not in ALGORITHMS:
            raise jwt.InvalidAlgorithmError(f"algorithm {algorithm!r} is none of {', '.join(ALGORITHMS)}")
        with self._lock:
            if self._is_worth_asking(key_id):
                self._asked_at = self._elapsed()
                try:
                    self._keys = self._fetch()
                except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, jwt.PyJWTError) as error:
                    log.warning("the OIDC issuer %s gives no keys: %s", self.url, type(error).__name__)
            if not self._keys:
                raise IssuerAway(f"the OIDC issuer {self.url} gives no keys", "check EYRIE_OIDC_ISSUER; will ask again")
            key = self._keys.get(key_id)
        if key is None:
            raise jwt.InvalidKeyError("it is signed with a key that the issuer does not name")
        if key.key_type != ALGORITHMS[algorithm]:
            raise jwt.InvalidKeyError(f"its key is not one for {algorithm}")
        return key

    def _is_worth_asking(self, key_id: str) -> bool:
        if self._asked_at is None:
            return True
        since = self._elapsed() - self._asked_at
        return since > _KEPT_S or (since > _ASKED_AGAIN_S and key_id not in self._keys)

    def _fetch(self) -> dict[str, jwt.PyJWK]:
        with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False) as http:
            document = http.get(self.url.rstrip("/") + _DISCOVERY).raise_for_status().json()
            if document["issuer"] != self.url:
                raise ValueError("another issuer answers there")
            _require_https(document["jwks_uri"], "jwks_uri")
            listed = http.get(document["jwks_uri"]).raise_for_status().json()["keys"]
        usable = [one for one in listed if one.get("kty") in ALGORITHMS.values() and one.get("use", "sig") == "sig"]
        return {str(one.get("kid", "")): jwt.PyJWK.from_dict(one) for one in usable}


def _require_https(url: str, name: str) -> None:
    parsed = urlsplit(url)
    if parsed.scheme != "https" and not (parsed.scheme == "http" and is_loopback_host(parsed.hostname or "")):
        raise InvalidInput(f"{name} {url!r} is not https", "whoever stands on the way could sign tokens; use https")
