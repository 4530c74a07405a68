"""A pod's share in a job's work area: what it needs comes down before a stage, what it makes goes up.

On one machine, and where the job's directory is a shared volume, nothing is copied. Where it is an artifact store, the
directory of a pod begins empty, and everything of a job lies in the store under the path it has below EYRIE_HOME:

    jobs/<id>/job.json                       what was asked
    jobs/<id>/run/failure.json               the first stage that failed
    jobs/<id>/stages/<stage>[/<key>]/...     as on disk; manifest.json last, and once

While a stage works, a thread puts what has changed up every EYRIE_SYNC_S seconds: what it says (events.jsonl, log.txt)
and the state it would go on from. A pod that is killed at any line therefore loses at most so much work; the next one
brings the unfinished directory down and the stage goes on as it does on one machine after kill -9.

What goes up is one moment of the directory. A stage writes data first and its mention after (a shard, then the index;
a checkpoint, then the training state); were files read one after the other while it works, the index could mention a
shard that is not there. So a picture of the directory is taken first (hard links, and copies of files that grow), and
taken again if anything was renamed meanwhile. Large state costs time: syncing takes at most a fifth of it.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, digest_model, read_manifest
from eyrie_api.artifacts.directories import download_dir, upload_dir
from eyrie_api.artifacts.fetch import fetch_part
from eyrie_api.artifacts.store import ArtifactStore, open_store
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError, Transient
from eyrie_api.v1alpha1.placement import Placement, S3Work
from eyrie_api.v1alpha1.stages import (
    BenchmarkStage,
    CaptureStage,
    Manifest,
    ProveStage,
    StageSpec,
    TrainStage,
    TuneStage,
)
from eyrie_workers.catalog import DAMAGED_SUFFIX, STATE_DIR, STORE_ADDRESS_FILE

SYNC_VARIABLE = "EYRIE_SYNC_S"
"""Set: the store of EYRIE_ARTIFACTS_* is the work area, and this is how often unfinished work goes there."""

STATES_VARIABLE = "EYRIE_STATES"
"""`ranged`: hidden states stay in the store, and training reads them there (`placement.work.states`)."""

CREDENTIALS_DIR = "/var/run/eyrie/artifacts"
"""Where a pod finds the store's keys."""

JOB_FILE, RUN_FAILURE = "job.json", "run/failure.json"
_GROWING = (".jsonl", ".txt")
_PICTURE = ".sync"
_PICTURES = 20
_SYNC_SHARE = 4
"""Pauses between two syncs are at least so many times what the last one took."""

_PATIENCE_S = 900.0
"""A finished stage is hours of work: a store that is away is waited for before it is given up."""


class WorkArea:
    """The work area of one job, seen from the pod of one box. Without a store it does nothing."""

    def __init__(self, job_dir: Path, store: ArtifactStore | None, sync_s: float = 15.0, *,
                 puts: bool = True, ranged: bool = False) -> None:
        """`puts` is false on the other nodes of a training: they read, and the first one puts what comes out.
        `ranged`: hidden states are not brought; who trains is told where they are."""
        self._job_dir, self._store, self._sync_s, self._puts, self._ranged = job_dir, store, sync_s, puts, ranged
        self._home = job_dir.parent.parent
        self._brought: set[Path] = set()

    @classmethod
    def of(cls, job_dir: Path) -> "WorkArea":
        """As the pod's environment says."""
        sync_s = os.environ.get(SYNC_VARIABLE)
        if not sync_s:
            return cls(job_dir, None)
        return cls(job_dir, open_store(), float(sync_s), puts=is_first_node(),
                   ranged=os.environ.get(STATES_VARIABLE) == "ranged")

    def begin(self) -> None:
        """Bring what every box reads: the job, and whether its run has failed already."""
        if self._store is not None:
            self._store.download(self._key(self._job_dir / JOB_FILE), self._job_dir / JOB_FILE)
            self._bring_if_there(self._job_dir / RUN_FAILURE)

    def bring_report(self, directory: Path) -> None:
        """Bring the manifest of a stage, without its files. None there is left to the reader to tell."""
        if self._store is not None:
            self._bring_if_there(directory / MANIFEST)

    def put(self, path: Path) -> None:
        """Put one small file up."""
        if self._store is not None and self._puts:
            self._store.write(self._key(path), path.read_bytes())

    def remove(self, directory: Path) -> None:
        """Remove a stage's directory from the store."""
        if self._store is not None:
            self._store.delete_all(self._key(directory))

    @contextmanager
    def stage(self, spec: StageSpec, directory: Path, among: int = 1) -> Iterator[bool]:
        """What a stage needs is here, and what it makes goes up.

        Yields whether it has to be run: not when the store has it finished, from this very spec. `among` so many stages
        in one pod, each syncs so much more seldom.
        """
        if self._store is None:
            yield True
            return
        noted = self._noted(directory) if isinstance(spec, CaptureStage) else []
        if noted and self._puts:  # no longer finished: what is damaged is made again, and nothing else
            self._store.delete(self._key(directory / MANIFEST))
        self.bring_report(directory)
        if (directory / MANIFEST).is_file():
            # Made from another spec, the stage program refuses it by its manifest, as on one machine.
            yield read_manifest(directory).spec_digest != digest_model(spec)
            return
        download_dir(self._store, self._key(directory), directory, unfinished=True)
        sync = _Sync(self._store, directory, self._key(directory), _SYNC_SHARE * among)
        sync.begin()
        self._bring_inputs(spec)
        if not self._puts:
            yield True
            return
        with sync.every(self._sync_s):
            yield True
        if (directory / MANIFEST).is_file():
            patiently(lambda: self._put_finished(directory))
            for key in noted:
                self._store.delete(key)

    def _put_finished(self, directory: Path) -> None:
        assert self._store is not None
        shutil.rmtree(directory / STATE_DIR, ignore_errors=True)  # several times a drafter's size, and of no more use
        upload_dir(self._store, directory, self._key(directory))
        self._store.delete_all(self._key(directory / STATE_DIR))

    def _noted(self, directory: Path) -> list[str]:
        """Keys of the notes beside damaged files of a stage's directory."""
        assert self._store is not None
        return [found.key for found in self._store.list(self._key(directory)) if found.key.endswith(DAMAGED_SUFFIX)]

    def _bring_states(self, directory: Path) -> None:
        """The feature store, each file held to its digest, or word of where it is (then its reader holds each block to
        its digest, and notes what differs). One that differs is noted beside it, so that capture makes it again when
        the job is retried. Raises ArtifactCorrupt then."""
        assert self._store is not None
        if self._ranged:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / STORE_ADDRESS_FILE).write_text(f"{self._store.url}/{self._key(directory)}\n")
            return
        try:
            download_dir(self._store, self._key(directory), directory)
        except ArtifactCorrupt as error:
            for entry in Manifest.model_validate_json(self._store.read(self._key(directory / MANIFEST))).files:
                path = directory / entry.path
                if not path.is_file() and self._differs(path, entry.sha256) and self._puts:
                    note = self._key(path.with_suffix(DAMAGED_SUFFIX))
                    self._store.write(note, b"its bytes in the artifact store differ from their digest")
            raise ArtifactCorrupt(error.message, "retry the job: capture makes what is damaged again") from error

    def _differs(self, path: Path, digest: str) -> bool:
        assert self._store is not None
        try:
            self._store.download(self._key(path), path, sha256=digest)
        except (ArtifactCorrupt, ArtifactMissing):
            return True
        return False

    def _bring_inputs(self, spec: StageSpec) -> None:
        """Exactly what the stage reads of stages before it."""
        assert self._store is not None
        if isinstance(spec, CaptureStage):
            download_dir(self._store, self._key(Path(spec.rows_dir)), Path(spec.rows_dir))
        elif isinstance(spec, TrainStage):
            if Path(spec.store_dir) not in self._brought:  # the same for all candidates: it is large, compare it once
                self._bring_states(Path(spec.store_dir))
            self._brought.add(Path(spec.store_dir))
        elif isinstance(spec, BenchmarkStage | TuneStage | ProveStage):
            self._bring_drafter(Path(spec.drafter_dir))
            if spec.held_out_file is not None:
                self._bring_file(Path(spec.held_out_file))
        if isinstance(spec, ProveStage):
            self.bring_report(Path(spec.tune_dir))
            if spec.incumbent is not None and spec.incumbent.drafter_dir is not None:
                self._bring_drafter(Path(spec.incumbent.drafter_dir))

    def _bring_drafter(self, directory: Path) -> None:
        """`<home>/jobs/<id>/stages/train/<candidate>/<part>`, of this job or another; other paths are the image's."""
        if directory.is_relative_to(self._home / "jobs"):
            assert self._store is not None
            stage, part = split_drafter(directory.relative_to(self._home))
            fetch_part(self._store, stage, part, directory)

    def _bring_file(self, path: Path) -> None:
        assert self._store is not None
        self.bring_report(path.parent)
        listed = {one.path: one for one in read_manifest(path.parent).files}
        if path.name not in listed:
            raise ArtifactMissing(f"the manifest in {path.parent} does not list {path.name}", "retry the job")
        self._store.download(self._key(path), path, sha256=listed[path.name].sha256)

    def _bring_if_there(self, path: Path) -> None:
        assert self._store is not None
        try:
            self._store.download(self._key(path), path)
        except ArtifactMissing:
            path.unlink(missing_ok=True)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._home).as_posix()


def is_first_node() -> bool:
    """Whether what comes out of a stage is this pod's to put up: of the nodes of a training, the first one's."""
    return os.environ.get("PET_NODE_RANK", "0") == "0"


def pod_variables(placement: Placement, home: str, sync_s: float) -> dict[str, str]:
    """What a pod is told of its home and of the work area; `WorkArea.of` and `open_store` read it."""
    told = {"EYRIE_HOME": home, "HOME": "/tmp"}
    if isinstance(placement.work, S3Work):
        told |= {"EYRIE_ARTIFACTS_URL": placement.work.url, "EYRIE_ARTIFACTS_REGION": placement.work.region,
                 SYNC_VARIABLE: f"{sync_s:g}"}
        if placement.work.states == "ranged":
            told[STATES_VARIABLE] = "ranged"
        if placement.work.endpoint_url is not None:
            told["EYRIE_ARTIFACTS_ENDPOINT_URL"] = placement.work.endpoint_url
        if placement.work.credentials_secret is not None:
            told["EYRIE_ARTIFACTS_CREDENTIALS_DIR"] = CREDENTIALS_DIR
    return told


def split_drafter(path: Path) -> tuple[str, str]:
    """The store's prefix of the training, and the part of it, of a drafter's path below EYRIE_HOME."""
    return Path(*path.parts[:5]).as_posix(), Path(*path.parts[5:]).as_posix()


class _Sync:
    """Brings what changes in one stage's directory up, again and again."""

    def __init__(self, store: ArtifactStore, directory: Path, prefix: str, share: int = _SYNC_SHARE) -> None:
        """`share`: pauses are at least so many times what the last sync took."""
        self._store, self._directory, self._prefix, self._share = store, directory, prefix, share
        self._sent: dict[str, tuple[int, int, int]] = {}
        self._ending = threading.Event()

    def begin(self) -> None:
        """What the store has of this directory is here, and the same."""
        there = {one.key.removeprefix(f"{self._prefix}/") for one in self._store.list(self._prefix)}
        self._sent = {name: mark for name, mark in _marks(self._directory).items() if name in there}

    @contextmanager
    def every(self, sync_s: float) -> Iterator[None]:
        """Sync in a thread, and once more when the stage ends without a manifest (told to stop, or failed)."""
        thread = threading.Thread(target=self._repeat, args=(sync_s,), name="eyrie-sync", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join()
            if not (self._directory / MANIFEST).exists():
                self._try()
            shutil.rmtree(self._directory / _PICTURE, ignore_errors=True)

    def _repeat(self, sync_s: float) -> None:
        pause_s = sync_s
        while not self._ending.wait(pause_s):
            began = time.monotonic()
            self._try()
            pause_s = max(sync_s, self._share * (time.monotonic() - began))

    def _try(self) -> None:
        try:
            self.once()
        except (EyrieError, OSError) as error:  # the stage goes on; what is not up yet goes up the next time
            print(f"sync: {type(error).__name__}: {error}", flush=True)

    def once(self) -> None:
        """Bring one moment of the directory up, and remove what is no longer in it."""
        found = _take_picture(self._directory)
        picture = self._directory / _PICTURE
        # In the order the stage wrote them, data before its mention: killed on the way, the store holds what a stage
        # could have left that was killed itself.
        for name in sorted(found, key=lambda one: _written(one, found[one])):
            if self._sent.get(name) != found[name]:
                self._store.upload(f"{self._prefix}/{name}", picture / name)
                self._sent[name] = found[name]
        for stored in list(self._store.list(self._prefix)):
            name = stored.key.removeprefix(f"{self._prefix}/")
            if name not in found:
                self._store.delete(stored.key)
                self._sent.pop(name, None)


def _take_picture(directory: Path) -> dict[str, tuple[int, int, int]]:
    """One moment of a directory under `.sync`, and what its files were: inode, size, time of change."""
    for _ in range(_PICTURES):
        shutil.rmtree(directory / _PICTURE, ignore_errors=True)
        before = _marks(directory)
        try:
            for name in before:
                path = directory / _PICTURE / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if name.endswith(_GROWING):
                    shutil.copyfile(directory / name, path)
                else:
                    os.link(directory / name, path)
        except FileNotFoundError:
            continue  # renamed or removed meanwhile
        after = _marks(directory)
        if _renamed(before) == _renamed(after):
            return before
        time.sleep(0.05)
    raise Transient(f"{directory} changes faster than it can be pictured", "will try at the next sync")


def _marks(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Of every visible file, manifest left out: a finished directory goes up by `upload_dir`."""
    marks = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if name.as_posix() != MANIFEST and not any(part.startswith(".") for part in name.parts) and path.is_file():
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            marks[name.as_posix()] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return marks


def _written(name: str, mark: tuple[int, int, int]) -> tuple[int, int, bool]:
    """When a file was written. Clocks of file systems tick some hundred times a second: within a tick, what lies deeper
    was first, and what is text came last, since indexes are text and training states lie above checkpoints."""
    return mark[2], -name.count("/"), name.endswith((".json", *_GROWING))


def _renamed(marks: dict[str, tuple[int, int, int]]) -> dict[str, int]:
    """What tells two moments apart: files written aside and renamed. Files that grow are whole at any length."""
    return {name: mark[0] for name, mark in marks.items() if not name.endswith(_GROWING)}


def patiently(put: Callable[[], None]) -> None:
    """Call `put` until it succeeds, for a quarter of an hour of a store that is away. Raises what it raised last."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            put()
            return
        except Transient as error:
            if time.monotonic() >= deadline:
                raise
            print(f"store: {error}", flush=True)
            time.sleep(min(error.after_s, 30.0))
