"""Tokens of one OIDC issuer, verified here: signature, issuer, audience, times. Programs send them as bearer tokens;
browsers sign in (`browser_sign_in`).

The issuer's keys are found through its discovery document (`jwks_uri`). They are cached, and fetched again when they
are `_KEYS_TTL_S` old or a token names an unknown key (the issuer has rotated its keys), but at most every
`_MIN_REFETCH_S`: invented key ids must not cause requests to the issuer. While the issuer is unavailable the last keys
remain valid.

Accepted signatures are RS256 and ES256 only: never `none`, never an HMAC, whose key would be the public one. The rules
are those of OpenID Connect Core 1.0, section 3.1.3.7, as far as they apply to access by bearer token.
"""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt

from eyrie_api.errors import InvalidInput, Transient, Unauthorized
from eyrie_api.request_origin import is_loopback_host
from eyrie_api.settings import Settings

log = logging.getLogger(__name__)

ALGORITHMS = {"RS256": "RSA", "ES256": "EC"}
"""Algorithm -> type of its key."""

_DISCOVERY = "/.well-known/openid-configuration"
_REQUIRED = ["iss", "sub", "aud", "exp", "iat"]
_KEYS_TTL_S, _MIN_REFETCH_S = 600.0, 10.0
_TIMEOUT_S = 5.0


class IssuerUnavailable(Transient):
    """The OIDC issuer is unavailable, and none of its keys is cached."""


@dataclass(frozen=True)
class Claims:
    subject: str
    groups: frozenset[str]


class Issuer:
    """One issuer and its keys. `elapsed` is a monotonic clock."""

    def __init__(self, url: str, audience: str, *, groups_claim: str = "groups", admin_group: str | None = None,
                 leeway_s: float = 30.0, elapsed: Callable[[], float] = time.monotonic) -> None:
        _require_https(url, "EYRIE_OIDC_ISSUER")
        self.url, self.admin_group = url, admin_group
        self._audience, self._groups_claim, self._leeway_s = audience, groups_claim, leeway_s
        self._elapsed, self._lock = elapsed, threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._document: dict[str, Any] = {}
        self._fetched_at: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Issuer | None":
        """The issuer in the settings, if any. Raises InvalidInput when its audience is missing."""
        if settings.oidc_issuer is None:
            return None
        if settings.oidc_audience is None:
            raise InvalidInput("EYRIE_OIDC_ISSUER is set and EYRIE_OIDC_AUDIENCE is not: every token of the "
                               "issuer, for any audience, would be accepted", "set the audience of this server")
        return cls(settings.oidc_issuer, settings.oidc_audience, groups_claim=settings.oidc_groups_claim,
                   admin_group=settings.oidc_admin_group, leeway_s=settings.oidc_leeway_s)

    def verify(self, token: str) -> Claims:
        """The claims of a valid bearer token. Raises Unauthorized, or IssuerUnavailable."""
        return self._claims(self._decoded(token, self._audience))

    def verify_id_token(self, token: str, client_id: str, nonce: str) -> Claims:
        """The claims of a browser's ID token for this client. Raises Unauthorized, or IssuerUnavailable."""
        claims = self._decoded(token, client_id)
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise Unauthorized("the OIDC token is of another attempt to sign in", "sign in again")
        if claims.get("azp", client_id) != client_id:  # OpenID Connect Core 1.0, section 3.1.3.7, rule 5
            raise Unauthorized("the OIDC token was given to another client", "sign in again")
        return self._claims(claims)

    def endpoint(self, name: str) -> str:
        """The URL of one of its endpoints. Raises IssuerUnavailable, or InvalidInput for one that it does not name."""
        with self._lock:
            waited = self._fetched_at is None or self._elapsed() - self._fetched_at > _MIN_REFETCH_S
            if not self._document and waited:
                self._refresh()
            if not self._document:
                raise self._unavailable()
            url = self._document.get(name)
        if not isinstance(url, str):
            raise InvalidInput(f"the OIDC issuer {self.url} names no {name}", "use an issuer where people can sign in")
        _require_https(url, name)
        return url

    def _decoded(self, token: str, audience: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
            key = self._key(str(header.get("kid", "")), str(header.get("alg", "")))
            claims: dict[str, Any] = jwt.decode(
                token, key.key, algorithms=[str(header["alg"])], audience=audience, issuer=self.url,
                leeway=self._leeway_s, options={"require": _REQUIRED})
        except jwt.PyJWTError as error:
            # The library's message names claims and never contains the token.
            raise Unauthorized(f"the OIDC token is invalid: {error}", "get a new one from the issuer") from None
        return claims

    def _claims(self, claims: Mapping[str, Any]) -> Claims:
        groups = claims.get(self._groups_claim, ())
        groups = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else ()
        return Claims(str(claims["sub"]), frozenset(str(group) for group in groups))

    def _key(self, key_id: str, algorithm: str) -> jwt.PyJWK:
        if algorithm not in ALGORITHMS:
            raise jwt.InvalidAlgorithmError(f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        with self._lock:
            since = None if self._fetched_at is None else self._elapsed() - self._fetched_at
            if since is None or since > _KEYS_TTL_S or (since > _MIN_REFETCH_S and key_id not in self._keys):
                self._refresh()
            if not self._keys:
                raise self._unavailable()
            key = self._keys.get(key_id)
        if key is None:
            raise jwt.InvalidKeyError("it is signed with a key that the issuer does not list")
        if key.key_type != ALGORITHMS[algorithm]:
            raise jwt.InvalidKeyError(f"its key is not for {algorithm}")
        return key

    def _refresh(self) -> None:
        self._fetched_at = self._elapsed()
        try:
            with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False) as http:
                document = http.get(self.url.rstrip("/") + _DISCOVERY).raise_for_status().json()
                if document["issuer"] != self.url:
                    raise ValueError("the discovery document names another issuer")
                _require_https(document["jwks_uri"], "jwks_uri")
                listed = http.get(document["jwks_uri"]).raise_for_status().json()["keys"]
            self._keys = {str(key.get("kid", "")): jwt.PyJWK.from_dict(key) for key in listed
                          if key.get("kty") in ALGORITHMS.values() and key.get("use", "sig") == "sig"}
            self._document = document
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, jwt.PyJWTError) as error:
            log.warning("no keys could be fetched from the OIDC issuer %s: %s", self.url, type(error).__name__)

    def _unavailable(self) -> IssuerUnavailable:
        return IssuerUnavailable(f"no keys could be fetched from the OIDC issuer {self.url}",
                                 "check EYRIE_OIDC_ISSUER; the next request tries again")


def _require_https(url: str, name: str) -> None:
    parsed = urlsplit(url)
    if parsed.scheme != "https" and not (parsed.scheme == "http" and is_loopback_host(parsed.hostname or "")):
        raise InvalidInput(f"{name} {url!r} is not https",
                           "use https: a man in the middle could substitute keys and sign tokens")
