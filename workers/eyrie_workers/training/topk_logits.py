"""Target distributions from stored top-k logits (`features.topk_logits`), as the table that training reads.

    R needed positions, D draft vocabulary
"""

import torch
from torch import Tensor

from eyrie_workers.features.shard_format import TopKLogits
from eyrie_workers.features.topk_logits import rebuild_distribution
from eyrie_workers.training.losses import TargetTable


def table_from_topk(topk_logits: TopKLogits, row_R: Tensor, draft_vocab_size: int) -> TargetTable:
    """The top-k logits of rows `row_R` as distributions over the draft vocabulary."""
    rows = topk_logits.map(lambda x: x[row_R])
    # -1 marks a most probable token outside the draft vocabulary; `inside` excludes it, so its id is never read.
    return TargetTable(rebuild_distribution(rows, draft_vocab_size), rows.mass, rows.choice >= 0,
                       rows.choice.clamp_min(0).to(torch.int64))
