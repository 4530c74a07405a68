"""Read a whole store and compare every block with its digest: `python -m eyrie_workers.features.verify STORE`.

STORE is a directory or `s3://bucket/prefix`. Damaged shards are printed with their rows and get a damage note; the next
run of capture writes them again. Exit code 0 for an intact store, 74 otherwise.
"""

import argparse
import sys
from collections.abc import Sequence

from eyrie_api.errors import ArtifactCorrupt, EyrieError, report_error
from eyrie_workers.features.store import FeatureStore, open_features


def main(argv: Sequence[str] | None = None) -> int:
    """Verify; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare every block of a hidden-state store with its digest.")
    parser.add_argument("store", help="directory, or s3://bucket/prefix")
    try:
        store = open_features(parser.parse_args(argv).store)
        damaged = report(store)
    except EyrieError as error:
        return report_error(error)
    print(f"{store.num_rows} rows, {store.num_tokens} tokens, {store.size_bytes} bytes: "
          + (f"{damaged} damaged shards" if damaged else "intact"))
    return ArtifactCorrupt.exit_code if damaged else 0


def report(store: FeatureStore) -> int:
    """Print damaged shards; returns their number."""
    count = 0
    for damage in store.damage():
        count += 1
        print(f"{damage.shard}: {damage}")
    return count


if __name__ == "__main__":
    sys.exit(main())
