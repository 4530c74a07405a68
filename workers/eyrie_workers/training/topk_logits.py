"""Target distributions from stored top-k logits (`features.topk_logits`), as the table that training reads.

    R asked positions, D draft vocabulary
"""

import torch
from torch import Tensor

from eyrie_workers.features.shard_format import Opinion
from eyrie_workers.features.topk_logits import rebuild
from eyrie_workers.training.losses import Teacher


def teacher_of(opinion: Opinion, row_R: Tensor, draft_vocab_size: int) -> Teacher:
    """The opinions `row_R` as distributions over the draft vocabulary they were formed over."""
    asked = Opinion(opinion.ids[row_R], opinion.logits[row_R], opinion.tail[row_R], opinion.mass[row_R],
                    opinion.choice[row_R])
    return Teacher(rebuild(asked, draft_vocab_size), asked.mass, asked.choice >= 0,
                   asked.choice.clamp_min(0).to(torch.int64))
