"""The repository of benchmark results, which the leaderboard ranks and promotion looks up.

The whole report is stored; the other columns are for filters. Recording a result again replaces it, so that a benchmark
repeated after a crash does not appear twice. A result is visible to callers that may read its job. Ranking is in
`eyrie_api.decisions.leaderboard`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import select as query_of

from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.reports import BenchmarkReport, LeaderboardEntry
from eyrie_api.contract.status import Leaderboard
from eyrie_api.database.engine import Database, upsert
from eyrie_api.database.tables import JobRow, ResultRow
from eyrie_api.decisions.leaderboard import (
    WITHOUT_DRAFTER,
    MeasuredCheckpoint,
    Selection,
    choices_of,
    mean_speedup,
    rank,
    select,
    select_best,
)
from eyrie_api.errors import NotFound


@dataclass(frozen=True)
class ResultRecord:
    measured: MeasuredCheckpoint
    drafter_dir: str


@dataclass(frozen=True)
class ResultFilter:
    """Which results to rank, by columns of `ResultRow`; empty fields do not restrict."""

    job_id: str | None = None
    target: str | None = None
    family: str | None = None
    tuned: bool | None = None
    lossless: bool | None = None


class Results:
    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def record(self, measured: MeasuredCheckpoint, drafter_dir: str) -> None:
        """Store a report. `drafter_dir` is the checkpoint's directory, absolute."""
        report = measured.report
        key = {"job_id": measured.job_id, "checkpoint": report.checkpoint, "tuned": measured.tuned}
        values = {
            "family": measured.family, "target": measured.target, "drafter_dir": drafter_dir,
            "speedup": mean_speedup(report), "lossless": report.lossless, "report": report.model_dump(mode="json"),
            "created_at": self._clock(),
        }
        with self._database.writing() as session:
            upsert(session, ResultRow, key, values)

    def leaderboard(self, wanted: ResultFilter | None = None, limit: int = 100) -> tuple[LeaderboardEntry, ...]:
        """Entries best first; ranks count the filtered results only."""
        return self._with_axes(rank(result.measured for result in self.list(wanted))[:limit])

    def board(self, wanted: ResultFilter, selection: Selection, limit: int = 100) -> Leaderboard:
        """The leaderboard by the selected measurements alone, and what can be selected."""
        measured = [result.measured for result in self.list(replace(wanted, family=None))]
        of_family = [result for result in measured if wanted.family in (None, result.family)]
        items = rank(select(of_family, selection))[:limit]
        return Leaderboard(items=self._with_axes(items), choices=choices_of(measured))

    def list(self, wanted: ResultFilter | None = None) -> tuple[ResultRecord, ...]:
        """Results, in no particular order."""
        columns = {name: value for name, value in vars(wanted or ResultFilter()).items() if value is not None}
        query = query_of(ResultRow).filter_by(**columns).join(JobRow, JobRow.id == ResultRow.job_id)
        query = query.where(self._scope.sees(JobRow.project, "jobs:read"))
        with self._database.reading() as session:
            return tuple(ResultRecord(MeasuredCheckpoint(
                row.job_id, row.family, row.target, row.tuned, BenchmarkReport.model_validate(row.report)),
                row.drafter_dir) for row in session.scalars(query))

    def find(self, job_id: str, checkpoint: str | None = None) -> ResultRecord:
        """The result of a checkpoint, or of the best drafter of the job when none is named; tuned results take
        precedence. Raises NotFound."""
        results = [result for result in self.list(ResultFilter(job_id=job_id))
                   if result.measured.report.checkpoint == checkpoint
                   or (checkpoint is None and result.measured.family not in WITHOUT_DRAFTER)]
        if not results:
            what = "checkpoint" if checkpoint is None else f"checkpoint {checkpoint!r}"
            raise NotFound(f"no measured {what} of job {job_id!r}", "see the job's leaderboard for what was measured")
        tuned = [result for result in results if result.measured.tuned]
        # The job's own before a rival that was tuned to be beaten.
        own = [result for result in tuned if not result.measured.report.rival] or tuned or results
        best = select_best([result.measured.report for result in own])
        return next(result for result in own if result.measured.report == best)

    def _with_axes(self, entries: Sequence[LeaderboardEntry]) -> tuple[LeaderboardEntry, ...]:
        """With what the sweeps of their jobs say. Race: a job that was deleted since its results were read has none."""
        query = query_of(JobRow.id, JobRow.submission).where(JobRow.id.in_({entry.job_id for entry in entries}))
        with self._database.reading() as session:
            axes = {(job_id, candidate["name"]): candidate["axes"] for job_id, submission in session.execute(query)
                    if submission is not None for candidate in submission["resolved"]["candidates"]}
        return tuple(entry.model_copy(update={"axes": axes.get((entry.job_id, entry.candidate), {})})
                     for entry in entries)
