"""The Markov head of DSpark (arXiv:2607.05147): each drafted token of a block reads the one before it.

A block's marginals do not depend on the tokens that are drafted with them, so that later ones contradict earlier ones.
The head adds a bias of low rank to the logits of step s, given the token t before it and the state h_s behind the final
norm:

    logits_s = W_head h_s + W_2 z_s

    vanilla   z_s = w_1[t]
    gated     z_s = sigmoid(G [h_s ; w_1[t]] + b) w_1[t]
    rnn       (g, c, o) = J [r_s ; w_1[t] ; h_s] + b,   r_{s+1} = sigmoid(g) r_s + (1 - sigmoid(g)) tanh(c),  r_0 = 0
              z_s = tanh(o)

Names and formulas are those of SGLang 0.5.23 (`srt/models/dspark.py`). W_2 starts at zero: a new drafter proposes the
marginals alone. Bias and logits are one product, [h_s ; z_s] with [W_head W_2], so the loss needs no second form.

A confidence head gives the probability that the target accepts token s where it has accepted those before it, from
the state and the token before, as DSPARK reads it where it verifies a part of a block:

    c_s = sigmoid(w [h_s ; w_1[t]] + b)          trained with cross-entropy against 1 - tv(p_s, q_s), q_s the target's

That loss and its weight of 1 are the paper's (`Objective._acceptance_loss`). It starts at 1/2.

    R roots or nodes, H hidden, M rank, V vocabulary
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyrie_api.contract.drafter import MarkovHeadKind


@dataclass(frozen=True)
class MarkovConfig:
    kind: MarkovHeadKind
    rank: int


class ConfidenceHead(nn.Module):
    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)


class BlockHead(ABC, nn.Module):
    """Corrects the marginals of a block by a bias W z_s, where z_s depends on the tokens before the proposed one."""

    state_size: int
    """Elements of what a node hands to its children."""

    @property
    @abstractmethod
    def bias_VM(self) -> Tensor:
        """W"""

    @abstractmethod
    def step(self, previous_R: Tensor, state_RH: Tensor, memory_RM: Tensor, depth: int,
             embed_VH: Tensor) -> tuple[Tensor, Tensor]:
        """z [R, M] of the step at a depth, and the memory for the next.

        previous_R  token before each proposed one
        state_RH    after the final norm
        memory_RM   of the step before; zeros at depth 0
        embed_VH    the target's embedding
        """

    def unroll(self, previous: Sequence[Tensor], states: Sequence[Tensor], embed_VH: Tensor) -> list[Tensor]:
        """z of every step, after the true tokens. Roots of a step are the first ones of the step before it."""
        memory_RM, read = states[0].new_zeros(states[0].shape[0], self.state_size), []
        for depth, (tokens_R, state_RH) in enumerate(zip(previous, states, strict=True)):
            z_RM, memory_RM = self.step(tokens_R, state_RH, memory_RM[: state_RH.shape[0]], depth, embed_VH)
            read.append(z_RM)
        return read


class MarkovHead(BlockHead):
    def __init__(self, config: MarkovConfig, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.config, rank = config, config.rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if config.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank) if config.kind == "rnn" else None
        self.state_size = 0 if self.joint_proj is None else rank

    @property
    def bias_VM(self) -> Tensor:
        return self.markov_w2.weight

    def step(self, previous_R: Tensor, state_RH: Tensor, memory_RM: Tensor, depth: int,
             embed_VH: Tensor) -> tuple[Tensor, Tensor]:
        """As in `BlockHead`; the memory is r."""
        embedded_RM = self.markov_w1(previous_R)
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([state_RH, embedded_RM], -1))) * embedded_RM, memory_RM
        if self.joint_proj is None:
            return embedded_RM, memory_RM
        gate, candidate, output = self.joint_proj(torch.cat([memory_RM, embedded_RM, state_RH], -1)).chunk(3, -1)
        kept = torch.sigmoid(gate)
        return torch.tanh(output), kept * memory_RM + (1.0 - kept) * torch.tanh(candidate)
