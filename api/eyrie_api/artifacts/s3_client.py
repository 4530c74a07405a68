"""The S3 client, the translation of its errors, and uploads in parts. boto3 is imported here and in `s3` only.

botocore retries single requests (standard mode: exponential backoff; throttling, 5xx, broken connections). What remains
becomes StoreUnavailable, which the driver of the stage retries, or StoreAccessDenied or InvalidInput, which are final.
Messages name the store, the key and the server's code; never a credential, a signature or a URL that may hold one.
"""

import base64
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.loaders import create_loader
from botocore.session import get_session
from pydantic import ValidationError

from eyrie_api.artifacts import write_atomically
from eyrie_api.artifacts.store import (
    AlreadyWritten,
    Sent,
    StoreAccessDenied,
    StoreOptions,
    StoreUnavailable,
    ignore,
    other_bytes,
    while_unavailable,
)
from eyrie_api.contract.model import Frozen
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError, InvalidInput, Permanent, Transient

ALREADY_EXISTS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MAX_SKEW_S = 300.0
"""S3 refuses signatures that are 15 minutes off; other stores may be stricter."""

_TRANSIENT_CODES = ("SlowDown", "RequestTimeout", "InternalError", "BadDigest")


# Descriptions of services, parsed once. Each session would parse its own: four fifths of the time of making a client.
_LOADER = create_loader()


class RangeNotSatisfiable(Permanent):
    """A range that begins at or after the object's end (HTTP 416)."""


class Bucket:
    """One bucket: boto3's client, and the translation of its errors."""

    def __init__(self, name: str, options: StoreOptions, url: str) -> None:
        self.name, self.options, self.url = name, options, url
        self.client = _client(options)

    @contextmanager
    def translating_errors(self, what: str) -> Iterator[None]:
        """Requests about `what`; errors of botocore become errors of this package."""
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise self._translated(error, what) from error

    def missing(self, key: str) -> ArtifactMissing:
        return ArtifactMissing(f"no {key} in {self.url}", "run the stage that writes it, or retry the job")

    def _translated(self, error: ClientError | BotoCoreError, what: str) -> EyrieError:
        if isinstance(error, ClientError):
            return self._translated_response(code_of(error), error, what)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreAccessDenied(f"no credentials for {self.url}",
                                     "set EYRIE_ARTIFACTS_CREDENTIALS_DIR to a directory with access_key and "
                                     "secret_key, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        name = type(error).__name__
        if isinstance(error, SSLError):
            return StoreAccessDenied(f"{self.url}: the server's certificate is not trusted", "set AWS_CA_BUNDLE")
        if isinstance(error, HTTPClientError | BotoConnectionError | IncompleteReadError):
            return StoreUnavailable(f"{self.url} did not respond for {what}: {name}")
        return InvalidInput(f"{self.url} rejects the request for {what}: {name}", "correct EYRIE_ARTIFACTS_*")

    def _translated_response(self, code: str, error: ClientError, what: str) -> EyrieError:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in ALREADY_EXISTS:
            return AlreadyWritten(f"{what} is in {self.url} already", "write under another key")
        if code == "NoSuchBucket":
            return InvalidInput(f"bucket {self.name!r} does not exist", "create it, or correct EYRIE_ARTIFACTS_URL")
        if status == 416:
            return RangeNotSatisfiable(f"{what} in {self.url} ends before the requested range")
        if status == 404:
            return self.missing(what)
        if status in (408, 429) or status >= 500 or code in _TRANSIENT_CODES:
            return StoreUnavailable(f"{self.url} answered {code} for {what}")
        date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        behind_s = 0.0
        with suppress(ValueError):  # no date. The code does not say it: an answer to HEAD has no body
            behind_s = parsedate_to_datetime(str(date)).timestamp() - time.time()
        if abs(behind_s) > _MAX_SKEW_S:
            return StoreUnavailable(f"{self.url} answered {code} for {what}: this machine's clock is {behind_s:.0f} s "
                                    "behind the store's, and signatures of another time are refused",
                                    "set the clock; the work continues by itself")
        return StoreAccessDenied(f"{self.url} answered {code} for {what}",
                            "check EYRIE_ARTIFACTS_*, the credentials, their permissions and the clock")


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def run_all(parallel: int, jobs: list[Callable[[], object]]) -> None:
    """Run jobs in order, `parallel` at once. After a failure no further job starts, and the error is raised."""
    failed = threading.Event()  # set by the job itself: the next one would begin before its future could be cancelled

    def do(job: Callable[[], object]) -> None:
        if failed.is_set():
            return
        try:
            job()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, min(parallel, len(jobs))), thread_name_prefix="eyrie-s3") as pool:
        futures = [pool.submit(do, job) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            failed.set()  # also on KeyboardInterrupt in this thread


def _client(options: StoreOptions) -> Any:
    style: str = options.addressing
    if style == "auto":
        style = "path" if options.endpoint_url else "virtual"  # few S3-compatible stores have a DNS name per bucket
    config = Config(
        signature_version="s3v4", s3={"addressing_style": style},
        retries={"mode": "standard", "total_max_attempts": options.max_attempts},
        connect_timeout=min(options.timeout_s, 10.0), read_timeout=options.timeout_s, tcp_keepalive=True,
        max_pool_connections=options.parallel * (options.parallel + 1),  # files at once, each with parts at once
        # Not every server supports the newer checksums, and a ranged read cannot be compared with one (rclone's
        # responses fail boto3's comparison): we send an MD5 per request and keep a SHA-256 per object.
        request_checksum_calculation="when_required", response_checksum_validation="when_required")
    names = {"access_key": "aws_access_key_id", "secret_key": "aws_secret_access_key",
             "session_token": "aws_session_token"}
    credentials = {names[name]: value for name, value in options.credentials().items()}
    session = get_session()
    session.register_component("data_loader", _LOADER)
    return boto3.session.Session(botocore_session=session).client(
        "s3", endpoint_url=options.endpoint_url, region_name=options.region, config=config, **credentials)


log = logging.getLogger(__name__)

_MAX_PARTS = 10_000


# Multipart uploads that resume after an interruption. Not boto3's transfer manager, which resumes nothing: after a kill
# it uploads the whole file again and leaves an orphaned multipart upload. Both send the same requests; ours also has
# the server verify an MD5 of each part, which costs 0.13 s of processor time per 100 MB.


class Upload(Frozen):
    """A multipart upload, as recorded in the file next to its source (`.name.upload.json`) while it is in progress."""

    url: str
    key: str
    sha256: str
    size_bytes: int
    part_size_bytes: int
    upload_id: str = ""

    @property
    def num_parts(self) -> int:
        return math.ceil(self.size_bytes / self.part_size_bytes)


def upload_in_parts(bucket: Bucket, key: str, source: Path, sha256: str, metadata: dict[str, str],
                    report: Sent = ignore) -> None:
    """Put the bytes of `source`, whose digest is `sha256`, at `key` (prefix included); `report` counts them.

    The next call for the same bytes lists the parts the server has and sends the others; a part is complete when its
    size and MD5 match. The upload is aborted, and the next call starts again, when it cannot be recorded (a read-only
    source), when the error is permanent, or when an attempt has sent no further part (rclone answers SlowDown to a part
    of which it has received a half, until it is restarted): otherwise invisible parts would be stored, and billed, for
    ever. `sweep_unfinished` aborts what a lost machine has left.
    """
    size = source.stat().st_size
    wanted = Upload(url=bucket.url, key=key, sha256=sha256, size_bytes=size,
                    part_size_bytes=max(bucket.options.part_size_bytes, math.ceil(size / _MAX_PARTS)))
    record_file = source.with_name(f".{source.name}.upload.json")
    upload, uploaded = _resume(bucket, record_file, wanted)
    if not upload.upload_id:
        with bucket.translating_errors(key):
            created = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key, Metadata=metadata)
        upload = upload.model_copy(update={"upload_id": created["UploadId"]})
    recorded = True
    try:
        write_atomically(record_file, upload.model_dump_json())
    except OSError:
        recorded = False
    sent: dict[int, str] = {}
    try:
        _send(bucket, source, upload, uploaded, sent, report)
        _complete(bucket, upload, sent, metadata)
    except BaseException as error:
        # After a transient error or a request to stop the next call resumes, if the upload is recorded and advances.
        if (not recorded or (isinstance(error, EyrieError) and not isinstance(error, Transient))
                or (isinstance(error, Transient) and sent.keys() <= uploaded.keys())):
            _remove_record(record_file)
            abort(bucket, key, upload.upload_id)
        raise
    _remove_record(record_file)


def upload_stream(bucket: Bucket, key: str, chunks: Iterable[bytes], size: int, sha256: str,
                  metadata: dict[str, str]) -> None:
    """Put chunks of `size` bytes together, whose digest is `sha256`, at `key` (prefix included): one part after the
    other, each tried again while the store is away. Resumes nothing."""
    part_size = max(bucket.options.part_size_bytes, math.ceil(size / _MAX_PARTS))
    with bucket.translating_errors(key):
        created = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key, Metadata=metadata)
    upload = Upload(url=bucket.url, key=key, sha256=sha256, size_bytes=size, part_size_bytes=part_size,
                    upload_id=created["UploadId"])
    sha, sent, etags = hashlib.sha256(), 0, dict[int, str]()
    try:
        for number, data in enumerate(in_parts(chunks, part_size), start=1):
            sha.update(data)
            sent += len(data)
            etags[number] = while_unavailable(partial(_put_part, bucket, upload, number, data))
        if (sent, f"sha256:{sha.hexdigest()}") != (size, sha256):
            raise other_bytes(key)
        _complete(bucket, upload, etags, metadata)
    except BaseException:
        abort(bucket, key, upload.upload_id)
        raise


def in_parts(chunks: Iterable[bytes], part_size: int) -> Iterator[bytes]:
    """The bytes of all chunks, in pieces of `part_size`; the last may be smaller. Pure."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= part_size:
            yield bytes(held[:part_size])
            del held[:part_size]
    if held:
        yield bytes(held)


def abort(bucket: Bucket, key: str, upload_id: str) -> None:
    """Abort a multipart upload; the server deletes its parts."""
    try:
        bucket.client.abort_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload_id)
    except (ClientError, BotoCoreError) as error:
        # Only logged: the caller is raising the error that caused the abort.
        log.warning("an unfinished upload of %s could not be aborted: %s", key, type(error).__name__)


def changed(source: Path) -> ArtifactCorrupt:
    """The error for a file that no longer matches its digest."""
    return ArtifactCorrupt(f"{source} changed while it was uploaded", "upload it after its writer has finished")


def md5_base64(data: bytes) -> str:
    """The Content-MD5 header of the bytes."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _resume(bucket: Bucket, record_file: Path, wanted: Upload) -> tuple[Upload, dict[int, tuple[str, int]]]:
    """The recorded upload and its parts, if it is of the same bytes and the server still has it."""
    try:
        recorded = Upload.model_validate_json(record_file.read_bytes())
    except (OSError, ValidationError):
        return wanted, {}
    if recorded.model_copy(update={"upload_id": ""}) != wanted:
        if (recorded.url, recorded.key) == (wanted.url, wanted.key):
            abort(bucket, recorded.key, recorded.upload_id)
        return wanted, {}
    uploaded: dict[int, tuple[str, int]] = {}
    try:
        with bucket.translating_errors(recorded.key):
            for page in bucket.client.get_paginator("list_parts").paginate(
                    Bucket=bucket.name, Key=recorded.key, UploadId=recorded.upload_id):
                uploaded.update({part["PartNumber"]: (part["ETag"], part["Size"]) for part in page.get("Parts", ())})
    except ArtifactMissing:  # race: swept, or completed just before the process was killed
        return wanted, {}
    return recorded, uploaded


def _send(bucket: Bucket, source: Path, upload: Upload, uploaded: dict[int, tuple[str, int]],
          etags: dict[int, str], report: Sent) -> None:
    """Send the missing parts; store the ETag of every part by its number."""

    def send(descriptor: int, number: int) -> None:
        data = os.pread(descriptor, upload.part_size_bytes, (number - 1) * upload.part_size_bytes)
        etag, size = uploaded.get(number, ("", -1))
        if size != len(data) or etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
            etag = _put_part(bucket, upload, number, data)
        etags[number] = etag
        report(len(data))

    with source.open("rb") as file:
        before = os.fstat(file.fileno())
        run_all(bucket.options.parallel,
                 [partial(send, file.fileno(), number) for number in range(1, upload.num_parts + 1)])
        after = os.stat(source)
    # Race: a writer may have changed the file between its digest and the last part.
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise changed(source)


def _put_part(bucket: Bucket, upload: Upload, number: int, data: bytes) -> str:
    with bucket.translating_errors(upload.key):
        answer = bucket.client.upload_part(Bucket=bucket.name, Key=upload.key, UploadId=upload.upload_id,
                                           PartNumber=number, Body=data, ContentMD5=md5_base64(data))
    return str(answer["ETag"])


def _complete(bucket: Bucket, upload: Upload, etags: dict[int, str], metadata: dict[str, str]) -> None:
    """Make one object of the parts. A retry of a request whose answer was lost finds no upload any more: the object
    then counts as done if it has this size and this metadata, the digest included."""
    parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
    with bucket.translating_errors(upload.key):
        try:
            bucket.client.complete_multipart_upload(Bucket=bucket.name, Key=upload.key, UploadId=upload.upload_id,
                                                    MultipartUpload={"Parts": parts})
        except (ClientError, BotoCoreError) as error:
            answered = isinstance(error, ClientError) and code_of(error) != "NoSuchUpload"
            if answered or not _is_there(bucket, upload, metadata):
                raise


def _is_there(bucket: Bucket, upload: Upload, metadata: dict[str, str]) -> bool:
    """Whether the object of an upload is stored. False also where the store does not say."""
    try:
        head = bucket.client.head_object(Bucket=bucket.name, Key=upload.key)
    except (ClientError, BotoCoreError):
        return False
    there = {name.lower(): value for name, value in head.get("Metadata", {}).items()}  # some servers fold the case
    return head["ContentLength"] == upload.size_bytes and there.items() >= metadata.items()


def _remove_record(record_file: Path) -> None:
    with suppress(OSError):
        record_file.unlink()
