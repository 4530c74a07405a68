"""How S3 is reached, and what its failures mean. With `s3` and `s3_parts` the one door to boto3.

Single requests are retried by botocore (standard mode: exponential waits; throttling, 5xx, broken connections). What
remains becomes StoreAway, which whoever drives the stage retries, or StoreRefused or InvalidInput, which nobody should.
Messages name the store, the key and the server's code; never a credential, a signature or a URL that may hold one.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
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

from eyrie_api.artifacts.options import StoreOptions
from eyrie_api.artifacts.store import AlreadyWritten, StoreAway, StoreRefused
from eyrie_api.errors import ArtifactMissing, EyrieError, InvalidInput, Permanent

TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MAY_PASS = ("SlowDown", "RequestTimeout", "InternalError", "BadDigest")


class BeyondTheEnd(Permanent):
    """A range that begins at or after the object's end."""

    reason = "BeyondTheEnd"


class Bucket:
    """One bucket: boto3's client, and the one way to ask it anything."""

    def __init__(self, name: str, options: StoreOptions, url: str) -> None:
        self.name, self.options, self.url = name, options, url
        self.client = _client(options)

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Requests about `what`; failures leave as ours."""
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise self._translated(error, what) from error

    def missing(self, key: str) -> ArtifactMissing:
        """No such object."""
        return ArtifactMissing(f"no {key} in {self.url}", "run the stage that writes it, or retry the job")

    def _translated(self, error: ClientError | BotoCoreError, what: str) -> EyrieError:
        if isinstance(error, ClientError):
            return self._answered(code_of(error), error, what)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreRefused(f"no credentials for {self.url}", "set EYRIE_ARTIFACTS_CREDENTIALS_DIR to a directory "
                                "with access_key and secret_key, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        name = type(error).__name__
        if isinstance(error, SSLError):
            return StoreRefused(f"{self.url}: the server's certificate is not trusted", "set AWS_CA_BUNDLE")
        if isinstance(error, HTTPClientError | BotoConnectionError | IncompleteReadError):
            return StoreAway(f"{self.url} did not answer for {what}: {name}")
        return InvalidInput(f"{self.url} cannot be asked for {what}: {name}", "correct EYRIE_ARTIFACTS_*")

    def _answered(self, code: str, error: ClientError, what: str) -> EyrieError:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in TAKEN:
            return AlreadyWritten(f"{what} is in {self.url} already", "write under another key")
        if code == "NoSuchBucket":
            return InvalidInput(f"bucket {self.name!r} does not exist", "make it, or correct EYRIE_ARTIFACTS_URL")
        if status == 416:
            return BeyondTheEnd(f"{what} in {self.url} ends before that")
        if status == 404:
            return self.missing(what)
        if status in (408, 429) or status >= 500 or code in _MAY_PASS:
            return StoreAway(f"{self.url} answered {code} for {what}")
        return StoreRefused(f"{self.url} answered {code} for {what}",
                            "check EYRIE_ARTIFACTS_*, the credentials, their rights and the clock")


def code_of(error: ClientError) -> str:
    """The server's own word for what is wrong."""
    return str(error.response.get("Error", {}).get("Code", ""))


def all_done(parallel: int, jobs: list[Callable[[], object]]) -> None:
    """Do them in order, `parallel` at once; after a failure no other is begun, and it is raised."""
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
            failed.set()  # also when this thread was asked to stop


def _client(options: StoreOptions) -> Any:
    style: str = options.addressing
    if style == "auto":
        style = "path" if options.endpoint_url else "virtual"  # few S3-compatible stores have a DNS name per bucket
    config = Config(
        signature_version="s3v4", s3={"addressing_style": style},
        retries={"mode": "standard", "total_max_attempts": options.max_attempts},
        connect_timeout=min(options.timeout_s, 10.0), read_timeout=options.timeout_s, tcp_keepalive=True,
        max_pool_connections=options.parallel * (options.parallel + 1),  # files at once, each with parts at once
        # Not every server knows the newer checksums, and a ranged read cannot be compared with one (rclone's answers
        # fail boto3's comparison): MD5 per request and SHA-256 per object are ours.
        request_checksum_calculation="when_required", response_checksum_validation="when_required")
    return boto3.session.Session().client("s3", endpoint_url=options.endpoint_url, region_name=options.region,
                                          config=config, **_credentials(options.credentials_dir))


def _credentials(directory: Path | None) -> dict[str, str]:
    if directory is None:
        return {}
    names = {"access_key": "aws_access_key_id", "secret_key": "aws_secret_access_key",
             "session_token": "aws_session_token"}
    found = {name: (directory / name).read_text().strip() for name in names if (directory / name).is_file()}
    missing = [name for name in ("access_key", "secret_key") if not found.get(name)]
    if missing:
        raise InvalidInput(f"EYRIE_ARTIFACTS_CREDENTIALS_DIR: {directory} has no {' and no '.join(missing)}",
                           "mount a Secret with the keys access_key and secret_key there")
    return {names[name]: value for name, value in found.items()}
