"""The device of a process, and where tensors without an explicit device are created.

CUDA is an external system that is absent here: tests that replace functions of torch.cuda observe the calls made to it.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from eyrie_api.errors import InvalidInput
from eyrie_workers.machine import other_versions
from eyrie_workers.targets.device import (
    CPU,
    choose_device,
    choose_target_device,
    default_device,
    device_scope,
    refuse_unusable_gpus,
)


@pytest.mark.parametrize(("environment", "num_gpus", "message", "hint"), [
    ({"EYRIE_DEVICE": "gpu"}, 1, "EYRIE_DEVICE 'gpu' is not a device", "give cpu, cuda or"),
    ({"EYRIE_DEVICE": "mps"}, 1, "EYRIE_DEVICE is 'mps'", "give cpu, cuda or"),
    ({"EYRIE_DEVICE": "cuda"}, 0, "sees no GPU", "EYRIE_DEVICE=cpu"),
    ({"EYRIE_DEVICE": "cuda:2"}, 2, "EYRIE_DEVICE is 'cuda:2', but torch sees 2 GPUs", "cuda:0 to cuda:1"),
    ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, 4, "8 processes on this machine.* 4 GPUs", "at most 4"),
    ({"EYRIE_DEVICE": "cuda:1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 2, "one GPU for 2 processes",
     "CUDA_VISIBLE_DEVICES")])
def test_a_device_that_cannot_be_had_is_refused_with_what_was_found_and_what_to_change(
        environment: dict[str, str], num_gpus: int, message: str, hint: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        choose_device(environment, num_gpus)
    assert hint in refused.value.hint


@pytest.mark.parametrize(("environment", "num_gpus", "device"), [
    ({}, 0, "cpu"), ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 0, "cpu"),
    ({}, 2, "cuda:0"), ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 2, "cuda:1"),
    ({"EYRIE_DEVICE": "cuda", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 2, "cuda:1"),
    ({"EYRIE_DEVICE": "cuda:1"}, 2, "cuda:1"),
    ({"EYRIE_DEVICE": "cpu", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, "cpu")])
def test_each_process_takes_the_gpu_of_its_local_rank_unless_one_is_named(
        environment: dict[str, str], num_gpus: int, device: str) -> None:
    assert choose_device(environment, num_gpus) == torch.device(device)


def test_the_gpu_of_a_process_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []
    used: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("EYRIE_DEVICE", "cuda:1")
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: used.append(on))
    assert default_device() == torch.device("cuda", 1)
    assert calls == [torch.device("cuda", 1)]
    assert used == [False], "cuDNN builds a plan for every new length"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match="Triton is not installed"):
        default_device()


def test_versions_outside_the_tested_ranges_are_reported_and_local_builds_are_not() -> None:
    requirements = ['torch<2.16,>=2.13; extra == "workers"', 'triton<4,>=3.6; extra == "kernels-test"', "pydantic>=2"]
    assert other_versions(requirements, {"torch": "2.13.1+cu130", "triton": "3.9.0"}) == []
    [line] = other_versions(requirements, {"torch": "2.12.0+cu128", "triton": "3.9.0"})
    assert "torch 2.12.0+cu128 is installed, and Eyrie is tested with torch<2.16,>=2.13" in line


def test_gpus_that_torch_cannot_use_are_refused_and_not_replaced_by_the_cpu() -> None:
    gpus = [Path("/dev/nvidia0"), Path("/dev/nvidia1")]
    with pytest.raises(InvalidInput, match=r"2 GPUs.*built for CUDA 13\.0") as refused:
        refuse_unusable_gpus({}, "13.0", gpus)
    assert "install a driver that supports CUDA 13.0" in refused.value.hint
    refuse_unusable_gpus({"CUDA_VISIBLE_DEVICES": ""}, "13.0", gpus)
    refuse_unusable_gpus({}, None, gpus)
    refuse_unusable_gpus({}, "13.0", [])


def test_the_processor_can_be_asked_for_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    assert default_device() == CPU


def test_what_is_made_inside_lies_there_and_outside_does_not() -> None:
    with device_scope(torch.device("meta")):
        assert torch.arange(3).device.type == "meta"
        with device_scope(CPU):  # nothing to do on a processor: what is around stays
            assert torch.zeros(1).device.type == "meta"
    assert torch.arange(3).device == CPU


def test_the_devices_of_streaming_targets_are_given_to_the_processes_in_turn() -> None:
    asked = {"EYRIE_TARGET_DEVICE": "cuda:6, cuda:7"}
    assert [choose_target_device(asked | {"LOCAL_RANK": str(rank)}, 8) for rank in range(3)] == [
        torch.device("cuda", 6), torch.device("cuda", 7), torch.device("cuda", 6)]
    assert choose_target_device({}, 8) is None
    for wrong in ("cuda:8", "cuda", "gpu", "cuda:1,", "meta"):
        with pytest.raises(InvalidInput, match="EYRIE_TARGET_DEVICE"):
            choose_target_device({"EYRIE_TARGET_DEVICE": wrong}, 8)
