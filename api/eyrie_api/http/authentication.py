"""Whom a request comes from: the installation's token, an API key, or a token of the OIDC issuer.

Asked on every request, so the answer for a token is remembered for `REMEMBERED_S` seconds (by the token's SHA-256, in
this process): a request costs one hash, and a key that was revoked is refused everywhere within that time. Tokens that
were refused are not remembered.

The installation's token (EYRIE_TOKEN) is the administrator of everything. Where none is demanded, on loopback, whoever
reaches this machine's own address is that administrator without a header; one who shows an API key there is held to it.
"""

import hashlib
import hmac
import threading
import time
from collections.abc import Callable

from eyrie_api.access.keys import PREFIX, id_of, proved
from eyrie_api.access.oidc import Issuer
from eyrie_api.access.roles import ALL_PROJECTS, Principal
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.api_keys import Keys
from eyrie_api.database.engine import Database
from eyrie_api.database.projects import Projects
from eyrie_api.errors import Unauthorized
from eyrie_api.settings import Settings

REMEMBERED_S = 5.0
_MAX_REMEMBERED = 10_000

LOCAL = Principal(subject="local", roles={ALL_PROJECTS: "admin"})
INSTALLATION = Principal(subject="token", roles={ALL_PROJECTS: "admin"})


class Callers:
    """Tells callers by what they show. `elapsed` is a clock that only goes forward."""

    def __init__(self, settings: Settings, database: Database, clock: Clock = utc_now,
                 elapsed: Callable[[], float] = time.monotonic) -> None:
        self._token = settings.required_token()
        self._issuer = Issuer.of(settings)
        self._keys, self._projects = Keys(database, clock), Projects(database, clock)
        self._clock, self._elapsed = clock, elapsed
        self._known: dict[bytes, tuple[Principal, float]] = {}
        self._known_projects: set[str] = set()
        self._limits: dict[str, tuple[int | None, float]] = {}
        self._lock = threading.Lock()

    @property
    def demands_proof(self) -> bool:
        """Whether a request without a token is refused."""
        return self._token is not None or self._issuer is not None

    def remembered(self, shown: str) -> Principal | None:
        """Whom `shown` stands for, when that is known without asking anybody."""
        if self._token is not None and hmac.compare_digest(shown.encode(), self._token.encode()):
            return INSTALLATION
        if not self.demands_proof and not shown.startswith(PREFIX + "_"):
            return LOCAL
        found = self._known.get(_digest(shown))
        return found[0] if found is not None and found[1] > self._elapsed() else None

    def identify(self, shown: str) -> Principal:
        """Whom `shown` stands for, asking the database and the issuer. Raises Unauthorized."""
        known = self.remembered(shown)
        if known is not None:
            return known
        if shown.startswith(PREFIX + "_"):
            principal = self._by_key(shown)
        elif self._issuer is not None and shown.count(".") == 2:
            principal = self._by_issuer(self._issuer, shown)
        else:
            raise Unauthorized("this server demands a bearer token",
                               "send Authorization: Bearer <API key>, a token of the OIDC issuer where one is set, or "
                               "EYRIE_TOKEN, which lies in <home>/token when it was not given")
        with self._lock:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            self._known[_digest(shown)] = (principal, self._elapsed() + REMEMBERED_S)
        return principal

    def _by_key(self, shown: str) -> Principal:
        key_id = id_of(shown)
        principal = proved(shown, self._keys.find(key_id), self._clock())
        self._keys.used(key_id)
        return principal

    def _by_issuer(self, issuer: Issuer, shown: str) -> Principal:
        claims = issuer.verify(shown)
        roles = self._projects.roles_of(issuer.url, claims.subject, claims.groups)
        if issuer.admin_group is not None and issuer.admin_group in claims.groups:
            roles[ALL_PROJECTS] = "admin"
        return Principal(subject=f"user:{issuer.url}#{claims.subject}", roles=roles)

    def known_limit(self, project: str) -> tuple[int | None] | None:
        """The project's requests per minute, in a tuple; None when the database has to be asked."""
        found = self._limits.get(project)
        return (found[0],) if found is not None and found[1] > self._elapsed() else None

    def limit(self, project: str) -> int | None:
        """The project's requests per minute."""
        found = self._projects.requests_per_minute(project)
        self._limits[project] = (found, self._elapsed() + REMEMBERED_S)
        return found

    def is_known_project(self, name: str) -> bool | None:
        """Whether there is such a project; None when the database has to be asked. A project is never deleted."""
        return True if name in self._known_projects else None

    def has_project(self, name: str) -> bool:
        """Whether there is such a project."""
        if name not in self._known_projects and self._projects.exists(name):
            self._known_projects.add(name)
        return name in self._known_projects


def _digest(shown: str) -> bytes:
    return hashlib.sha256(shown.encode()).digest()
