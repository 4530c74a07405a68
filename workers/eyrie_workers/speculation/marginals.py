"""Draft trees from marginals: for drafters that say all depths at once, each blind to what the others picked.

Medusa's heads (arXiv:2401.10774) and a diffused block (DFlash, arXiv:2602.06036) give for each depth d a distribution
p_d over tokens that does not depend on the path. A path's chance of being accepted is then taken to be the product

    P(t_1 .. t_d) = p_1(t_1) p_2(t_2) .. p_d(t_d)

and the tree of N nodes with the most expected acceptance is simply the N most probable prefixes: a prefix is never less
probable than what goes on from it, so they form a tree, and best-first search finds them exactly (DDTree,
arXiv:2604.12989). The top_k most probable tokens of a depth are looked at, no others.

    B rows, S depths, D draft vocabulary, N nodes of the tree, K top-k
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from eyrie_api.v1alpha1.job import DraftTreeShape
from eyrie_workers.drafters.protocol import NO_TOKEN, DraftTree
from eyrie_workers.speculation.noise import RowNoise


def draft(logits_BSD: Tensor, shape: DraftTreeShape, vocabulary: Tensor | None = None,
          noise: RowNoise | None = None) -> DraftTree:
    """The tree of each row's most probable prefixes; the chain of first choices where top_k is 1.

    logits_BSD  for depth 1 .. S. A shape deeper than S gets nodes of NO_TOKEN beyond.
    vocabulary  [D] int64 target id of each draft id; None when both vocabularies are the same.
    noise       of the same rows; None when all are greedy.
    """
    depths = min(shape.num_steps, logits_BSD.shape[1])
    confidences = []
    for depth in range(1, depths + 1):
        logits = logits_BSD[:, depth - 1: depth]
        confidences.append(logits.log_softmax(-1) if noise is None else noise.confidence(logits, depth, vocabulary))
    best_BSK, ids_BSK = torch.cat(confidences, 1).topk(min(shape.top_k, logits_BSD.shape[-1]), -1)
    tokens_BSK = ids_BSK if vocabulary is None else vocabulary[ids_BSK]
    trees = [_best_first(scores, tokens, shape.num_draft_tokens)
             for scores, tokens in zip(best_BSK.tolist(), tokens_BSK.tolist(), strict=True)]
    return DraftTree(torch.tensor([tree[0] for tree in trees]), torch.tensor([tree[1] for tree in trees]),
                     torch.tensor([tree[2] for tree in trees]))


def _best_first(scores_SK: Sequence[Sequence[float]], tokens_SK: Sequence[Sequence[int]],
                num_nodes: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and scores of `num_nodes` nodes, the root first, filled up with a chain of NO_TOKEN nodes.

    The heap holds, for each node taken, its best child not taken yet, and for each child its next best sibling: every
    prefix enters once, after whatever is more probable than it.
    """
    tokens, parents, scores, depths = [NO_TOKEN], [0], [0.0], [0]
    heap = [(-scores_SK[0][0], 0, 0)] if scores_SK else []  # (minus the score, parent, rank among its siblings)
    while heap and len(tokens) < num_nodes:
        minus, parent, rank = heapq.heappop(heap)
        depth = depths[parent]
        node = len(tokens)
        tokens.append(tokens_SK[depth][rank])
        parents.append(parent)
        scores.append(-minus)
        depths.append(depth + 1)
        if rank + 1 < len(scores_SK[depth]):
            heapq.heappush(heap, (-(scores[parent] + scores_SK[depth][rank + 1]), parent, rank + 1))
        if depth + 1 < len(scores_SK):
            heapq.heappush(heap, (minus - scores_SK[depth + 1][0], node, 0))
    while len(tokens) < num_nodes:
        parents.append(len(tokens) - 1)
        tokens.append(NO_TOKEN)
        scores.append(-torch.inf)
    return tokens, parents, scores
