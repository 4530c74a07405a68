"""Domino's head of a DFlash block (arXiv:2605.29707): each drafted token reads those before it through a GRU.

The marginals of a block are corrected by a bias of low rank, given the tokens t_0 (settled), t_1, .. t_s before the one
that step s proposes, and the state h_s behind the final norm:

    g_s = GRU(e(t_s), g_{s-1})          g_{-1} = 0, e the target's embedding, no biases
    z_s = silu(W_a [h_s ; g_s])         of s = 0: 0, the first proposal is the marginal alone
    logits_s = W_head h_s + W_b z_s

As SGLang 0.5.23 computes it (`srt/speculative/domino_utils.py`, `pure_draft_prefix_len` 1). Published blocks are
shifted (`shift_label`): the position of the settled token proposes, too, and the last position of the block nothing.

Training (the paper's curriculum, as SpecForge 0.2.0 has it): (1 - b) of the loss is that of the corrected logits, b of
it that of the marginals; b falls in a line from 1 to 0 over the first half of the steps, so that the block is good
before the head leans on it. W_b starts at zero: a new drafter proposes the marginals.

    R roots or nodes, H hidden, G size of the GRU's state, M rank, V vocabulary
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_workers.drafters.markov_head import BlockHead
from eyrie_workers.training.objective import StepContext

_BASE_SHARE_OF_STEPS = 0.5  # SpecForge's lambda_base_decay_ratio


@dataclass(frozen=True)
class DominoConfig:
    state_size: int
    """G"""

    rank: int
    """M"""

    shifted: bool = True
    """Whether the settled token's position proposes."""


class DominoHead(BlockHead):
    def __init__(self, config: DominoConfig, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.state_size = config.state_size
        self.prefix_gru = nn.GRU(hidden_size, config.state_size, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(nn.Linear(hidden_size + config.state_size, config.rank, bias=False), nn.SiLU(),
                                        nn.Linear(config.rank, vocab_size, bias=False))

    @property
    def bias_VM(self) -> Tensor:
        weight = self.embed_proj[2].weight
        assert isinstance(weight, Tensor)
        return weight

    def step(self, previous_R: Tensor, state_RH: Tensor, memory_RM: Tensor, depth: int,
             embed_VH: Tensor) -> tuple[Tensor, Tensor]:
        """As in `BlockHead`; the memory is g."""
        of_input, of_state = self.prefix_gru.parameters()
        memory_RG = torch.gru_cell(F.embedding(previous_R, embed_VH).to(memory_RM.dtype), memory_RM, of_input, of_state)
        z_RM = self.embed_proj[1](self.embed_proj[0](torch.cat([state_RH, memory_RG], -1)))
        return z_RM if depth else torch.zeros_like(z_RM), memory_RG


def base_share(context: StepContext) -> float:
    """b: the share of the loss that is the marginals'."""
    return max(0.0, 1.0 - context.step / max(1.0, _BASE_SHARE_OF_STEPS * context.num_steps))
