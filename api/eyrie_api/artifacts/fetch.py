"""Download one directory of a finished stage: a drafter, before its engine starts.

    python -m eyrie_api.artifacts.fetch --prefix jobs/j1/stages/train/c1 --part checkpoints/c3 --directory DIR

A stage's directory may hold much that a server never reads; only `part` is downloaded, and each file is compared with
the stage's manifest. DIR then holds the files of `part`. A second run downloads what is missing. The store is the one
of EYRIE_ARTIFACTS_*.
"""

import argparse
import sys
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, digest_file, parse_manifest
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.errors import ArtifactMissing, EyrieError, report_error


def fetch_part(store: ArtifactStore, prefix: str, part: str, directory: Path) -> int:
    """Download the files below `part` of the stage at `prefix`; returns their number. Raises ArtifactMissing when the
    stage is unfinished or has no such part, ArtifactCorrupt when a file differs."""
    manifest = parse_manifest(store.read(f"{prefix}/{MANIFEST}"), f"{prefix}/{MANIFEST} in {store.url}")
    part_prefix = f"{part.strip('/')}/" if part else ""
    entries = [entry for entry in manifest.files if entry.path.startswith(part_prefix)]
    if not entries:
        raise ArtifactMissing(f"the manifest of {prefix} in {store.url} lists nothing below {part!r}",
                              "check the part's path, as the stage's report names it")
    for entry in entries:
        path = directory / entry.path.removeprefix(part_prefix)
        if not path.is_file() or digest_file(path) != entry.sha256:
            store.download(f"{prefix}/{entry.path}", path, sha256=entry.sha256)
    return len(entries)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch one directory of a finished stage from the artifact store.")
    parser.add_argument("--prefix", required=True, help="the stage's directory in the store")
    parser.add_argument("--part", default="", help="the directory wanted inside it; default: all of it")
    parser.add_argument("--directory", type=Path, required=True, help="where its files go")
    options = parser.parse_args(argv)
    try:
        count = fetch_part(open_store(), options.prefix, options.part, options.directory)
    except EyrieError as error:
        return report_error(error)
    print(f"{count} files of {options.prefix}/{options.part} are in {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
