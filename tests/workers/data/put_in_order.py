"""A program that puts the answers of a ledger in the store, in order of their ids, and prints a line per answer read.

    python -m tests.workers.data.put_in_order PATH
"""

import sys
from pathlib import Path

from eyrie_workers.data.rows import open_row_ledger

if __name__ == "__main__":
    with open_row_ledger(Path(sys.argv[1])) as ledger:
        for _ in ledger.put_in_order(sorted(one.id for one in ledger.entries)):
            print("read", flush=True)
