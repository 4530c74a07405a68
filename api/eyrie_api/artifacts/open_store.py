"""Open the artifact store that a URL names: a bucket (`s3://`), or a directory (`file://` or a path)."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from eyrie_api.artifacts.local import LocalStore
from eyrie_api.artifacts.store import ArtifactStore, StoreOptions
from eyrie_api.errors import InvalidInput


def open_store(url: str | None = None, options: StoreOptions | None = None) -> ArtifactStore:
    """The store at `url`, by default at the options' url. Sends no request yet: see `ArtifactStore.check`. Raises
    InvalidInput for a url that names no store."""
    options = options or StoreOptions.from_env()
    url = url or options.url
    if not url:
        raise InvalidInput("no artifact store is configured", "set EYRIE_ARTIFACTS_URL, for example s3://bucket/eyrie")
    parts = urlsplit(url)
    if parts.scheme == "s3":
        # Imported here: boto3 need not be installed where artifacts are local directories.
        from eyrie_api.artifacts.s3 import S3Store

        return S3Store(url, options)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(Path(unquote(parts.path)), parallel=options.parallel)
    if "://" not in url:
        return LocalStore(Path(url), parallel=options.parallel)
    raise InvalidInput(f"artifact store {url!r} has an unknown scheme",
                       "write s3://bucket/prefix, file:///directory or a path")
