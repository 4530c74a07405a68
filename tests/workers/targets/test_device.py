"""Where this process computes, and what happens to tensors that nobody placed."""

import pytest
import torch

from eyrie_api.errors import InvalidInput
from eyrie_workers.targets.device import CPU, default_device, device_scope


def test_a_device_that_is_none_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_DEVICE", "gpu")
    with pytest.raises(InvalidInput, match="EYRIE_DEVICE 'gpu' is not a device"):
        default_device()


def test_the_processor_can_be_asked_for_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    assert default_device() == CPU


def test_what_is_made_inside_lies_there_and_outside_does_not() -> None:
    with device_scope(torch.device("meta")):
        assert torch.arange(3).device.type == "meta"
        with device_scope(CPU):  # nothing to do on a processor: what is around stays
            assert torch.zeros(1).device.type == "meta"
    assert torch.arange(3).device == CPU
