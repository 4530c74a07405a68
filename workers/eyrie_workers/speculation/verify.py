"""Lossless verification: the target's own tokens, and their log probabilities, from one pass over the draft tree.

The target samples the next token at every node. The accepted path starts at the root and follows the children that
carry exactly the sampled token; the token sampled at its last node is the bonus token. The drafter's confidence never
decides, so the emitted text is the target's own for any tree.

Greedy, the token is argmax. Sampled, it is argmax(logits / temperature + Gumbel noise) with noise keyed by position
(`speculation.noise`): one draw per position, shared by all nodes at that depth. Only one of them is on the path, so
each emitted token is one draw from softmax(logits / temperature), and the same draw that plain decoding makes.

The usual min(1, p/q) rule (arXiv:2211.17192, and SpecInfer's multi-round form, arXiv:2305.09781) is lossless in
distribution only: its text depends on the drafter. This rule is lossless token by token, which a user can check.

A log probability is the log-softmax in float32 of the target's logits after the text before the token: before
temperature, top_k, top_p and noise, so it belongs to the target and not to the distribution that the token was drawn
from. The logits of a node are those of plain decoding at that position: a drafter changes no value. vLLM returns the
same values by default (`--logprobs-mode raw_logprobs`). SGLang divides the logits by the temperature first, unless
SGLANG_RETURN_ORIGINAL_LOGPROB is set: its values are the same for greedy requests and at temperature 1. Requests
without log probabilities cost nothing here. Those with them cost a log-softmax of their accepted rows per round and, on
a GPU, further waits for the device.
"""

# B rows, N nodes, T emitted tokens, V vocabulary, K alternatives

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_api.contract.engine import SamplingSpec
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.targets.device import upload

NOT_FINITE = -2
"""In place of a token where the target's logits are NaN or infinite. No node of a tree has it."""


@dataclass(frozen=True)
class AcceptedPath:
    """The accepted nodes of one row and the tokens it emits in a round."""

    nodes: list[int]
    """Accepted nodes in order, root included."""

    tokens: list[int]
    """The target's token at each of them: the accepted draft tokens, then the bonus token."""


def sample_target_tokens(logits: Tensor, depths: Tensor, samplings: Sequence[SamplingSpec],
                         noise: RowNoise | None) -> Tensor:
    """The target's token after each node.

    logits     [B, N, V]
    depths     [B, N] int64   depth of each node, root 0; indexes `noise`, which starts at the token after the root
    samplings  per row
    noise      None when all rows are greedy
    returns    [B, N] int64   target token ids, NOT_FINITE where the logits are not finite
    """
    choices = _sample(logits, depths, samplings, noise)
    # argmax returns the place of a NaN before that of any number, and of infinity before that of a finite one: it is
    # enough to look at the chosen logits.
    finite = logits.gather(-1, choices[..., None])[..., 0].isfinite()
    return choices.masked_fill(~finite, NOT_FINITE)


def _sample(logits: Tensor, depths: Tensor, samplings: Sequence[SamplingSpec], noise: RowNoise | None) -> Tensor:
    if noise is None:
        return logits.argmax(dim=-1)
    scores = logits.to(torch.float64)
    if any(sampling.top_k or sampling.top_p < 1.0 for sampling in samplings):
        rows = [row if sampling.temperature == 0.0 else apply_top_k_top_p(row / sampling.temperature, sampling)
                for row, sampling in zip(scores, samplings, strict=True)]
        scores = torch.stack(rows)
    else:
        scores = scores / noise.temperature[:, None, None]
    # noise.gumbel[b, d] belongs to the token after a node of depth d: siblings share it.
    rows_at = torch.arange(len(samplings), device=logits.device)[:, None]
    drawn = (scores + noise.gumbel[rows_at, depths]).argmax(dim=-1)
    greedy = [sampling.temperature == 0.0 for sampling in samplings]
    if not any(greedy):
        return drawn
    return torch.where(upload(greedy, torch.bool)[:, None], logits.argmax(dim=-1), drawn)


def apply_top_k_top_p(scores: Tensor, sampling: SamplingSpec) -> Tensor:
    """Set scores to -inf outside the top_k tokens, then outside the nucleus of top_p (arXiv:1904.09751).

    scores [..., V] are logits / temperature. The nucleus is the smallest set of most probable tokens whose mass reaches
    top_p; the most probable token always stays.
    """
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1)
        # Mass of all more probable tokens, without the token itself: 0 for the first, which therefore always stays.
        outside = mass.cumsum(dim=-1) - mass >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), -torch.inf)
    return scores


def accept_path(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> AcceptedPath:
    """The longest path from the root whose nodes carry the target's tokens.

    tokens, parents, choices  [N]; node 0 is the root and parents precede children. Siblings carry distinct tokens, so
    at most one child matches. Plain lists: a path takes a dozen comparisons, and a tensor operation costs far more than
    one.
    """
    nodes, emitted = [0], [choices[0]]
    for node in range(1, len(tokens)):
        # Parents come first, so one pass over the nodes follows the path; its last node decides which child is next.
        if parents[node] == nodes[-1] and tokens[node] == emitted[-1]:
            nodes.append(node)
            emitted.append(choices[node])
    return AcceptedPath(nodes, emitted)


@dataclass(frozen=True)
class TokenLogprobs:
    logprob: float
    """Of the token itself."""

    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens of the position with their log probabilities, best first."""


def emitted_logprobs(logits: Tensor | None, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]],
                     num_top: Sequence[int | None]) -> list[list[TokenLogprobs]]:
    """The log probabilities of the tokens that a pass emitted.

    logits   [B, N, V]; None where no row gets any
    nodes    per row: the nodes whose logits chose the tokens; further ones are ignored
    tokens   per row: the emitted tokens, possibly fewer than nodes
    num_top  per row: alternatives to return with each token, at most V; None for a row that gets no log probabilities
    returns  per row: one entry per token, none for a row without
    """
    by_row: list[list[TokenLogprobs]] = [[] for _ in num_top]
    if logits is None:
        return by_row
    # Rows of the flattened logits that chose an emitted token; accepted nodes beyond the answer's end are left out.
    places = [row * logits.shape[1] + node for row, top in enumerate(num_top) if top is not None
              for node, _ in zip(nodes[row], tokens[row], strict=False)]
    if not places:
        return by_row
    logprobs_TV = logits.flatten(0, 1).index_select(0, upload(places)).float().log_softmax(dim=-1)
    emitted = upload([token for row, top in enumerate(num_top) if top is not None for token in tokens[row]])
    own = logprobs_TV.gather(1, emitted[:, None])[:, 0].tolist()
    most = min(max(top or 0 for top in num_top), logits.shape[-1])
    values_TK, ids_TK = logprobs_TV.topk(most, dim=-1)
    best = [tuple(zip(ids, values, strict=True)) for ids, values in
            zip(ids_TK.tolist(), values_TK.tolist(), strict=True)]
    at = 0
    for row, top in enumerate(num_top):
        if top is not None:
            end = at + len(tokens[row])
            by_row[row] = [TokenLogprobs(own[place], best[place][:top]) for place in range(at, end)]
            at = end
    return by_row
