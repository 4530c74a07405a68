"""What the decision about stored files needs to know of all jobs, in two queries: rendering thousands takes seconds."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from eyrie_api.artifacts.storage_usage import MAY_READ, JobFacts, named_by
from eyrie_api.database.engine import Database
from eyrie_api.database.tables import JobRow, StageRow
from eyrie_api.v1alpha1.job import JobSpec


@dataclass(frozen=True)
class JobOwner:
    """Whose a job is, and the facts that the decision depends on."""

    name: str | None
    project: str
    facts: JobFacts


class JobOwners:
    """All jobs of one database; not filtered by a scope."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> tuple[dict[str, JobOwner], set[tuple[str, str]], list[str]]:
        """Job id -> owner; (job, checkpoint) of what jobs may still read, as `storage_usage.read_by`; and the jobs that
        may still copy states of others, as `storage_usage.that_have_not`."""
        columns = select(JobRow.id, JobRow.name, JobRow.project, JobRow.phase, JobRow.status)
        with self._database.reading() as session:
            rows = session.execute(columns).all()
            owners = {row.id: JobOwner(row.name, row.project, JobFacts(row.phase, _best(row.status))) for row in rows}
            capturing = [row.id for row in rows if row.phase in MAY_READ and not _has(row.status, "Captured")]
            specs = session.scalars(select(JobRow.spec).where(JobRow.phase.in_(sorted(MAY_READ))))
            return owners, named_by(JobSpec.model_validate(spec) for spec in specs), capturing

    def have_run(self) -> bool:
        """Whether a stage of a job has begun, and files must be somewhere."""
        query = select(StageRow.job_id).where(StageRow.state.notin_(("Pending", "Skipped"))).limit(1)
        with self._database.reading() as session:
            return session.scalars(query).first() is not None


def _has(status: dict[str, Any], condition: str) -> bool:
    return any(one["type"] == condition and one["status"] == "True" for one in status.get("conditions", ()))


def _best(status: dict[str, object]) -> str | None:
    best = status.get("best")
    return str(best["checkpoint"]) if isinstance(best, dict) and best.get("checkpoint") else None
