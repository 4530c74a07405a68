"""Servers get groups of GPUs of their own."""

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_workers.sglang.local_hardware import gpu_groups


def test_gpus_are_divided_into_groups_of_one_server() -> None:
    assert gpu_groups(("0", "1", "2", "3"), 2, None) == (("0", "1"), ("2", "3"))
    assert gpu_groups(("4", "5", "6"), 2, None) == (("4", "5"),)
    assert gpu_groups(("0", "1", "2", "3"), 1, 2) == (("0",), ("1",))


def test_without_a_gpu_there_is_one_server() -> None:
    assert gpu_groups((), 1, None) == ((),)


@pytest.mark.parametrize(("tp_size", "num_gpus", "says"), [
    (2, None, "engine.tp_size is 2 and this process sees 1 GPUs"), (1, 4, "engine.num_gpus is 4 and")])
def test_missing_gpus_are_reported_with_the_number_found(tp_size: int, num_gpus: int | None, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        gpu_groups(("0",), tp_size, num_gpus)
