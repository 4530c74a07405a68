"""The S3 client, and the translation of its errors. boto3 is imported here, in `s3` and in `s3_parts` only.

botocore retries single requests (standard mode: exponential backoff; throttling, 5xx, broken connections). What remains
becomes StoreUnavailable, which the driver of the stage retries, or StoreAccessDenied or InvalidInput, which are final.
Messages name the store, the key and the server's code; never a credential, a signature or a URL that may hold one.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
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

from eyrie_api.artifacts.options import StoreOptions
from eyrie_api.artifacts.store import AlreadyWritten, StoreAccessDenied, StoreUnavailable
from eyrie_api.errors import ArtifactMissing, EyrieError, InvalidInput, Permanent

ALREADY_EXISTS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MAX_SKEW_S = 300.0
"""S3 refuses signatures that are 15 minutes off; other stores may be stricter."""

_TRANSIENT_CODES = ("SlowDown", "RequestTimeout", "InternalError", "BadDigest")


class RangeNotSatisfiable(Permanent):
    """A range that begins at or after the object's end (HTTP 416)."""

    reason = "RangeNotSatisfiable"


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
        """No such object."""
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
        behind_s = _clock_behind_s(error)
        if abs(behind_s) > _MAX_SKEW_S:
            return StoreUnavailable(f"{self.url} answered {code} for {what}: this machine's clock is {behind_s:.0f} s "
                                    "behind the store's, and signatures of another time are refused",
                                    "set the clock; it goes on by itself")
        return StoreAccessDenied(f"{self.url} answered {code} for {what}",
                            "check EYRIE_ARTIFACTS_*, the credentials, their permissions and the clock")


def _clock_behind_s(error: ClientError) -> float:
    """How far the wall clock is behind the server's, by the response's Date; 0 without one. The code does not say: an
    answer to HEAD has no body."""
    date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(str(date)).timestamp() - time.time()
    except ValueError:
        return 0.0


def code_of(error: ClientError) -> str:
    """The server's error code."""
    return str(error.response.get("Error", {}).get("Code", ""))


def run_all(parallel: int, jobs: list[Callable[[], object]]) -> None:
    """Run jobs in order, `parallel` at once. After a failure no further job starts, and the error is raised."""
    failed = threading.Event()

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
    return boto3.session.Session().client("s3", endpoint_url=options.endpoint_url, region_name=options.region,
                                          config=config, **credentials)
