"""Draft trees from marginals: for drafters that predict all depths at once, independently of the path.

Medusa's heads (arXiv:2401.10774) and a diffused block (DFlash, arXiv:2602.06036) give for each depth d a distribution
p_d over tokens that does not depend on the path. A path's probability of being accepted is then taken to be the product

    P(t_1 .. t_d) = p_1(t_1) p_2(t_2) .. p_d(t_d)

and the tree of N nodes with the highest expected acceptance consists of the N most probable prefixes: a prefix is never
less probable than its extensions, so they form a tree, and best-first search finds them exactly (DDTree,
arXiv:2604.12989). Only the top_k most probable tokens of a depth are considered.

A static tree (`static_tree`) takes its topology from a table instead: each node takes the token of its rank at its
depth, independently of the drafter's confidence.

Neither predicts more depths than it is given logits for: nodes beyond hold NO_TOKEN.

    B rows, S depths, D draft vocabulary, N nodes of the tree, K top-k
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftTree
from eyrie_workers.speculation.static_tree import Topology, static_topology


def build_tree_from_marginals(logits_BSD: Tensor, shape: DraftTreeShape, vocabulary: Tensor | None = None,
          noise: RowNoise | None = None) -> DraftTree:
    """The tree of each row's most probable prefixes, or the static one; the chain of most probable tokens for top_k 1.

    logits_BSD  of depths 1 .. S. Nodes deeper than S hold NO_TOKEN.
    vocabulary  [D] int64 target id of each draft id; None when both vocabularies are the same.
    noise       of the same rows; None when all are greedy.
    """
    best_BSK, tokens_BSK = _ranked(logits_BSD[:, : shape.num_steps], shape.top_k, vocabulary, noise)
    if shape.top_k == 1:
        return _chain(best_BSK[:, :, 0], tokens_BSK[:, :, 0], shape.num_draft_tokens)
    # Plain Python numbers: a heap over tensors would cost a tensor operation per comparison. Measured, CPU ms on one
    # core of an EPYC for a row of 2048 logits a depth: 0.04 for shape 5/4/16, 0.08 for 7/4/64, of which ranking takes
    # 0.02; for 32768 logits 0.24 and 0.35.
    ranked = zip(best_BSK.tolist(), tokens_BSK.tolist(), strict=True)
    if shape.static:
        topology = static_topology(shape)
        trees = [_static(scores, tokens, topology) for scores, tokens in ranked]
    else:
        trees = [_best_first(scores, tokens, shape.num_draft_tokens) for scores, tokens in ranked]
    tokens, parents, scores = zip(*trees, strict=True)
    device = logits_BSD.device
    return DraftTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device),
                     torch.tensor(scores, dtype=torch.float32, device=device))


def _ranked(logits_BSD: Tensor, top_k: int, vocabulary: Tensor | None,
            noise: RowNoise | None) -> tuple[Tensor, Tensor]:
    """Log-confidences and target ids of each depth's best tokens, best first: [B, S, K] each."""
    logits_BSD = logits_BSD.float()  # in half precision many of the top tokens would tie
    if noise is None:
        confidence_BSD = logits_BSD.log_softmax(-1)
    else:
        confidence_BSD = torch.cat([noise.confidence(logits_BSD[:, depth - 1: depth], depth, vocabulary)
                                    for depth in range(1, logits_BSD.shape[1] + 1)], 1)
    best_BSK, ids_BSK = confidence_BSD.topk(min(top_k, logits_BSD.shape[-1]), -1)
    return best_BSK, ids_BSK if vocabulary is None else vocabulary[ids_BSK]


def _chain(best_BS: Tensor, tokens_BS: Tensor, num_nodes: int) -> DraftTree:
    num_rows, depths = best_BS.shape
    tokens = tokens_BS.new_full((num_rows, num_nodes), NO_TOKEN)
    tokens[:, 1: depths + 1] = tokens_BS
    scores = best_BS.new_full((num_rows, num_nodes), -torch.inf)
    scores[:, 0] = 0.0
    scores[:, 1: depths + 1] = best_BS.cumsum(1)
    parents = torch.arange(-1, num_nodes - 1, device=tokens.device).clamp_(min=0)
    return DraftTree(tokens, parents.expand(num_rows, -1), scores)


_Tree = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Tokens, parents and scores of the nodes of one row."""


def _static(scores_SK: Sequence[Sequence[float]], tokens_SK: Sequence[Sequence[int]], topology: Topology) -> _Tree:
    tokens, scores, depths = [NO_TOKEN], [0.0], [0]
    for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
        depth = depths[parent]
        predicted = depth < len(tokens_SK) and rank < len(tokens_SK[depth])
        tokens.append(tokens_SK[depth][rank] if predicted else NO_TOKEN)
        scores.append(scores[parent] + scores_SK[depth][rank] if predicted else -torch.inf)
        depths.append(depth + 1)
    return tokens, topology.parents, scores


def _best_first(scores_SK: Sequence[Sequence[float]], tokens_SK: Sequence[Sequence[int]], num_nodes: int) -> _Tree:
    """Tokens, parents and scores of `num_nodes` nodes, the root first, padded with a chain of NO_TOKEN nodes.

    The heap holds, for each node taken, its best child not taken yet, and for each child its next best sibling: every
    prefix enters once, after every prefix that is more probable.
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
        # Two successors: the next best sibling replaces this node's token; the best child extends its prefix.
        if rank + 1 < len(scores_SK[depth]):
            heapq.heappush(heap, (-(scores[parent] + scores_SK[depth][rank + 1]), parent, rank + 1))
        if depth + 1 < len(scores_SK):
            heapq.heappush(heap, (minus - scores_SK[depth + 1][0], node, 0))
    while len(tokens) < num_nodes:
        parents.append(len(tokens) - 1)
        tokens.append(NO_TOKEN)
        scores.append(-torch.inf)
    return tokens, parents, scores
