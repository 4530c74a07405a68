"""Large files to S3 in parts, several at once; what was cut off is taken up again.

A small file beside the source (`.name.upload.json`) remembers the upload while it lasts. The next call for the same
bytes asks the server which parts it has and sends the others; a part counts as there when its size and MD5 are ours.
Where nothing can be remembered (a source we may only read), the server refused for good, or not one part more could be
sent (rclone answers SlowDown to a part it has half of, for as long as it lives), the upload is aborted and the next
call begins anew: nobody pays for parts that nobody sees. What a killed machine leaves, `sweep_unfinished` finds.
"""

import base64
import hashlib
import logging
import math
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError
from pydantic import ValidationError

from eyrie_api.artifacts import write_atomically
from eyrie_api.artifacts.s3_client import Bucket, run_all
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError, Transient
from eyrie_api.v1alpha1.model import Frozen

log = logging.getLogger(__name__)

_MAX_PARTS = 10_000


class Upload(Frozen):
    """An upload in parts, as the file beside its source remembers it."""

    url: str
    key: str
    sha256: str
    size_bytes: int
    part_size_bytes: int
    upload_id: str = ""

    @property
    def num_parts(self) -> int:
        """How many parts it has."""
        return math.ceil(self.size_bytes / self.part_size_bytes)


def upload_in_parts(bucket: Bucket, key: str, source: Path, sha256: str, metadata: dict[str, str]) -> None:
    """Put the bytes of `source`, whose digest is `sha256`, at `key` (prefix included)."""
    size = source.stat().st_size
    wanted = Upload(url=bucket.url, key=key, sha256=sha256, size_bytes=size,
                    part_size_bytes=max(bucket.options.part_size_bytes, math.ceil(size / _MAX_PARTS)))
    memory = source.with_name(f".{source.name}.upload.json")
    upload, there = _taken_up(bucket, memory, wanted)
    if not upload.upload_id:
        with bucket.translating_errors(key):
            made = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key, Metadata=metadata)
        upload = upload.model_copy(update={"upload_id": made["UploadId"]})
    remembered = _remember(memory, upload)
    sent: dict[int, str] = {}
    try:
        _send(bucket, source, upload, there, sent)
        _complete(bucket, upload, sent)
    except BaseException as error:
        # What may pass is taken up by the next call, if that will know of it; so is a request to stop.
        if (not remembered or (isinstance(error, EyrieError) and not isinstance(error, Transient))
                or (isinstance(error, Transient) and sent.keys() <= there.keys())):
            _forget(memory)
            abort(bucket, key, upload.upload_id)
        raise
    _forget(memory)


def abort(bucket: Bucket, key: str, upload_id: str) -> None:
    """Let the server forget an upload."""
    try:
        bucket.client.abort_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload_id)
    except (ClientError, BotoCoreError) as error:
        # Called on the way out of other trouble, which is the one to tell.
        log.warning("an unfinished upload of %s could not be aborted: %s", key, type(error).__name__)


def changed(source: Path) -> ArtifactCorrupt:
    """The file is not what it was when its digest was taken."""
    return ArtifactCorrupt(f"{source} changed while it was uploaded", "upload it once its writer has ended")


def md5_base64(data: bytes) -> str:
    """The Content-MD5 header of some bytes."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _taken_up(bucket: Bucket, memory: Path, wanted: Upload) -> tuple[Upload, dict[int, tuple[str, int]]]:
    """The upload that `memory` tells of, if it is of the same bytes and the server still knows it, and its parts."""
    try:
        found = Upload.model_validate_json(memory.read_bytes())
    except (OSError, ValidationError):
        return wanted, {}
    if found.model_copy(update={"upload_id": ""}) != wanted:
        if (found.url, found.key) == (wanted.url, wanted.key):
            abort(bucket, found.key, found.upload_id)
        return wanted, {}
    there: dict[int, tuple[str, int]] = {}
    try:
        with bucket.translating_errors(found.key):
            for page in bucket.client.get_paginator("list_parts").paginate(
                    Bucket=bucket.name, Key=found.key, UploadId=found.upload_id):
                there.update({part["PartNumber"]: (part["ETag"], part["Size"]) for part in page.get("Parts", ())})
    except ArtifactMissing:  # swept, or completed just before we were killed
        return wanted, {}
    return found, there


def _send(bucket: Bucket, source: Path, upload: Upload, there: dict[int, tuple[str, int]],
          etags: dict[int, str]) -> None:
    """Send the parts that are not there; note the ETag of every part by its number."""

    def send(descriptor: int, number: int) -> None:
        data = os.pread(descriptor, upload.part_size_bytes, (number - 1) * upload.part_size_bytes)
        etag, size = there.get(number, ("", -1))
        if size != len(data) or etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
            with bucket.translating_errors(upload.key):
                etag = bucket.client.upload_part(Bucket=bucket.name, Key=upload.key, UploadId=upload.upload_id,
                                                 PartNumber=number, Body=data, ContentMD5=md5_base64(data))["ETag"]
        etags[number] = etag

    with source.open("rb") as file:
        before = os.fstat(file.fileno())
        run_all(bucket.options.parallel,
                 [partial(send, file.fileno(), number) for number in range(1, upload.num_parts + 1)])
        after = os.stat(source)
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise changed(source)


def _complete(bucket: Bucket, upload: Upload, etags: dict[int, str]) -> None:
    parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
    with bucket.translating_errors(upload.key):
        bucket.client.complete_multipart_upload(Bucket=bucket.name, Key=upload.key, UploadId=upload.upload_id,
                                                MultipartUpload={"Parts": parts})


def _remember(memory: Path, upload: Upload) -> bool:
    try:
        write_atomically(memory, upload.model_dump_json())
    except OSError:
        return False
    return True


def _forget(memory: Path) -> None:
    with suppress(OSError):
        memory.unlink()
