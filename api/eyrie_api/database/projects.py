"""The repository of projects: their quotas and members.

Projects are never deleted, because the audit log, keys and jobs contain their names. Usage is counted from the rows
when it is requested.
"""

from collections.abc import Iterable

from sqlalchemy import func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from eyrie_api.access.roles import ROLES
from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.api_keys import revoke_keys_of
from eyrie_api.database.audit import record_change
from eyrie_api.database.engine import Database
from eyrie_api.database.quotas import live_endpoints, live_gpus, live_jobs, live_replicas
from eyrie_api.database.tables import JobRow, MembershipRow, ProjectRow
from eyrie_api.decisions.attention import UsedUp
from eyrie_api.errors import Conflict, NotFound
from eyrie_api.v1alpha1.access import Action, CreateMember, CreateProject, Member, Project, Quotas, Role


class Projects:
    """Project and membership rows of one database, as `scope` sees them."""

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

    def used_up(self) -> tuple[UsedUp, ...]:
        """Quotas of jobs and GPUs that are used up, in the projects the caller has a role in."""
        limited = select(ProjectRow).where(
            self._scope.sees(ProjectRow.name, "jobs:read"),
            or_(ProjectRow.max_jobs.is_not(None), ProjectRow.max_gpus.is_not(None))).order_by(ProjectRow.name)
        found = []
        with self._database.reading() as session:
            rows = {row.name: row for row in session.scalars(limited)}
            if not rows:  # without quotas there may be any number of live jobs to count
                return ()
            live = select(JobRow.project, func.count(), func.sum(JobRow.num_gpus)).where(
                JobRow.project.in_(rows), JobRow.ended.is_(False)).group_by(JobRow.project).order_by(JobRow.project)
            for name, jobs, gpus in session.execute(live):
                max_jobs, max_gpus = rows[name].max_jobs, rows[name].max_gpus
                if max_jobs is not None and jobs >= max_jobs:
                    found.append(UsedUp(name, "jobs", jobs, max_jobs))
                if max_gpus is not None and gpus >= max_gpus > 0:
                    found.append(UsedUp(name, "GPUs", int(gpus), max_gpus))
        return tuple(found)

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
            return tuple(_member(row) for row in session.scalars(query))

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
            return _member(row)

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
        kept = set(session.scalars(select(MembershipRow.value).where(
            MembershipRow.project == removed.project, MembershipRow.issuer == removed.issuer,
            MembershipRow.kind == "subject")))
        prefix = f"user:{removed.issuer}#"

        def is_former(creator: str) -> bool:
            subject = creator.removeprefix(prefix)
            return creator.startswith(prefix) and (
                subject == removed.value if removed.kind == "subject" else subject not in kept)

        revoke_keys_of(session, self._scope, self._clock, removed.project, is_former)

    def _find(self, session: Session, name: str, action: Action = "jobs:read") -> ProjectRow:
        row, absent = session.get(ProjectRow, name), NotFound(f"no project {name!r}", "list the projects you are in")
        if row is None:
            raise absent
        self._scope.check(action, name, absent)
        return row


def _render(session: Session, row: ProjectRow) -> Project:
    quotas = Quotas.model_validate({name: getattr(row, name) for name in Quotas.model_fields})
    return Project(name=row.name, description=row.description, quotas=quotas, live_jobs=live_jobs(session, row.name),
                   live_endpoints=live_endpoints(session, row.name), live_gpus=live_gpus(session, row.name),
                   live_replicas=live_replicas(session, row.name), created_at=row.created_at)


def _member(row: MembershipRow) -> Member:
    return Member.model_validate({
        "id": row.id, "project": row.project, "issuer": row.issuer, "kind": row.kind, "value": row.value,
        "role": row.role, "created_at": row.created_at})
