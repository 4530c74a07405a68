"""The MTP layer of a target, trained on: one decoder layer for multi-token prediction (arXiv:2412.19437, section 2.2).

Some targets are published with such a layer, trained together with them to predict one token further. SGLang drafts
with it as with an EAGLE drafter: the first token from the target's final state, later ones from the layer's own output.
It was trained for the first alone. Here it is trained as it drafts, unrolled on its own outputs, on the target's texts
(FastMTP, arXiv:2509.18362, which unrolls one shared layer and weighs later steps less, `train.step_decay`; its loss is
the cross-entropy with the answer's token, here it is `train.loss`, against the target's distribution):

    x_i     = input_proj [hidden_layernorm(f_i); token_layernorm(embed(token i+1))]
    h_i     = x_i + attention(input_layernorm(x_i));  h_i = h_i + mlp(post_attention_layernorm(h_i))
    f'_i+1  = final_layernorm(h_i)            logits of token i+2 = lm_head f'_i+1

f is the target's state after its final norm, for deeper steps f' of the step before; embedding and lm_head are the
target's: frozen, not saved. At position 0 of a text the embedding is replaced by zeros. Names and arithmetic are those
of SGLang's `MiMoMTP`, read in 0.5.23: the layer is Qwen 2's, with biases on q, k and v. A checkpoint holds the tensors
under the target's names, and in its config.json the target's architecture and a mark (`sglang_support.MARK`).

The default rate is that of all families; none was measured for a pretrained layer.

    T packed tokens, R roots, H hidden, Q = q + k + v widths, K kv heads, W query heads per kv head, E head size,
    V vocabulary
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.sglang_support import MARK, MTP_LAYER
from eyrie_workers.drafters import layer_proposer
from eyrie_workers.drafters.decoder import DecoderLayer, decoder_config, layer_flops, load_layers, save_layers
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.feature_layer import FeatureLayer, FeatureObjective, Projection
from eyrie_workers.drafters.initialisation import TargetEmbeddings, initialise_parameters
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.operators import Linear, rms_normalise
from eyrie_workers.training.objective import StepContext, plan_drawn
from eyrie_workers.training.unroll_plan import UnrollPlan

_NO_TOKEN = -1
"""In place of the token after position 0, whose embedding the layer does not read."""


class MtpDrafter(DecoderLayer):
    """The parameters, under the names of the target's checkpoint behind `MTP_LAYER`."""

    def __init__(self, config: TargetConfig) -> None:
        """`config` is the target's."""
        super().__init__(config)
        for projection in (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj):
            projection.bias = nn.Parameter(torch.zeros(projection.out_features))
        self.token_layernorm, self.hidden_layernorm = nn.RMSNorm(config.hidden_size), nn.RMSNorm(config.hidden_size)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.final_layernorm = nn.RMSNorm(config.hidden_size)

    def feature_layer(self, dtype: torch.dtype) -> FeatureLayer:
        """The matrices joined by input, in `dtype`; gradients flow to the parameters."""
        attention, hidden, input_norm = self.self_attn, self.config.hidden_size, self.input_layernorm.weight
        return FeatureLayer(
            self.config, self.final_layernorm.weight.dtype,
            state=Projection(self.input_proj.weight[:, :hidden].to(dtype), self.hidden_layernorm.weight),
            token=Projection(self.input_proj.weight[:, hidden:].to(dtype), self.token_layernorm.weight),
            query=Projection(attention.q_proj.weight.to(dtype), input_norm, attention.q_proj.bias),
            key_value=Projection(torch.cat([attention.k_proj.weight, attention.v_proj.weight]).to(dtype), input_norm,
                                 torch.cat([attention.k_proj.bias, attention.v_proj.bias])),
            post_attention=self.post_attention(dtype), final_norm=self.final_layernorm.weight, reads_first_token=False)


class UnrolledPrediction(FeatureObjective):
    """Trains an MtpDrafter on the target's distributions, unrolled as EAGLE-3 (`eagle3.drafter.TrainingTimeTest`)."""

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """In training, some roots unrolled; in evaluation all roots and steps."""
        return plan_drawn(documents, context, self._spec)

    def flops(self, plan: UnrollPlan) -> int:
        """The output matrix has no gradient, nor have the states and embeddings of step 0."""
        config: TargetConfig = self.drafter.config
        tokens, hidden = plan.positions.numel(), config.hidden_size
        kv = 2 * config.num_kv_heads * config.head_dim
        once = tokens * hidden * (2 * 2 * hidden + 3 * kv) * 2  # input_proj, k and v of every position
        later = 6 * (plan.num_predictions - plan.alive[0]) * hidden * hidden  # the state's half of input_proj
        head = 2 * hidden * config.vocab_size * (2 * plan.num_predictions + plan.target_positions.numel())
        return once + later + head + layer_flops(config, plan.num_predictions, plan.num_visible)


class MtpProposer(layer_proposer.LayerProposer):
    """An MtpDrafter with its target's embedding and output matrix, for decoding, with norms folded into the matrices
    that follow them."""

    @torch.inference_mode()
    def __init__(self, drafter: MtpDrafter, target: TargetModel) -> None:
        """Drafting computes in the target's dtype."""
        layer, config, dtype = drafter.feature_layer(torch.float32), drafter.config, target.dtype
        super().__init__(config, (target.config.num_layers,), dtype, layer.post_attention)
        self._target, self._final_norm = target, drafter.final_layernorm.weight.detach().to(dtype)
        self._state = Linear((layer.state.weight * drafter.hidden_layernorm.weight).to(dtype))
        token = Linear((layer.token.weight * drafter.token_layernorm.weight).to(dtype))
        self._token = layer_proposer.token_projection(
            target.embed_weight, lambda embed_TH: token(rms_normalise(embed_TH, self._eps)), config.hidden_size)
        qkv_QH, bias_Q1 = (self.adjacent_pairs(matrix) for matrix in (
            torch.cat([layer.query.weight, layer.key_value.weight]) * drafter.input_layernorm.weight,
            torch.cat([projection.bias for projection in (
                drafter.self_attn.q_proj, drafter.self_attn.k_proj, drafter.self_attn.v_proj)])[:, None].float()))
        self._qkv = Linear(qkv_QH.to(dtype), bias_Q1[:, 0].to(dtype))

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        return aux_TAH[:, 0].to(self._dtype)

    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], and its q, k, v [T, Q]."""
        token_TH = self._token(tokens_T.clamp(min=0)) * tokens_T.ge(0)[:, None]
        x_TH = self._state.add(rms_normalise(hidden_TH, self._eps), token_TH)
        return x_TH, self._qkv(rms_normalise(x_TH, self._eps))

    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits of a state [T, V], and the state."""
        state_TH = rms_normalise(hidden_TH, self._eps) * self._final_norm
        return self._target.logits(state_TH), state_TH

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """As `LayerProposer`; the pair at position 0 has no token."""
        tokens = [[_NO_TOKEN, *row[1:]] if start == 0 else row
                  for start, row in zip(pairs.starts, pairs.tokens, strict=True)]
        super().extend(state, replace(pairs, tokens=tokens))


def _create(spec: DrafterSpec, target: TargetConfig, embeddings: TargetEmbeddings, _layers: Layers,
            _vocabulary: DraftVocabulary, seed: int) -> MtpDrafter:
    """The target's own layer; random where its checkpoint has none, which submission refuses."""
    own = decoder_config(spec, target, "qwen2", target.num_layers, attention_bias=True)
    drafter = MtpDrafter(own)
    initialise_parameters(drafter, seed)
    for projection in (drafter.self_attn.q_proj, drafter.self_attn.k_proj, drafter.self_attn.v_proj):
        nn.init.zeros_(projection.bias)
    if stored := embeddings.mtp_layer():
        if own.rope != target.rope:
            raise InvalidInput(f"the target's MTP layer has rope type {target.rope.kind!r}, which a drafter lacks here",
                               "train another family")
        own_tensors = drafter.state_dict()
        wrong = sorted(name for name in {*stored, *own_tensors} if name not in stored or name not in own_tensors
                       or stored[name].shape != own_tensors[name].shape)
        if wrong:
            raise InvalidInput(f"the target's MTP layer differs from SGLang's class MiMoMTP in {', '.join(wrong)}",
                               "train another family")
        drafter.load_state_dict(stored)
    return drafter


save = partial(save_layers, "mtp", prefix=MTP_LAYER, more={
    "attention_bias": True, "num_nextn_predict_layers": 1, "eyrie": {"drafter": MARK}})
load = partial(load_layers, MtpDrafter, "mtp", prefix=MTP_LAYER)

FAMILY = FamilyImplementation("mtp", _create, UnrolledPrediction, save, load, MtpProposer)
