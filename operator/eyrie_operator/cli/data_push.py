"""`eyrie data push`: data files of this machine into a bucket, from which stages read them as streams.

The files are those that `data.sources[].path` would name here, checked as a submission checks them, before any byte is
sent. A file that the bucket has already, by size and digest, is skipped, and a large one resumes with its missing
parts, so that the command is simply repeated after an interruption. Access is that of the artifact store
(EYRIE_ARTIFACTS_*, or AWS's default chain).
"""

import threading
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from eyrie_api.artifacts import digest_file
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.cli.verbs import Screen
from eyrie_api.data_files import S3, data_files
from eyrie_api.errors import InvalidInput
from eyrie_api.submission.data_files import check_data_source
from eyrie_api.v1alpha1.data import DataSource
from eyrie_api.v1alpha1.model import Frozen

FOLDER = "data"
"""Below the artifact store's URL, where no other place is given."""


class Pushed(Frozen):
    """What is in the bucket afterwards."""

    path: str
    """For `data.sources[].path`."""

    files: int
    sent: int
    """Files that the bucket did not have."""

    bytes: int


def destination(path: Path, to: str | None, options: StoreOptions) -> str:
    """The URL to write to. Raises InvalidInput for what is no bucket. Pure."""
    url = to or (f"{options.url.rstrip('/')}/{FOLDER}/{path.absolute().name}" if options.url else "")
    if not url.startswith(S3):
        raise InvalidInput(f"--to {url or '(none)'} is not in a bucket",
                           "give --to s3://bucket/prefix, or set EYRIE_ARTIFACTS_URL to a bucket")
    return url.rstrip("/")


def push(path: Path, to: str | None, screen: Screen) -> Pushed:
    """Upload, with progress on stderr. Raises NoUsableData for what no job would read, and the store's errors."""
    options = StoreOptions.from_env()
    url = destination(path, to, options)
    check_data_source(DataSource(path=str(path)))
    files, store, lock = data_files(str(path)), open_store(url, options), threading.Lock()
    sizes = {file: file.stat().st_size for file in files}
    sent = 0
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                  TimeRemainingColumn(), console=screen.err, disable=screen.as_json, transient=True) as progress:
        whole = progress.add_task("uploading", total=sum(sizes.values()))

        def advance(num_bytes: int) -> None:
            with lock:
                progress.advance(whole, num_bytes)

        for file in files:
            progress.update(whole, description=file.name)
            stored = store.stat(file.name)
            if stored is not None and (stored.size_bytes, stored.sha256) == (sizes[file], digest_file(file)):
                advance(sizes[file])
                continue
            store.upload(file.name, file, advance)
            sent += 1
    alone = len(files) == 1 and not path.is_dir()
    return Pushed(path=f"{url}/{files[0].name}" if alone else url, files=len(files), sent=sent,
                  bytes=sum(sizes.values()))
