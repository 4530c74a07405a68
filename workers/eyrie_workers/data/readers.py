"""Reads conversations from files, buckets, Hub data sets and the shipped quickstart corpus, row by row.

Files are read as streams, compressed ones too: memory is bounded by the longest row, whose size is limited. A file that
begins with `[` is an array of rows, any other has a row on each line. A row that cannot be read or breaks a rule
becomes a `QuarantinedRow` at its position in the stream; the caller counts and keeps it, and no reader drops a row. A
source that cannot be opened is an error before any work, because a job that silently trains on half its data is worse
than one that stops.

`quickstart` is `data.jsonl.gz` of eyrie_workers.quickstart, a finite corpus in fixed order. Rows are not
shuffled: they are read in file order, and the files of a directory or pattern in the order of their names, so a sorted
file should be shuffled beforehand.

Files in a bucket or on a web server are listed and read as streams, without a copy on this machine's disk:

    s3://bucket/key      pyarrow's client, with the endpoint, region and credentials of EYRIE_ARTIFACTS_*, as the
                         artifact store has them; without a credentials directory those of AWS's default chain
    https://host/path    `eyrie_api.ssrf_safe_http`; parquet needs a server that answers ranges

In a bucket a path names an object, the objects directly below a prefix, or by a pattern those of one prefix, with the
rules of `eyrie_api.data_files`; on a web server it names one file.

The rules of a job of a project (`contract.read_rules`) are applied to each file and each address as it is opened.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from importlib import resources
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.chat_messages import Malformed
from eyrie_api.contract.data import DataSource
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.reports import QuarantinedRow
from eyrie_api.conversation import Conversation, conversation, decode_row, detect_layout
from eyrie_api.data_files import (
    GZIP,
    MAX_ROW_BYTES,
    PARQUET,
    S3,
    SAVED_TO_DISK_HINT,
    SUFFIXES,
    ZSTD,
    array_rows,
    begins_array,
    data_files,
    is_pattern,
    is_remote,
    names_data,
    row_lines,
    saved_to_disk,
)
from eyrie_api.errors import InvalidInput, Transient
from eyrie_api.file_rules import check_path, open_file
from eyrie_api.ssrf_safe_http import WebFile, open_at_any_place

_PEEKED_BYTES = 1 << 12
_RETRY_S = 10.0
_DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID",
           "HTTP status 401", "HTTP status 403", "No credentials")
_ABSENT = ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "HTTP status 404")


@dataclass(frozen=True)
class RemoteFile:
    """One file. Raises InvalidInput where it is not there or may not be read, Transient where nothing answers."""

    url: str
    rules: ReadRules | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        return self.url

    def open(self) -> io.BufferedReader:
        with translating_errors(self.url):
            if self.url.startswith(S3):
                return io.BufferedReader(_bucket_client().open_input_stream(
                    self.url.removeprefix(S3), compression=None))
            return io.BufferedReader(WebFile(self.url, self.rules, timeout_s=StoreOptions.from_env().timeout_s))

    def open_at_any_place(self) -> Any:
        """A file object that seeks, and reads what it is asked for alone."""
        with translating_errors(self.url):
            if self.url.startswith(S3):
                return _bucket_client().open_input_file(self.url.removeprefix(S3))
            return open_at_any_place(self.url, self.rules, timeout_s=StoreOptions.from_env().timeout_s)


def remote_files(url: str, rules: ReadRules | None = None) -> list[RemoteFile]:
    """The files that a URL names, in the order of their names. Raises InvalidInput where none is, and Transient."""
    if not url.startswith(S3):
        return [RemoteFile(url, rules)]
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
    names = sorted(info.path for info in listed if info.type == FileType.File
                   and names_data(info.base_name, pattern))
    if not names:
        raise InvalidInput(f"data source {url!r} names no object with data",
                           f"give an object, a pattern, or a prefix of names that end in {', '.join(SUFFIXES)}")
    return [RemoteFile(S3 + name) for name in names]


@contextmanager
def translating_errors(url: str) -> Iterator[None]:
    """Requests for `url`: errors of the clients become ours. Messages hold no credential: a source's URL has none."""
    try:
        yield
    except (OSError, HTTPException) as error:
        status = getattr(error, "status", None)
        text = f"HTTP status {status}" if status is not None else str(error)
        if isinstance(error, FileNotFoundError) or any(sign in text for sign in _ABSENT):
            raise InvalidInput(f"the data at {url!r} is not there",
                               "correct the path; the bucket has to exist") from error
        if isinstance(error, PermissionError) or any(sign in text for sign in _DENIED):
            raise InvalidInput(
                f"the data at {url!r} may not be read with the credentials of the stage",
                "permit s3:GetObject and s3:ListBucket, or set EYRIE_ARTIFACTS_CREDENTIALS_DIR or AWS_*") from error
        hint = ", EYRIE_ARTIFACTS_ENDPOINT_URL of the stages too" if url.startswith(S3) else ""
        raise Transient(f"the data at {url!r} cannot be read now: {type(error).__name__}: {text[:300]}",
                        f"check the network and the address{hint}", _RETRY_S) from error


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


def read_conversations(source: DataSource, rules: ReadRules | None = None) -> Iterator[Conversation | QuarantinedRow]:
    """Conversations and unreadable rows of one source, in order. Raises InvalidInput when the source cannot be opened
    or its rules forbid it, Transient when the Hub is unreachable."""
    layout: str | None = None if source.format == "auto" else source.format
    for line, (where, value) in enumerate(islice(_rows(source, rules), source.max_rows), start=1):
        layout = layout or detect_layout(value)
        try:
            yield conversation(value, source.path, line, layout)
        except Malformed as error:
            yield QuarantinedRow(source=source.path, line=line, reason=str(error) + where)


def check_source(source: DataSource, rules: ReadRules | None = None) -> None:
    """Refuse a source that cannot be opened, before any work is done. Raises InvalidInput."""
    if source.path == "quickstart":
        return
    check_path("data source", source.path, rules)
    if is_remote(source.path):
        remote_files(source.path)
        return
    if saved_to_disk(source.path):
        raise InvalidInput(f"data source {source.path!r} is a directory of save_to_disk", SAVED_TO_DISK_HINT)
    if data_files(source.path):
        return
    if Path(source.path).is_dir():
        raise InvalidInput(f"data source {source.path!r} is a directory without data files",
                           "put .jsonl or .parquet files there")
    if is_pattern(source.path):
        raise InvalidInput(f"data source {source.path!r} matches no file", "correct the pattern")
    if source.path.count("/") != 1 or source.path.startswith(("/", ".", "~")) or source.path.endswith(
            (".jsonl", ".parquet")):
        raise InvalidInput(f"data source {source.path!r} does not exist",
                           "give a JSONL or parquet file, a directory or pattern, an s3:// or https:// URL, a Hub "
                           "data set id (org/name), or `quickstart`")
    if find_spec("datasets") is None:
        raise InvalidInput(f"data source {source.path!r} is not a file here, and reading it from the Hub needs the "
                           "`datasets` package, which is not installed",
                           "pip install datasets, or download the data set and give its parquet or JSONL file")


def _rows(source: DataSource, rules: ReadRules | None) -> Iterator[tuple[str, Any]]:
    """Rows, each with what its reason needs to name its place: the file and its line, where there are several files."""
    check_source(source, rules)
    if source.path == "quickstart":
        # The conversations shipped with the quickstart target; `benchmarks/quickstart` generates the file.
        packed = resources.files("eyrie_workers.quickstart") / "conversations.jsonl.gz"
        return (("", json.loads(line)) for line in gzip.decompress(packed.read_bytes()).splitlines())
    files: list[Path] | list[RemoteFile] = (
        remote_files(source.path, rules) if is_remote(source.path) else data_files(source.path))
    if not files:
        return (("", row) for row in _hub_rows(source))
    if len(files) == 1:
        return (("", row) for row in _rows_of(files[0], rules))
    return ((f" ({file.name} row {number})", row)
            for file in files for number, row in enumerate(_rows_of(file, rules), start=1))


def _rows_of(file: Path | RemoteFile, rules: ReadRules | None) -> Iterator[Any]:
    rows = (row for _, row in file_rows(file, "data source ", rules))
    return map(_without_nulls, rows) if file.suffix == PARQUET else rows


def file_rows(file: Path | RemoteFile, owner: str, rules: ReadRules | None = None) -> Iterator[tuple[str, Any]]:
    """The decoded rows of one file, each with its place (`line 3`, `row 3`); `Undecodable` for a line that is not JSON.

    owner   what errors begin with: "data source ", "suite 'gsm8k': "

    Raises InvalidInput for a file that cannot be read, Transient for a URL where nothing answers.
    """
    with translating_errors(file.url) if isinstance(file, RemoteFile) else nullcontext():
        try:
            if file.suffix == PARQUET:
                from pyarrow.parquet import ParquetFile

                data = file.open_at_any_place() if isinstance(file, RemoteFile) else open_file(file, rules, owner)
                with data, ParquetFile(data) as table:
                    rows = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(batch_size=256))
                    yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
                return
            with unpacked(file.open() if isinstance(file, RemoteFile) else open_file(file, rules, owner),
                          file.suffix) as data:
                if begins_array(data.peek(_PEEKED_BYTES)):
                    elements = array_rows(data, MAX_ROW_BYTES)
                    yield from ((f"row {number}", row) for number, row in enumerate(elements, start=1))
                else:
                    yield from located_lines(data)
        except (EOFError, ValueError, zlib.error, OSError) as error:
            if isinstance(file, RemoteFile) and isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
                raise  # of the network: translated
            what = "is not readable parquet" if file.suffix == PARQUET else "cannot be read"
            raise InvalidInput(f"{owner}{file} {what}: {error}", "copy or write it again, or give JSONL") from error


def unpacked(file: io.BufferedReader, suffix: str) -> io.BufferedReader:
    """The file, unpacked as the suffix of its name says. `peek` reads at least what its first read returns."""
    if suffix == GZIP:
        return io.BufferedReader(gzip.open(file))
    if suffix == ZSTD:
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))
    return file


def located_lines(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """The decoded rows of a file with a row on each line, as `file_rows`. Raises ValueError as `row_lines`."""
    yield from ((f"line {number}", decode_row(line)) for number, line in enumerate(row_lines(file, MAX_ROW_BYTES), 1))


def _without_nulls(value: Any) -> Any:
    """Parquet structs hold null where JSON omits the key: null fields are removed."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _hub_rows(source: DataSource) -> Iterator[Any]:
    from datasets import load_dataset

    hint = "check id, config, split and network, or download the data set and give its parquet or JSONL file"
    try:
        yield from map(_without_nulls, load_dataset(
            source.path, source.config, split=source.split, revision=source.revision, streaming=True))
    except (FileNotFoundError, ValueError) as error:
        raise InvalidInput(f"data source {source.path!r}, split {source.split!r}: {error}", hint) from error
    except OSError as error:
        raise Transient(f"data source {source.path!r} cannot be read from the Hub: {error}", hint, 30.0) from error
