"""Log probabilities of emitted tokens, from the logits that prefill and verification compute anyway.

A log probability is the log-softmax in float32 of the target's logits after the text before the token: before
temperature, top_k, top_p and noise, so it belongs to the target and not to the distribution that the token was drawn
from. A round emits the target's own token at each accepted node, and the logits of a node are those of plain decoding
at that position: a drafter changes no value.

vLLM returns the same values by default (`--logprobs-mode raw_logprobs`). SGLang divides the logits by the temperature
first, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set: its values are the same for greedy requests and at temperature 1.

Requests without log probabilities cost nothing here. Those with them cost a log-softmax of their accepted rows per
round and, on a GPU, further waits for the device.
"""

# B rows, N nodes, T emitted tokens, V vocabulary, K alternatives

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eyrie_workers.speculation.upload import upload


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at the position of one emitted token."""

    logprob: float
    """Of the token itself."""

    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens of the position with their log probabilities, best first."""


def emitted_logprobs(logits: Tensor, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]],
                     num_top: Sequence[int | None]) -> list[list[TokenLogprobs]]:
    """The log probabilities of the tokens that a pass emitted.

    logits   [B, N, V]
    nodes    per row: the nodes whose logits chose the tokens; further ones are ignored
    tokens   per row: the emitted tokens, possibly fewer than nodes
    num_top  per row: alternatives to return with each token, at most V; None for a row that gets no log probabilities
    returns  per row: one entry per token, none for a row without
    """
    places = [row * logits.shape[1] + node for row, top in enumerate(num_top) if top is not None
              for node, _ in zip(nodes[row], tokens[row], strict=False)]
    found: list[list[TokenLogprobs]] = [[] for _ in num_top]
    if not places:
        return found
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
            found[row] = [TokenLogprobs(own[place], best[place][:top]) for place in range(at, end)]
            at = end
    return found
