"""The repository of API keys: create, list, revoke, rotate, and look up for authentication."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from eyrie_api.access.keys import KeyRecord, NewKey, create_key
from eyrie_api.access.roles import ALL_PROJECTS, Principal
from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.audit import record_change
from eyrie_api.database.engine import Database
from eyrie_api.database.tables import ApiKeyRow
from eyrie_api.errors import Conflict, NotFound
from eyrie_api.v1alpha1.access import Action, ApiKey, Role

USED_EVERY_S = 60.0
"""Minimum interval between two updates of a key's `last_used_at`."""


@dataclass(frozen=True)
class KeyRequest:
    """The attributes of a key to be created."""

    name: str
    role: Role
    scopes: frozenset[Action] | None = None
    expires_at: datetime | None = None
    everywhere: bool = False
    """Valid in every project, future ones included."""


class ApiKeys:
    """Key rows of one database, as `scope` sees them."""

    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def create(self, wanted: KeyRequest) -> tuple[ApiKey, str]:
        """A new key and its text, which is not stored. Raises Forbidden, or InvalidInput when the key would have more
        rights than its creator."""
        project = None if wanted.everywhere else self._scope.home("keys:write")
        if project is None:
            self._scope.check_installation("keys:write")
        made = self._mint(wanted, project)
        with self._database.writing() as session:
            row = _row(made.record, project, wanted.role)
            session.add(row)
            record_change(session, self._scope, self._clock, "key.create", f"key/{row.id}", project)
            return _render(row), made.text

    def list(self) -> tuple[ApiKey, ...]:
        """The keys that the scope may read, newest first, revoked ones included."""
        query = select(ApiKeyRow).where(self._seen()).order_by(ApiKeyRow.created_at.desc(), ApiKeyRow.id)
        with self._database.reading() as session:
            return tuple(_render(row) for row in session.scalars(query))

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key at once, also one that was rotated and whose overlap lasts; no effect on a revoked one. Raises
        NotFound or Forbidden."""
        with self._database.writing() as session:
            row = self._hold(session, key_id)
            now = self._clock()
            row.revoked_at = now if row.revoked_at is None else min(row.revoked_at, now)
            record_change(session, self._scope, self._clock, "key.revoke", f"key/{key_id}", row.project)
            return _render(row)

    def rotate(self, key_id: str, overlap_s: float = 0.0) -> tuple[ApiKey, str]:
        """A new key with the same rights; the old one is revoked after `overlap_s`. Raises NotFound, Forbidden, or
        Conflict when the old one has expired or was revoked."""
        with self._database.writing() as session:
            row = self._hold(session, key_id)
            now = self._clock()
            if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
                raise Conflict(f"key {key_id} has ended", "create a new one")
            record = _record(row)
            made = self._mint(KeyRequest(name=row.name, role=record.roles[row.project or ALL_PROJECTS],
                                     scopes=record.scopes, expires_at=row.expires_at), row.project)
            row.revoked_at = now + timedelta(seconds=overlap_s)
            new = _row(made.record, row.project, row.role)
            session.add(new)
            record_change(session, self._scope, self._clock, "key.rotate", f"key/{key_id}", row.project)
            record_change(session, self._scope, self._clock, "key.create", f"key/{new.id}", row.project)
            return _render(new), made.text

    def find(self, key_id: str) -> KeyRecord | None:
        """The stored part of a key, for authentication; not filtered by the scope."""
        with self._database.reading() as session:
            row = session.get(ApiKeyRow, key_id)
            return None if row is None else _record(row)

    def used(self, key_id: str) -> None:
        """Set `last_used_at`, unless it was set within `USED_EVERY_S`."""
        now = self._clock()
        old = or_(ApiKeyRow.last_used_at.is_(None), ApiKeyRow.last_used_at < now - timedelta(seconds=USED_EVERY_S))
        query = select(ApiKeyRow.id).where(ApiKeyRow.id == key_id, old)
        with self._database.reading() as session:
            if session.execute(query).first() is None:
                return
        with self._database.writing() as session:
            session.execute(update(ApiKeyRow).where(ApiKeyRow.id == key_id, old).values(last_used_at=now))

    def _mint(self, wanted: KeyRequest, project: str | None) -> NewKey:
        creator = self._scope.principal or Principal(subject="system", roles={ALL_PROJECTS: "admin"})
        return create_key(wanted.name, creator, {project or ALL_PROJECTS: wanted.role}, self._clock(),
                    expires_at=wanted.expires_at, scopes=wanted.scopes)

    def _hold(self, session: Session, key_id: str) -> ApiKeyRow:
        row = session.get(ApiKeyRow, key_id, with_for_update=True)
        absent = NotFound(f"no key {key_id!r}", "list the keys to see their ids")
        if row is None:
            raise absent
        self._scope.check("keys:write", row.project, absent)
        return row

    def _seen(self) -> Any:
        seen = self._scope.sees(ApiKeyRow.project, "keys:write")
        principal = self._scope.principal
        if self._scope.project is None and (principal is None or principal.allows("keys:write", ALL_PROJECTS)):
            return or_(seen, ApiKeyRow.project.is_(None))
        return seen


def revoke_keys_of(session: Session, scope: Scope, clock: Clock, project: str,
                   is_former: Callable[[str], bool]) -> None:
    """Revoke the project's keys that former members have created, and the keys created with those.

    is_former   whether the creator of a key (`user:<issuer>#<sub>`, `key:<id>`, `token`, ...) is a former member
    """
    now = clock()
    rows = session.scalars(select(ApiKeyRow).where(
        ApiKeyRow.project == project, or_(ApiKeyRow.revoked_at.is_(None), ApiKeyRow.revoked_at > now),
    ).order_by(ApiKeyRow.created_at)).all()
    found: set[str] = set()
    for row in rows:  # in order of creation, so that a key comes after the one that created it
        if row.created_by in found or is_former(row.created_by):
            found.add(f"key:{row.id}")
            row.revoked_at = now
            record_change(session, scope, clock, "key.revoke", f"key/{row.id}", project)


def _row(record: KeyRecord, project: str | None, role: str) -> ApiKeyRow:
    return ApiKeyRow(
        id=record.id, name=record.name, secret_sha256=record.secret_sha256, project=project, role=role,
        scopes=None if record.scopes is None else sorted(record.scopes), created_by=record.created_by,
        created_at=record.created_at, expires_at=record.expires_at, revoked_at=None, last_used_at=None)


def _record(row: ApiKeyRow) -> KeyRecord:
    return KeyRecord.model_validate({
        "id": row.id, "name": row.name, "secret_sha256": row.secret_sha256,
        "roles": {row.project or ALL_PROJECTS: row.role}, "scopes": row.scopes, "created_by": row.created_by,
        "created_at": row.created_at, "expires_at": row.expires_at, "revoked_at": row.revoked_at})


def _render(row: ApiKeyRow) -> ApiKey:
    return ApiKey.model_validate({
        "id": row.id, "name": row.name, "project": row.project, "role": row.role, "scopes": row.scopes,
        "created_by": row.created_by, "created_at": row.created_at, "expires_at": row.expires_at,
        "revoked_at": row.revoked_at, "last_used_at": row.last_used_at})
