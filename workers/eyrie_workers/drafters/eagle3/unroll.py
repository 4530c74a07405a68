"""Training-time test: the drafter unrolled on its own outputs, as in decoding (EAGLE-3, arXiv:2503.01840).

Step 0 reads the target's fused states at every position. Step s reads, at each root still alive, the drafter's own
state of step s-1 and the next known token; it attends to the step-0 keys up to its root and to its own keys of steps
1 .. s. The weights are the same at every step, so the gradient of a late step flows through all earlier states.

Position i at step s has rope position i + s, reads the embedding of token i+1+s and predicts token i+2+s against
the target's distribution at i+1+s. `training.unroll_plan` decides which (i, s) exist; the tensors here are dense.

    T packed tokens, R roots, S steps, A aux layers, H hidden, Q = q + k + v widths, K kv heads, W heads per kv head,
    E head size
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_workers.drafters.eagle3.model import Eagle3Config, Eagle3Weights
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.targets.operators import Rotary
from eyrie_workers.training.attention import SharedKeys, attend, gather_rows, leading_rows
from eyrie_workers.training.fused import apply_rotary
from eyrie_workers.training.unroll_plan import UnrollPlan


@dataclass(frozen=True)
class UnrolledStep:
    """One step's predictions.

    state    [R_s, H]  of the first R_s roots, after the final norm.
    teacher  [R_s]     packed position whose `last` state gives the target's distribution of the same token.
    """

    step: int
    state: Tensor
    teacher: Tensor


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


def shared_projections(weights: Eagle3Weights, rotary: Rotary, embed_VH: Tensor, documents: PackedBatch,
                       positions_T: Tensor) -> SharedProjections:
    """The shared projections of packed documents."""
    # The embedding's share of q, k, v depends on the token only: computed once, indexed at every step.
    embed_TQ = weights.embed_half(embed_VH.index_select(0, documents.token_ids))
    fused_TH = weights.fuse(documents.aux)
    # Position i pairs with token i+1. The last position of a document has no such token; no root attends to its key.
    shared_TQ = weights.hidden_half(fused_TH) + torch.cat([embed_TQ[1:], embed_TQ[-1:]])
    q_TKWE, k_TKE, v_TKE = split_heads(shared_TQ, weights.config)
    return SharedProjections(embed_TQ, fused_TH, q_TKWE, apply_rotary(k_TKE, rotary.at(positions_T)), v_TKE)


def unroll(weights: Eagle3Weights, rotary: Rotary, projections: SharedProjections, plan: UnrollPlan,
           recompute: bool = False) -> Iterator[UnrolledStep]:
    """Run the drafter from the roots of a plan, step by step; stops when no root is alive.

    recompute  save fewer activations and recompute them in the backward pass (`training.fused.mlp`).
    """
    config = weights.config
    shared = SharedKeys(plan, projections.k, projections.v, config.sliding_window)
    hidden_RH = gather_rows(projections.fused, plan.roots)
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of the roots at steps 1 .. s
    for step, num_alive in enumerate(plan.alive):
        if num_alive == 0:
            return
        roots = plan.roots[:num_alive]
        angles = rotary.at(plan.positions[roots] + step)
        if step == 0:
            q_RKWE = apply_rotary(gather_rows(projections.q, roots), angles)
        else:
            hidden_RH = leading_rows(hidden_RH, num_alive)
            qkv_RQ = weights.hidden_half(hidden_RH) + gather_rows(projections.embed, roots + 1 + step)
            q_RKWE, k_RKE, v_RKE = split_heads(qkv_RQ, config)
            q_RKWE = apply_rotary(q_RKWE, angles)
            own.append((apply_rotary(k_RKE, angles), v_RKE))
        attended = attend(q_RKWE, shared, own)
        hidden_RH = weights.post_attention(hidden_RH, attended.flatten(1), recompute)
        state_RH = weights.normed(hidden_RH)
        if config.norm_output:
            hidden_RH = state_RH
        yield UnrolledStep(step=step, state=state_RH, teacher=roots + 1 + step)


def split_heads(qkv_TQ: Tensor, config: Eagle3Config) -> tuple[Tensor, Tensor, Tensor]:
    """[T, Q] -> q [T, K, W, E], k [T, K, E], v [T, K, E]. Query head j belongs to kv head j // W, as in Llama."""
    q, k, v = qkv_TQ.split(config.qkv_widths, -1)
    kv_heads, head = config.num_kv_heads, config.head_dim
    return q.unflatten(-1, (kv_heads, -1, head)), k.unflatten(-1, (kv_heads, head)), v.unflatten(-1, (kv_heads, head))
