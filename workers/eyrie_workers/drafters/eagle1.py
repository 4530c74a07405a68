"""EAGLE: one decoder layer that goes on in the target's own feature space (arXiv:2401.15077), and EAGLE-2 with it.

The target's last hidden state f_i, after its final norm, is what its output matrix reads to choose token i+1. Features
follow each other more regularly than tokens do, given which token was drawn. So the drafter predicts features, and asks
the target's own output matrix what they mean (sections 3 and 4.1):

    x_i     = fc [embed(token i+1); f_i] + b
    f'_i+1  = x_i + attention(x_i) + mlp(..)             one decoder layer, without a norm in front of its attention
    logits of token i+2 = lm_head f'_i+1                  both ends are the target's: shared, frozen, not saved

To go deeper f' takes the place of f, and the proposed token that of token i+1. Learning is one step, on the target's
features, which are constants (section 4.2, with its weights; CE against the target's distribution p):

    L = SmoothL1(f_i+1, f'_i+1) + 0.1 CE(p_i+2, softmax(lm_head f'_i+1))

as a mean over the positions that may begin a draft. What serving adds to that is the drafter's own error, fed back step
by step. Against it stands noise: each feature that is read, not the one that is aimed at, is shifted by a uniform
number (section 4.2: U(-0.1, 0.1)). How large features are is the target's affair, so the bounds here are 0.1 of the
root mean square of the state at that position. Evaluation unrolls as a chain is served: on true tokens and the
drafter's own features.

Measured on the quickstart target (208 conversations, 6 epochs, one seed; theoretical speed-up of chains of 5 on
held-out ones, at rate 2e-3). Regression is what makes the later steps: with the paper's weights 2.74, weighing both
alike 2.29, without it 2.01, though the first step hits nearly as often (.67 against .69). Beginning with `fc` as the
identity on the feature: 2.55, so nothing is inherited but the ends. Without noise: 2.75, the same, and with three times
as much 2.78 where it is 2.85 (at rate 4e-3). Rates of 1, 2, 4, 8e-3: 2.49, 2.74, 2.85, 2.76.

EAGLE-2 (arXiv:2406.16858) changes no weight. It observes that confidences predict acceptance
(`tests.benchmarks.calibration` measures it) and grows the tree by them; EAGLE's own tree is fixed. Both are shapes
(`DraftTreeShape`, `speculation.tree`): one checkpoint of this family is either.

Names and arithmetic are those of SGLang's `LlamaForCausalLMEagle`, read in 0.5.23: `fc` has a bias, the layer has none
and no `input_layernorm`, there is no final norm. It is written for targets of every architecture. The class SGLang has
for Qwen 2 targets (`Qwen2ForCausalLMEagle`) would need biases on q, k and v, and the drafter's class need not be the
target's.

    T packed tokens, R roots, N predictions, H hidden, Q = q + k + v widths, K kv heads, W query heads per kv head,
    E head size, V vocabulary
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.errors import UnsupportedTarget
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.checkpoint.files import (
    CheckpointInvalid,
    as_stored,
    exact_tensors,
    read_config,
    read_tensors,
    write_checkpoint,
)
from eyrie_workers.drafters.family import Family, Layers, final
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.layers.decoder import DecoderLayer, decoder_json, heads_for, initialise, refuse_eagle_fields
from eyrie_workers.drafters.layers.serving import MAX_TABLE_BYTES, LayerServer, pairs_together
from eyrie_workers.drafters.validation.family_checks import loaded_by
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.config import TargetConfig, parse_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.linear import Linear, rms_normalise
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.rotary import Rotary
from eyrie_workers.training.attention import SharedKeys, attend, first, pick
from eyrie_workers.training.fused import apply_rotary, mlp
from eyrie_workers.training.matmul import linear, round_up_rows
from eyrie_workers.training.objective import (
    DistillationObjective,
    Objective,
    Outcome,
    Prediction,
    StepContext,
    TargetDistribution,
)
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll

ARCHITECTURE = "LlamaForCausalLMEagle"

# The paper weighs classification with 0.1 against regression. What `DistillationObjective` adds up has classification
# at 1, so that a loss means the same in every family; the proportion is the paper's.
REGRESSION_WEIGHT = 10.0
NOISE = 0.1


class _Layer(DecoderLayer):
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
        self.layers = nn.ModuleList([_Layer(config)])

    def weights(self, dtype: torch.dtype) -> "Eagle1Weights":
        """The matrices joined by input, in `dtype`; gradients flow to the parameters."""
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        attention, hidden = layer.self_attn, self.config.hidden_size
        return Eagle1Weights(
            config=self.config, token=self.fc.weight[:, :hidden].to(dtype), state=self.fc.weight[:, hidden:].to(dtype),
            bias=self.fc.bias, query=attention.q_proj.weight.to(dtype),
            key_value=torch.cat([attention.k_proj.weight, attention.v_proj.weight]).to(dtype),
            out=attention.o_proj.weight.to(dtype), norm=layer.post_attention_layernorm.weight,
            gate_up=torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).to(dtype),
            down=layer.mlp.down_proj.weight.to(dtype))


@dataclass(frozen=True)
class Eagle1Weights:
    """Matrices in the compute dtype, norm and bias as stored.

    token, state [H, H] the halves of fc   query [q, H]   key_value [2k, H]   out [H, q]   gate_up [2I, H]   down [H, I]
    """

    config: TargetConfig
    token: Tensor
    state: Tensor
    bias: Tensor
    query: Tensor
    key_value: Tensor
    out: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor

    def tokens(self, embed_TH: Tensor) -> Tensor:
        """The tokens' share of x: [T, H]."""
        return linear(embed_TH, self.token).to(self.norm.dtype) + self.bias

    def states(self, features_TH: Tensor) -> Tensor:
        """The features' share of x: [T, H]."""
        return linear(features_TH, self.state).to(self.norm.dtype)

    def queries(self, x_TH: Tensor, angles: Tensor) -> Tensor:
        """[T, K, W, E], turned."""
        heads = linear(x_TH, self.query).unflatten(-1, (self.config.num_kv_heads, -1, self.config.head_dim))
        return apply_rotary(heads, angles)

    def keys(self, x_TH: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Turned k and v, each [T, K, E]."""
        k_TKE, v_TKE = (part.unflatten(-1, (-1, self.config.head_dim))
                        for part in linear(x_TH, self.key_value).chunk(2, -1))
        return apply_rotary(k_TKE, angles), v_TKE

    def finish(self, x_TH: Tensor, attended_TQ: Tensor, recompute: bool) -> Tensor:
        """What follows attention: the predicted features, [T, H]."""
        x_TH = x_TH + linear(attended_TQ, self.out)
        return mlp(x_TH, self.norm, self.gate_up, self.down, self.config.rms_eps, recompute)


def unroll(weights: Eagle1Weights, rotary: Rotary, embed_VH: Tensor, documents: PackedBatch, plan: UnrollPlan,
           recompute: bool = False) -> Iterator[Tensor]:
    """Predicted features [R_s, H] of each step with roots, on true tokens; after step 0 from the drafter's own
    features. The features read at step 0 are the last of `documents.aux`; only roots run more than keys and values."""
    token_TH = weights.tokens(embed_VH.index_select(0, documents.token_ids))
    features_TH = documents.aux[:, -1].to(weights.norm.dtype)
    # Position i pairs with token i+1. The last token of a document has none of its own, but no root reads its key.
    x_TH = weights.states(features_TH) + torch.cat([token_TH[1:], token_TH[-1:]])
    shared = SharedKeys(plan, *weights.keys(x_TH, rotary.at(plan.positions)))
    own: list[tuple[Tensor, Tensor]] = []
    x_RH = features_RH = pick(x_TH, plan.roots)
    for step, alive in enumerate(plan.alive):
        if alive == 0:
            return
        roots = plan.roots[:alive]
        angles = rotary.at(plan.positions[roots] + step)
        if step > 0:
            x_RH = weights.states(first(features_RH, alive)) + pick(token_TH, roots + 1 + step)
            own.append(weights.keys(x_RH, angles))
        attended = attend(weights.queries(x_RH, angles), shared, own)
        features_RH = weights.finish(x_RH, attended.flatten(1), recompute)
        yield features_RH


class FeatureRegression(DistillationObjective):
    """Eagle1Drafter taught the target's next feature, and by it the target's distribution."""

    def __init__(self, drafter: Eagle1Drafter, ends: TargetEmbeddings, spec: TrainSpec, max_positions: int,
                 dtype: torch.dtype) -> None:
        vocab_size = drafter.config.vocab_size
        super().__init__(DraftVocabulary(torch.arange(vocab_size), vocab_size), ends.lm_head, spec, dtype=dtype)
        self._drafter, self._embed_VH, self._recompute = drafter, ends.embed, spec.grad_checkpoint
        self._head_VH = ends.lm_head.to(dtype)
        self._rotary = Rotary(drafter.config.rope, drafter.config.head_dim, max_positions + self.steps)

    @property
    def drafter(self) -> Eagle1Drafter:
        """The module being trained."""
        return self._drafter

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """Learning: one step from every root. Judged: as it is served."""
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps if context is None else 1)

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """Judged, features are read as they are; learning reads them with noise, beside what they are."""
        if context is not None:
            read = noisy(documents.aux[:, 0], documents.lengths, context)
            documents = replace(documents, aux=torch.stack([documents.aux[:, 0].to(read.dtype), read], 1))
        return super().__call__(documents, context, targets)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """Features of every root and step; learning, how far they are from the target's."""
        states = tuple(unroll(self._drafter.weights(self.dtype), self._rotary, self._embed_VH, documents, plan,
                              self._recompute))
        extra = None
        if not evaluating:
            aim = documents.aux[:, 0].index_select(0, plan.roots + 1).to(states[0].dtype)
            extra = REGRESSION_WEIGHT * F.smooth_l1_loss(states[0], aim, reduction="none").mean(-1)
        return Prediction(states, self._head_VH, extra, step_flops(self._drafter.config, plan),
                          sum(round_up_rows(alive) for alive in plan.alive if alive))


def noisy(features_TH: Tensor, lengths: tuple[int, ...], context: StepContext) -> Tensor:
    """[T, H] float32: each feature shifted by U(-NOISE, NOISE) of its position's root mean square.

    A document's noise depends on the seed, the step and where it begins in the step's whole batch: not on how the batch
    is spread over processes.
    """
    starts = context.starts or tuple(accumulate(lengths[:-1], initial=0))
    draws = [np.random.default_rng((context.seed, context.step, start, 0xEA61)).random(
        (length, features_TH.shape[1]), dtype=np.float32) for start, length in zip(starts, lengths, strict=True)]
    features_TH = features_TH.float()
    size_T1 = features_TH.square().mean(-1, keepdim=True).sqrt_()
    uniform_TH = torch.from_numpy(np.concatenate(draws)).to(features_TH.device).mul_(2.0).sub_(1.0)
    return torch.addcmul(features_TH, uniform_TH, size_T1, value=NOISE)


def step_flops(config: TargetConfig, plan: UnrollPlan) -> int:
    """Floating-point operations of one batch, forward and backward. Neither fc's inputs at step 0 nor the output matrix
    have a gradient."""
    tokens, hidden = plan.positions.numel(), config.hidden_size
    q, kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    once = tokens * hidden * (2 * 2 * hidden + 3 * kv)
    per_root = 3 * hidden * (2 * q + 3 * config.intermediate_size) + 2 * hidden * config.vocab_size
    again = (plan.num_predictions - plan.alive[0]) * 3 * hidden * (hidden + kv)
    sight = sum(int(plan.positions[plan.roots[:alive]].sum()) + alive * (1 + step)
                for step, alive in enumerate(plan.alive))
    asked = plan.target_positions().numel()
    unrolled = plan.num_predictions * per_root + 3 * 2 * sight * q
    return 2 * (once + again + unrolled + asked * hidden * config.vocab_size)


class _ServedLayer:
    """`serving.ServedLayer`: x and its q, k, v are linear in token and feature, so one product per feature yields all
    four, and where the vocabulary is small the token's share of them is a table."""

    def __init__(self, drafter: Eagle1Drafter, target: TargetModel) -> None:
        weights, config = drafter.weights(torch.float32), drafter.config
        qkv_QH = pairs_together(torch.cat([weights.query, weights.key_value]), config.num_heads + config.num_kv_heads,
                                config.head_dim)
        joined = torch.cat([torch.eye(config.hidden_size), qkv_QH])  # from x to x and its q, k, v
        dtype = target.dtype
        self._widths = [config.hidden_size, qkv_QH.shape[0]]
        self._state = Linear((joined @ weights.state).to(dtype))
        self._token = Linear((joined @ weights.token).to(dtype), (joined @ weights.bias).to(dtype))
        self._out, self._down = Linear(weights.out.to(dtype)), Linear(weights.down.to(dtype))
        self._gate_up = Linear((weights.gate_up * weights.norm).to(dtype))
        self._eps = torch.tensor(config.rms_eps, dtype=dtype)
        self._target, self._embed_VH = target, target.embed_weight
        table_bytes = config.vocab_size * sum(self._widths) * dtype.itemsize
        self._table = self._token(self._embed_VH) if table_bytes <= MAX_TABLE_BYTES else None

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """The feature itself: [T, H]."""
        return aux_TAH[:, 0].to(self._eps.dtype)

    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], and its q, k, v [T, Q]."""
        if self._table is not None:
            share = self._table.index_select(0, tokens_T)
        else:
            share = self._token(self._embed_VH.index_select(0, tokens_T))
        x_TH, qkv_TQ = self._state.add(hidden_TH, share).split(self._widths, -1)
        return x_TH.contiguous(), qkv_TQ

    def finish(self, residual_TH: Tensor, attended_TQ: Tensor) -> Tensor:
        """The predicted feature [T, H]."""
        hidden_TH = self._out.add(attended_TQ, residual_TH)
        gate, up = self._gate_up(rms_normalise(hidden_TH, self._eps)).chunk(2, -1)
        return self._down.add(F.silu(gate).mul_(up), hidden_TH)

    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What the target's output matrix reads in a feature, [T, V], and the feature."""
        return self._target.logits(hidden_TH), hidden_TH


class Eagle1Server(LayerServer):
    """One loaded Eagle1Drafter between its target's two ends."""

    def __init__(self, drafter: Eagle1Drafter, target: TargetModel) -> None:
        """What drafting runs in is the target's dtype."""
        with torch.inference_mode():
            layer = _ServedLayer(drafter, target)
        super().__init__(layer, drafter.config, (target.config.num_layers,), target.dtype)


def _create(
    spec: DrafterSpec,
    target: TargetConfig,
    _ends: TargetEmbeddings,
    _layers: Layers,
    _vocabulary: DraftVocabulary,
    seed: int,
) -> Eagle1Drafter:
    refuse_eagle_fields(spec, "eagle1")
    num_heads, num_kv_heads = heads_for(spec, target, target.num_heads)
    drafter = Eagle1Drafter(replace(
        target, family="llama", num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads,
        intermediate_size=spec.intermediate_size or target.intermediate_size, tie_word_embeddings=False, qk_norm=False,
        attention_bias=False, output_bias=False, mlp_bias=False, layer_types=("full_attention",), sliding_window=None,
        post_norm=False, full_rope=None,
        max_position_embeddings=spec.max_position_embeddings or target.max_position_embeddings))
    initialise(drafter, seed)
    nn.init.zeros_(drafter.fc.bias)
    return drafter


def _objective(drafter: Eagle1Drafter, ends: TargetEmbeddings, spec: TrainSpec, max_positions: int,
               dtype: torch.dtype) -> Objective:
    return FeatureRegression(drafter, ends, spec, max_positions, dtype)


def save(directory: Path, drafter: Eagle1Drafter, dtype: str = "float32", card: Card | None = None) -> None:
    """Write a drafter to `directory`, atomically, replacing what is there."""
    write_checkpoint(directory, decoder_json(drafter.config, ARCHITECTURE, dtype),
                     as_stored(drafter.state_dict(), dtype), card)


def load(directory: Path) -> Eagle1Drafter:
    """Read and check a drafter. Raises ArtifactMissing, or CheckpointInvalid naming what breaks the contract."""
    found = read_config(directory)
    try:
        config = parse_config(found)
    except UnsupportedTarget as error:
        raise CheckpointInvalid(f"drafter {directory.name}: {error.message}", error.hint) from error
    wanted = {"architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1, "attention_bias": False,
              "mlp_bias": False}
    faults = [f"{name} is {found[name]!r}, not {value!r}" for name, value in wanted.items()
              if found.get(name, value) != value]
    if found.get("hot_vocab_size") not in (None, config.vocab_size):
        faults.append(f"hot_vocab_size is {found['hot_vocab_size']!r}: a cut output matrix is not computed here")
    if config.sliding_window is not None:
        faults.append(f"sliding_window is {config.sliding_window}: not what SGLang computes for this class")
    if faults:
        raise CheckpointInvalid(f"drafter {directory.name}: {'; '.join(faults)}",
                                "serve this one in SGLang, or train one")
    tensors = read_tensors(directory)
    with torch.device("meta"):
        drafter = Eagle1Drafter(config)
    exact_tensors(directory.name, tensors, {name: tuple(x.shape) for name, x in drafter.state_dict().items()})
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter


def adopt(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write to `directory` what the authors of EAGLE publish, in the form this family has.

    config, tensors   of their directory: an architecture of their target's name, an embedding, perhaps no fc.bias

    Raises CheckpointInvalid, before writing, for what is not EAGLE-1/2.
    """
    found = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] not in ("embed_tokens", "lm_head")}
    fc = found.get("fc.weight")
    if fc is None or fc.dim() != 2 or fc.shape[1] != 2 * fc.shape[0]:
        raise CheckpointInvalid("fc.weight is missing or does not join one state with one embedding: no EAGLE-1/2 "
                                "drafter", "an EAGLE-3 drafter needs another architecture name alone; see "
                                "`eyrie check-drafter`")
    found.setdefault("fc.bias", torch.zeros(fc.shape[0], dtype=fc.dtype))
    try:
        parsed = replace(parse_config(config), tie_word_embeddings=False)
    except UnsupportedTarget as error:
        raise CheckpointInvalid(f"EAGLE-1/2 drafter: {error.message}", error.hint) from error
    with torch.device("meta"):
        expected = {name: tuple(x.shape) for name, x in Eagle1Drafter(parsed).state_dict().items()}
    exact_tensors(directory.name, found, expected)
    dtype = str(fc.dtype).removeprefix("torch.")
    write_checkpoint(directory, decoder_json(parsed, ARCHITECTURE, dtype), as_stored(found, dtype), None)


def _serve(directory: Path, target: TargetModel) -> Drafter:
    drafter = load(directory)
    wanted, got = (target.config.hidden_size, target.config.vocab_size), (drafter.config.hidden_size,
                                                                         drafter.config.vocab_size)
    if wanted != got:
        raise CheckpointInvalid(f"drafter {directory} is for a target of hidden size {got[0]} and vocabulary {got[1]}, "
                                f"this target has {wanted[0]} and {wanted[1]}", "serve it with its own target")
    return Eagle1Server(drafter, target)


FAMILY = Family("eagle1", ARCHITECTURE, _create, _objective, save, _serve,
                loaded_by("eagle1", lambda directory, _target: load(directory)), layers=final, whole_vocabulary=True,
                learning_rate=4e-3)
