"""Idempotency-Key: a request that is sent twice is executed once.

A request is one transaction, which writes key, change and response: a crash leaves all of them or none. A second
request with the same key waits for that transaction, and with the same body gets the first one's response; with another
body it is refused (422). Two projects may use the same key: routes are stored with their project, and without for
`default`.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import delete
from sqlalchemy.orm import Session

from eyrie_api.access.scope import DEFAULT_PROJECT
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.engine import Database, rowcount
from eyrie_api.database.tables import IdempotencyRow
from eyrie_api.errors import InvalidInput


class IdempotencyMismatch(InvalidInput):
    """The key was used before with another body."""


@dataclass(frozen=True)
class Once:
    key: str
    route: str
    body_digest: str

    @classmethod
    def of(cls, key: str, project: str, route: str, body_digest: str) -> "Once":
        """Raises InvalidInput for an invalid Idempotency-Key."""
        if not 1 <= len(key) <= 255 or not key.isprintable():
            raise InvalidInput(f"Idempotency-Key of {len(key)} characters",
                               "send 1 to 255 printable characters, for example a UUID")
        return cls(key, route if project == DEFAULT_PROJECT else f"{project}:{route}", body_digest)


class Idempotency:
    """Keys with their responses, and the removal of expired ones."""

    def __init__(self, database: Database, ttl_s: float, clock: Clock = utc_now) -> None:
        self._database, self._ttl_s, self._clock = database, ttl_s, clock

    def store(self, session: Session, once: Once, response: dict[str, Any]) -> None:
        """Store the response, inside the transaction that makes the change. The flush raises IntegrityError when the
        key exists: call `find` then, and retry if it returns None."""
        now = self._clock()
        session.add(IdempotencyRow(key=once.key, route=once.route, body_digest=once.body_digest, status=202,
                                   response=response, created_at=now, expires_at=now + timedelta(seconds=self._ttl_s)))

    def find(self, once: Once) -> dict[str, Any] | None:
        """The response of the first request; None when there is none, or it has expired. Raises
        IdempotencyMismatch."""
        with self._database.writing() as session:
            row = session.get(IdempotencyRow, (once.key, once.route))
            if row is None:
                return None
            if row.expires_at < self._clock():
                session.execute(delete(IdempotencyRow).where(
                    IdempotencyRow.key == once.key, IdempotencyRow.route == once.route,
                    IdempotencyRow.expires_at == row.expires_at))
                return None
            if row.body_digest != once.body_digest:
                raise IdempotencyMismatch(f"Idempotency-Key {once.key!r} was used before with another body",
                                          "send a new key with a new request")
            return row.response

    def sweep(self) -> int:
        """Delete expired rows; return their number."""
        with self._database.writing() as session:
            return rowcount(session, delete(IdempotencyRow).where(IdempotencyRow.expires_at < self._clock()))
