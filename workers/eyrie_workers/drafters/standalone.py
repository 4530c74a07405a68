"""A small language model as drafter: the original speculative decoding (arXiv:2211.17192, arXiv:2302.01318).

It reads tokens of the target's vocabulary and no hidden states, and predicts one token per pass:

    q(x_{i+1} | x_0 .. x_i) = softmax(lm_head(norm(layers(embed(x_0) .. embed(x_i)))))

Verification takes the target's choice at every node (`speculation.verify`), so speed depends on how often the two make
the same choice. The drafter is therefore distilled: trained on the target's answers with the target's distribution p at
each position (DistillSpec, arXiv:2310.08461, with the target's text in place of the drafter's and forward KL by
default; `train.loss: tv` is one minus the acceptance of sampled tokens),

    L = mean over the answer's tokens of  D(p(. | x_<t), q(. | x_<t))

One causal pass over whole documents yields all positions. Step s of a draft from root i and step s - 1 from root i + 1
are the same prediction, so training uses each position once; evaluation counts it at every (i, s).

The checkpoint is a plain Llama (`LlamaForCausalLM`, Hugging Face's names) that `transformers` and SGLang's STANDALONE
load; only its card marks it as a drafter. Head size and rope are the target's; width and depth are its own, by default
half the target's width and two layers. It has its own embedding and output matrix: with a vocabulary of 150 000 they
are most of its weights.

Both matrices are initialised from the target's, projected on the directions in which the rows vary most: with E = U S
V' (singular values descending), embed = E V_h, the best approximation of the target's geometry in the drafter's width
h; the output matrix likewise, with the weight of the target's final norm folded in. Measured on 150 conversations of
the quickstart target, 130 steps, 251 held-out roots: theoretical speed-up 2.39 and first-step accuracy .59 (with other
signs of the same directions 2.51 and .61: the spread of two runs), against 2.05 and .49 from random matrices.

    T packed tokens, N predicted positions, B rows, H hidden, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters import kv_cache
from eyrie_workers.drafters.decoder import DecoderLayer, decoder_config, layer_flops, load_layers, save_layers
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.initialisation import TargetEmbeddings, initialise_parameters
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState, DraftStep, DraftTree
from eyrie_workers.speculation.tree import BranchKeys, build_draft_tree
from eyrie_workers.targets.causal_attention import CausalAttention, packed_causal, starts_of
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import upload
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import Attend, TargetModel
from eyrie_workers.targets.operators import Rotary
from eyrie_workers.training.attention import gather_rows
from eyrie_workers.training.numerics import rms_norm
from eyrie_workers.training.objective import Objective, Prediction, StepContext
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll

_NUM_LAYERS = 2


class _Body(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)


class StandaloneDrafter(nn.Module):
    """The parameters, under the names of Hugging Face's Llama."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def states(self, documents: PackedBatch, angles: Tensor, positions_N: Tensor, dtype: torch.dtype,
               recompute: bool = False) -> Tensor:
        """[N, H] states before the output matrix at distinct packed positions; angles [T, 2, E / 2]."""
        config = self.config
        x_TH = F.embedding(documents.token_ids, self.model.embed_tokens.weight)
        layers = [layer.weights(dtype) for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        starts = starts_of(documents.lengths, x_TH.device)
        for number, layer in enumerate(layers):
            q_TKWE, k_TKE, v_TKE = layer.heads(x_TH, angles)
            attended_TQ = packed_causal(q_TKWE.flatten(1, 2), k_TKE, v_TKE, documents.lengths, starts)
            if number + 1 == len(layers):  # after the last attention only the requested positions are needed
                x_TH, attended_TQ = gather_rows(x_TH, positions_N), gather_rows(attended_TQ, positions_N)
            x_TH = layer.post_attention(x_TH, attended_TQ, recompute)
        return rms_norm(x_TH, self.model.norm.weight, config.rms_eps)


class Distillation(Objective[StandaloneDrafter]):
    """Trains a StandaloneDrafter on the target's answers and distribution."""

    def __init__(self, drafter: StandaloneDrafter, embeddings: TargetEmbeddings, spec: TrainSpec, max_positions: int,
                 dtype: torch.dtype) -> None:
        super().__init__(drafter, drafter.config.vocab_size, embeddings.output_head, spec, dtype=dtype)
        self._target_hidden = embeddings.lm_head.shape[1]
        self._rotary = Rotary(drafter.config.rope, drafter.config.head_dim, max_positions)

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """In training step 0 of every root, which is every position once; in evaluation all steps, as in decoding."""
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps if context is None else 1)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """Step s of root i is the state after the true token i + 1 + s."""
        positions_N = plan.target_positions
        states_NH = self.drafter.states(documents, self._rotary.at(plan.positions), positions_N, self.dtype,
                                         self._recompute)
        # Each position is computed once; in evaluation several (root, step) pairs read the same state.
        row_T = torch.full_like(documents.token_ids, -1)
        row_T[positions_N] = torch.arange(positions_N.numel(), device=positions_N.device)
        states = tuple(states_NH.index_select(0, row_T[plan.roots[:alive] + 1 + step])
                       for step, alive in enumerate(plan.alive) if alive)
        return Prediction(states, self.drafter.lm_head.weight.to(self.dtype))

    def flops(self, plan: UnrollPlan) -> int:
        """The layers at every token, both output matrices at the predicted ones."""
        config, num_tokens, num_predicted = self.drafter.config, plan.positions.numel(), plan.target_positions.numel()
        num_visible = int(plan.positions.sum()) + num_tokens
        heads = 6 * num_predicted * config.hidden_size * config.vocab_size
        return (config.num_layers * layer_flops(config, num_tokens, num_visible) + heads
                + 2 * num_predicted * self._target_hidden * config.vocab_size)


@dataclass
class StandaloneState:
    """Keys of every row's text, and the prediction after its last token: logits [rows, V]."""

    cache: kv_cache.DrafterKVCache
    logits: Tensor
    first: list[int]
    """First token of each row's text: the pairs of `extend` contain the others, and it is read with them."""


class StandaloneProposer:
    """`speculation.protocol.Drafter` with a Llama of its own."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, drafter: StandaloneDrafter, target: TargetModel) -> None:
        """Drafting computes in the target's dtype, on its device."""
        self.branch_keys: BranchKeys = "ancestors"
        self.reads_first_token = True
        """SGLang's STANDALONE pairs each position with the following token, as EAGLE does, and so never reads the first
        token of a text. False reproduces that."""
        self._model = TargetModel(drafter.config, {name: tensor.to(target.device, target.dtype)
                                                   for name, tensor in drafter.state_dict().items()})
        self.max_length = drafter.config.max_position_embeddings

    def new_state(self, num_rows: int) -> StandaloneState:
        config, dtype = self._model.config, self._model.dtype
        return StandaloneState(kv_cache.DrafterKVCache(config, config.num_layers, num_rows, dtype),
                               torch.zeros(num_rows, config.vocab_size, dtype=dtype), [0] * num_rows)

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        assert isinstance(state, StandaloneState)
        state.cache.settled[row], state.first[row] = 0, prompt[0]

    @torch.inference_mode()
    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Read the tokens of the pairs, and predict from the last of each row."""
        assert isinstance(state, StandaloneState)
        lengths = [state.cache.settled[row] for row in pairs.rows]
        texts = [[*([state.first[row]] if length == 0 and self.reads_first_token else []), *tokens]
                 for row, length, tokens in zip(pairs.rows, lengths, pairs.tokens, strict=True)]
        chosen, num_new = kv_cache.RowLengths.of(pairs.rows, lengths), max(map(len, texts))
        tokens_BT = upload([[*text, *[0] * (num_new - len(text))] for text in texts])
        attend: Attend
        if lengths == [0]:  # the first tokens of one row, without the mask of N * N elements
            cache = state.cache
            cache.reserve(num_new)
            attend = CausalAttention(self._model.config, [num_new], self._model.dtype, self._model.device,
                                     lambda layer, kv: cache.write(layer, chosen, kv[None]))
        else:
            attend = kv_cache.NewTokens(state.cache, chosen, num_new, kv_cache.causal_mask(chosen, num_new))
        positions_BT = chosen.lengths_B1 + torch.arange(num_new)  # padding included: it is overwritten
        _, states = self._model.run(tokens_BT.flatten(), positions_BT.flatten(), attend)
        last_B = upload([row * num_new + len(text) - 1 for row, text in enumerate(texts)])
        state.logits.index_copy_(0, chosen.rows_B, self._model.logits(states.index_select(0, last_B)))
        for row, length, text in zip(pairs.rows, lengths, texts, strict=True):
            state.cache.settled[row] = length + len(text)

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """Grow one tree per row from the predictions of `extend`. Nodes have keys and no state."""
        assert isinstance(state, StandaloneState)
        cache = state.cache
        chosen = kv_cache.RowLengths.of(rows, [cache.settled[row] for row in rows])

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
            num_new, num_scratch = mask.shape[1:]
            # One node at every depth: each sees all before it.
            visible = (kv_cache.all_scratch_mask(chosen, num_new, num_scratch) if num_scratch == depth
                       else kv_cache.scratch_mask(chosen, mask))
            attend = kv_cache.NewTokens(cache, chosen, num_new, visible, num_scratch - num_new)
            positions_BN = (chosen.lengths_B1 + (depth - 1)).expand(-1, num_new)  # depth 1 follows the text
            _, states = self._model.run(tokens.flatten(), positions_BN.flatten(), attend)
            return DraftStep(self._model.logits(states).view(*tokens.shape, -1), hidden)

        logits = state.logits.index_select(0, chosen.rows_B)[:, None]
        first = DraftStep(logits, logits.new_zeros(len(rows), 1, 1))
        return build_draft_tree(first, step, shape, None, noise, self.branch_keys)


def _create(spec: DrafterSpec, target: TargetConfig, embeddings: TargetEmbeddings, _layers: Layers,
            _vocabulary: DraftVocabulary, seed: int) -> StandaloneDrafter:
    head_dim = target.head_dim
    hidden = spec.hidden_size or max(1, round(target.hidden_size / 2 / head_dim)) * head_dim  # whole heads
    # An MLP of the target's width on a narrower stream would be most of the drafter: its width is scaled down alike.
    width = spec.intermediate_size or max(8, round(target.intermediate_size * hidden / target.hidden_size / 8) * 8)
    drafter = StandaloneDrafter(decoder_config(
        spec, target, "llama", spec.num_layers or _NUM_LAYERS, max(1, hidden // head_dim), hidden_size=hidden,
        intermediate_size=width))
    initialise_parameters(drafter, seed)
    with torch.no_grad():
        _project(drafter.model.embed_tokens.weight, embeddings.embed)
        _project(drafter.lm_head.weight, embeddings.lm_head * embeddings.norm)
    return drafter


def _project(own_Vh: Tensor, rows_VH: Tensor) -> None:
    """Set the drafter's rows to the target's, projected on their principal directions."""
    rows_VH = rows_VH.to(torch.promote_types(rows_VH.dtype, torch.float32))
    # The directions in which the rows vary: eigenvectors of their second moments, decomposed in float64.
    _, directions_HH = torch.linalg.eigh((rows_VH.T @ rows_VH).double())  # ascending
    width = min(own_Vh.shape[1], rows_VH.shape[1])
    own_Vh[:, :width] = rows_VH @ directions_HH.flip(1)[:, :width].to(rows_VH.dtype)


# 130 steps of 1024 tokens: theoretical speed-up (loss) 2.25 (1.76) at 1e-3, 2.39 (1.66) at 2e-3, 2.49 (1.72) at 3e-3;
# from random matrices 1.82 at 1e-3, 2.05 at 2e-3, 1.52 at 3e-3, 1.28 at 6e-3.
FAMILY = FamilyImplementation(
    "standalone", _create, Distillation, partial(save_layers, "standalone"),
    partial(load_layers, StandaloneDrafter, "standalone"), StandaloneProposer, learning_rate=2e-3)
