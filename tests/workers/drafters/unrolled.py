"""The logits of an unroll against those of decoding, for families of one layer on the target's final state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyrie_workers.drafters.kv_cache import RowLengths
from eyrie_workers.drafters.layer_proposer import LayerProposer
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.protocol import CommittedTokens, DraftStep
from eyrie_workers.training.unroll_plan import UnrollPlan


def compare_with_decoding(unrolled: Sequence[Tensor], proposer: LayerProposer, documents: PackedBatch,
                          plan: UnrollPlan) -> None:
    """Every root and step. Same weights, same sums in another order, and logits of order ten: float32 rounding only.

    unrolled   [R_s, V] logits of each step, on the documents' own tokens
    """
    compared = 0
    for rank, root in enumerate(plan.roots.tolist()):
        start = max(int(one) for one in plan.starts if one <= root)
        tokens = documents.token_ids[start + 1: root + 2].tolist()
        state = proposer.new_state(1)
        proposer.extend(state, CommittedTokens([0], [0], [tokens], documents.aux[None, start: root + 1]))
        step = DraftStep(state.logits[None], state.hidden[None])
        for depth in range(sum(rank < alive for alive in plan.alive)):
            if depth > 0:
                token = documents.token_ids[None, None, root + 1 + depth]
                step = proposer._step(state, RowLengths.of([0], state.cache.settled), token, step.hidden,
                                      torch.ones(1, 1, depth, dtype=torch.bool), depth)
            torch.testing.assert_close(step.logits[0, 0], unrolled[depth][rank], atol=1e-3, rtol=1e-4)
            compared += 1
    assert compared == plan.num_predictions > 40
