"""Hydra: heads like Medusa's, each of which also reads the tokens before its own (arXiv:2402.05109, section 3).

At position i the target has chosen token x_{i+1} from its state h_i after the final norm. Head s, counted from 0, reads
h_i and the embeddings of all tokens between that state and its prediction, settled or drafted:

    z_s = [ h_i ; e(x_{i+1}) ; e(x_{i+2}) ; .. ; e(x_{i+1+s}) ]                        (2 + s) H numbers
    p_s = softmax(W (P_s z_s + SiLU(W_s z_s)))                                          over x_{i+2+s}

one perceptron with one hidden layer per head, and one output matrix W for all heads. P_s starts as the selection of h_i
and W as the target's output matrix, so that a new drafter gives the target's distribution as Medusa's does; W_s starts
small.

Training and evaluation use the true tokens: in decoding a head's prediction matters only after an accepted path. A path
is drafted token by token, one head per depth, so trees grow by confidence like EAGLE's
(`speculation.tree.build_draft_tree`); the state of a node is its z. There are no keys and no positions.

Two things differ from the paper: e is the target's embedding scaled to a mean square of one, and W is shared, which
saves S - 1 matrices of [D, H]. Measured on the quickstart target (295 answers of 16 k tokens, 4 epochs, 7 heads,
D 1536, peak learning rate 2e-3, one run each; theoretical speed-up over 780 held-out roots, and the share of first and
last heads that are correct):

    as it is                        4.00    .74 .74        learning rate 5e-3    3.86    .74 .70
    embeddings as they are          3.68    .70 .69        2 layers a head       4.03    .74 .74
    one W for each head             3.92    .75 .71        4 layers a head       4.04    .74 .73
    Medusa, at its best rate        3.23    .69 .41

Reading the tokens gains .05 at the first head, which then knows x_{i+1}, and .33 at the last; more layers gained
nothing in so short a run. The paper's Hydra++, whose heads read a decoder layer over all positions in place of h_i
(prefix attention), is not implemented.

    B rows, N nodes, R roots, S heads, H hidden, D draft vocabulary, V vocabulary
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
from eyrie_workers.drafters.layer_proposer import target_ids, token_projection
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState, DraftStep, DraftTree
from eyrie_workers.speculation.tree import build_limited_tree
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import upload
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import Linear
from eyrie_workers.training.numerics import linear
from eyrie_workers.training.objective import Objective, Prediction
from eyrie_workers.training.unroll_plan import UnrollPlan

_INITIAL_STD = 0.02
_EPS = 1e-6


class _Head(nn.Module):
    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.skip = nn.Linear(width, hidden_size, bias=False)
        self.inner = nn.Linear(width, hidden_size, bias=False)


class HydraDrafter(HeadsDrafter):
    """The parameters. The embedding is the target's: shared, frozen, not saved."""

    family, shared_output = "hydra", SHARED_OUTPUT["hydra"]

    def __init__(self, config: HeadsConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.heads = nn.ModuleList(_Head((2 + head) * config.hidden_size, config.hidden_size)
                                   for head in range(config.num_heads))
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def head(self, number: int) -> Tensor:
        """P and W of a head, concatenated: [2 H, (2 + number) H]."""
        return torch.cat([self.get_parameter(f"heads.{number}.{part}.weight") for part in ("skip", "inner")])


def scaled_embeddings(embed_VH: Tensor) -> Tensor:
    """e: the target's embedding, each row scaled to a mean square of one."""
    return F.rms_norm(embed_VH, embed_VH.shape[-1:], eps=_EPS)


def head_state(projected: Tensor) -> Tensor:
    """P z + SiLU(W z) from [P z ; W z]: [.., 2 H] -> [.., H]."""
    skip, inner = projected.chunk(2, -1)
    return residual_silu(skip, inner)


class HydraObjective(Objective[HydraDrafter]):
    """All heads at every root, after the true tokens."""

    def __init__(self, drafter: HydraDrafter, embeddings: TargetEmbeddings, spec: TrainSpec, _max_positions: int,
                 dtype: torch.dtype = torch.float32) -> None:
        super().__init__(drafter, drafter.vocabulary, embeddings.output_head, spec, steps=drafter.config.num_heads,
                         dtype=dtype)
        self._embed_VH = embeddings.embed

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """The states of each head at its roots, after the true tokens; the same in training and evaluation."""
        drafter, config, dtype = self.drafter, self.drafter.config, self.drafter.lm_head.weight.dtype
        # Tokens i+1 .. i+S after each root i; an arbitrary token where the root is not alive.
        steps = torch.arange(1, len(plan.alive) + 1, device=documents.token_ids.device)
        tokens_RS = documents.token_ids[(plan.roots[:, None] + steps).clamp(max=documents.token_ids.numel() - 1)]
        embed_RSH = scaled_embeddings(self._embed_VH[tokens_RS].to(dtype))
        inputs_RC = torch.cat([documents.aux[:, 0].index_select(0, plan.roots).to(dtype), embed_RSH.flatten(1)], 1)
        states = []
        for number, alive in enumerate(plan.alive):
            if alive == 0:
                break
            width = (2 + number) * config.hidden_size
            inputs = inputs_RC[:alive, :width]  # the inputs of head s are a prefix of those of head s + 1
            weight = drafter.head(number).to(self.dtype)
            states.append(checkpoint(_state, inputs, weight, dtype, use_reentrant=False) if self._recompute
                          else _state(inputs, weight, dtype))
        return Prediction(tuple(states), drafter.lm_head.weight.to(self.dtype))

    def flops(self, plan: UnrollPlan) -> int:
        """The inputs of the heads have no gradient; the target is one product forward."""
        config = self.drafter.config
        per_prediction = [2 * 2 * (2 + head) * config.hidden_size + 3 * config.draft_vocab_size
                          for head in range(len(plan.alive))]
        heads = sum(alive * each for alive, each in zip(plan.alive, per_prediction, strict=True))
        return 2 * config.hidden_size * (heads + plan.target_positions.numel() * config.vocab_size)


def _state(inputs: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return head_state(linear(inputs, weight).to(dtype))


class HydraProposer(HeadsProposer):
    """`speculation.protocol.Drafter`: one head per depth, trees grown by confidence. A row's state is z_0 [2 H]: the
    target's state at the last settled pair, and the pair's token as embedding."""

    def __init__(self, drafter: HydraDrafter, embed_VH: Tensor, num_layers: int) -> None:
        """embed_VH: the target's embedding; drafting computes in its dtype. num_layers: of the target."""
        config, dtype = drafter.config, embed_VH.dtype
        super().__init__(drafter, num_layers, 2 * config.hidden_size, dtype, embed_VH.device)
        with torch.inference_mode():
            self._embedding = token_projection(embed_VH, scaled_embeddings, config.hidden_size)
            self._heads = [Linear(drafter.head(number).to(dtype)) for number in range(config.num_heads)]
            self._lm_head = Linear(drafter.lm_head.weight.to(dtype))
            self._draft_ids_D = target_ids(drafter.vocabulary, embed_VH.device)

    @torch.inference_mode()
    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        assert isinstance(state, Tensor)
        indices = pairs.indices()
        chosen_B = indices.tokens.flatten().index_select(0, indices.last)  # x_{i+1}
        read_BC = torch.cat([last_states(pairs, indices).to(self._dtype), self._embedding(chosen_B)], 1)
        state.index_copy_(0, indices.rows, read_BC)

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """Grow one tree per row, at most as deep as there are heads; NO_TOKEN at deeper nodes."""
        assert isinstance(state, Tensor)
        first = self._predict(0, state.index_select(0, upload(rows))[:, None])
        return build_limited_tree(first, self._step, shape, self._num_heads, self._draft_ids_D, noise)

    def _step(self, tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
        """`protocol.StepFunction`: the input of a node is its parent's input and its own token."""
        return self._predict(depth, torch.cat([hidden, self._embedding(tokens.flatten()).view(*tokens.shape, -1)], -1))

    def _predict(self, number: int, read_BNC: Tensor) -> DraftStep:
        rows, nodes, _ = read_BNC.shape
        logits = self._lm_head(head_state(self._heads[number](read_BNC.flatten(0, 1))))  # [B * N, D]
        return DraftStep(logits.view(rows, nodes, -1), read_BNC)


@torch.no_grad()
def create(spec: DrafterSpec, target: TargetConfig, embeddings: TargetEmbeddings, _layers: Layers,
           vocabulary: DraftVocabulary, seed: int) -> HydraDrafter:
    """A drafter whose heads give the target's distribution of the next token, except for the noise of W_s."""
    assert spec.max_draft_tokens is not None
    drafter = HydraDrafter(HeadsConfig(target.hidden_size, target.vocab_size, vocabulary.size, spec.max_draft_tokens),
                           vocabulary)
    generator, hidden = torch.Generator(device="cpu").manual_seed(seed), target.hidden_size
    for number in range(spec.max_draft_tokens):
        skip, inner = (drafter.get_parameter(f"heads.{number}.{part}.weight") for part in ("skip", "inner"))
        skip.zero_()[:, :hidden].fill_diagonal_(1.0)  # P_s z = h_i
        inner.copy_(torch.empty(inner.shape, device="cpu").normal_(0.0, _INITIAL_STD, generator=generator))
    drafter.lm_head.weight.copy_(embeddings.lm_head.index_select(0, vocabulary.ids.to(embeddings.lm_head.device)))
    return drafter


FAMILY = FamilyImplementation(
    "hydra", create, HydraObjective, save_heads, partial(load_heads, HydraDrafter),
    lambda drafter, target: HydraProposer(drafter, target.embed_weight, target.config.num_layers), learning_rate=2e-3)
