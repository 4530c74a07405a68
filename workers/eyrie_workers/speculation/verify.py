"""Lossless verification: what the target itself would have said, read off one pass over the draft tree.

At every node the target makes its own choice for the next token; then we walk from the root along children that carry
exactly the chosen token, and the choice at the last node reached is the bonus token. No token is ever taken because the
drafter liked it, so the emitted text is the target's own, whatever the tree.

Greedy, the choice is argmax. Sampled, it is argmax(logits / temperature + Gumbel noise) with noise keyed by position
(`speculation.noise`): one draw per position, shared by all nodes at that depth. Only one of them is on the path, so
each emitted token is one honest draw from softmax(logits / temperature), and the same draw that plain decoding makes.

The usual min(1, p/q) rule (arXiv:2211.17192, and SpecInfer's multi-round form, arXiv:2305.09781) is lossless in
distribution only: its text depends on the drafter. Ours is lossless token by token, which a user can check.
"""

# B rows, N nodes, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_api.v1alpha1.sampling import SamplingSpec
from eyrie_workers.speculation.noise import RowNoise


@dataclass(frozen=True)
class AcceptedPath:
    """What one row emits in a round."""

    nodes: list[int]
    """Accepted nodes in order, root included."""

    tokens: list[int]
    """The target's choice at each of them: the accepted draft tokens, then the bonus token."""


def sample_target_tokens(logits: Tensor, depths: Tensor, samplings: Sequence[SamplingSpec],
                         noise: RowNoise | None) -> Tensor:
    """The target's choice after each node.

    logits     [B, N, V]
    depths     [B, N] int64   depth of each node, root 0; indexes `noise`, which starts at the token after the root
    samplings  per row
    noise      None when all rows are greedy
    returns    [B, N] int64   target token ids
    """
    if noise is None:
        return logits.argmax(dim=-1)
    scores = logits.to(torch.float64)
    greedy = torch.tensor([sampling.temperature == 0.0 for sampling in samplings], device=logits.device)
    if any(sampling.top_k or sampling.top_p < 1.0 for sampling in samplings):
        rows = [row if sampling.temperature == 0.0 else apply_top_k_top_p(row / sampling.temperature, sampling)
                for row, sampling in zip(scores, samplings, strict=True)]
        scores = torch.stack(rows)
    else:
        scores = scores / noise.temperature[:, None, None]
    rows_at = torch.arange(len(samplings), device=logits.device)[:, None]
    drawn = (scores + noise.gumbel[rows_at, depths]).argmax(dim=-1)
    return torch.where(greedy[:, None], logits.argmax(dim=-1), drawn) if bool(greedy.any()) else drawn


def apply_top_k_top_p(scores: Tensor, sampling: SamplingSpec) -> Tensor:
    """-inf for tokens outside top_k and then outside the nucleus of top_p (arXiv:1904.09751), in that order.

    scores [..., V] are logits / temperature. The nucleus is the smallest set of most probable tokens whose mass reaches
    top_p; the most probable token always stays.
    """
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1)
        outside = mass.cumsum(dim=-1) - mass >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), -torch.inf)
    return scores


def accept_path(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> AcceptedPath:
    """Walk from the root along children that carry the target's choice.

    tokens, parents, choices  [N]; node 0 is the root and parents precede children. Plain lists: a walk is a dozen
    comparisons, and each would cost a tensor operation a thousand times as much.
    """
    nodes, emitted = [0], [choices[0]]
    for node in range(1, len(tokens)):
        if parents[node] == nodes[-1] and tokens[node] == emitted[-1]:
            nodes.append(node)
            emitted.append(choices[node])
    return AcceptedPath(nodes, emitted)
