"""The interface between the engine and drafters of all families.

A round of speculative decoding has two halves. The target verifies, which yields its hidden states at the positions it
ran and the tokens now known to follow them; the drafter proposes a tree for what comes next. A drafter therefore has
two methods:

    extend    receives committed positions: target states h_i paired with the token x_{i+1} that the target sampled
              after them. EAGLE runs one forward over the pairs (EAGLE-3, arXiv:2503.01840, figure 5: fused h_i next to
              the embedding of x_{i+1}, predicting x_{i+2}); Medusa keeps the last h_i; an n-gram drafter the tokens.
    propose   returns a draft tree on each row's last token. A family that predicts one token at a time passes its step
              to `speculation.tree.build_draft_tree`, which does expansion, reranking and masks; a family that finds
              whole continuations builds the tree itself.

Why pairs: after a prefill of P prompt tokens the target has states h_0 .. h_{P-1} and has sampled x_P; after a round
that accepted `a` draft tokens it has `a + 1` more states and the same number of new tokens. States and next tokens
always come in equal number, so one method covers prefill and decoding.

A drafter cannot change the output: verification never reads its confidences, only its tokens.

On a GPU the host waits for the device once per round, when the engine reads the accepted tokens. A drafter therefore
reads no number of a device tensor: what the host knows (rows, lengths, tokens) it receives as Python numbers, and
uploads without waiting (`targets.device.upload`). tests/gpu counts the waits of every family.

`noise` carries the sampling noise of the positions ahead. The target will take argmax(logits / temperature + Gumbel
noise of that position); a drafter that perturbs its own logits with the same noise proposes that argmax more often than
by proposing its most probable token (shared-noise coupling: Daliri et al., arXiv:2408.07978). How much noise to add is
measured in `eyrie_workers.speculation.noise`; `build_draft_tree` applies it.
"""

# B rows, T pairs, A aux layers, H hidden, D draft vocabulary, N tree nodes, K top-k, M scratch keys

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.targets.device import upload

NO_TOKEN = -1
"""Fills tree nodes that hold no proposal. It matches no target token, so such a node is never accepted."""


class CommittedIndices(NamedTuple):
    """The host's numbers of `CommittedTokens` as tensors.

    rows    [B]     int64
    starts  [B]     int64
    ends    [B]     int64   starts + lengths
    last    [B]     int64   index of each row's last pair among the B * T pairs
    tokens  [B, T]  int64   zero beyond a row's length
    """

    rows: Tensor
    starts: Tensor
    ends: Tensor
    last: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class CommittedTokens:
    """Target states and the tokens sampled after them, for some rows at once.

    Everything but the states is known on the host, where the scheduler needs it, and stays there: a family reads lists,
    or uploads them once by `indices`.

    rows     B rows (slots) of the drafter's state; distinct
    starts   position of the first pair of each row; equals the number of pairs that row already holds
    tokens   tokens[b][t] is the token at position starts[b] + t + 1; at least one per row
    aux      [B, T, A, H] float  aux[b, t] holds the target's `hidden_states` of `aux_layers` at position starts[b] + t.
             T is the longest row's number of pairs; positions beyond a row's own are padding of any value
    """

    rows: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]
    aux: Tensor

    @property
    def ends(self) -> list[int]:
        """Pairs of each row once these are added."""
        return [start + len(tokens) for start, tokens in zip(self.starts, self.tokens, strict=True)]

    def indices(self) -> CommittedIndices:
        """The numbers on the device of the current scope, in one copy that the host does not wait for."""
        num_rows, num_pairs = len(self.rows), max(map(len, self.tokens))
        last = [row * num_pairs + len(tokens) - 1 for row, tokens in enumerate(self.tokens)]
        flat = [*self.rows, *self.starts, *self.ends, *last]
        for tokens in self.tokens:
            flat += [*tokens, *[0] * (num_pairs - len(tokens))]
        uploaded = upload(flat)
        rows, starts, ends, last_B = uploaded[: 4 * num_rows].view(4, num_rows).unbind(0)
        return CommittedIndices(rows, starts, ends, last_B, uploaded[4 * num_rows:].view(num_rows, num_pairs))


@dataclass(frozen=True)
class DraftTree:
    """Proposals arranged by prefix, one tree per row. Node 0 is the row's last committed token.

    tokens   [B, N] int64   target token ids; NO_TOKEN where a row has fewer nodes
    parents  [B, N] int64   index of each node's parent, always smaller than its own; the root is its own parent.
                            Siblings carry distinct tokens.
    scores   [B, N] float   log of the confidence that the node is accepted (root 0, padding -inf); for reports only
    num_filled              nodes after this many hold NO_TOKEN in every row, and the engine does not verify them; None:
                            all may hold a token. Known without reading a tensor of the device
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    num_filled: int | None = None


class DraftStep(NamedTuple):
    """Outputs of one drafter pass for each frontier node.

    logits  [B, K, D] float   unnormalised log-probabilities over the draft vocabulary
    hidden  [B, K, H] float   passed back as the state of that node when its children are run
    """

    logits: Tensor
    hidden: Tensor


class StepFunction(Protocol):
    """One drafter pass over the frontier of every row: appends K scratch keys and predicts the next tokens."""

    def __call__(self, tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
        """Run the nodes of one depth.

        tokens  [B, K]     int64   target token ids of the nodes
        hidden  [B, K, H]  float   `DraftStep.hidden` of each node's parent
        mask    [B, K, M]  bool    which scratch keys of this round a node sees: its ancestors below the root and
                                   itself. The nodes of this call are the last K of the M, after those of earlier
                                   calls: M = depth * K in a dynamic tree; a static one's width varies by depth.
        depth                      1 for children of the root. Rope position = last pair's position + depth.
        """
        ...


class DrafterState(Protocol):
    """A family's state of all rows (KV cache, texts, last states). Opaque to the engine."""


class Drafter(Protocol):
    """A drafter of any family."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """`hidden_states` indices it reads (0 embeddings, i + 1 output of layer i, num_layers after the final norm)."""
        ...

    @property
    def max_length(self) -> int:
        """Longest text in tokens; beyond it the engine decodes that row without drafting."""
        ...

    def new_state(self, num_rows: int) -> DrafterState:
        """State of `num_rows` rows. Its memory grows with the texts and trees that it holds."""
        ...

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Reset `row` for a new request. Its pairs follow by `extend`, from position 0."""
        ...

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Add committed tokens. Scratch keys of an earlier `propose` become invalid."""
        ...

    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """Build one tree per row on its last committed token. With top_k 1 every tree is a chain, padding included.

        rows   rows that hold pairs; calling again before the next `extend`, with any shape, starts over
        noise  sampling noise of those rows (same order), None when all are greedy
        """
        ...
