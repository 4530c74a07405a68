"""Medusa: several heads on the target's last state, each predicting one token further ahead (arXiv:2401.10774, section
2.1).

At position i the target has chosen token x_{i+1} from its state h_i after the final norm. Head s, counted from 0,
predicts the token s + 1 positions later, from h_i only:

    p_s = softmax(W2_s (SiLU(W1_s h_i) + h_i))           over x_{i+2+s}

W1_s starts at zero and W2_s as the target's output matrix, so that initially every head gives the target's distribution
of x_{i+1}. Only the heads are trained (Medusa-1); their losses are weighted by step_decay ** s (the paper's lambda **
k).

No head reads x_{i+1} or the choices of earlier heads. One pass therefore predicts all depths, and the probability of a
path is the product of the marginals of its depths, from which trees are built (`speculation.tree`). In Hydra
(`drafters.hydra`) the heads read the tokens.

Each head has its own output matrix, as in the paper. Measured on the quickstart target (295 answers of 16 k
tokens, 4 epochs, 7 heads, D 1536, one run each; theoretical speed-up over 780 held-out roots):

    peak learning rate               5e-4    2e-3    5e-3    1e-2
    one matrix for each head         1.64    2.77    3.23    3.24
    one for all heads, trained       1.54    2.46    3.01
    one for all heads, the target's  1.42

The cost is memory: S D H values, four times that in training. For D 32768, H 4096 and 7 heads these are 15 GB in
float32; `drafter.draft_vocab_size` and `drafter.max_draft_tokens` lower it, and Hydra has one matrix.

The checkpoint is what vLLM's `MedusaModel` loads (`model_executor/models/medusa.py`; read, not run): `blocks`, output
matrices, and a `token_map` where the draft vocabulary is smaller than the target's. SGLang 0.5.23 has no Medusa.

    B rows, R roots, S heads, H hidden, D draft vocabulary, V vocabulary
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning.drafter_rules import SHARED_OUTPUT
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.heads import (
    HeadsConfig,
    HeadsDrafter,
    HeadsProposer,
    last_states,
    load_heads,
    residual_silu,
    save_heads,
)
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.layer_proposer import target_ids
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState, DraftTree
from eyrie_workers.speculation.tree import build_tree_from_marginals
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import upload
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import Linear
from eyrie_workers.training.numerics import linear
from eyrie_workers.training.objective import Objective, Prediction
from eyrie_workers.training.unroll_plan import UnrollPlan


class _Block(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size, bias=False)])


class MedusaDrafter(HeadsDrafter):
    """The parameters, under the names vLLM loads."""

    family, shared_output = "medusa", SHARED_OUTPUT["medusa"]

    def __init__(self, config: HeadsConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.blocks = nn.ModuleList(_Block(config.hidden_size) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
                                      for _ in range(config.num_heads))

    def block(self, head: int) -> Tensor:
        """W1 of a head: [H, H]."""
        return self.get_parameter(f"blocks.{head}.layers.0.weight")

    def output(self, head: int) -> Tensor:
        """W2 of a head: [D, H]."""
        return self.get_parameter(f"lm_heads.{head}.weight")


class MedusaObjective(Objective[MedusaDrafter]):
    """All heads at every root, from the target's state there."""

    def __init__(self, drafter: MedusaDrafter, embeddings: TargetEmbeddings, spec: TrainSpec, _max_positions: int,
                 dtype: torch.dtype = torch.float32) -> None:
        super().__init__(drafter, drafter.vocabulary, embeddings.output_head, spec, steps=drafter.config.num_heads,
                         dtype=dtype)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """The states of each head at its roots; the same in training and evaluation, since no head reads a token."""
        drafter = self.drafter
        # Heads look further ahead where fewer roots are alive: head s reads the first alive[s] states.
        h_RH = documents.aux[:, 0].index_select(0, plan.roots).to(drafter.block(0).dtype)
        heads = [head for head, alive in enumerate(plan.alive) if alive]  # the last heads may have no root
        states = [residual_silu(h_RH[: plan.alive[head]], linear(h_RH[: plan.alive[head]],
                                                                   drafter.block(head).to(self.dtype)))
                  for head in heads]
        return Prediction(tuple(states), tuple(drafter.output(head).to(self.dtype) for head in heads))

    def flops(self, plan: UnrollPlan) -> int:
        """W1: one product forward and one backward, since h has no gradient. W2: three. The target: one forward
        product."""
        config = self.drafter.config
        return 2 * config.hidden_size * (
            plan.num_predictions * (2 * config.hidden_size + 3 * config.draft_vocab_size)
            + plan.target_positions.numel() * config.vocab_size)


class MedusaProposer(HeadsProposer):
    """`speculation.protocol.Drafter`: one pass for all heads, then a tree of their marginals. A row's state is that of
    the target at the last settled pair."""

    def __init__(self, drafter: MedusaDrafter, num_layers: int, dtype: torch.dtype) -> None:
        """num_layers: of the target. dtype: compute dtype."""
        config = drafter.config
        super().__init__(drafter, num_layers, config.hidden_size, dtype, drafter.block(0).device)
        with torch.inference_mode():
            self._blocks = Linear(torch.cat([drafter.block(head) for head in range(config.num_heads)]).to(dtype))
            self._outputs = [Linear(drafter.output(head).to(dtype)) for head in range(config.num_heads)]
            self._draft_ids_D = target_ids(drafter.vocabulary, self._device)

    @torch.inference_mode()
    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        assert isinstance(state, Tensor)
        indices = pairs.indices()
        state.index_copy_(0, indices.rows, last_states(pairs, indices).to(self._dtype))

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """The tree of the heads' marginals; NO_TOKEN at depths without a head."""
        assert isinstance(state, Tensor)
        h_BH = state.index_select(0, upload(rows))  # of each row's last settled pair
        h_BSH = residual_silu(h_BH[:, None], self._blocks(h_BH).view(h_BH.shape[0], self._num_heads, -1))
        depths = min(shape.num_steps, self._num_heads)  # deeper nodes have no head
        logits_BSD = torch.stack([self._outputs[head](h_BSH[:, head].contiguous()) for head in range(depths)], 1)
        return build_tree_from_marginals(logits_BSD, shape, self._draft_ids_D, noise)


@torch.no_grad()
def create(spec: DrafterSpec, target: TargetConfig, embeddings: TargetEmbeddings, _layers: Layers,
           vocabulary: DraftVocabulary, _seed: int) -> MedusaDrafter:
    """A drafter whose heads all give the target's distribution of the next token."""
    assert spec.max_draft_tokens is not None
    drafter = MedusaDrafter(HeadsConfig(target.hidden_size, target.vocab_size, vocabulary.size, spec.max_draft_tokens),
                            vocabulary)
    rows_DH = embeddings.lm_head.index_select(0, vocabulary.ids.to(embeddings.lm_head.device))
    for head in range(spec.max_draft_tokens):
        drafter.block(head).zero_()  # SiLU(0) + h = h
        drafter.output(head).copy_(rows_DH)
    return drafter


FAMILY = FamilyImplementation(
    "medusa", create, MedusaObjective, save_heads, partial(load_heads, MedusaDrafter),
    lambda drafter, target: MedusaProposer(drafter, target.config.num_layers, target.dtype), learning_rate=5e-3)
