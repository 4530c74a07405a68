"""The interface of an artifact store, whatever holds the bytes, and the options to open one with (`open_store`).

Keys are relative paths with forward slashes; no component begins with a dot (temporary names do). Every object carries
the SHA-256 of its bytes, computed before the upload and compared after a download, so that corruption on the way or in
the store is found. A ranged read cannot be compared, so formats that read ranges keep digests of their own blocks.

Manifests are written with `write_once`: of two writers with different bytes, the second is refused. A store that cannot
guarantee that (an S3 server that ignores If-None-Match overwrites silently) reports it in `check`. There the object is
read before and after the write, which leaves a race of milliseconds.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from pydantic import Field, ValidationError

from eyrie_api.contract.model import FromVariables
from eyrie_api.contract.rules import rule_of
from eyrie_api.errors import ArtifactCorrupt, Conflict, InvalidInput, Permanent, Transient

_KEY = re.compile(r"(?:[^./\\\x00-\x1f][^/\\\x00-\x1f]*)(?:/[^./\\\x00-\x1f][^/\\\x00-\x1f]*)*")

_PIECE_BYTES = 8 * 2**20


class StoreUnavailable(Transient):
    """The store does not respond, or throttles requests."""


class StoreAccessDenied(Permanent):
    """Credentials rejected, or permission missing."""

    exit_code = 77  # EX_NOPERM


class AlreadyWritten(Conflict):
    """The object exists, with other bytes."""


Sent = Callable[[int], None]


def ignore(_num_bytes: int) -> None:
    """For callers who do not follow an upload."""


@dataclass(frozen=True)
class StoredObject:
    key: str
    size_bytes: int
    sha256: str | None = None
    """`sha256:<hex>` where known: always from `stat` of an object that Eyrie wrote, never from `list`."""


class ArtifactStore(Protocol):
    """A place for artifacts.

    Every method raises StoreUnavailable for transient failures, StoreAccessDenied without permission, InvalidInput for
    an invalid key or bucket.
    """

    @property
    def url(self) -> str:
        """The URL of `open_store`, with an absolute path."""

    @property
    def parallel(self) -> int:
        """How many objects may be transferred at once."""

    def check(self) -> bool:
        """Write, write again, read and delete a small object: tests credentials, bucket and permissions. Returns
        whether `write_once` is atomic."""

    def stat(self, key: str) -> StoredObject | None:
        """The object's metadata; None when there is no such object."""

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length), fewer at the end; by default all of them, compared with their digest. Raises
        ArtifactMissing, ArtifactCorrupt."""

    def write(self, key: str, data: bytes) -> None:
        """Write or replace an object; readers see the old one or the new one."""

    def write_once(self, key: str, data: bytes) -> bool:
        """Create an object. False when it exists with the same bytes. Raises AlreadyWritten."""

    def upload(self, key: str, source: Path, sent: Sent = ignore) -> None:
        """Upload a file. After an interruption the next call resumes, where the store supports it.

        sent   called with the number of bytes whenever some more are in the store; from several threads
        """

    def write_stream(self, key: str, chunks: Iterable[bytes], *, size_bytes: int, sha256: str) -> None:
        """Write or replace an object whose bytes are made while they are sent; memory holds one part of it. Raises
        ArtifactCorrupt when the chunks have another size or digest: the object is then as it was before."""

    def download(self, key: str, target: Path, *, sha256: str | None = None) -> None:
        """Download an object into a file, atomically.

        sha256   the expected digest; by default the one it was written with. Raises ArtifactMissing, ArtifactCorrupt.
        """

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Objects below `prefix/`, in order of key; all of them by default."""

    def delete(self, key: str) -> None:
        """Delete an object; no error when there is none."""

    def delete_all(self, prefix: str) -> None:
        """Delete every object below `prefix/`."""

    def sweep_unfinished(self, prefix: str = "", *, older_than_s: float) -> int:
        """Abort interrupted uploads below `prefix/`, which readers never see; return their number."""


def checked_key(key: str) -> str:
    """The key, if it is valid. Raises InvalidInput."""
    if not _KEY.fullmatch(key):
        raise InvalidInput(f"{key!r} is not an artifact key",
                           "write a relative path with forward slashes in which no name begins with a dot")
    return key


def digest_stored(store: ArtifactStore, key: str, size_bytes: int) -> str:
    """`sha256:<hex>` of an object's bytes, which are read in pieces and not kept."""
    sha = hashlib.sha256()
    for start in range(0, size_bytes, _PIECE_BYTES):
        sha.update(store.read(key, start=start, length=min(_PIECE_BYTES, size_bytes - start)))
    return "sha256:" + sha.hexdigest()


def other_bytes(key: str) -> ArtifactCorrupt:
    """The error for chunks that do not have the size and the digest that they were announced with."""
    return ArtifactCorrupt(f"what was to be written as {key} has another digest than before", "retry the job")


def directory_prefix(prefix: str) -> str:
    """`prefix/`, or empty for the whole store. Raises InvalidInput."""
    prefix = prefix.rstrip("/")
    return checked_key(prefix) + "/" if prefix else ""


VariablesT = TypeVar("VariablesT", bound=FromVariables)

PREFIX = "EYRIE_ARTIFACTS_"
MIN_PART_BYTES = 5 * 2**20
"""S3's smallest part, the last one excepted."""


def from_variables(kind: type[VariablesT], prefix: str, environ: Mapping[str, str] | None = None,
                   secret: Collection[str] = (), **given_values: object) -> VariablesT:
    """Settings from the variables named after their fields, but for those given. Raises InvalidInput naming the
    variable that is wrong.

    secret   fields whose values the error does not contain, because messages reach logs
    """
    environ = os.environ if environ is None else environ
    names = {name: prefix + name.upper() for name in kind.model_fields if name not in given_values}
    values = {name: environ[variable] for name, variable in names.items() if environ.get(variable)}
    try:
        return kind.model_validate(values | given_values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        value = "<secret>" if name in secret else repr(values.get(name))
        raise InvalidInput(f"{names[name]} = {value}: {rule_of(first)}", "correct or unset the variable") from error


class StoreOptions(FromVariables):
    """Location of the artifact store and access to it, read from EYRIE_ARTIFACTS_* variables.

    The control plane and stage programs read the same variables, so that a chart sets them once. Credentials are not
    among them: they come from a mounted Secret (`credentials_dir`, one file per value) or from boto3's default chain
    (AWS_ACCESS_KEY_ID ..., a profile, a pod's web identity), and are never part of a spec, a status or a log line.
    """

    url: str | None = None
    """`s3://bucket/prefix`, `file:///directory` or a path. Default: artifacts stay in the job's directory."""

    endpoint_url: str | None = Field(None, pattern=r"^https?://")
    """Of an S3-compatible store; default: AWS."""

    region: str = Field("us-east-1", min_length=1)
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """How a request names the bucket. `auto`: in the path where endpoint_url is set, in the host name at AWS."""

    credentials_dir: Path | None = None
    """Directory with the files `access_key`, `secret_key` and, if need be, `session_token`: a mounted Secret."""

    part_size_bytes: int = Field(16 * 2**20, ge=MIN_PART_BYTES, le=5 * 2**30)
    """Larger files are transferred in parts of this size. Each part in flight takes this much memory."""

    parallel: int = Field(4, ge=1, le=64)
    """Parts, or small files, in flight."""

    timeout_s: float = Field(60.0, gt=0.0)
    """Of a connection attempt, and between two reads of a response."""

    max_attempts: int = Field(6, ge=1, le=20)
    """Attempts of one request before StoreUnavailable is raised; the waits between them double."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "StoreOptions":
        """Read EYRIE_ARTIFACTS_URL, ... Raises InvalidInput naming the variable that is wrong."""
        return from_variables(cls, PREFIX, environ)

    def credentials(self) -> dict[str, str]:
        """`access_key`, `secret_key` and, if there is one, `session_token` of `credentials_dir`; empty without one.
        Raises InvalidInput where one is missing."""
        directory = self.credentials_dir
        if directory is None:
            return {}
        values = {name: (directory / name).read_text().strip() for name in ("access_key", "secret_key", "session_token")
                 if (directory / name).is_file()}
        missing = [name for name in ("access_key", "secret_key") if not values.get(name)]
        if missing:
            raise InvalidInput(f"EYRIE_ARTIFACTS_CREDENTIALS_DIR: {directory} lacks {' and '.join(missing)}",
                               "mount a Secret with the keys access_key and secret_key there")
        return values


T = TypeVar("T")

RETRY_S = 900.0
"""How long a request is tried: what it would save is up to hours of work."""


def while_unavailable(action: Callable[[], T]) -> T:
    """Call `action` until it succeeds, for up to RETRY_S of Transient errors; raises the last one then."""
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return action()
        except Transient as error:
            if time.monotonic() >= deadline:
                raise
            print(f"store: {error}", flush=True)
            time.sleep(min(error.after_s, 30.0))
