"""The page docs/results/training_memory.md: which training steps fit which GPU, by the model of
`eyrie_api.planning.training_cost`.

    python -m benchmarks.training_memory > docs/results/training_memory.md

Computed, not measured: no figure of the page comes from a run. `tests.gpu.test_step_memory` compares the model's bytes
with what a step allocates in the code path of a GPU, at small sizes. A test keeps the page equal to this output.
"""

from collections.abc import Callable

from eyrie_api.contract.families import DecoderSizes, DrafterSizes
from eyrie_api.planning.training_cost import (
    StepSetting,
    StepWork,
    TrainedDrafter,
    eagle3_flops,
    expected_work,
    largest_tokens,
    needed_bytes,
    usable_bytes,
)

_GB = 10**9
_DEVICES = (80 * _GB, 141 * _GB)
_RANKS = (1, 8)
_H100_FLOPS = 989e12
"""bfloat16, dense, of an H100 SXM: NVIDIA's data sheet."""

_GOAL = 0.45
_ROW_TOKENS = 2048

# Sizes from each model's config.json: hidden, layers, intermediate, heads, kv heads, head size, vocabulary.
TARGETS = {
    "Llama-3.1-8B": (4096, 32, 14_336, 32, 8, 128, 128_256),
    "Qwen3-32B": (5120, 64, 25_600, 64, 8, 128, 151_936),
    "Llama-3.1-70B": (8192, 80, 28_672, 64, 8, 128, 128_256),
    "Qwen3-235B-A22B": (4096, 94, 12_288, 64, 4, 128, 151_936)}

Counts = Callable[[int], StepWork]


def drafter_of(target: str) -> TrainedDrafter:
    """The EAGLE-3 drafter of default sizes: the target's layer, three aux layers, a draft vocabulary of 32768."""
    *sizes, vocab = TARGETS[target]
    return TrainedDrafter("eagle3", DrafterSizes(
        target=DecoderSizes(*sizes), output_vocab_size=32_768, num_aux_layers=3, max_draft_tokens=7, hidden_size=None,
        intermediate_size=None, num_layers=None), vocab)


def counts(share: float, unrolled: float) -> Counts:
    """Counts of a TTT-7 step in which this share of the tokens is supervised and of the roots unrolled."""
    return lambda tokens: expected_work(tokens, supervised_share=share, ttt_length=7, unrolled_fraction=unrolled,
                                        row_tokens=_ROW_TOKENS)


USUAL, ALL = counts(0.5, 0.33), counts(1.0, 1.0)


def _fitting(drafter: TrainedDrafter, work_of: Counts) -> str:
    cells = []
    for ranks in _RANKS:
        for device in _DEVICES:
            tokens = largest_tokens(drafter, work_of, StepSetting(num_ranks=ranks), device)
            parts = needed_bytes(drafter, work_of(tokens), StepSetting(num_ranks=ranks), device)
            cells.append(f"{tokens:,} ({parts.moment})" if tokens else "none")
    return " | ".join(cells)


def _components(drafter: TrainedDrafter, work_of: Counts, tokens: int) -> tuple[str, str]:
    need = needed_bytes(drafter, work_of(tokens), StepSetting(), _DEVICES[0])
    largest = sorted(need.components.items(), key=lambda item: -item[1])[:3]
    return f"{need.total / _GB:.1f}", ", ".join(f"{name} {size / _GB:.1f}" for name, size in largest)


def page() -> str:
    """The page."""
    lines = [
        "# Memory and time of a training step", "",
        "**Computed, not measured**: the output of `python -m benchmarks.training_memory`, which evaluates",
        "`eyrie_api.planning.training_cost`. No figure here comes from a GPU. A test compares the model's bytes with "
        "what a step allocates",
        "in the code path of a GPU, run on a CPU at small sizes with kernels that only allocate: within 10 %.", "",
        "EAGLE-3 drafters of default sizes (three aux layers, draft vocabulary 32768, bfloat16 products, TTT length 7,",
        f"rows of {_ROW_TOKENS} tokens). *usual*: half of the tokens supervised, a third of the roots unrolled "
        "(the default). *all*: every token",
        "supervised, every root unrolled, the most a step can need. GB are 10^9 bytes.", "",
        "## Largest step", "",
        "Tokens per GPU and step; in parentheses the moment of most memory. Of a device's memory 8 % and 1 GiB are "
        "left out "
        f"({', '.join(f'{device // _GB} GB: {usable_bytes(device) / _GB:.1f}' for device in _DEVICES)}),",
        "an assumption. On eight GPUs each keeps the moments of some of the parameters.", "",
        "| target | step | 1 x 80 GB | 1 x 141 GB | 8 x 80 GB | 8 x 141 GB |", "|---|---|---|---|---|---|"]
    lines += [f"| {target} | {name} | {_fitting(drafter_of(target), work_of)} |"
              for target in TARGETS for name, work_of in (("usual", USUAL), ("all", ALL))]
    lines += ["", "## Need of a step on one GPU of 80 GB", "",
              "| target | drafter parameters | tokens | step | GB | the three largest components, GB |",
              "|---|---|---|---|---|---|"]
    for target in TARGETS:
        drafter = drafter_of(target)
        for tokens in (8192, 16_384):
            for name, work_of in (("usual", USUAL), ("all", ALL)):
                total, largest = _components(drafter, work_of, tokens)
                size = f"{drafter.parameters / 1e6:.0f} M"
                lines.append(f"| {target} | {size} | {tokens} | {name} | {total} | {largest} |")
    lines += ["", "The goal of 8192 tokens for an 8B target within 25 GB holds in this model, usual and all.", "",
              "## Time", "",
              f"Operations of a step of 16384 tokens, and its seconds at {_GOAL:.0%} of {_H100_FLOPS / 1e12:.0f} "
              "TFLOP/s (an H100's rate for bfloat16 by its",
              "data sheet). 45 % is a goal, not a result.", "",
              "| target | step | TFLOP | seconds at the goal |", "|---|---|---|---|"]
    for target in TARGETS:
        for name, work_of in (("usual", USUAL), ("all", ALL)):
            flops = eagle3_flops(drafter_of(target), work_of(16_384))
            lines.append(f"| {target} | {name} | {flops / 1e12:.0f} | {flops / (_H100_FLOPS * _GOAL):.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
