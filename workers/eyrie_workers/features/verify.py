"""Read a whole store and compare every block with its digest: `python -m eyrie_workers.features.verify STORE`.

STORE is a directory or `s3://bucket/prefix`. What is damaged is named, with its rows, and noted beside the shard; run
capture again and it makes those shards anew. Exit code 0 when all is as it was written, 74 when not.
"""

import argparse
import sys
from collections.abc import Sequence

from eyrie_api.errors import ArtifactCorrupt, EyrieError
from eyrie_api.program_exit import report_error
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
          + (f"{damaged} damaged shards" if damaged else "as they were written"))
    return ArtifactCorrupt.exit_code if damaged else 0


def report(store: FeatureStore) -> int:
    """Print what is damaged; how many shards."""
    count = 0
    for damage in store.damage():
        count += 1
        print(f"{damage.shard}: {damage}")
    return count


if __name__ == "__main__":
    sys.exit(main())
