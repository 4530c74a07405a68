"""EAGLE-1/2: one decoder layer that predicts the target's features (arXiv:2401.15077).

The feature f_i is the target's last hidden state after its final norm, from which its output matrix predicts token i+1.
Given the sampled token, features are easier to predict than tokens. The drafter therefore predicts features, and the
target's output matrix maps them to tokens (sections 3 and 4.1):

    x_i     = fc [embed(token i+1); f_i] + b
    f'_i+1  = x_i + attention(x_i) + mlp(..)             one decoder layer, without a norm before its attention
    logits of token i+2 = lm_head f'_i+1                  embedding and lm_head are the target's: frozen, not saved

For deeper steps f' replaces f, and the proposed token replaces token i+1. Training is one step, on the target's
features, which are constants (section 4.2, with its weights; CE against the target's distribution p):

    L = SmoothL1(f_i+1, f'_i+1) + 0.1 CE(p_i+2, softmax(lm_head f'_i+1))

as a mean over the positions that may start a draft. In decoding the drafter's own error is fed back step by step. To
make it robust against that, noise is added to the input features, not to the regression targets (section 4.2: U(-0.1,
0.1)). Feature magnitudes differ between targets, so the bounds here are 0.1 of the root mean square of the state at
that position. Evaluation unrolls as a chain is decoded: on true tokens and the drafter's own features.

Measured on the quickstart target (208 conversations, 6 epochs, one seed; theoretical speed-up of chains of 5 on
held-out ones, at rate 2e-3). Regression improves the later steps: with the paper's weights 2.74, with equal weights
2.29, without regression 2.01, while the first step's accuracy is nearly the same (.67 against .69). Initialising `fc`
as the identity on the feature: 2.55, so all parameters start random. Without noise: 2.75, the same, and with three
times as much 2.78 where it is 2.85 (at rate 4e-3). Rates of 1, 2, 4, 8e-3: 2.49, 2.74, 2.85, 2.76.

EAGLE-2 (arXiv:2406.16858) uses the same weights. It observes that confidences predict acceptance
(`benchmarks.calibration` measures it) and grows the tree by confidence, where EAGLE's tree is fixed. Both are
shapes (`DraftTreeShape`, `speculation.tree`) for the same checkpoint.

Names and arithmetic are those of SGLang's `LlamaForCausalLMEagle`, read in 0.5.23: `fc` has a bias, the layer has none
and no `input_layernorm`, and there is no final norm. This class is written for targets of every architecture: the
drafter's class need not be the target's, and SGLang's class for Qwen 2 targets (`Qwen2ForCausalLMEagle`) would need
biases on q, k and v.

    T packed tokens, R roots, N predictions, H hidden, Q = q + k + v widths, K kv heads, W query heads per kv head,
    E head size, V vocabulary
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_workers.drafters import layer_proposer
from eyrie_workers.drafters.decoder import DecoderLayer, decoder_config, load_layers, save_layers
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.feature_layer import FeatureLayer, FeatureObjective, Projection
from eyrie_workers.drafters.initialisation import TargetEmbeddings, initialise_parameters
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.operators import Linear
from eyrie_workers.training.objective import Outcome, Prediction, StepContext, TargetDistribution
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll

# The paper weights classification with 0.1 and regression with 1. `Objective` weights classification with
# 1, so that losses of all families are comparable; the ratio is the paper's.
REGRESSION_WEIGHT = 10.0
NOISE = 0.1


class _Eagle1Layer(DecoderLayer):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config)
        del self.input_layernorm


class Eagle1Drafter(nn.Module):
    """The parameters, under the names SGLang loads."""

    def __init__(self, config: TargetConfig) -> None:
        """`config` of the one layer; its vocabulary and hidden size are the target's."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([_Eagle1Layer(config)])

    def feature_layer(self, dtype: torch.dtype) -> FeatureLayer:
        """The matrices joined by input, in `dtype`; gradients flow to the parameters."""
        layer = self.layers[0]
        assert isinstance(layer, _Eagle1Layer)
        attention, hidden = layer.self_attn, self.config.hidden_size
        return FeatureLayer(
            self.config, self.fc.bias.dtype, token=Projection(self.fc.weight[:, :hidden].to(dtype), bias=self.fc.bias),
            state=Projection(self.fc.weight[:, hidden:].to(dtype)), query=Projection(attention.q_proj.weight.to(dtype)),
            key_value=Projection(torch.cat([attention.k_proj.weight, attention.v_proj.weight]).to(dtype)),
            post_attention=layer.post_attention(dtype))


class FeatureRegression(FeatureObjective):
    """Trains an Eagle1Drafter on the target's next feature and on the target's distribution."""

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """In training one step from every root; in evaluation all steps, as in decoding."""
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps if context is None else 1)

    def flops(self, plan: UnrollPlan) -> int:
        """The inputs of fc at step 0 and the output matrix have no gradient."""
        config: TargetConfig = self.drafter.config
        tokens, hidden = plan.positions.numel(), config.hidden_size
        q, kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
        once = tokens * hidden * (2 * 2 * hidden + 3 * kv)  # fc without a gradient of its inputs; k and v
        per_root = 3 * hidden * (2 * q + 3 * config.intermediate_size) + 2 * hidden * config.vocab_size
        later_steps = (plan.num_predictions - plan.alive[0]) * 3 * hidden * (hidden + kv)  # the state's half of fc
        unrolled = plan.num_predictions * per_root + 3 * 2 * plan.num_visible * q
        return 2 * (once + later_steps + unrolled + plan.target_positions.numel() * hidden * config.vocab_size)

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """In training, noisy features are appended to the true ones as a second layer; evaluation reads the true
        ones."""
        if context is not None:
            features = documents.aux[:, 0].to(self.device, non_blocking=True)
            inputs = noisy(features, documents.lengths, context)
            documents = replace(documents, aux=torch.stack([features.to(inputs.dtype), inputs], 1))
        return super().__call__(documents, context, targets)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """Features of every root and step, and in training their regression loss."""
        prediction = super().predict(documents, plan, evaluating)
        if evaluating:
            return prediction
        # The target's next feature, without noise: layer 0 of aux is the true one.
        first_RH = prediction.states[0]
        expected_RH = documents.aux[:, 0].index_select(0, plan.roots + 1).to(first_RH.dtype)
        regression_RH = F.smooth_l1_loss(first_RH, expected_RH, reduction="none")
        return replace(prediction, extra=REGRESSION_WEIGHT * regression_RH.mean(-1))


def noisy(features_TH: Tensor, lengths: tuple[int, ...], context: StepContext) -> Tensor:
    """[T, H] float32: each feature shifted by U(-NOISE, NOISE) times the root mean square at its position.

    A document's noise depends on the seed, the step and its start in the step's global batch, and is therefore the same
    for every number of processes.
    """
    starts, hidden = context.starts or tuple(accumulate(lengths[:-1], initial=0)), features_TH.shape[1]
    uniform_TH = torch.cat([_uniform((length, hidden), (context.seed, context.step, start, 0xEA61), features_TH.device)
                            for start, length in zip(starts, lengths, strict=True)])
    features_TH = features_TH.float()
    # Relative to the position's own size: feature magnitudes differ between targets.
    size_T1 = features_TH.square().mean(-1, keepdim=True).sqrt_()
    return torch.addcmul(features_TH, uniform_TH, size_T1, value=NOISE)


def _uniform(shape: tuple[int, int], key: tuple[int, ...], device: torch.device) -> Tensor:
    """U(-1, 1), a function of the key. A GPU draws its own numbers: a core needs longer for those of a batch than a GPU
    for the whole step."""
    if device.type == "cpu":
        return torch.from_numpy(np.random.default_rng(key).random(shape, dtype=np.float32)).mul_(2.0).sub_(1.0)
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1
    return torch.empty(shape, device=device).uniform_(-1.0, 1.0, generator=torch.Generator(device).manual_seed(seed))


class Eagle1Proposer(layer_proposer.LayerProposer):
    """An Eagle1Drafter with its target's embedding and output matrix, for decoding. x and its q, k, v are linear in
    token and feature, so one product per feature yields all four, and the token's share is a `token_projection`."""

    @torch.inference_mode()
    def __init__(self, drafter: Eagle1Drafter, target: TargetModel) -> None:
        """Drafting computes in the target's dtype."""
        layer, config, dtype = drafter.feature_layer(torch.float32), drafter.config, target.dtype
        super().__init__(config, (target.config.num_layers,), dtype, layer.post_attention)
        qkv_QH = self.adjacent_pairs(torch.cat([layer.query.weight, layer.key_value.weight]))
        to_outputs = torch.cat([torch.eye(config.hidden_size), qkv_QH])  # from x to x and its q, k, v
        self._target, self._widths = target, [config.hidden_size, qkv_QH.shape[0]]
        # Products of the matrices in float32, once, when the drafter is loaded; then rounded to the compute dtype.
        self._state = Linear((to_outputs @ layer.state.weight).to(dtype))
        token = Linear((to_outputs @ layer.token.weight).to(dtype), (to_outputs @ drafter.fc.bias.float()).to(dtype))
        self._token = layer_proposer.token_projection(target.embed_weight, token, sum(self._widths))

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        return aux_TAH[:, 0].to(self._dtype)

    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], and its q, k, v [T, Q]."""
        x_TH, qkv_TQ = self._state.add(hidden_TH, self._token(tokens_T)).split(self._widths, -1)
        return x_TH.contiguous(), qkv_TQ

    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits of a feature [T, V], and the feature."""
        return self._target.logits(hidden_TH), hidden_TH


def _create(spec: DrafterSpec, target: TargetConfig, _embeddings: TargetEmbeddings, _layers: Layers,
            _vocabulary: DraftVocabulary, seed: int) -> Eagle1Drafter:
    drafter = Eagle1Drafter(decoder_config(spec, target, "llama", 1))
    initialise_parameters(drafter, seed)
    nn.init.zeros_(drafter.fc.bias)
    return drafter


save, load = partial(save_layers, "eagle1"), partial(load_layers, Eagle1Drafter, "eagle1")

FAMILY = FamilyImplementation("eagle1", _create, FeatureRegression, save, load, Eagle1Proposer, learning_rate=4e-3)
