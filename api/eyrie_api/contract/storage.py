"""What the files of jobs occupy, as the REST API shows it."""

from datetime import datetime
from typing import Literal

from eyrie_api.contract.model import Frozen
from eyrie_api.contract.status import Phase

StoredKind = Literal["captured-states", "training-state", "checkpoint", "record"]


class StoredFiles(Frozen):
    """Files of one kind that a job holds, and whether `eyrie storage --clean` would remove them."""

    kind: StoredKind
    name: str
    """The checkpoint; empty for the rest."""

    size_bytes: int
    removable: bool
    reason: str
    """Why they may be removed, or why not: for example what reads them."""


class JobStorage(Frozen):
    """The files of one job."""

    job_id: str
    name: str | None
    project: str | None
    """null: this server has no such job."""

    phase: Phase | None
    size_bytes: int
    removable_bytes: int
    files: tuple[StoredFiles, ...]
    """The largest first."""


class ProjectStorage(Frozen):
    """The files of a project's jobs, together."""

    project: str | None
    """null: of jobs that this server does not have."""

    num_jobs: int
    """Those that hold files."""

    size_bytes: int
    removable_bytes: int


class StoragePage(Frozen):
    """One page of the jobs that hold files, the largest first, with the sums of all pages."""

    items: tuple[JobStorage, ...]
    next_cursor: str | None = None
    projects: tuple[ProjectStorage, ...]
    """The largest first."""

    size_bytes: int
    removable_bytes: int
    measured_at: datetime
    incomplete: str | None = None
    """Why the measurement ended early; null: every file is counted."""

    place: Literal["disk", "store"]
    """Where the files are: on a disk of the server, or in the artifact store that is the jobs' work area."""

    disk_total_bytes: int | None = None
    """Size of that disk. null: the files are in a store, or the caller may not read all projects."""

    disk_free_bytes: int | None = None
