"""The EAGLE-3 drafter and its training: architecture, unroll and loss (arXiv:2503.01840).

At position i there are the target's hidden states of a low, a middle and a high layer, and the token i+1 it chose. The
drafter fuses the states into one vector, concatenates it with the token's embedding, and predicts token i+2:

    f_i   = fc(concat of the A aux states at i)                                  start of the residual stream
    x_i   = concat(input_layernorm(embed(token i+1)), hidden_norm(f_i))          input of attention only
    h_i   = f_i + attention(x_i);  h_i = h_i + mlp(post_attention_layernorm(h_i))
    logits over the draft vocabulary = lm_head(norm(h_i))

For deeper steps h_i (before `norm`) replaces f, and the proposed token replaces token i+1. Names, shapes and arithmetic
are exactly those of SGLang's `LlamaForCausalLMEagle3`, so that trained weights load there. The embedding is the
target's: shared, frozen, not saved.

**Variants** that the engines serve are flags, with the same arithmetic in training. `fc_norm` (EAGLE-3.1) normalises
each aux state before `fc`; `norm_before_fc` (NVIDIA's GPT-OSS drafters) all of them as one vector; both are skipped,
like `fc`, when the drafter reads its own state. `norm_output` (EAGLE-3.1) feeds back the state after `norm`; with a
different setting in serving than in training, only the first draft step is good. `sliding_window` W lets position p
attend to keys p-W+1 .. p, its own included; draft steps are positions like any other, so each step moves the window by
one settled key. How the engines learn of it: `drafters.eagle3.directory`.

**Training-time test.** The drafter is unrolled on its own outputs, as in decoding. Step 0 reads the target's fused
states at every position. Step s reads, at each root still alive, the drafter's own state of step s-1 and the next known
token; it attends to the step-0 keys up to its root and to its own keys of steps 1 .. s. The weights are the same at
every step, so the gradient of a late step flows through all earlier states. Position i at step s has rope position
i + s, reads the embedding of token i+1+s and predicts token i+2+s against the target's distribution at i+1+s. Which
(i, s) exist is decided by `training.unroll_plan`; the tensors here are dense.

The q, k and v projections are linear in the two halves of x, and the token's half does not depend on the step. Training
computes it once per token and looks it up at every unrolled step; decoding (`drafters.eagle3.family`) stores it as a
table where the vocabulary is small.

**Parts.** A training step keeps activations of every unrolled root for the backward pass. Parts of a batch may run one
after the other, each with its backward pass, so that the activations of one part alone exist. Every part reads all
weights and writes all their gradients again, so a GPU wants as few parts as its memory allows: at 8B sizes and 8192
tokens one. A CPU computes small parts as fast as large ones, and its limit keeps a part near its cache.

    T tokens or rows, R roots, S steps, A aux layers, H hidden, Q = q + k + v widths, K kv heads, W query heads per kv
    head, E head size, P positions, I intermediate, N predictions, D draft vocabulary, V vocabulary
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eyrie_api.contract.families import DecoderSizes, DrafterSizes
from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning import training_cost
from eyrie_api.planning.training_cost import StepWork, TrainedDrafter
from eyrie_workers.drafters.decoder import AttentionProjections, GatedMlp
from eyrie_workers.drafters.initialisation import TargetEmbeddings, initialise_parameters
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import Rotary
from eyrie_workers.training.attention import SharedKeys, attend, gather_rows, leading_rows
from eyrie_workers.training.numerics import (
    PostAttention,
    apply_rotary,
    linear,
    normed_linear,
    rms_norm,
    round_up_rows,
    soft_target_loss,
)
from eyrie_workers.training.objective import (
    Objective,
    Outcome,
    Prediction,
    StepContext,
    TargetDistribution,
    plan_drawn,
)
from eyrie_workers.training.unroll_plan import UnrollPlan, split_plan


@dataclass(frozen=True)
class Eagle3Config:
    hidden_size: int
    """Equal to the target's: the embedding is shared."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """The target's."""

    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """`hidden_states` indices (0 = embeddings), ascending."""

    rms_eps: float
    rope: RopeConfig
    """The target's."""

    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    fc_norm: bool = False
    """Normalise each aux state before fusing them (EAGLE-3.1)."""

    norm_before_fc: bool = False
    """Normalise the concatenated aux states, as one vector of A * H, before fusing them."""

    norm_output: bool = False
    """Feed back the state after `norm` instead of before it (EAGLE-3.1). Logits always come from after it."""

    sliding_window: int | None = None
    """Keys a position attends to, its own included; None: all."""

    @property
    def num_aux(self) -> int:
        return len(self.aux_layers)

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim


# --- parameters ------------------------------------------------------------------------------------------------------


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size)
        q, k, _ = config.qkv_widths
        self.self_attn = AttentionProjections(2 * config.hidden_size, config.hidden_size, q, k)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)


class Eagle3Drafter(nn.Module):
    """The parameters, under the names the serving engines load. The arithmetic is in this module's functions."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, vocabulary: DraftVocabulary) -> None:
        """Parameters at torch's default initialisation; `initialise_from_target` copies from the target."""
        super().__init__()
        assert (config.vocab_size, config.draft_vocab_size) == (vocabulary.vocab_size, vocabulary.size)
        self.config = config
        self.fc = nn.Linear(config.num_aux * config.hidden_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.num_aux * config.hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.hidden_size) for _ in config.aux_layers)
        self.midlayer = _MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t)
        self.register_buffer("t2d", vocabulary.t2d)

    @property
    def vocabulary(self) -> DraftVocabulary:
        return DraftVocabulary.from_buffers(self.d2t, self.t2d)

    def weights(self, dtype: torch.dtype | None = None) -> "Eagle3Weights":
        """The projections joined by input, in `dtype` (default: as they are); gradients flow to the parameters."""
        layer, attention, hidden = self.midlayer, self.midlayer.self_attn, self.config.hidden_size
        dtype = dtype or self.fc.weight.dtype
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]  # each [.., 2H]
        return Eagle3Weights(
            config=self.config,
            fc=self.fc.weight.to(dtype),
            input_norm=self.input_norm.weight if self.config.norm_before_fc else None,
            fc_norm=tuple(norm.weight for norm in self.fc_norm) if self.config.fc_norm else (),  # type: ignore[misc]
            input_layernorm=layer.input_layernorm.weight,
            hidden_norm=layer.hidden_norm.weight,
            norm=self.norm.weight,
            # x is [embedding; state]: the first H columns of q, k and v read the token, the last H the state.
            embed_qkv=torch.cat([weight[:, :hidden] for weight in qkv]).to(dtype),
            hidden_qkv=torch.cat([weight[:, hidden:] for weight in qkv]).to(dtype),
            post_attention=PostAttention(
                out=attention.o_proj.weight.to(dtype), norm=layer.post_attention_layernorm.weight,
                gate_up=torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).to(dtype),
                down=layer.mlp.down_proj.weight.to(dtype), rms_eps=self.config.rms_eps),
            lm_head=self.lm_head.weight.to(dtype),
        )


@torch.no_grad()
def initialise_from_target(drafter: Eagle3Drafter, embeddings: TargetEmbeddings, seed: int) -> None:
    """Initialise every parameter in place: head and final norm from the target, the others as `initialise_parameters`.

    From the first step the residual stream then learns states the target's head can read. Measured on a half-trained
    quickstart target after 30 k drafted positions, everything else equal: first-step accuracy .45, against .27 from a
    random output matrix. Copying more was worse at the same point: an identity from the high layer through `fc` .31,
    and with it the MLP and attention of the last layer .34, of the first .39. The states a drafter reads already encode
    the prediction of token i+1, while the drafter predicts i+2, so layers that read other states do not help.
    """
    initialise_parameters(drafter, seed)
    ids_D = drafter.vocabulary.ids.to(embeddings.lm_head.device)
    drafter.lm_head.weight.copy_(embeddings.lm_head.index_select(0, ids_D))
    drafter.norm.weight.copy_(embeddings.norm)


# --- forward ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Eagle3Weights:
    """One layer's matrices, joined where they share an input. Matrices in the compute dtype, norms as stored: norms,
    the residual stream and the loss are float32 also where the products are bfloat16.

    fc [H, A*H]   embed_qkv [Q, H]   hidden_qkv [Q, H]   lm_head [D, H]
    """

    config: Eagle3Config
    fc: Tensor
    input_norm: Tensor | None
    fc_norm: tuple[Tensor, ...]
    input_layernorm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    embed_qkv: Tensor
    hidden_qkv: Tensor
    post_attention: PostAttention
    lm_head: Tensor

    def unrolled(self) -> tuple[Tensor, ...]:
        """The weights that every unrolled step uses, in the order `with_unrolled` takes them."""
        after = self.post_attention
        return (self.hidden_norm, after.norm, self.norm, self.hidden_qkv, after.out, after.gate_up, after.down,
                self.lm_head)

    def with_unrolled(self, tensors: Sequence[Tensor]) -> "Eagle3Weights":
        """A copy with these tensors in the place of `unrolled`."""
        hidden_norm, post_attention_layernorm, norm, hidden_qkv, out, gate_up, down, lm_head = tensors
        after = replace(self.post_attention, norm=post_attention_layernorm, out=out, gate_up=gate_up, down=down)
        return replace(self, hidden_norm=hidden_norm, norm=norm, hidden_qkv=hidden_qkv, post_attention=after,
                       lm_head=lm_head)

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """[T, A, H] aux states -> [T, H], the start of the residual stream."""
        eps = self.config.rms_eps
        if self.fc_norm:
            chunks = aux_TAH.to(self.norm.dtype).unbind(1)
            aux_TAH = torch.stack([rms_norm(chunk, w, eps) for chunk, w in zip(chunks, self.fc_norm, strict=True)], 1)
        concatenated_TC = aux_TAH.flatten(-2)  # C = A * H
        if self.input_norm is not None:
            return normed_linear(concatenated_TC.to(self.norm.dtype), self.input_norm, self.fc, eps).to(self.norm.dtype)
        return linear(concatenated_TC, self.fc).to(self.norm.dtype)

    def hidden_half(self, hidden_TH: Tensor) -> Tensor:
        """The state's share of q, k and v: [T, H] residual stream -> [T, Q]."""
        return normed_linear(hidden_TH, self.hidden_norm, self.hidden_qkv, self.config.rms_eps)

    def heads(self, qkv_TQ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, Q] -> q [T, K, W, E], k [T, K, E], v [T, K, E]. Query head j belongs to kv head j // W, as in Llama."""
        q, k, v = qkv_TQ.split(self.config.qkv_widths, -1)
        kv_heads, head = self.config.num_kv_heads, self.config.head_dim
        return (q.unflatten(-1, (kv_heads, -1, head)), k.unflatten(-1, (kv_heads, head)),
                v.unflatten(-1, (kv_heads, head)))


@dataclass(frozen=True)
class SharedProjections:
    """Step-0 projections that all roots of a batch share: one row per packed token.

    embed [T, Q] the token's share of q, k, v   fused [T, H] the residual stream   q [T, K, W, E], k, v [T, K, E] of
    step 0, k rotated to its position
    """

    embed: Tensor
    fused: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def shared_projections(weights: Eagle3Weights, angles_P: Tensor, embed_VH: Tensor, documents: PackedBatch,
                       positions_T: Tensor) -> SharedProjections:
    """The shared projections of packed documents. angles_P [P, 2, E / 2]: `targets.operators` at every position."""
    # 1. The embedding's share of q, k, v depends on the token only: computed once, indexed at every step.
    embed_TH = embed_VH.index_select(0, documents.token_ids).to(weights.norm.dtype)
    embed_TQ = normed_linear(embed_TH, weights.input_layernorm, weights.embed_qkv, weights.config.rms_eps)
    # 2. The target's states, fused.
    fused_TH = weights.fuse(documents.aux)
    # 3. Position i pairs with token i+1. The last position of a document has no such token; no root attends to its key.
    shared_TQ = weights.hidden_half(fused_TH) + torch.cat([embed_TQ[1:], embed_TQ[-1:]])
    q_TKWE, k_TKE, v_TKE = weights.heads(shared_TQ)
    # 4. Keys are rotated for all positions; queries at the roots alone, in `unroll`.
    k_TKE = apply_rotary(k_TKE, angles_P.index_select(0, positions_T))
    return SharedProjections(embed_TQ, fused_TH, q_TKWE, k_TKE, v_TKE)


def unroll(weights: Eagle3Weights, angles_P: Tensor, projections: SharedProjections, plan: UnrollPlan,
           recompute: bool = False) -> Iterator[Tensor]:
    """[R_s, H] states after the final norm of each step with roots, of the first R_s roots of a plan.

    recompute  save fewer activations and recompute them in the backward pass (`training.numerics.mlp`).
    """
    shared = SharedKeys(plan, projections.k, projections.v, weights.config.sliding_window)
    hidden_RH = gather_rows(projections.fused, plan.roots)  # [R, H]
    own: list[tuple[Tensor, Tensor]] = []  # keys and values [R_s, K, E] of the roots at steps 1 .. s
    for step, num_alive in enumerate(plan.alive):
        if num_alive == 0:
            return
        # 1. Roots are sorted by their number of steps, so those alive are the first. The query stands at i + s.
        roots = plan.roots[:num_alive]  # [R_s]
        angles = angles_P.index_select(0, plan.positions[roots] + step)  # [R_s, 2, E / 2]
        # 2. q, k and v. Step 0 has them already, and its keys are the shared ones.
        if step == 0:
            q_RKWE = apply_rotary(gather_rows(projections.q, roots), angles)
        else:
            hidden_RH = leading_rows(hidden_RH, num_alive)
            qkv_RQ = weights.hidden_half(hidden_RH) + gather_rows(projections.embed, roots + 1 + step)
            q_RKWE, k_RKE, v_RKE = weights.heads(qkv_RQ)
            q_RKWE = apply_rotary(q_RKWE, angles)
            own.append((apply_rotary(k_RKE, angles), v_RKE))
        # 3. Attention over the document's step-0 keys and the root's own, then the MLP.
        attended_RKWE = attend(q_RKWE, shared, own)
        hidden_RH = weights.post_attention(hidden_RH, attended_RKWE.flatten(1), recompute)
        # 4. What the output matrix reads; with norm_output also what the next step reads.
        state_RH = rms_norm(hidden_RH, weights.norm, weights.config.rms_eps)
        if weights.config.norm_output:
            hidden_RH = state_RH
        yield state_RH


# --- loss ------------------------------------------------------------------------------------------------------------


class TrainingTimeTest(Objective[Eagle3Drafter]):
    """Eagle3Drafter unrolled `ttt_length` steps against the frozen target's embedding and output matrix.

    Step s at root i and step s - 1 at root i + 1 predict the same token from nearly the same context, so unrolling
    every root repeats every prediction `ttt_length` times. A random `unrolled_fraction` of the roots, drawn per
    optimizer step, is unrolled beyond step 0. Step 0, on which all later steps depend, is trained at every root; for
    the first `single_step_ratio` of the run it is the only step. Measured on a half-trained quickstart target for equal
    arithmetic (400 k token predictions, one run each): theoretical speed-up 3.95 with all roots unrolled from the
    start, 4.32 after 30 % of the arithmetic on the first step only, 4.73 with a third of the roots unrolled.
    """

    def __init__(self, drafter: Eagle3Drafter, embeddings: TargetEmbeddings, spec: TrainSpec, max_positions: int,
                 dtype: torch.dtype = torch.float32, *, max_kept_bytes: int | None = None) -> None:
        """`max_kept_bytes`: most activations kept at a time; None: the device's budget."""
        super().__init__(drafter, drafter.vocabulary, embeddings.output_head, spec, dtype=dtype)
        self._embed_VH = embeddings.embed
        self._spec = spec
        self._max_kept_bytes = activation_budget(self.device) if max_kept_bytes is None else max_kept_bytes
        # The last root of the longest document stands `steps` positions behind its end at the last step.
        num_positions = max_positions + self.steps
        self._angles_P = Rotary(drafter.config.rope, drafter.config.head_dim, num_positions).at(
            torch.arange(num_positions))

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """In training, some roots unrolled; in evaluation (no step context), all roots and steps."""
        return plan_drawn(documents, context, self._spec)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """The unroll without splitting: true tokens at every step and the drafter's own states, also in evaluation."""
        weights = self.drafter.weights(self.dtype)
        projections = shared_projections(weights, self._angles_P, self._embed_VH, documents, plan.positions)
        states = tuple(unroll(weights, self._angles_P, projections, plan, self._recompute))
        return Prediction(states, weights.lm_head, computed=self._computed([plan]))

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """As `Objective`, with the roots split into parts when their activations exceed the bound."""
        plan = self.plan(documents, context)
        plans = [plan] if context is None else split_plan(plan, self._max_roots(plan))
        with self._scope:
            if len(plans) == 1:
                return self.compute(documents, plan, context, targets)
            return self._compute_parts(documents, plan, plans, context, targets)

    def _compute_parts(self, documents: PackedBatch, plan: UnrollPlan, plans: Sequence[UnrollPlan],
                       context: StepContext | None, targets: TargetDistribution | None) -> Outcome:
        # 1. Targets and weights of all parts at once: the counts are those of the whole batch.
        supervision = self.supervise(documents, plans, context, targets)
        ends = list(accumulate((part.num_predictions for part in plans), initial=0))
        # 2. What all roots share.
        documents, positions_T = documents.inputs().to(self.device), plan.to(self.device).positions
        weights = self.drafter.weights(self.dtype)
        projections = shared_projections(weights, self._angles_P, self._embed_VH, documents, positions_T)

        def loss_of(number: int, projections: SharedProjections, weights: Eagle3Weights) -> Tensor:
            predictions = slice(ends[number], ends[number + 1])
            part = plans[number].to(self.device)
            states_NH = torch.cat([*unroll(weights, self._angles_P, projections, part, self._recompute)])
            return soft_target_loss(states_NH, weights.lm_head, supervision.targets.table,
                                    supervision.row_N[predictions], supervision.share_N[predictions],
                                    self.loss_kind)[0]

        # 3. One part after the other, each with its backward pass.
        loss = loss_in_parts(len(plans), loss_of, projections, weights)
        return Outcome(loss, plan.num_predictions, flops=self.flops(plan), computed=self._computed(plans))

    def _computed(self, plans: Sequence[UnrollPlan]) -> int:
        """Rows of all products with the output matrix, padding included."""
        return sum(round_up_rows(alive, self.device) for plan in plans for alive in plan.alive if alive)

    def _max_roots(self, plan: UnrollPlan) -> int:
        """Roots unrolled at a time, from the activations saved per root: on a CPU of one with all steps, on a GPU of
        the mean."""
        config, steps = self.drafter.config, sum(alive > 0 for alive in plan.alive)
        if self.device.type == "cpu":
            kept = 12 * config.hidden_size + (0 if self._recompute else 2 * config.intermediate_size)
            return training_cost.roots_per_part(self._max_kept_bytes, kept * max(1, steps) * self.dtype.itemsize)
        setting = training_cost.StepSetting(compute_bytes=self.dtype.itemsize, recompute=self._recompute)
        bytes_per_root = training_cost.mean_root_bytes(trained_drafter(config), plan.alive, setting)
        return training_cost.roots_per_part(self._max_kept_bytes, bytes_per_root)

    def flops(self, plan: UnrollPlan) -> int:
        """Of one optimizer step, forward and backward, without the optimizer's own: the numerator of MFU."""
        return training_cost.eagle3_flops(trained_drafter(self.drafter.config), step_work(plan))


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_parts: int, loss_of: Callable[[int, Sequence[Tensor]], Tensor],
                *tensors: Tensor) -> Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        # Sums in at least float32: in a leaf's own bfloat16 every further part would be rounded to 8 bits of the sum.
        totals: list[Tensor | None] = [None] * len(leaves)
        loss = torch.zeros((), dtype=torch.float64)
        for number in range(num_parts):
            # The backward pass of a part runs at once and adds to the leaves: its graph is freed before the next part.
            with torch.enable_grad():
                part = loss_of(number, leaves)
            part.backward()
            loss += part.detach()
            for index, leaf in enumerate(leaves):
                grad, leaf.grad, total = leaf.grad, None, totals[index]
                if grad is not None:
                    totals[index] = (grad.to(torch.promote_types(grad.dtype, torch.float32)) if total is None
                                     else total.add_(grad))
        ctx.grads = totals
        return loss.to(part.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        # On the device, by 1 as well: to compare the factor, the host would wait for it.
        return None, None, *(None if own is None else own.mul_(grad) for own in grads)


def loss_in_parts(num_parts: int, loss_of: Callable[[int, SharedProjections, Eagle3Weights], Tensor],
                  projections: SharedProjections, weights: Eagle3Weights) -> Tensor:
    """Sum over parts of loss_of(part, projections, weights), with the gradient of each part computed before the next.

    The roots of a batch share only the projections and the weights. A part's activations can be freed when its
    gradients with respect to these two are known: memory is that of one part, and nothing is recomputed.
    """
    shared = (projections.embed, projections.fused, projections.q, projections.k, projections.v)

    def loss_from_leaves(number: int, leaves: Sequence[Tensor]) -> Tensor:
        return loss_of(number, SharedProjections(*leaves[: len(shared)]), weights.with_unrolled(leaves[len(shared):]))

    loss: Tensor = _InParts.apply(num_parts, loss_from_leaves, *shared, *weights.unrolled())
    return loss


# --- memory and arithmetic -------------------------------------------------------------------------------------------

CPU_BUDGET = 64 << 20
"""Bytes of activations that a CPU keeps at a time. Measured: see docs/results/training.md."""

_FREE_SHARE = 2


def activation_budget(device: torch.device) -> int:
    """Bytes of activations that may be kept at a time on a device, asked of a GPU when it holds the drafter already."""
    if device.type == "cpu":
        return CPU_BUDGET
    free, total = torch.cuda.mem_get_info(device)
    # What torch's allocator holds and does not use is free for this process.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return gpu_budget(free + unused, total)


def gpu_budget(free_bytes: int, total_bytes: int) -> int:
    """A quarter of a GPU's memory: what else a step needs (weights, gradients, moments, target distributions) takes
    less than the other three.

    It does not depend on what is free at the moment, because the number of parts decides the order of sums: a run
    resumed on the same kind of GPU has the same parts. Only where less than twice the budget is free, half of what is
    free is taken.
    """
    return min(total_bytes // training_cost.ACTIVATION_SHARE, free_bytes // _FREE_SHARE)


def trained_drafter(config: Eagle3Config) -> TrainedDrafter:
    """Sizes of a drafter, as `planning.training_cost` takes them."""
    layer = DecoderSizes(
        hidden_size=config.hidden_size, num_layers=1, intermediate_size=config.intermediate_size,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return TrainedDrafter("eagle3", DrafterSizes(
        target=layer, output_vocab_size=config.draft_vocab_size, num_aux_layers=config.num_aux, max_draft_tokens=1,
        hidden_size=None, intermediate_size=None, num_layers=None), config.vocab_size)


def step_work(plan: UnrollPlan) -> StepWork:
    """The counts of a plan, which is on the CPU."""
    return StepWork(plan.positions.numel(), plan.alive, plan.target_positions.numel(), plan.num_visible)
