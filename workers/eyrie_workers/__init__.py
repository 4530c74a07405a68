"""What a stage does: the data plane, from conversations to a measured drafter. Never sees the database.

Importing this package, which every stage program does before it loads torch, sets how OpenMP threads wait: spin for a
fraction of a millisecond, then sleep. By default they spin on, and two programs on the same cores starve each other;
asleep at once, they wake too late for the short products of decoding. Measured on 2 cores, quickstart target and
2 threads: plain decoding alone 145 tok/s spinning, 82 asleep, 125 so; batched decoding beside two busy processes 39,
278 and 210 tokens per CPU second. Set OMP_WAIT_POLICY or GOMP_SPINCOUNT to choose otherwise.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
