"""S3, or any store that speaks its protocol, as an artifact store.

- Requests carry an MD5, which servers verify (the newer checksums are not used: not every server supports them); the
  SHA-256 of the object is stored in its metadata and compared whenever the whole object is read.
- Large files are uploaded in parts (`s3_client`) and downloaded as ranges into one file; each range resumes after a
  broken connection.
- `write_once` is a conditional write where the server honours If-None-Match, which `check` tests.

Observed of the two servers of the tests: rclone 1.75 verifies signatures and MD5s, but ignores If-None-Match and folds
the case of metadata names; moto 5.2 honours If-None-Match and verifies neither.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.exceptions import ClientError

from eyrie_api.artifacts import digest_bytes, digest_file, s3_client, temporary_file
from eyrie_api.artifacts.store import (
    AlreadyWritten,
    Sent,
    StoreAccessDenied,
    StoredObject,
    StoreOptions,
    StoreUnavailable,
    checked_key,
    directory_prefix,
    ignore,
    other_bytes,
)
from eyrie_api.errors import RUN_AGAIN, ArtifactCorrupt, ArtifactMissing, InvalidInput

log = logging.getLogger(__name__)

DIGEST = "eyrie-sha256"
PAGE = 1000
"""Most objects that one request lists or deletes."""

_CHUNK = 1 << 20
_KNOWS_NO_CONDITION = ("NotImplemented", "501", "InvalidArgument", "InvalidRequest")


class S3Store:
    """`ArtifactStore` below a prefix of a bucket."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        parts = urlsplit(url)
        if not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
            raise InvalidInput("the artifact store's URL does not name a bucket alone",
                               "write s3://bucket or s3://bucket/prefix; credentials come from a mounted Secret or the "
                               "environment, never from a URL")
        self._prefix = directory_prefix(unquote(parts.path).lstrip("/"))
        self.url, self.parallel = f"s3://{parts.netloc}/{self._prefix}".rstrip("/"), options.parallel
        self._bucket = s3_client.Bucket(parts.netloc, options, self.url)
        self._conditional: bool | None = None

    def check(self) -> bool:
        """See `ArtifactStore`. Tests whether the server honours If-None-Match: some ignore it silently."""
        place: dict[str, Any] = {"Bucket": self._bucket.name, "Key": f"{self._prefix}_check/{uuid.uuid4().hex}"}
        with self._bucket.translating_errors("the check of the store"):
            self._bucket.client.put_object(**place, Body=b"first")
            try:
                try:
                    self._bucket.client.put_object(**place, Body=b"second", IfNoneMatch="*")
                    self._conditional = False
                except ClientError as error:
                    if s3_client.code_of(error) not in (*s3_client.ALREADY_EXISTS, *_KNOWS_NO_CONDITION):
                        raise
                    self._conditional = s3_client.code_of(error) in s3_client.ALREADY_EXISTS
                self._bucket.client.get_object(**place)["Body"].read()
            finally:
                self._bucket.client.delete_object(**place)
        if not self._conditional:
            log.warning("%s ignores If-None-Match: two writers of one manifest are detected by reads before and after "
                        "the write, with a race of milliseconds", self._bucket.options.endpoint_url or "S3")
        return self._conditional

    def stat(self, key: str) -> StoredObject | None:
        try:
            with self._bucket.translating_errors(key):
                head = self._bucket.client.head_object(**self._place(key))
        except ArtifactMissing:
            return None
        return StoredObject(key, head["ContentLength"], _digest_of(head))

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        read: list[bytes] = []
        stop = None if length is None else start + length
        expected = self._fetch(key, start, stop, lambda _, chunk: read.append(chunk)) if length != 0 else None
        data = b"".join(read)
        if start == 0 and length is None:
            self._compare(key, digest_bytes(data), expected)
        return data

    def write(self, key: str, data: bytes) -> None:
        with self._bucket.translating_errors(key):
            self._put(key, data)

    def write_once(self, key: str, data: bytes) -> bool:
        if not (self.check() if self._conditional is None else self._conditional):
            if self.stat(key) is None:
                self.write(key, data)
                self._refuse_other(key, data)
                return True
        else:
            try:
                with self._bucket.translating_errors(key):
                    self._put(key, data, IfNoneMatch="*")
                return True
            except AlreadyWritten:
                pass
        self._refuse_other(key, data)
        return False

    def upload(self, key: str, source: Path, sent: Sent = ignore) -> None:
        digest, size = digest_file(source), source.stat().st_size
        if size > self._bucket.options.part_size_bytes:
            s3_client.upload_in_parts(self._bucket, self._place(key)["Key"], source, digest, {DIGEST: digest}, sent)
            return
        data = source.read_bytes()
        if digest_bytes(data) != digest:
            raise s3_client.changed(source)
        self.write(key, data)
        sent(size)

    def write_stream(self, key: str, chunks: Iterable[bytes], *, size_bytes: int, sha256: str) -> None:
        if size_bytes > self._bucket.options.part_size_bytes:
            s3_client.upload_stream(self._bucket, self._place(key)["Key"], chunks, size_bytes, sha256, {DIGEST: sha256})
            return
        data = next(s3_client.in_parts(chunks, size_bytes + 1), b"")
        if (len(data), digest_bytes(data)) != (size_bytes, sha256):
            raise other_bytes(key)
        self.write(key, data)

    def download(self, key: str, target: Path, *, sha256: str | None = None) -> None:
        stored = self.stat(key)
        if stored is None:
            raise self._bucket.missing(key)
        step = self._bucket.options.part_size_bytes
        with temporary_file(target) as (file, temporary):
            os.truncate(file.fileno(), stored.size_bytes)
            s3_client.run_all(self.parallel, [
                partial(self._fetch, key, start, min(start + step, stored.size_bytes),
                        lambda at, chunk: os.pwrite(file.fileno(), chunk, at))
                for start in range(0, stored.size_bytes, step)])
            os.fsync(file.fileno())
            self._compare(key, digest_file(temporary), sha256 or stored.sha256)
            os.replace(temporary, target)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        below = self._prefix + directory_prefix(prefix)
        pages = self._bucket.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket.name, Prefix=below, PaginationConfig={"PageSize": PAGE})
        with self._bucket.translating_errors(f"the list of {below}"):
            for page in pages:
                for item in page.get("Contents", ()):
                    yield StoredObject(item["Key"].removeprefix(self._prefix), item["Size"])

    def delete(self, key: str) -> None:
        with self._bucket.translating_errors(key):
            self._bucket.client.delete_object(**self._place(key))

    def delete_all(self, prefix: str) -> None:
        doomed = [{"Key": self._place(stored.key)["Key"]} for stored in self.list(prefix)]
        for start in range(0, len(doomed), PAGE):
            batch = {"Objects": doomed[start:start + PAGE], "Quiet": True}
            with self._bucket.translating_errors(prefix):
                answer = self._bucket.client.delete_objects(Bucket=self._bucket.name, Delete=batch)
            for error in answer.get("Errors", ()):
                raise StoreAccessDenied(f"{error.get('Key')} in {self.url} could not be deleted: {error.get('Code')}",
                                   "check that the credentials permit deletion")

    def sweep_unfinished(self, prefix: str = "", *, older_than_s: float) -> int:
        before = datetime.fromtimestamp(time.time() - older_than_s, UTC)
        below = self._prefix + directory_prefix(prefix)
        pages = self._bucket.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket.name, Prefix=below)
        try:
            with self._bucket.translating_errors(f"list of unfinished uploads below {below}"):
                old = [upload for page in pages for upload in page.get("Uploads", ()) if upload["Initiated"] <= before]
        except ArtifactMissing:  # rclone's server answers NoSuchUpload where no upload has begun since its start
            return 0
        for upload in old:
            s3_client.abort(self._bucket, upload["Key"], upload["UploadId"])
        return len(old)

    def _place(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket.name, "Key": self._prefix + checked_key(key)}

    def _put(self, key: str, data: bytes, **conditions: str) -> None:
        self._bucket.client.put_object(**self._place(key), Body=data, Metadata={DIGEST: digest_bytes(data)},
                                       ContentMD5=s3_client.md5_base64(data), **conditions)

    def _refuse_other(self, key: str, data: bytes) -> None:
        if self.read(key) != data:
            raise AlreadyWritten(f"{key} is in {self.url} already, with other bytes",
                                 "artifacts are immutable: write under another key")

    def _compare(self, key: str, digest: str, expected: str | None) -> None:
        if expected not in (None, digest):
            raise ArtifactCorrupt(f"{key} in {self.url} is {digest}, not {expected}", RUN_AGAIN)

    def _fetch(self, key: str, start: int, stop: int | None, take: Callable[[int, bytes], object]) -> str | None:
        """Read bytes [start, stop) and pass each chunk with its offset to `take`; return the object's stored digest.

        After a broken connection the read resumes at the current offset, up to `max_attempts` times without progress.
        """
        at, attempt, digest = start, 0, None
        while True:
            try:
                with self._bucket.translating_errors(key):
                    part = {"Range": f"bytes={at}-{'' if stop is None else stop - 1}"} if at or stop else {}
                    answer = self._bucket.client.get_object(**self._place(key), **part)
                    digest = _digest_of(answer)
                    for chunk in answer["Body"].iter_chunks(_CHUNK):
                        take(at, chunk)
                        at, attempt = at + len(chunk), 0
                return digest
            except s3_client.RangeNotSatisfiable:
                return digest
            except StoreUnavailable:
                attempt += 1
                if attempt >= self._bucket.options.max_attempts:
                    raise
                time.sleep(min(2.0**attempt / 10, 20.0))


def _digest_of(answer: dict[str, Any]) -> str | None:
    # Some servers fold the case of metadata names.
    return next((value for name, value in answer.get("Metadata", {}).items() if name.lower() == DIGEST), None)
