"""Authentication of bearer tokens: the installation's token, an API key, or a token of the OIDC issuer; and of the
console's cookies (`access.browser_sign_in`), which an API key or the installation's token is exchanged for, or which
somebody gets who signs in at the issuer.

Every request is authenticated, so the principal of a token is cached for `CACHED_S` seconds (by the token's SHA-256, in
this process): a request costs one hash, and a revoked key is refused by every server within that time. Refused tokens
are not cached.

The installation's token (EYRIE_TOKEN) has administrator rights in all projects. Without a token or an issuer, which is
allowed on loopback only, requests without a header have administrator rights; a request with an API key has that key's.
"""

import hashlib
import hmac
import threading
import time
from collections.abc import Callable

from eyrie_api.access import browser_sign_in
from eyrie_api.access.keys import PREFIX, SecretKeys, id_of, principal_of, verify_key
from eyrie_api.access.oidc import Claims, Issuer
from eyrie_api.access.roles import ACTIONS, ALL_PROJECTS, READS, Principal
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.access import Action
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import ApiKeys, Projects
from eyrie_api.errors import InvalidInput, Unauthorized
from eyrie_api.settings import Settings

CACHED_S = 5.0
_USER = "user:"
_MAX_CACHED = 10_000

LOCAL = Principal(subject="local", roles={ALL_PROJECTS: "admin"})
INSTALLATION = Principal(subject="token", roles={ALL_PROJECTS: "admin"})


class Authenticator:
    """Authenticates bearer tokens, and caches what a request needs of the database. `elapsed` is a monotonic clock."""

    def __init__(self, settings: Settings, database: Database, clock: Clock = utc_now,
                 elapsed: Callable[[], float] = time.monotonic) -> None:
        self._token = settings.required_token()
        self._issuer = Issuer.of(settings)
        keys = SecretKeys(settings.required_secret_keys()) if settings.oidc_client_id is not None else SecretKeys()
        self.sign_in = browser_sign_in.BrowserSignIn.of(settings, self._issuer, keys)
        self._keys, self._projects = ApiKeys(database, clock), Projects(database, clock)
        self._clock, self._elapsed = clock, elapsed
        self._principals: dict[bytes, tuple[Principal, float]] = {}
        self.known_projects: set[str] = set()
        self._limits: dict[str, tuple[int | None, float]] = {}
        self._lock = threading.Lock()

    @property
    def requires_token(self) -> bool:
        return self._token is not None or self._issuer is not None

    def cached(self, token: str) -> Principal | None:
        """The principal of a token, if known without the database and the issuer; else None."""
        if self._token is not None and hmac.compare_digest(token.encode(), self._token.encode()):
            return INSTALLATION
        if not self.requires_token and not token.startswith(PREFIX + "_"):
            return LOCAL
        remembered = self._principals.get(_digest(token))
        return remembered[0] if remembered is not None and remembered[1] > self._elapsed() else None

    def authenticate(self, token: str) -> Principal:
        """The principal of a token, by a query of the database or the issuer's keys. Raises Unauthorized."""
        cached = self.cached(token)
        if cached is not None:
            return cached
        if token.startswith(PREFIX + "_"):
            key_id = id_of(token)
            principal = verify_key(token, self._keys.find(key_id), self._clock())
            self._keys.used(key_id)
        elif self._issuer is not None and token.count(".") == 2:
            principal = self._of_claims(self._issuer, self._issuer.verify(token))
        else:
            raise Unauthorized("this server requires a bearer token",
                               "send Authorization: Bearer <API key>, a token of the OIDC issuer where one is set, or "
                               "EYRIE_TOKEN (generated in <home>/token when it is not set; of the chart in the Secret "
                               "that its notes name)")
        self._remember(_digest(token), principal)
        return principal

    def cached_session(self, cookie: str) -> Principal | None:
        """The principal of a cookie, if known without the database; else None."""
        remembered = self._principals.get(_cookie_digest(cookie))
        return remembered[0] if remembered is not None and remembered[1] > self._elapsed() else None

    def authenticate_session(self, cookie: str) -> Principal:
        """The principal of a cookie, restricted to reading. Raises Unauthorized."""
        now_s = self._clock().timestamp()
        if self.sign_in is not None and cookie.startswith(browser_sign_in.USER_SESSION):
            user = self._of_claims(self.sign_in.issuer, self.sign_in.claims_of(cookie, now_s))
            principal = user.model_copy(update={"scopes": READS})
        else:
            principal = self._holder(browser_sign_in.verify_cookie(cookie, self._digest_of, now_s), READS)
        self._remember(_cookie_digest(cookie), principal)
        return principal

    def authenticate_change(self, cookie: str, change: str) -> Principal:
        """The principal of a cookie with a page's proof, which may do what its credential may. Raises Unauthorized."""
        now_s = self._clock().timestamp()
        if self.sign_in is not None and cookie.startswith(browser_sign_in.USER_SESSION):
            user = self._of_claims(self.sign_in.issuer, self.sign_in.claims_of(cookie, now_s))
            self.sign_in.check_change(change, user.subject, now_s)
            return user
        credential = browser_sign_in.verify_cookie(cookie, self._digest_of, now_s)
        browser_sign_in.verify_change_token(change, credential, self._digest_of(credential) or "", now_s)
        return self._holder(credential, frozenset(ACTIONS))

    def signed_in_recently(self, cookie: str) -> bool:
        """Whether the holder of a valid cookie signed in within `RECENT_S`."""
        now_s = self._clock().timestamp()
        if self.sign_in is not None and cookie.startswith(browser_sign_in.USER_SESSION):
            return now_s - self.sign_in.signed_in_at(cookie, now_s) < browser_sign_in.RECENT_S
        return now_s - browser_sign_in.signed_in_at(cookie) < browser_sign_in.RECENT_S

    def rights_of(self, principal: Principal) -> Principal:
        """All that the credential of a session may do, in place of what its cookie alone may; for pages, which show it
        to this origin only."""
        if principal == LOCAL:
            return principal
        if principal.subject.startswith(_USER):
            return principal.model_copy(update={"scopes": None})
        return self._holder(_credential_of(principal), frozenset(ACTIONS))

    def _holder(self, credential: str, most: frozenset[Action]) -> Principal:
        held = INSTALLATION
        if credential != browser_sign_in.INSTALLATION_TOKEN:
            record = self._keys.find(credential)
            if record is None:
                raise Unauthorized("no such API key", "sign in again")
            held = principal_of(record)
        return held.model_copy(update={"scopes": most if held.scopes is None else most & held.scopes})

    def change_token_for(self, principal: Principal) -> str:
        """For the text of a page, whose browser's session changes something by it; empty where no session is used."""
        if self.sign_in is not None and principal.subject.startswith(_USER):
            return self.sign_in.change_token(principal.subject, self._clock().timestamp())
        credential = _credential_of(principal)
        digest = None if principal == LOCAL else self._digest_of(credential)
        now_s = self._clock().timestamp()
        return "" if digest is None else browser_sign_in.create_change_token(credential, digest, now_s)

    def session_for(self, principal: Principal) -> str | None:
        """A cookie for the caller of a request; None where requests need no token. Raises InvalidInput for a caller
        without an API key."""
        if principal == LOCAL:
            return None
        credential = _credential_of(principal)
        digest = self._digest_of(credential)
        if digest is None:
            raise InvalidInput("this caller has no API key, and the console is signed in to with one",
                               "create a key (`eyrie keys create`), and sign in with it")
        return browser_sign_in.create_cookie(credential, digest, self._clock().timestamp())

    def renewed(self, cookie: str) -> str | None:
        """A new cookie in place of a valid one that is old enough, else None. A user's ends when it ends."""
        if cookie.startswith(browser_sign_in.USER_SESSION):
            return None
        now_s = self._clock().timestamp()
        credential = cookie.partition(".")[0]
        digest = self._digest_of(credential) if browser_sign_in.is_due(cookie, now_s) else None
        return None if digest is None else browser_sign_in.create_cookie(
            credential, digest, now_s, browser_sign_in.signed_in_at(cookie))

    def _digest_of(self, credential: str) -> str | None:
        """SHA-256 of the secret of a credential that is valid now."""
        if credential == browser_sign_in.INSTALLATION_TOKEN:
            return None if self._token is None else _digest(self._token).hex()
        record, now = self._keys.find(credential), self._clock()
        if record is None or any(end is not None and end <= now for end in (record.revoked_at, record.expires_at)):
            return None
        return record.secret_sha256

    def _remember(self, key: bytes, principal: Principal) -> None:
        with self._lock:
            if len(self._principals) >= _MAX_CACHED:
                self._principals.clear()
            self._principals[key] = (principal, self._elapsed() + CACHED_S)

    def _of_claims(self, issuer: Issuer, claims: Claims) -> Principal:
        roles = self._projects.roles_of(issuer.url, claims.subject, claims.groups)
        if issuer.admin_group is not None and issuer.admin_group in claims.groups:
            roles[ALL_PROJECTS] = "admin"
        return Principal(subject=f"{_USER}{issuer.url}#{claims.subject}", roles=roles)

    def cached_limit(self, project: str) -> tuple[int | None] | None:
        """The project's requests per minute, in a tuple; None when it is not cached."""
        remembered = self._limits.get(project)
        return (remembered[0],) if remembered is not None and remembered[1] > self._elapsed() else None

    def limit(self, project: str) -> int | None:
        per_minute = self._projects.requests_per_minute(project)
        self._limits[project] = (per_minute, self._elapsed() + CACHED_S)
        return per_minute

    def has_project(self, name: str) -> bool:
        if self._projects.exists(name):
            self.known_projects.add(name)
        return name in self.known_projects


def _credential_of(principal: Principal) -> str:
    """The id of the caller's key, or `INSTALLATION_TOKEN`."""
    of_installation = principal.subject == INSTALLATION.subject
    return browser_sign_in.INSTALLATION_TOKEN if of_installation else principal.subject.removeprefix("key:")


def _cookie_digest(cookie: str) -> bytes:
    """Never that of a token: a cookie sent as a bearer token is none, nor the reverse."""
    return _digest(f"cookie {cookie}")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
