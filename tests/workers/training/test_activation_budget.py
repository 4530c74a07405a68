"""How many parts a step has: few on a GPU, small ones on a CPU."""

import pytest
import torch

from eyrie_api.planning.training_cost import roots_per_part
from eyrie_workers.drafters.eagle3.drafter import CPU_BUDGET, activation_budget, gpu_budget

GIB = 1 << 30
# An EAGLE-3 drafter of an 8B target in bfloat16, seven steps: 12 hidden states and the MLP's two inputs for each root.
BYTES_PER_ROOT = (12 * 4096 + 2 * 14336) * 7 * 2


@pytest.mark.parametrize(("total_gib", "tokens", "parts"),
                         [(80, 8192, 1), (80, 16_384, 1), (40, 16_384, 2), (24, 8192, 2)])
def test_a_gpu_unrolls_a_batch_of_an_8b_target_in_few_parts(total_gib: int, tokens: int, parts: int) -> None:
    roots = roots_per_part(gpu_budget((total_gib - 10) * GIB, total_gib * GIB), BYTES_PER_ROOT)
    assert -(-tokens // roots) == parts


def test_a_gpu_in_use_gives_half_of_what_is_free() -> None:
    assert gpu_budget(8 * GIB, 80 * GIB) == 4 * GIB


def test_what_is_free_decides_nothing_while_enough_is() -> None:
    assert gpu_budget(41 * GIB, 80 * GIB) == gpu_budget(80 * GIB, 80 * GIB)


def test_a_cpu_keeps_its_own_limit_and_no_part_has_fewer_than_32_roots() -> None:
    assert activation_budget(torch.device("cpu")) == CPU_BUDGET == 64 << 20
    assert roots_per_part(CPU_BUDGET, BYTES_PER_ROOT) == 32
    assert roots_per_part(1, 1000) == 32
    assert roots_per_part(100_000, 1000) == 96
