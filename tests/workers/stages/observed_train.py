"""The train program, unchanged, noting in its output directory what each rank did: `digest-<rank>` when it read the
target for its digest, `threads-<rank>` with its CPU threads.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from eyrie_workers.stages import train

OUT, RANK = Path(sys.argv[sys.argv.index("--out") + 1]).parent, os.environ["RANK"]
DIGEST, RESOLVE = train.target_digest, train.resolve


def observed_digest(path: Path) -> str:
    (OUT / f"digest-{RANK}").touch()
    return DIGEST(path)


def observed_resolve(target: Any) -> Path:
    (OUT / f"threads-{RANK}").write_text(str(torch.get_num_threads()))
    return RESOLVE(target)


train.target_digest, train.resolve = observed_digest, observed_resolve
sys.exit(train.main(sys.argv[1:]))
