"""The repositories of projects, with their quotas and members, and of API keys.

Projects are never deleted, because the audit log, keys and jobs contain their names. Usage is counted from the rows
when it is requested.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from eyrie_api.access.keys import KeyRecord, create_key
from eyrie_api.access.roles import ALL_PROJECTS, ROLES, Principal
from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.access import Action, ApiKey, CreateMember, CreateProject, Member, Project, Quotas, Role
from eyrie_api.database.audit import record_change
from eyrie_api.database.engine import Database
from eyrie_api.database.quotas import live_endpoints, live_jobs
from eyrie_api.database.rendering import render
from eyrie_api.database.tables import ApiKeyRow, JobRow, MembershipRow, ProjectRow
from eyrie_api.decisions.alerts import ExhaustedQuota
from eyrie_api.errors import Conflict, NotFound


class Projects:
    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def create(self, wanted: CreateProject) -> Project:
        """Create a project. Raises Forbidden without administrator rights in all projects, Conflict when it exists."""
        self._scope.check_installation("quotas:write")
        try:
            with self._database.writing() as session:
                row = ProjectRow(name=wanted.name, description=wanted.description, created_at=self._clock(),
                                 **wanted.quotas.model_dump())
                session.add(row)
                session.flush()
                record_change(session, self._scope, self._clock, "project.create", f"project/{row.name}", row.name)
                return _render(session, row)
        except IntegrityError:
            raise Conflict(f"project {wanted.name!r} is there already", "give it another name, or use it") from None

    def list(self) -> tuple[Project, ...]:
        """Projects the caller has a role in, by name."""
        query = select(ProjectRow).where(self._scope.sees(ProjectRow.name, "jobs:read")).order_by(ProjectRow.name)
        with self._database.reading() as session:
            return tuple(_render(session, row) for row in session.scalars(query).all())

    def used_up(self) -> tuple[ExhaustedQuota, ...]:
        """Quotas of jobs and GPUs that are used up, in the projects the caller has a role in."""
        limited = select(ProjectRow).where(
            self._scope.sees(ProjectRow.name, "jobs:read"),
            or_(ProjectRow.max_jobs.is_not(None), ProjectRow.max_gpus.is_not(None))).order_by(ProjectRow.name)
        exhausted = []
        with self._database.reading() as session:
            rows = {row.name: row for row in session.scalars(limited)}
            if not rows:  # without quotas there may be any number of live jobs to count
                return ()
            live = select(JobRow.project, func.count(), func.sum(JobRow.num_gpus)).where(
                JobRow.project.in_(rows), JobRow.ended.is_(False)).group_by(JobRow.project).order_by(JobRow.project)
            for name, jobs, gpus in session.execute(live):
                max_jobs, max_gpus = rows[name].max_jobs, rows[name].max_gpus
                if max_jobs is not None and jobs >= max_jobs:
                    exhausted.append(ExhaustedQuota(name, "jobs", jobs, max_jobs))
                if max_gpus is not None and gpus >= max_gpus > 0:
                    exhausted.append(ExhaustedQuota(name, "GPUs", int(gpus), max_gpus))
        return tuple(exhausted)

    def get(self, name: str) -> Project:
        """One project. Raises NotFound."""
        with self._database.reading() as session:
            return _render(session, self._find(session, name))

    def set_quotas(self, name: str, quotas: Quotas) -> Project:
        """Replace a project's quotas. Raises NotFound, or Forbidden without administrator rights in all projects."""
        with self._database.writing() as session:
            row = self._find(session, name)
            self._scope.check_installation("quotas:write")
            for field, value in quotas.model_dump().items():
                setattr(row, field, value)
            record_change(session, self._scope, self._clock, "project.quotas", f"project/{name}", name)
            session.flush()
            return _render(session, row)

    def members(self, name: str) -> tuple[Member, ...]:
        """Role assignments of a project. Raises NotFound or Forbidden."""
        with self._database.reading() as session:
            self._find(session, name, "members:write")
            query = select(MembershipRow).where(MembershipRow.project == name).order_by(MembershipRow.id)
            return tuple(render(Member, row) for row in session.scalars(query))

    def add_member(self, name: str, wanted: CreateMember, issuer: str) -> Member:
        """Assign a role, or change an existing assignment. Raises NotFound or Forbidden."""
        with self._database.writing() as session:
            self._find(session, name, "members:write")
            row = session.scalars(select(MembershipRow).where(
                MembershipRow.project == name, MembershipRow.issuer == issuer, MembershipRow.kind == wanted.kind,
                MembershipRow.value == wanted.value)).first()
            if row is None:
                row = MembershipRow(project=name, issuer=issuer, kind=wanted.kind, value=wanted.value,
                                    role=wanted.role, created_at=self._clock())
                session.add(row)
            row.role = wanted.role
            session.flush()
            record_change(session, self._scope, self._clock, "member.add", f"member/{row.id}", name)
            return render(Member, row)

    def remove_member(self, name: str, member_id: int) -> None:
        """Remove a role assignment, and revoke the project's keys that its holder has created. Which users a group has
        is not stored: with a group's assignment, keys of all users without an assignment of their own are revoked.
        Raises NotFound or Forbidden."""
        with self._database.writing() as session:
            self._find(session, name, "members:write")
            row = session.get(MembershipRow, member_id)
            if row is None or row.project != name:
                raise NotFound(f"no member {member_id} in project {name!r}", "list the members to see their ids")
            session.delete(row)
            session.flush()
            self._revoke_keys_of_former(session, row)
            record_change(session, self._scope, self._clock, "member.remove", f"member/{member_id}", name)

    def exists(self, name: str) -> bool:
        """Whether the project exists; not filtered by the scope."""
        with self._database.reading() as session:
            return session.get(ProjectRow, name) is not None

    def requests_per_minute(self, name: str) -> int | None:
        """The project's rate limit, or None; not filtered by the scope."""
        with self._database.reading() as session:
            row = session.get(ProjectRow, name)
            return None if row is None else row.requests_per_minute

    def roles_of(self, issuer: str, subject: str, groups: Iterable[str]) -> dict[str, Role]:
        """The highest role of a subject in each project, by itself or through a group; not filtered by the scope."""
        by_subject = (MembershipRow.kind == "subject") & (MembershipRow.value == subject)
        by_group = (MembershipRow.kind == "group") & MembershipRow.value.in_(sorted(groups))
        query = select(MembershipRow).where(MembershipRow.issuer == issuer, or_(by_subject, by_group))
        held: dict[str, Role] = {}
        with self._database.reading() as session:
            for row in session.scalars(query):
                rank = max(ROLES.index(row.role), ROLES.index(held.get(row.project, ROLES[0])))
                held[row.project] = ROLES[rank]
        return held

    def _revoke_keys_of_former(self, session: Session, removed: MembershipRow) -> None:
        """Revoke the project's keys that former members have created, and the keys created with those."""
        members = set(session.scalars(select(MembershipRow.value).where(
            MembershipRow.project == removed.project, MembershipRow.issuer == removed.issuer,
            MembershipRow.kind == "subject")))
        prefix, now = f"user:{removed.issuer}#", self._clock()
        rows = session.scalars(select(ApiKeyRow).where(
            ApiKeyRow.project == removed.project, or_(ApiKeyRow.revoked_at.is_(None), ApiKeyRow.revoked_at > now),
        ).order_by(ApiKeyRow.created_at)).all()
        revoked: set[str] = set()
        for row in rows:  # in order of creation, so that a key comes after the one that created it
            subject = row.created_by.removeprefix(prefix)
            is_former = row.created_by.startswith(prefix) and (
                subject == removed.value if removed.kind == "subject" else subject not in members)
            if is_former or row.created_by in revoked:
                revoked.add(f"key:{row.id}")
                row.revoked_at = now
                record_change(session, self._scope, self._clock, "key.revoke", f"key/{row.id}", removed.project)

    def _find(self, session: Session, name: str, action: Action = "jobs:read") -> ProjectRow:
        row, absent = session.get(ProjectRow, name), NotFound(f"no project {name!r}", "list the projects you are in")
        if row is None:
            raise absent
        self._scope.check(action, name, absent)
        return row


def _render(session: Session, row: ProjectRow) -> Project:
    jobs, gpus = live_jobs(session, row.name)
    endpoints, replicas = live_endpoints(session, row.name)
    return Project(name=row.name, description=row.description, quotas=render(Quotas, row), live_jobs=jobs,
                   live_endpoints=endpoints, live_gpus=gpus, live_replicas=replicas, created_at=row.created_at)


USED_EVERY_S = 60.0
"""Minimum interval between two updates of a key's `last_used_at`."""


class ApiKeys:
    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def create(self, name: str, role: Role, *, scopes: frozenset[Action] | None = None,
               expires_at: datetime | None = None, everywhere: bool = False) -> tuple[ApiKey, str]:
        """A new key and its text, which is not stored; with `everywhere` it is valid in every project, future ones
        included. Raises Forbidden, or InvalidInput when the key would have more rights than its creator."""
        project = None if everywhere else self._scope.home("keys:write")
        if project is None:
            self._scope.check_installation("keys:write")
        with self._database.writing() as session:
            return self._add(session, name, role, project, scopes, expires_at)

    def list(self) -> tuple[ApiKey, ...]:
        """The keys that the scope may read, newest first, revoked ones included."""
        seen = self._scope.sees(ApiKeyRow.project, "keys:write")
        query = select(ApiKeyRow).where(seen).order_by(ApiKeyRow.created_at.desc(), ApiKeyRow.id)
        with self._database.reading() as session:
            return tuple(render(ApiKey, row) for row in session.scalars(query))

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key at once, also one that was rotated and whose overlap lasts; no effect on a revoked one. Raises
        NotFound or Forbidden."""
        with self._database.writing() as session:
            row = self._hold(session, key_id)
            now = self._clock()
            row.revoked_at = now if row.revoked_at is None else min(row.revoked_at, now)
            record_change(session, self._scope, self._clock, "key.revoke", f"key/{key_id}", row.project)
            return render(ApiKey, row)

    def rotate(self, key_id: str, overlap_s: float = 0.0) -> tuple[ApiKey, str]:
        """A new key with the same rights; the old one is revoked after `overlap_s`. Raises NotFound, Forbidden, or
        Conflict when the old one has expired or was revoked."""
        with self._database.writing() as session:
            row = self._hold(session, key_id)
            now = self._clock()
            if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
                raise Conflict(f"key {key_id} has ended", "create a new one")
            record = _record(row)
            row.revoked_at = now + timedelta(seconds=overlap_s)
            record_change(session, self._scope, self._clock, "key.rotate", f"key/{key_id}", row.project)
            return self._add(session, row.name, record.roles[row.project or ALL_PROJECTS], row.project, record.scopes,
                             row.expires_at)

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

    def _add(self, session: Session, name: str, role: Role, project: str | None, scopes: frozenset[Action] | None,
             expires_at: datetime | None) -> tuple[ApiKey, str]:
        creator = self._scope.principal or Principal(subject="system", roles={ALL_PROJECTS: "admin"})
        new_key = create_key(name, creator, {project or ALL_PROJECTS: role}, self._clock(), expires_at=expires_at,
                             scopes=scopes)
        record = new_key.record
        row = ApiKeyRow(
            id=record.id, name=name, secret_sha256=record.secret_sha256, project=project, role=role,
            scopes=None if scopes is None else sorted(scopes), created_by=record.created_by,
            created_at=record.created_at, expires_at=expires_at, revoked_at=None, last_used_at=None)
        session.add(row)
        record_change(session, self._scope, self._clock, "key.create", f"key/{row.id}", project)
        return render(ApiKey, row), new_key.text

    def _hold(self, session: Session, key_id: str) -> ApiKeyRow:
        row = session.get(ApiKeyRow, key_id, with_for_update=True)
        absent = NotFound(f"no key {key_id!r}", "list the keys to see their ids")
        if row is None:
            raise absent
        self._scope.check("keys:write", row.project, absent)
        return row


def _record(row: ApiKeyRow) -> KeyRecord:
    return KeyRecord.model_validate({
        "id": row.id, "name": row.name, "secret_sha256": row.secret_sha256,
        "roles": {row.project or ALL_PROJECTS: row.role}, "scopes": row.scopes, "created_by": row.created_by,
        "created_at": row.created_at, "expires_at": row.expires_at, "revoked_at": row.revoked_at})
