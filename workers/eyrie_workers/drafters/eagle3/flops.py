"""Floating-point operations of an EAGLE-3 training step: the numerator of MFU. Pure.

Counted is what loss and gradient require: each matrix product once forward and twice backward (for its input and for
its weight), attention's two products once and twice, the teacher's forward only. Recomputation and padding are not
counted, so they lower MFU.

    T packed tokens, R roots, S steps, A aux layers, H hidden, Q = q + k + v widths, I intermediate, D draft vocabulary,
    V vocabulary
"""

from eyrie_workers.drafters.eagle3.model import Eagle3Config
from eyrie_workers.training.unroll_plan import UnrollPlan


def step_flops(config: Eagle3Config, plan: UnrollPlan) -> int:
    """Operations of one optimiser step, forward and backward, without the optimiser's own."""
    tokens, hidden, (q, k, v) = plan.positions.numel(), config.hidden_size, config.qkv_widths
    once = tokens * hidden * (2 * config.num_aux * hidden + 3 * (k + v))  # fc needs no gradient of its input
    token_half = 3 * tokens * hidden * (q + k + v)
    per_root = 3 * (q * hidden + 3 * hidden * config.intermediate_size + hidden * config.draft_vocab_size)
    unrolled = (plan.num_predictions * (per_root + 3 * q * hidden)
                + 3 * (plan.num_predictions - plan.alive[0]) * hidden * (k + v))
    num_visible = sum(int(plan.positions[plan.roots[:alive]].sum()) + alive * (1 + step)
                      for step, alive in enumerate(plan.alive))
    num_teacher = plan.target_positions().numel()
    attention, teacher = 3 * 2 * num_visible * q, num_teacher * hidden * config.vocab_size
    return 2 * (once + token_half + unrolled + attention + teacher)
