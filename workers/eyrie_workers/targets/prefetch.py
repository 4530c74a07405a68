"""Fills the model cache of a cluster: a target of the Hub is downloaded once, verified, and recorded.

`fill` is called by the first task of a pipeline (`stages.prefetch`) and, as a program, by an init container of each
engine's pod. Called again, or by several at once, it does the work once:

1. the link of the revision leads to a snapshot whose files have the recorded sizes and times: nothing to do;
2. it takes the model's lock; another task that holds it is waited for;
3. files that are there already are hashed and compared with the Hub's digests; a damaged one is removed;
4. it waits until there is space for the rest, and downloads it;
5. the new files are hashed and compared; the record is written, then the link.

Killed at any line it leaves whole files, which the next run does not download again, and no link. A file that was
being downloaded is begun again: huggingface_hub gives each download a file of its own, since locks do not work on every
shared file system. Where they do not, two tasks download twice and neither damages what the other has written.

Other targets need no cache: a directory is read where it is, `quickstart` is in the image, and there are no others
(`loading.resolve`).

Token and mirror are those of the environment: HF_TOKEN and HF_ENDPOINT.
"""

import argparse
import errno
import fcntl
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from eyrie_api.artifacts import digest_file, write_atomically, write_sealed
from eyrie_api.contract.targets import JobTarget
from eyrie_api.errors import (
    ArtifactCorrupt,
    DiskTooSmall,
    EyrieError,
    InvalidInput,
    TargetNotFound,
    Transient,
    report_error,
)
from eyrie_api.full_disk import MIN_FREE_BYTES, is_full, total_and_free_bytes
from eyrie_api.quantities import duration, size
from eyrie_workers.targets import model_cache
from eyrie_workers.targets.model_cache import CachedFile, CachedModel

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 60.0, 60.0)
"""Between the attempts to reach a Hub that does not answer. An attempt that brought a file starts the count again."""

_MB = 1e6
_POLL_S = 0.5
_WAIT_S = 1.0
_SAY_AGAIN_S = 60.0
_ABANDONED_S = 3600.0
"""A partial file last written to so long ago belongs to a task that was killed."""

_PASSES = 3
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


T = TypeVar("T")


class Report(Protocol):
    """Where `fill` reports its progress; `stage_program.Stage` is one."""

    def pause_point(self) -> None:
        """Raise where a stop was requested."""

    def progress(self, done: float, total: float | None, unit: str, message: str = "") -> None:
        """Amount done of a phase, in MB."""

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """What happened."""


@dataclass(frozen=True)
class _HubFile:
    """A file of a revision, as the Hub lists it."""

    size_bytes: int
    digest: str
    """`sha256:<hex>` of a large file, `git:<hex>` of one that is kept in git, which hashes a header with it."""


def fill(cache: Path, target: JobTarget, report: Report, pauses_s: tuple[float, ...] = PAUSES_S) -> Path:
    """The directory of a target of the Hub in the cache, filled if it is not whole. Raises TargetNotFound where the Hub
    has no such model or does not show it without a token, DiskTooSmall where the volume is smaller than the model,
    ArtifactCorrupt where downloads keep differing from the Hub's digests, InvalidInput where the cache cannot be
    written, Transient where the Hub stays unreachable."""
    name = f"{target.model} (revision {target.revision or model_cache.DEFAULT_REVISION})"
    snapshot = _whole(cache, target)
    if snapshot is None:
        ours = Path(model_cache.revision_link(cache, target)).parent
        try:
            ours.mkdir(parents=True, exist_ok=True)
            with _lock(ours / "lock", name, report):
                snapshot = _whole(cache, target)  # race: the task that was waited for has filled it
                if snapshot is None:
                    return _Filling(cache, target, report, pauses_s).run()
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            raise InvalidInput(f"the model cache {cache} does not hold {name} whole, and cannot be written: "
                               f"{error.strerror}",
                               "make the volume writable for the pods' user, or fill it where it is") from error
    report.event("TargetCached", f"{name} is in the model cache: {snapshot.name}")
    return snapshot


def _whole(cache: Path, target: JobTarget) -> Path | None:
    snapshot = model_cache.cached_snapshot(cache, target)
    record = None if snapshot is None else model_cache.read_record(snapshot)
    if snapshot is None or record is None or not all(model_cache.unchanged(snapshot, file) for file in record.files):
        return None
    return snapshot


@contextmanager
def _lock(path: Path, name: str, report: Report) -> Iterator[None]:
    """Hold the lock of a model. It is freed by the kernel, or the file server, when its holder dies."""
    with path.open("a+") as file:
        said = -_SAY_AGAIN_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - said >= _SAY_AGAIN_S:
                    said = time.monotonic()
                    report.event("ModelCacheBusy", f"waiting for {path.read_text().strip() or 'another task'}, which "
                                                   f"fills the model cache with {name}")
            report.pause_point()
            time.sleep(_WAIT_S)
        file.truncate(0)
        file.write(f"{socket.gethostname()}\n")
        file.flush()
        yield


class _Filling:
    """One run of steps 3 to 5, under the lock."""

    def __init__(self, cache: Path, target: JobTarget, report: Report, pauses_s: tuple[float, ...]) -> None:
        self._cache, self._target, self._report, self._pauses_s = cache, target, report, pauses_s
        self._home = Path(model_cache.model_dir(cache, target.model))
        known = model_cache.cached_snapshot(cache, target)
        record = None if known is None else model_cache.read_record(known)
        # A revision that was filled before stays at its commit; what is whole of it needs no Hub.
        if record is not None:
            self._commit = record.commit
            self._listed = {file.path: _HubFile(file.size_bytes, file.sha256) for file in record.files}
        else:
            self._commit, self._listed = self._with_retries(lambda: _listing(target))
            known = self._home / "snapshots" / self._commit
            record = model_cache.read_record(known)
        self._snapshot = self._home / "snapshots" / self._commit
        self._verified = {} if record is None else {
            file.path: file for file in record.files if model_cache.unchanged(self._snapshot, file)}

    def run(self) -> Path:
        """Returns the snapshot. Raises as `fill`."""
        # Partial files of killed tasks are not resumed. Race: where locks do not work another task may be downloading,
        # so a file that is still written to stays.
        for path in self._partial():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
        for remaining in reversed(range(_PASSES + 1)):
            self._verify()
            missing = sorted(name for name in self._listed if name not in self._verified)
            if not missing:
                return self._record()
            while remaining and not self._download(missing):
                pass
        raise ArtifactCorrupt(f"{missing[0]} of {self._target.model} was downloaded {_PASSES} times and differs from "
                              "the Hub's digest each time", "check the mirror (HF_ENDPOINT), the proxy and the volume")

    def _record(self) -> Path:
        files = tuple(self._verified[name] for name in sorted(self._listed))
        write_sealed(model_cache.record_path(self._snapshot),
                     CachedModel(model=self._target.model, commit=self._commit, files=files))
        # What the Hub's own client reads to find the snapshot of a branch or tag: an operator, for example, in whose
        # pod the cache is mounted as HF_HUB_CACHE.
        revision = self._target.revision or model_cache.DEFAULT_REVISION
        if revision != self._commit and ".." not in Path(revision).parts and not Path(revision).is_absolute():
            write_atomically(self._home / "refs" / revision, self._commit)
        link = Path(model_cache.revision_link(self._cache, self._target))
        new = link.with_name(f".{link.name}")
        new.unlink(missing_ok=True)
        new.symlink_to(Path("..") / "snapshots" / self._commit)
        new.replace(link)
        total = sum(file.size_bytes for file in files)
        self._report.event("TargetFetched", f"{self._target.model} is in the model cache: {len(files)} files, "
                                            f"{size(total)}, commit {self._commit}")
        return self._snapshot

    def _verify(self) -> None:
        """Hash the files that are there and not verified; remove those that differ."""
        present = [name for name in self._listed if name not in self._verified and (self._snapshot / name).is_file()]
        total, done = sum((self._snapshot / name).stat().st_size for name in present), 0
        for name in present:
            self._report.pause_point()
            self._report.progress(done / _MB, total / _MB, "MB", f"verifying {self._target.model}")
            path, listed = self._snapshot / name, self._listed[name]
            before = path.stat()
            digest = hubs = digest_file(path)
            if listed.digest.startswith("git:"):  # git holds no large files, and hashes a header with them
                data = path.read_bytes()
                header = b"blob %d\0" % len(data)
                hubs = "git:" + hashlib.sha1(header + data, usedforsecurity=False).hexdigest()
            if hubs == listed.digest:
                self._verified[name] = CachedFile(path=name, size_bytes=before.st_size, mtime_ns=before.st_mtime_ns,
                                                  sha256=digest)
            else:
                self._report.event("ModelFileDamaged", f"{name} of {self._target.model} differs from the Hub's digest; "
                                                       "it is downloaded again", warning=True)
                path.resolve().unlink(missing_ok=True)  # the blob, of which the snapshot's file is a link
                path.unlink(missing_ok=True)
            done += before.st_size
        if present:
            self._report.progress(total / _MB, total / _MB, "MB", f"verifying {self._target.model}")

    def _download(self, names: list[str]) -> bool:
        """Download files. False where the volume became full meanwhile: there is to be a next call."""
        self._await_space()
        try:
            self._with_retries(lambda: self._run_beside(
                lambda: _download(self._cache, self._target.model, self._commit, names)))
        except OSError as error:
            if not is_full(error):
                raise
            return False
        return True

    def _run_beside(self, action: Callable[[], None]) -> None:
        """Run `action` in a thread and report the bytes that arrive. Raises what it raises."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 (raised again below)
                raised.append(error)

        # A daemon: a program that was asked to stop ends without it.
        thread = threading.Thread(target=run, name="eyrie-prefetch", daemon=True)
        thread.start()
        total = sum(file.size_bytes for file in self._listed.values())
        while True:
            thread.join(_POLL_S)
            self._report.pause_point()
            self._report.progress(min(total, self._arrived()) / _MB, total / _MB, "MB",
                                  f"downloading {self._target.model}")
            if not thread.is_alive():
                break
        if raised:
            raise raised[0]

    def _arrived(self) -> int:
        """Bytes of the listed files that are on the volume, partial ones included."""
        whole = sum(file.size_bytes for name, file in self._listed.items() if (self._snapshot / name).exists())
        partial = 0
        for path in self._partial():
            with suppress(OSError):  # it may have been renamed since
                partial += path.stat().st_size
        return whole + partial

    def _partial(self) -> list[Path]:
        return list((self._home / "blobs").glob("*.incomplete"))

    def _await_space(self) -> None:
        said = -_SAY_AGAIN_S
        while True:
            missing = sum(file.size_bytes for name, file in self._listed.items()
                          if not (self._snapshot / name).exists())
            total, free = total_and_free_bytes(self._home)
            if free >= missing + MIN_FREE_BYTES:
                return
            if total < missing:
                raise DiskTooSmall(
                    f"{self._target.model} takes {size(missing)} more, and the volume of the model cache {self._cache} "
                    f"has {size(total)} in all", "give the model cache a larger volume")
            if time.monotonic() - said >= _SAY_AGAIN_S:
                said = time.monotonic()
                self._report.event(
                    "ModelCacheFull", f"{self._target.model} takes {size(missing)} more, and {size(free)} are free in "
                    f"the model cache {self._cache}: waiting. Remove models that no job or endpoint uses "
                    f"({self._cache}/models--*), or enlarge the volume; it goes on by itself", warning=True)
            self._report.pause_point()
            time.sleep(_WAIT_S)

    def _with_retries(self, action: Callable[[], T]) -> T:
        failures, arrived = 0, -1
        while True:
            try:
                with _hub_errors(self._target):
                    return action()
            except Transient as error:
                so_far = self._arrived() if hasattr(self, "_listed") else 0
                failures, arrived = (0 if so_far > arrived >= 0 else failures) + 1, so_far
                if failures > len(self._pauses_s):
                    raise
                pause_s = self._pauses_s[failures - 1]
                self._report.event("HubUnavailable", f"{error.message}; trying again in {pause_s:g} s", warning=True)
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                self._report.pause_point()
                time.sleep(min(_POLL_S, pause_s))


def _listing(target: JobTarget) -> tuple[str, dict[str, _HubFile]]:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    info = HfApi().model_info(target.model, revision=target.revision, files_metadata=True)
    assert info.sha is not None
    files = {file.rfilename: _HubFile(
        file.size or 0, f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}")
        for file in info.siblings or ()}
    wanted = set(filter_repo_objects(files, allow_patterns=list(model_cache.WANTED_FILES)))
    return info.sha, {name: file for name, file in files.items() if name in wanted}


def _download(cache: Path, model: str, commit: str, names: list[str]) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the package is imported
    from huggingface_hub import snapshot_download

    snapshot_download(model, revision=commit, cache_dir=cache, allow_patterns=names)


@contextmanager
def _hub_errors(target: JobTarget) -> Iterator[None]:
    """Raise errors of the Hub as ours: whether another attempt may succeed, and what the user can do. Those of a full
    disk pass as they are."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    name = f"target.model {target.model!r} (revision {target.revision or model_cache.DEFAULT_REVISION})"
    try:
        yield
    except EyrieError:
        raise
    except HFValidationError as error:
        raise TargetNotFound(f"{name} is no id of the Hub: {error}", "give an id of the form org/name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise TargetNotFound(
                f"the Hub does not show {name}: {type(error).__name__} ({status})",
                "check id and revision; for a gated or private model give HF_TOKEN from a Secret "
                "(secret_variables of the stages' placement) and accept the model's terms") from error
        raise Transient(f"the Hub answered {status} for {target.model}") from error
    except OfflineModeIsEnabled as error:
        raise InvalidInput(f"{name} is not in the model cache, and HF_HUB_OFFLINE forbids to download it",
                           "unset HF_HUB_OFFLINE for the prefetch task, or copy a filled cache") from error
    except Exception as error:
        if is_full(error) or (isinstance(error, OSError) and error.errno in _UNWRITABLE):
            raise
        # Of the client's own network library, of which huggingface_hub changes.
        raise Transient(f"{target.model} could not be downloaded: {type(error).__name__}: {error}") from error


class _Printed:
    def __init__(self) -> None:
        self._began: tuple[str, float, float] | None = None
        self._last_s = 0.0

    def pause_point(self) -> None:
        """SIGTERM ends this program at once."""

    def progress(self, done: float, total: float | None, unit: str, message: str = "") -> None:
        now = time.monotonic()
        if self._began is None or self._began[0] != message:
            self._began = (message, now, done)
        if total is None or (now - self._last_s < 10.0 and done < total):
            return
        self._last_s = now
        rate = (done - self._began[2]) / max(now - self._began[1], 1e-9)
        left = f", {rate:.1f} {unit}/s, {duration((total - done) / rate)} left" if rate > 0 and done < total else ""
        print(f"{message}: {done:,.0f} of {total:,.0f} {unit}{left}", flush=True)

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        print(f"{reason}: {message}", flush=True)


def main() -> int:
    """`python -m eyrie_workers.targets.prefetch --cache DIR --model org/name [--revision R]`."""
    parser = argparse.ArgumentParser(description="Fill a model cache with a target of the Hub.")
    parser.add_argument("--cache", type=Path, required=True, help="directory of the cache")
    parser.add_argument("--model", required=True, help="Hub id, org/name")
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    arguments = parser.parse_args()
    try:
        fill(arguments.cache, JobTarget(model=arguments.model, revision=arguments.revision), _Printed())
    except EyrieError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
