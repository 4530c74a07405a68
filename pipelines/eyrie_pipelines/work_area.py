"""The work area of a job, as one pod sees it: a stage's inputs are downloaded before it, its output uploaded after it.

On one machine, and where the job's directory is a shared volume, nothing is copied. Where it is an artifact store, a
pod's directory starts empty, and every file of a job has the key that is its path below EYRIE_HOME:

    jobs/<id>/job.json                       the job
    jobs/<id>/run/failure.json               the first stage that failed
    jobs/<id>/stages/<stage>[/<key>]/...     as on disk; manifest.json is uploaded last, and once

While a stage works, a thread uploads what has changed every EYRIE_SYNC_S seconds (`directory_sync`): its events and log
(events.jsonl, log.txt) and the state from which it resumes. A pod killed at any line loses at most that much work: the
next pod downloads the unfinished directory, and the stage resumes as it does on one machine after kill -9.

With `ranged` the shards of hidden states are never copied as files of a directory: capture uploads each and deletes it
(`eyrie_workers.hidden_states.storage_backend`), training reads ranges of them; and so with the answers, which
regenerate puts there (`eyrie_workers.data.rows`) and capture reads. They find the store's address in a hidden file
of the directory.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, digest_model, parse_manifest, read_manifest
from eyrie_api.artifacts.directories import download_dir, upload_dir
from eyrie_api.artifacts.fetch import fetch_part
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore, while_unavailable
from eyrie_api.contract.placement import Placement, S3Work
from eyrie_api.contract.stages import (
    BenchmarkStage,
    CaptureStage,
    HardwareStage,
    ProveStage,
    RegenerateStage,
    StageName,
    StageSpec,
    TrainStage,
    TuneStage,
)
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_api.full_disk import with_room
from eyrie_pipelines.directory_sync import SYNC_SHARE, DirectorySync, join_parts
from eyrie_pipelines.run_records import FAILURE_FILE, RUN_DIR
from eyrie_pipelines.runner import JOB_FILE
from eyrie_pipelines.several_gpus import is_first_node
from eyrie_workers.catalog import (
    DAMAGED_SUFFIX,
    LEDGER_PARTS,
    LOAD_RESULTS_FILE,
    ROWS_FILE,
    SELECTION_FILE,
    SHARD_PATTERN,
    STATE_DIR,
    STORE_ADDRESS_FILE,
    SYNC_VARIABLE,
)

STATES_VARIABLE = "EYRIE_STATES"
"""`ranged`: hidden states and answers stay in the store: capture and regenerate put every part there when it is
complete and keep none, and later stages read them there (`placement.work.states`)."""

CREDENTIALS_DIR = "/var/run/eyrie/artifacts"
"""Where the store's credentials are mounted in a pod."""

_LEFT_IN_STORE: dict[StageName, tuple[str, ...]] = {
    "regenerate": (ROWS_FILE, f"{LEDGER_PARTS}/*", SELECTION_FILE),
    "capture": (SHARD_PATTERN, f"shard-*{DAMAGED_SUFFIX}")}
"""With `ranged`: patterns of what a stage puts into the store itself, by stage."""

RUN_FAILURE = f"{RUN_DIR}/{FAILURE_FILE}"


class WorkArea:
    """The work area of one job in the pod of one task. Without a store every method does nothing."""

    def __init__(self, job_dir: Path, store: ArtifactStore | None, sync_s: float = 15.0, *,
                 uploads: bool = True, ranged: bool = False) -> None:
        """`uploads` is false on every node of a training run but the first: those only download.
        `ranged`: hidden states are not copied; capture and training get the URL of the store."""
        self._job_dir, self._store, self._sync_s, self._uploads, self._ranged = job_dir, store, sync_s, uploads, ranged
        self._home = job_dir.parent.parent
        self._downloaded: set[Path] = set()

    @classmethod
    def of(cls, job_dir: Path) -> "WorkArea":
        """The work area that the pod's environment configures."""
        sync_s = os.environ.get(SYNC_VARIABLE)
        if not sync_s:
            return cls(job_dir, None)
        return cls(job_dir, open_store(), float(sync_s), uploads=is_first_node(),
                   ranged=os.environ.get(STATES_VARIABLE) == "ranged")

    def begin(self) -> None:
        """Download what every task reads: the job, and the failure of its run if there is one."""
        store = self._store
        if store is not None:
            job = self._job_dir / JOB_FILE
            with_room(self._job_dir, lambda: store.download(self._key(job), job))
            with_room(self._job_dir, lambda: self._download_if_stored(self._job_dir / RUN_FAILURE))

    def download_manifest(self, directory: Path) -> None:
        """Download the manifest of a stage without its files. A missing one is no error here: its reader raises."""
        if self._store is not None:
            with_room(self._job_dir, lambda: self._download_if_stored(directory / MANIFEST))

    def upload(self, path: Path) -> None:
        """Upload one small file, retrying while the store is unavailable."""
        store = self._store
        if store is not None and self._uploads:
            while_unavailable(lambda: store.write(self._key(path), path.read_bytes()))

    def remove(self, directory: Path) -> None:
        if self._store is not None:
            self._store.delete_all(self._key(directory))

    @contextmanager
    def stage(self, spec: StageSpec, directory: Path, concurrent: int = 1) -> Iterator[bool]:
        """Download a stage's inputs, sync its directory while it runs, upload its output when it has finished.

        Yields whether the stage has to run: False when the store holds its output for this spec.

        concurrent  stages that run in this pod at once; each syncs that much less often.
        """
        if self._store is None:
            yield True
            return
        # Keys of the markers next to damaged files.
        damaged = [item.key for item in self._store.list(self._key(directory)) if item.key.endswith(DAMAGED_SUFFIX)
                   ] if isinstance(spec, CaptureStage) else []
        # Without its manifest the stage counts as unfinished, and rebuilds only the damaged files.
        if damaged and self._uploads:
            self._store.delete(self._key(directory / MANIFEST))
        self.download_manifest(directory)
        if (directory / MANIFEST).is_file():
            # A manifest of another spec: the stage program runs and refuses it, as on one machine.
            yield read_manifest(directory).spec_digest != digest_model(spec)
            return
        store = self._store
        # Shards and answers that are in the store already stay there, and so do the notes next to them.
        left = _LEFT_IN_STORE.get(spec.stage, ()) if self._ranged else ()
        with_room(self._job_dir, lambda: download_dir(store, self._key(directory), directory, unfinished=True,
                                                      leave_out=left))
        with_room(self._job_dir, lambda: join_parts(directory))
        if left:
            with_room(self._job_dir, lambda: self._write_address(directory))
        sync = DirectorySync(self._store, directory, self._key(directory), SYNC_SHARE * concurrent, not_ours=left)
        sync.begin()
        with_room(self._job_dir, lambda: self._download_inputs(spec))
        if not self._uploads:
            yield True
            return
        with sync.every(self._sync_s):
            yield True
        if (directory / MANIFEST).is_file():
            while_unavailable(lambda: self._upload_finished(directory))
            # Deleted last: if this pod dies before, the next capture still finds which files to rebuild.
            for key in damaged:
                self._store.delete(key)

    @contextmanager
    def before(self, directory: Path) -> Iterator[None]:
        """Upload events and log of the program before a stage while it runs, from the stage's directory. What the stage
        has left in the store stays there: nothing else is downloaded."""
        if self._store is None or self._store.stat(self._key(directory / MANIFEST)) is not None:
            yield
            return
        for name in ("events.jsonl", "log.txt"):
            with_room(self._job_dir, partial(self._download_if_stored, directory / name))
        # Not `begin`, which removes a ledger from the store that is not in this directory.
        sync = DirectorySync(self._store, directory, self._key(directory), SYNC_SHARE, not_ours=("*",))
        with sync.every(self._sync_s):
            yield

    def _upload_finished(self, directory: Path) -> None:
        assert self._store is not None
        # Several times a drafter's size, and only an unfinished stage needs it.
        shutil.rmtree(directory / STATE_DIR, ignore_errors=True)
        upload_dir(self._store, directory, self._key(directory))
        for name in (STATE_DIR, LEDGER_PARTS):
            self._store.delete_all(self._key(directory / name))
        if self._ranged:
            self._store.delete(self._key(directory / SELECTION_FILE))

    def _download_states(self, directory: Path) -> None:
        """Download the feature store and verify each file's digest; with `ranged`, write its URL instead (the reader
        then verifies each block, and marks damaged files itself). A file whose digest differs gets a marker next to it,
        so that capture rebuilds it when the job is retried. Raises ArtifactCorrupt then."""
        assert self._store is not None
        if self._ranged:
            self._write_address(directory)
            return
        try:
            download_dir(self._store, self._key(directory), directory)
        except ArtifactCorrupt as error:
            name = self._key(directory / MANIFEST)
            for entry in parse_manifest(self._store.read(name), name).files:
                path = directory / entry.path
                if path.is_file() or not self._uploads:
                    continue
                try:
                    self._store.download(self._key(path), path, sha256=entry.sha256)
                except (ArtifactCorrupt, ArtifactMissing):
                    marker = self._key(path.with_suffix(DAMAGED_SUFFIX))
                    self._store.write(marker, b"its bytes in the artifact store differ from their digest")
            raise ArtifactCorrupt(error.message, "retry the job: capture rebuilds the damaged files") from error

    def address(self, path: Path) -> str:
        """Where everyone finds a path of the job: its URL in the artifact store, or the path itself."""
        return str(path) if self._store is None else f"{self._store.url}/{self._key(path)}"

    def _write_address(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / STORE_ADDRESS_FILE).write_text(f"{self.address(directory)}\n")

    def _download_inputs(self, spec: StageSpec) -> None:
        """Download exactly what the stage reads of earlier stages."""
        assert self._store is not None
        drafters, files = list[str | None](), list[str | None]()
        if isinstance(spec, RegenerateStage):
            # Of earlier jobs, or as much as there is: the stage leaves out what is not whole.
            for directory in map(Path, spec.reuse):
                with suppress(ArtifactMissing, ArtifactCorrupt):
                    self._download_file(directory / "rows.meta.json")
                    if self._ranged:
                        self._write_address(directory)
                    else:
                        self._download_file(directory / ROWS_FILE)
        elif isinstance(spec, CaptureStage):
            rows = Path(spec.rows_dir)
            download_dir(self._store, self._key(rows), rows, leave_out=(ROWS_FILE,) if self._ranged else ())
            if self._ranged:
                self._write_address(rows)
            drafters += [head.path for head in spec.init_from]
            for directory in map(Path, spec.reuse):  # read by ranges, whatever this job does with its own
                self._write_address(directory)
        elif isinstance(spec, TrainStage):
            if Path(spec.store_dir) not in self._downloaded:  # large, and the same for all candidates: verify it once
                self._download_states(Path(spec.store_dir))
            self._downloaded.add(Path(spec.store_dir))
            drafters.append(spec.drafter.init_from)
        elif isinstance(spec, HardwareStage):
            self.download_manifest(Path(spec.proof_dir))
            drafters.append(spec.proof.drafter_dir)
            files += [spec.proof.held_out_file, spec.baseline_dir and f"{spec.baseline_dir}/{LOAD_RESULTS_FILE}"]
        else:
            if not isinstance(spec, BenchmarkStage) or spec.source is None:  # else the stage's own output
                drafters.append(spec.drafter_dir)
            files.append(spec.held_out_file)
        if isinstance(spec, TuneStage) and spec.rival is not None:
            drafters.append(spec.rival.drafter_dir)
        if isinstance(spec, ProveStage):
            self.download_manifest(Path(spec.tune_dir))
            drafters += [spec.rival_dir, None if spec.incumbent is None else spec.incumbent.drafter_dir]
        for drafter in filter(None, drafters):
            self._download_drafter(Path(drafter))
        for file in filter(None, files):
            self._download_file(Path(file))

    def _download_drafter(self, directory: Path) -> None:
        """Download `<home>/jobs/<id>/stages/<stage>/<key>/<part>`, of this job or another. Any other path is part
        of the image."""
        if directory.is_relative_to(self._home / "jobs"):
            assert self._store is not None
            stage, part = split_drafter(directory.relative_to(self._home))
            fetch_part(self._store, stage, part, directory)

    def _download_file(self, path: Path) -> None:
        assert self._store is not None
        self.download_manifest(path.parent)
        listed = {entry.path: entry for entry in read_manifest(path.parent).files}
        if path.name not in listed:
            raise ArtifactMissing(f"the manifest in {path.parent} does not list {path.name}", "retry the job")
        self._store.download(self._key(path), path, sha256=listed[path.name].sha256)

    def _download_if_stored(self, path: Path) -> None:
        assert self._store is not None
        try:
            self._store.download(self._key(path), path)
        except ArtifactMissing:
            path.unlink(missing_ok=True)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._home).as_posix()


def pod_variables(placement: Placement, home: str, sync_s: float) -> dict[str, str]:
    """Environment variables of a pod for its home and the work area; `WorkArea.of` and `open_store` read them."""
    variables = {"EYRIE_HOME": home, "HOME": "/tmp"}
    if isinstance(placement.work, S3Work):
        variables |= {"EYRIE_ARTIFACTS_URL": placement.work.url, "EYRIE_ARTIFACTS_REGION": placement.work.region,
                      SYNC_VARIABLE: f"{sync_s:g}"}
        if placement.work.states == "ranged":
            variables[STATES_VARIABLE] = "ranged"
        if placement.work.endpoint_url is not None:
            variables["EYRIE_ARTIFACTS_ENDPOINT_URL"] = placement.work.endpoint_url
        if placement.work.credentials_secret is not None:
            variables["EYRIE_ARTIFACTS_CREDENTIALS_DIR"] = CREDENTIALS_DIR
    return variables


def split_drafter(path: Path) -> tuple[str, str]:
    """Split a drafter's path below EYRIE_HOME into the key prefix of its training and the part inside it."""
    return Path(*path.parts[:5]).as_posix(), Path(*path.parts[5:]).as_posix()
