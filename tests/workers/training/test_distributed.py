"""The process group of a training, and its share of a machine.

CUDA and NCCL are external systems that are absent here: tests observe the calls made to them. The collectives run with
gloo in `tests.workers.stages.test_train` and `test_optimizer`.
"""

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eyrie_workers.training.distributed import PATIENCE, DistContext, threads_of_process


def test_each_process_binds_nccl_to_its_own_gpu_and_makes_it_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: calls.append((given, named)))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("EYRIE_DEVICE", raising=False)
    second = torch.device("cuda", 1)
    assert DistContext.from_environment() == DistContext(3, 4)
    assert calls == [second, (("cpu:gloo,cuda:nccl",), {"device_id": second, "timeout": PATIENCE})]
    calls.clear()
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    DistContext.from_environment()
    assert calls == [(("gloo",), {"timeout": PATIENCE})]


def test_the_processes_of_a_machine_divide_its_threads() -> None:
    assert threads_of_process(16, {}) == 16
    assert threads_of_process(16, {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "32"}) == 2
    assert threads_of_process(2, {"LOCAL_WORLD_SIZE": "4"}) == 1
