"""The sizes and counts of an EAGLE-3 step, as `eyrie_api.decisions.training_cost` takes them; its floating-point
operations, the numerator of MFU.

    S steps
"""

from eyrie_api.decisions.training_cost import StepWork, TrainedDrafter, eagle3_flops
from eyrie_api.v1alpha1.families import DecoderSizes, DrafterSizes
from eyrie_workers.drafters.eagle3.model import Eagle3Config
from eyrie_workers.training.unroll_plan import UnrollPlan


def trained_drafter(config: Eagle3Config) -> TrainedDrafter:
    """Sizes of a drafter."""
    layer = DecoderSizes(
        hidden_size=config.hidden_size, num_layers=1, intermediate_size=config.intermediate_size,
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return TrainedDrafter("eagle3", DrafterSizes(
        target=layer, output_vocab_size=config.draft_vocab_size, num_aux_layers=config.num_aux, max_draft_tokens=1,
        hidden_size=None, intermediate_size=None, num_layers=None), config.vocab_size)


def step_work(plan: UnrollPlan) -> StepWork:
    """The counts of a plan, which is on the CPU."""
    visible = sum(int(plan.positions[plan.roots[:alive]].sum()) + alive * (1 + step)
                  for step, alive in enumerate(plan.alive))
    return StepWork(plan.positions.numel(), plan.alive, plan.target_positions.numel(), visible)


def step_flops(config: Eagle3Config, plan: UnrollPlan) -> int:
    """Operations of one optimiser step, forward and backward, without the optimiser's own."""
    return eagle3_flops(trained_drafter(config), step_work(plan))
