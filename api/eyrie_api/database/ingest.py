"""Imports a stage's `events.jsonl` into the database, each record exactly once.

A running stage appends one JSON line per record; the driver of the job calls `read` regularly. The records and the byte
offset they end at are written in one transaction. Race: two drivers may read the same lines, or one may die between
reading and writing; the transaction compares the stored offset with the one the read began at, so that no event is lost
or repeated. Only complete lines are imported. A file shorter than its offset is a new one (the stage's directory was
created again).
"""

from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.orm import Session

from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.records import STAGE_RECORD, EventRecord, MetricRecord, StageRecord
from eyrie_api.contract.rules import first_problem
from eyrie_api.contract.stages import StageName
from eyrie_api.database.engine import Database, upsert
from eyrie_api.database.jobs import put_metric
from eyrie_api.database.tables import EventRow, IngestRow, JobRow, StageRow
from eyrie_api.errors import NotFound

_CHUNK = 8 << 20
# Far longer than any line: the longest record is an event with a short message.


class Ingest:
    """Reads stage records into one database."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database, self._clock = database, clock

    def read(self, job_id: str, stage: StageName, key: str, path: Path) -> int:
        """Import the lines appended to `path`; return the number of records. A missing file has none yet."""
        total = 0
        while imported := self._read_chunk(job_id, stage, key, path):
            total += imported
        return total

    def _read_chunk(self, job_id: str, stage: StageName, key: str, path: Path) -> int:
        row_key = {"job_id": job_id, "stage": stage, "key": key}
        with self._database.reading() as session:
            row = session.get(IngestRow, (job_id, stage, key))
            recorded = 0 if row is None else row.offset_bytes
        try:
            with path.open("rb") as file:
                start = recorded if recorded <= path.stat().st_size else 0
                file.seek(start)
                data = file.read(_CHUNK)
        except FileNotFoundError:
            return 0
        complete = data[: data.rfind(b"\n") + 1]
        if not complete:
            return 0
        lines = complete.splitlines()
        with self._database.writing() as session:
            if session.get(JobRow, job_id, with_for_update=True) is None:
                raise NotFound(f"no job {job_id!r}", "it was deleted while it ran")
            row = session.get(IngestRow, (job_id, stage, key))
            if (0 if row is None else row.offset_bytes) != recorded:
                return 0  # another reader has imported these lines
            for line in lines:
                self._store(session, job_id, stage, key, line)
            upsert(session, IngestRow, row_key, {"offset_bytes": start + len(complete)})
        return len(lines)

    def _store(self, session: Session, job_id: str, stage: StageName, key: str, line: bytes) -> None:
        record: StageRecord
        try:
            record = STAGE_RECORD.validate_json(line)
        except ValidationError as error:
            shown = line[:200].decode(errors="replace")
            record = EventRecord(time=self._clock(), type="Warning", reason="UnreadableRecord",
                                 message=f"a line of events.jsonl is not a record ({first_problem(error)}): {shown}")
        if isinstance(record, EventRecord):
            session.add(EventRow(job_id=job_id, time=record.time, type=record.type, reason=record.reason,
                                 message=record.message, stage=stage, key=key, data=record.data))
        elif isinstance(record, MetricRecord):
            put_metric(session, job_id, stage, key, record)
        else:
            progress = record.model_dump(mode="json", exclude={"kind", "time"})
            row = session.get(StageRow, (job_id, stage, key))
            if row is None:
                # Not yet Running: its driver, which may be killed before it stores the next status, reports the start
                # of what was not running before.
                session.add(StageRow(job_id=job_id, stage=stage, key=key, state="Pending", attempt=1,
                                     started_at=record.time, finished_at=None, progress=progress, reason=None,
                                     message=None, hint=None))
                session.flush()
            else:
                row.progress = progress
