"""Idempotency-Key: a request that is sent twice is executed once.

Where the request is one transaction (`Once`), that transaction writes key, change and response, and a second request
waits for it. Otherwise the first request claims the key in a transaction of its own, and the claim is completed in the
*same* transaction as the change (`complete`), so that a crash leaves either both or neither. A second request with the
same body gets the first one's response; with another body it is refused (422), and while the claim is held it gets 409.
Race: a process may die between claim and completion; its claim expires after `IN_FLIGHT_TTL_S`. Two projects may use
the same key: routes are stored with their project, and without for `default`.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, insert, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from eyrie_api.access.scope import DEFAULT_PROJECT
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.engine import Database, rowcount
from eyrie_api.database.tables import IdempotencyRow
from eyrie_api.errors import Conflict, InvalidInput

IN_FLIGHT_TTL_S = 60.0
MAX_KEY_LENGTH = 255


class IdempotencyMismatch(InvalidInput):
    """The key was used before with another body."""

    reason = "IdempotencyMismatch"


class RequestInFlight(Conflict):
    """The first request with this key is still being processed."""

    reason = "RequestInFlight"


def route_within(project: str, route: str) -> str:
    """The route as it is stored."""
    return route if project == DEFAULT_PROJECT else f"{project}:{route}"


def check_key(key: str) -> None:
    """Raises InvalidInput for an invalid Idempotency-Key."""
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        raise InvalidInput(f"Idempotency-Key of {len(key)} characters",
                           "send 1 to 255 printable characters, for example a UUID")


@dataclass(frozen=True)
class Claim:
    """The right to execute the request once."""

    key: str
    route: str


@dataclass(frozen=True)
class Once:
    """A request that is one transaction, which claims the key, makes the change and stores the response. A concurrent
    second request waits for that transaction and gets its response."""

    key: str
    route: str
    body_digest: str


@dataclass(frozen=True)
class Replay:
    """The response of the first request."""

    status: int
    response: dict[str, Any]


class Idempotency:
    """Claims and stored responses, and the removal of expired ones."""

    def __init__(self, database: Database, ttl_s: float, clock: Clock = utc_now) -> None:
        self._database, self._ttl_s, self._clock = database, ttl_s, clock

    def claim(self, key: str, route: str, body_digest: str) -> Claim | Replay:
        """Claim the key, or return the stored response. Raises InvalidInput, IdempotencyMismatch or RequestInFlight."""
        check_key(key)
        for _ in range(2):
            # Race: two requests may claim a key at once; the primary key rejects the second INSERT. Nearly all keys are
            # new and cost this one statement.
            with suppress(IntegrityError), self._database.writing() as session:
                now = self._clock()
                session.execute(insert(IdempotencyRow).values(
                    key=key, route=route, body_digest=body_digest, status=None, response=None, created_at=now,
                    expires_at=now + timedelta(seconds=IN_FLIGHT_TTL_S)))
                return Claim(key, route)
            if (replay := self.find(Once(key, route, body_digest))) is not None:
                return replay
        raise RequestInFlight(f"another request with Idempotency-Key {key!r} arrived at the same time",
                              "repeat it shortly to get its response")

    def row(self, once: Once, status: int, response: Any) -> dict[str, Any]:
        """The row that claims the key and stores the response, for the transaction that makes the change. Inserting it
        raises IntegrityError when the key exists: call `find` then, and retry if it returns None."""
        now = self._clock()
        return {"key": once.key, "route": once.route, "body_digest": once.body_digest, "status": status,
                "response": response, "created_at": now, "expires_at": now + timedelta(seconds=self._ttl_s)}

    def find(self, once: Once) -> Replay | None:
        """The response of the first request; None when there is none, or it has expired or was released.

        Raises IdempotencyMismatch or RequestInFlight.
        """
        key, route = once.key, once.route
        with self._database.writing() as session:
            row = session.get(IdempotencyRow, (key, route))
            if row is None:
                return None
            if row.expires_at < self._clock():
                session.execute(delete(IdempotencyRow).where(
                    IdempotencyRow.key == key, IdempotencyRow.route == route,
                    IdempotencyRow.expires_at == row.expires_at))
                return None
            if row.body_digest != once.body_digest:
                raise IdempotencyMismatch(f"Idempotency-Key {key!r} was used before with another body",
                                          "send a new key with a new request")
            if row.status is None or row.response is None:
                raise RequestInFlight(f"the first request with Idempotency-Key {key!r} is still in flight",
                                      "repeat it shortly to get its response")
            return Replay(row.status, row.response)

    def complete(self, session: Session, claim: Claim, status: int, response: dict[str, Any]) -> None:
        """Store the response, inside the transaction that makes the change."""
        expires_at = self._clock() + timedelta(seconds=self._ttl_s)
        session.execute(update(IdempotencyRow).where(
            IdempotencyRow.key == claim.key, IdempotencyRow.route == claim.route).values(
            status=status, response=response, expires_at=expires_at))

    def release(self, claim: Claim) -> None:
        """Release an uncompleted claim: the request was refused and may be corrected."""
        with self._database.writing() as session:
            session.execute(delete(IdempotencyRow).where(
                IdempotencyRow.key == claim.key, IdempotencyRow.route == claim.route, IdempotencyRow.status.is_(None)))

    def sweep(self) -> int:
        """Delete expired rows; return their number."""
        with self._database.writing() as session:
            return rowcount(session, delete(IdempotencyRow).where(IdempotencyRow.expires_at < self._clock()))
