"""Draft trees from marginals: for drafters that predict all depths at once, independently of the path.

Medusa's heads (arXiv:2401.10774) and a diffused block (DFlash, arXiv:2602.06036) give for each depth d a distribution
p_d over tokens that does not depend on the path. A path's probability of being accepted is then taken to be the product

    P(t_1 .. t_d) = p_1(t_1) p_2(t_2) .. p_d(t_d)

and the tree of N nodes with the highest expected acceptance consists of the N most probable prefixes: a prefix is never
less probable than its extensions, so they form a tree (DDTree, arXiv:2604.12989). A prefix of depth d is among them
only if its first d - 1 tokens are, so extending the N best prefixes of each depth finds them all. Only the top_k most
probable tokens of a depth are considered.

A static tree (`static_tree`) takes its topology from a table instead: each node takes the token of its rank at its
depth, independently of the drafter's confidence.

Neither predicts more depths than it is given logits for: nodes beyond hold NO_TOKEN.

DDTree's best-first search over a heap visits fewer prefixes, but on the host: it would read every depth's best tokens
from the device, a wait per round that the tensor form does not have.

    B rows, S depths, D draft vocabulary, N nodes of the tree, K top-k, W prefixes extended at a depth
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftTree
from eyrie_workers.speculation.static_tree import Topology, static_topology
from eyrie_workers.speculation.tree import Candidates, rerank
from eyrie_workers.speculation.upload import upload


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
    if shape.static:
        return _static(best_BSK, tokens_BSK, static_topology(shape))
    return _most_probable(best_BSK, tokens_BSK, shape.num_draft_tokens)


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
    return DraftTree(tokens, parents.expand(num_rows, -1), scores, num_filled=depths + 1)


def _most_probable(best_BSK: Tensor, tokens_BSK: Tensor, num_nodes: int) -> DraftTree:
    """The most probable prefixes, most probable first. Sums are float64: paths differ by little, and depths add up."""
    num_rows, depths, width = best_BSK.shape
    tokens, parents, scores = [], [], []
    frontier_BW = tokens_BSK.new_full((num_rows, 1), -1)  # candidate indices of the prefixes to extend; -1 the root
    frontier_scores_BW = torch.zeros(num_rows, 1, dtype=torch.float64, device=best_BSK.device)
    num_candidates = 0
    for depth in range(depths):
        extended = (frontier_scores_BW[:, :, None] + best_BSK[:, depth, None]).flatten(1)  # [B, W * K]
        tokens.append(tokens_BSK[:, depth].repeat(1, frontier_BW.shape[1]))
        parents.append(frontier_BW.repeat_interleave(width, dim=1))
        scores.append(extended)
        frontier_scores_BW, chosen = extended.topk(min(num_nodes - 1, extended.shape[1]))
        frontier_BW = num_candidates + chosen
        num_candidates += extended.shape[1]
    tree = rerank(Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1)), num_nodes, "score")
    return DraftTree(tree.tokens, tree.parents, tree.scores.float(), tree.num_filled)


class _Places(NamedTuple):
    """Where a static tree's nodes find their values among S * K ranked tokens, then one missing value, then zero."""

    tokens: tuple[int, ...]
    """Of each node."""

    paths: tuple[int, ...]
    """Of each node the tokens on its path, padded with the zero to one length."""

    num_filled: int


def _static(best_BSK: Tensor, tokens_BSK: Tensor, topology: Topology) -> DraftTree:
    num_rows, depths, width = best_BSK.shape
    num_nodes, places = len(topology.parents), _places(topology, depths, width)
    parents_N, token_N, path_X = upload([*topology.parents, *places.tokens, *places.paths]).split(
        [num_nodes, num_nodes, len(places.paths)])
    values = torch.cat([best_BSK.flatten(1), best_BSK.new_full((num_rows, 1), -torch.inf),
                        best_BSK.new_zeros(num_rows, 1)], 1)
    tokens = torch.cat([tokens_BSK.flatten(1), tokens_BSK.new_full((num_rows, 1), NO_TOKEN)], 1)
    scores_BN = values.index_select(1, path_X).unflatten(1, (num_nodes, -1)).sum(-1)
    return DraftTree(tokens.index_select(1, token_N), parents_N.expand(num_rows, -1), scores_BN, places.num_filled)


@cache
def _places(topology: Topology, depths: int, width: int) -> _Places:
    missing, zero = depths * width, depths * width + 1
    tokens = [missing]  # of the root
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
        depth = len(paths[parent])
        place = depth * width + rank if depth < depths and rank < width else missing
        tokens.append(place)
        paths.append((*paths[parent], place))
    longest = max(map(len, paths))
    filled = [node for node, place in enumerate(tokens) if place != missing]
    return _Places(tuple(tokens), tuple(place for path in paths for place in (*path, *[zero] * (longest - len(path)))),
                   num_filled=1 + max(filled, default=0))
