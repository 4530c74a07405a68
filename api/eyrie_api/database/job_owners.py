"""What the decision about stored files needs to know of all jobs, in two queries: rendering thousands takes seconds."""

from dataclasses import dataclass

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

    def read(self) -> tuple[dict[str, JobOwner], set[tuple[str, str]]]:
        """Job id -> owner, and (job, checkpoint) of what jobs may still read, as `storage_usage.read_by`."""
        columns = select(JobRow.id, JobRow.name, JobRow.project, JobRow.phase, JobRow.status)
        with self._database.reading() as session:
            owners = {row.id: JobOwner(row.name, row.project, JobFacts(row.phase, _best(row.status)))
                      for row in session.execute(columns)}
            specs = session.scalars(select(JobRow.spec).where(JobRow.phase.in_(sorted(MAY_READ))))
            return owners, named_by(JobSpec.model_validate(spec) for spec in specs)

    def have_run(self) -> bool:
        """Whether a stage of a job has begun, and files must be somewhere."""
        query = select(StageRow.job_id).where(StageRow.state.notin_(("Pending", "Skipped"))).limit(1)
        with self._database.reading() as session:
            return session.scalars(query).first() is not None


def _best(status: dict[str, object]) -> str | None:
    best = status.get("best")
    return str(best["checkpoint"]) if isinstance(best, dict) and best.get("checkpoint") else None
