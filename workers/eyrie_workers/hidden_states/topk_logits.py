"""Top-k logits instead of the final state: the K most probable of D draft tokens, and the mass of all others.

At a supervised position let z be the target's logits over the draft vocabulary and p = softmax(z) over those D tokens,
which is what a drafter is trained on (`training.objective`). Stored are

    ids j_1 .. j_K        of the K largest p, most probable first
    logits z_j - z_j1     float16: differences, because softmax is invariant to an offset
    tail = 1 - sum p_j    float32, computed from all D logits before anything is rounded
    mass                  the target's probability of the whole draft vocabulary, for losses that use it
    choice                the target's most probable token over all of V as a draft id, -1 outside the draft vocabulary

and the distribution is rebuilt as

    q(j_k) = (1 - tail) * softmax(stored logits)_k        q(i) = tail / (D - K) for every other i

It sums to 1, its tail mass is the target's exactly, and each of the K has its share of the rest up to float16's
rounding of a logit. The division of the tail is lost; a uniform division adds no assumption.

    M positions, V target vocabulary, D draft vocabulary, K top-k, H hidden
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from eyrie_workers.hidden_states.shard_format import StoreFormat, TopKLogits, supervised_positions
from eyrie_workers.targets.operators import OutputHead

_MAX_LOGITS = 1 << 26
"""Elements of a [M, V] product computed at a time: 256 MiB."""


@torch.no_grad()
def compute_topk_logits(last: Sequence[Tensor], output: OutputHead, fmt: StoreFormat) -> TopKLogits:
    """Top-k logits of the positions of some rows, end to end, from their final states [M, H] and on their device. Each
    row is a product of its own, so that its numbers do not depend on the other rows."""
    lm_head_VH = output.weight_VH
    ids_D = torch.tensor(fmt.draft_ids, device="cpu").to(lm_head_VH.device, non_blocking=True)
    vocab_size = lm_head_VH.shape[0]
    draft_id_V = torch.full((vocab_size,), -1, device=ids_D.device)
    draft_id_V[ids_D] = torch.arange(ids_D.numel(), device=ids_D.device)
    parts: list[tuple[Tensor, ...]] = []
    for chunk in chain.from_iterable(row_MH.to(lm_head_VH.dtype).split(max(1, _MAX_LOGITS // vocab_size))
                                     for row_MH in last):
        logits_MV = output.capped((chunk @ lm_head_VH.T).float())
        logits_MD = logits_MV.index_select(1, ids_D)
        top_MK, ids_MK = logits_MD.topk(fmt.top_k, dim=-1)
        # float64: 1 - sum with a sum near 1 loses a tail of 1e-6 to float32 rounding.
        share_MK = logits_MD.double().softmax(-1).gather(1, ids_MK)
        tail_M = (1.0 - share_MK.sum(-1)).clamp_(0.0, 1.0) if fmt.top_k < ids_D.numel() else share_MK.new_zeros(
            share_MK.shape[0])
        mass_M = (logits_MD.double().logsumexp(-1) - logits_MV.double().logsumexp(-1)).exp()
        parts.append((ids_MK, top_MK - top_MK[:, :1], tail_M.float(), mass_M.float(),
                      draft_id_V[logits_MV.argmax(-1)]))
    ids, logits, tail, mass, choice = (torch.cat(part) for part in zip(*parts, strict=True))
    # A difference below float16's range is a probability of 0 either way.
    return TopKLogits(ids, logits.clamp_min(torch.finfo(torch.float16).min).to(torch.float16), tail, mass, choice)


def rebuild_distribution(topk_logits: TopKLogits, draft_vocab_size: int) -> Tensor:
    """[M, D] float32: the rebuilt distribution (see the module's docstring), the training target."""
    num, top_k = topk_logits.ids.shape
    if draft_vocab_size > top_k:
        others = topk_logits.tail / (draft_vocab_size - top_k)
        rebuilt = others.unsqueeze(-1).expand(num, draft_vocab_size).contiguous()
    else:
        rebuilt = topk_logits.tail.new_zeros(num, draft_vocab_size)
    share_MK = topk_logits.logits.float().softmax(-1) * (1.0 - topk_logits.tail).unsqueeze(-1)  # of each stored token
    return rebuilt.scatter_(1, topk_logits.ids, share_MK)


def topk_rows(loss_mask_T: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[T] int64: for packed rows, the row of the top-k logits of each position; -1 at unsupervised positions."""
    supervised_T = torch.cat([supervised_positions(mask) for mask in loss_mask_T.split(lengths)])
    return torch.where(supervised_T, supervised_T.cumsum(0) - 1, -1)
