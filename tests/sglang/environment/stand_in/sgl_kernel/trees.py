"""The draft tree as SGLang's verification reads it (stand-in; see the package's essay).

SGLang grows candidates in the order EAGLE-2 does and keeps two lists per request. With K = top-k:

    parent_list       [B, 1 + K * (S - 1)]   -1 for the root, then the candidate numbers of the K nodes that each of the
                                             steps 2 .. S expanded; those of step 2 are 0 .. K - 1
    top_scores_index  [B, N - 1]             candidate numbers that stay after reranking, ascending

Candidate c was grown in group c // K: group 0 hangs from the root, group g from candidate parent_list[g]. From that
this module writes what verification wants. Node numbers: 0 for the root, i + 1 for the i-th candidate that stayed.

    tree_mask               [B, N, N] flat   n sees m: m is n itself or above it. With FULL_MASK, each row of it is
                                             preceded by as many columns as the text has tokens
    positions               [B * N]          text length + depth
    retrieve_index          [B, N]           number of the node among all nodes of the batch
    retrieve_next_token     [B, N]           first child, -1 without one
    retrieve_next_sibling   [B, N]           next child of the same parent, -1 without one

N-gram drafting comes with a ready mask instead and wants the other four from it (`reconstruct_indices_from_tree_mask`,
which SGLang looks for in `sgl_kernel.speculative`).
"""

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def parents_of(parent_list: list[int], top_scores_index: list[int], topk: int) -> list[int]:
    """The parent of every node; the root's is itself, and -1 for an orphan.

    An orphan stays in the tree though its parent does not. Scores are products of float32 probabilities, so a child of
    probability 1 ties with its parent, and SGLang's selection (`torch.topk`) may then keep the child alone. Its kernels
    leave such a node unlinked: it is computed and can never be accepted.
    """
    node_of = {candidate: node for node, candidate in enumerate(top_scores_index, start=1)}
    groups = [candidate // topk for candidate in top_scores_index]
    return [0, *(0 if group == 0 else node_of.get(parent_list[group], -1) for group in groups)]


def build_tree_kernel_efficient_cpu(parent_list: Tensor, top_scores_index: Tensor, seq_lens: Tensor, tree_mask: Tensor,
                                    positions: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor,
                                    retrieve_next_sibling: Tensor, topk: int, depth: int, draft_token_num: int,
                                    tree_mask_mode: int) -> None:
    """Write mask, positions and links of every request's tree into the tensors given (see the module)."""
    num_nodes, mask_starts = draft_token_num, 0
    lists = parent_list.tolist() if parent_list.dim() > 1 else [parent_list.tolist()] * len(seq_lens)
    for row, length in enumerate(seq_lens.tolist()):
        parents = parents_of(lists[row], top_scores_index[row].tolist(), topk)
        seen, depths = lineage(parents)
        prefix = length if int(tree_mask_mode) == FULL_MASK else 0
        if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
            raise ValueError(f"tree_mask_mode {tree_mask_mode}: bit-packed masks are not read on CPU")
        size = num_nodes * (prefix + num_nodes)
        tree_mask[mask_starts: mask_starts + size].view(num_nodes, prefix + num_nodes)[:, prefix:] = seen
        mask_starts += size
        positions[row * num_nodes: (row + 1) * num_nodes] = length + depths
        retrieve_index[row] = torch.arange(row * num_nodes, (row + 1) * num_nodes)
        first_child, next_sibling = links(parents)
        retrieve_next_token[row] = torch.tensor(first_child)
        retrieve_next_sibling[row] = torch.tensor(next_sibling)


def reconstruct_indices_from_tree_mask(tree_mask: Tensor, verified_seq_len: Tensor, positions: Tensor,
                                       retrieve_index: Tensor, retrieve_next_token: Tensor,
                                       retrieve_next_sibling: Tensor, batch_size: int, draft_token_num: int) -> None:
    """Positions and links from a ready mask [B, N, N]. A node's parent is the last node above it; nodes above which
    there is none have no siblings."""
    num_nodes = draft_token_num
    masks = tree_mask.flatten()[: batch_size * num_nodes * num_nodes].view(batch_size, num_nodes, num_nodes).bool()
    for row, length in enumerate(verified_seq_len.tolist()):
        above = masks[row].tril(-1)
        parents = [max((m for m in range(n) if above[n, m]), default=-1) for n in range(num_nodes)]
        first_child, next_sibling = links(parents)
        positions.view(batch_size, num_nodes)[row] = above.sum(1) + length
        retrieve_index.view(batch_size, num_nodes)[row] = torch.arange(row * num_nodes, (row + 1) * num_nodes)
        # A mask's first child is the first node that sees this one at all, which in a tree is its first child.
        retrieve_next_token.view(batch_size, num_nodes)[row] = torch.tensor(first_child)
        retrieve_next_sibling.view(batch_size, num_nodes)[row] = torch.tensor(next_sibling)


def lineage(parents: list[int]) -> tuple[Tensor, Tensor]:
    """Mask [N, N] of each node's path to the root, itself included, and depths [N]. Parents precede children; orphans
    are computed as children of the root."""
    num_nodes = len(parents)
    seen = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        seen[node] |= seen[max(parents[node], 0)]
    return seen, seen.sum(1) - 1


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, ascending, -1 for none; node 0 and nodes with parent -1 have no
    siblings."""
    num_nodes = len(parents)
    first_child, next_sibling, latest = [-1] * num_nodes, [-1] * num_nodes, [-1] * num_nodes
    for node in range(1, num_nodes):
        parent = parents[node]
        if parent < 0:
            continue
        if latest[parent] < 0:
            first_child[parent] = node
        else:
            next_sibling[latest[parent]] = node
        latest[parent] = node
    return first_child, next_sibling
