"""Data files in a bucket or on a web server: listed and read as streams, without a copy on this machine's disk.

    s3://bucket/key      pyarrow's client, with the endpoint, region and credentials of EYRIE_ARTIFACTS_*, as the
                         artifact store has them; without a credentials directory those of AWS's default chain
    https://host/path    fsspec's client; parquet needs a server that answers ranges

In a bucket a path names an object, the objects directly below a prefix, or by a pattern those of one prefix, with the
rules of `eyrie_api.data_files`; on a web server it names one file.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.data_files import S3, SUFFIXES, is_pattern
from eyrie_api.errors import EyrieError, InvalidInput, Transient

_RETRY_S = 10.0
_DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID",
           "HTTP status 401", "HTTP status 403", "No credentials")
_ABSENT = ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "HTTP status 404")


@dataclass(frozen=True)
class RemoteFile:
    """One file. Raises InvalidInput where it is not there or may not be read, Transient where nothing answers."""

    url: str

    @property
    def name(self) -> str:
        """Its last part."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def suffix(self) -> str:
        """Its last suffix, with the dot."""
        return PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        return self.url

    def open(self) -> io.BufferedReader:
        """A stream from its beginning."""
        with translating_errors(self.url):
            if self.url.startswith(S3):
                return io.BufferedReader(_bucket_client().open_input_stream(
                    self.url.removeprefix(S3), compression=None))
            return io.BufferedReader(_web_client().open(self.url, block_size=0))

    def open_at_any_place(self) -> Any:
        """A file object that seeks, and reads what it is asked for alone."""
        with translating_errors(self.url):
            if self.url.startswith(S3):
                return _bucket_client().open_input_file(self.url.removeprefix(S3))
            return _web_client().open(self.url)


def remote_files(url: str) -> list[RemoteFile]:
    """The files that a URL names, in the order of their names. Raises InvalidInput where none is, and Transient."""
    if not url.startswith(S3):
        return [RemoteFile(url)]
    from pyarrow.fs import FileSelector, FileType

    path = url.removeprefix(S3).rstrip("/")
    with translating_errors(url):
        client = _bucket_client()
        if is_pattern(path):
            folder, pattern = path.rpartition("/")[::2]
        elif client.get_file_info(path).type == FileType.File:
            return [RemoteFile(S3 + path)]
        else:
            folder, pattern = path, ""
        listed = client.get_file_info(FileSelector(folder, allow_not_found=True))
    names = sorted(one.path for one in listed if one.type == FileType.File
                   and (fnmatchcase(one.base_name, pattern) if pattern else one.base_name.endswith(SUFFIXES)))
    if not names:
        raise InvalidInput(f"data source {url!r} names no object with data",
                           f"give an object, a pattern, or a prefix of names that end in {', '.join(SUFFIXES)}")
    return [RemoteFile(S3 + name) for name in names]


@contextmanager
def translating_errors(url: str) -> Iterator[None]:
    """Requests for `url`: errors of the clients become ours. Messages hold no credential: a source's URL has none."""
    import aiohttp
    from fsspec.exceptions import FSTimeoutError

    try:
        yield
    except (OSError, aiohttp.ClientError, FSTimeoutError, TimeoutError) as error:
        raise _translated(url, error) from error


def _translated(url: str, error: Exception) -> EyrieError:
    status = getattr(error, "status", None)
    text = f"HTTP status {status}" if status is not None else str(error)
    if isinstance(error, FileNotFoundError) or any(one in text for one in _ABSENT):
        return InvalidInput(f"the data at {url!r} is not there", "correct the path; the bucket has to exist")
    if isinstance(error, PermissionError) or any(one in text for one in _DENIED):
        return InvalidInput(f"the data at {url!r} may not be read with the credentials of the stage",
                            "permit s3:GetObject and s3:ListBucket, or set EYRIE_ARTIFACTS_CREDENTIALS_DIR or AWS_*")
    return Transient(f"the data at {url!r} cannot be read now: {type(error).__name__}: {text[:300]}",
                     "check the network and the address" + (
                         ", EYRIE_ARTIFACTS_ENDPOINT_URL of the stages too" if url.startswith(S3) else ""), _RETRY_S)


def _bucket_client() -> Any:
    return _client_of(StoreOptions.from_env())


@cache
def _client_of(options: StoreOptions) -> Any:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    where: dict[str, Any] = {"region": options.region}
    if options.endpoint_url is not None:
        endpoint = urlsplit(options.endpoint_url)
        where |= {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme}
    if options.addressing == "virtual":
        where["force_virtual_addressing"] = True
    return S3FileSystem(**where, **options.credentials(), request_timeout=options.timeout_s,
                        connect_timeout=min(options.timeout_s, 10.0),
                        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=options.max_attempts))


@cache
def _web_client() -> Any:
    import aiohttp
    from fsspec.implementations.http import HTTPFileSystem

    # No limit on the whole of a stream: a stage reads it as fast as the target answers.
    patience = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=StoreOptions.from_env().timeout_s)
    return HTTPFileSystem(client_kwargs={"timeout": patience, "trust_env": True})
