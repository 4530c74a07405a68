"""The saved state: a moment's copy, written while training goes on."""

from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

from eyrie_api.errors import ArtifactCorrupt
from eyrie_workers.training.state import Counters, Snapshot, StateWriter, load_state, take_snapshot, write_snapshot


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def snapshot_of(model: nn.Linear, step: int) -> Snapshot:
    return take_snapshot(model, [{}, {}], Counters(step=step), "digest", {})


def loaded(path: Path) -> tuple[int, float]:
    """Step and first weight of the state on disk."""
    model = model_of(-1.0)
    found = load_state(path, model, "digest")
    assert found is not None
    return found[0].step, float(model.weight.detach()[0, 0])


def test_a_step_changes_nothing_of_a_snapshot_that_is_being_written(tmp_path: Path) -> None:
    path, stepped = tmp_path / "state" / "training.safetensors", Event()

    def write_after_the_step(path: Path, snapshot: Snapshot) -> None:
        assert stepped.wait(60)
        write_snapshot(path, snapshot)

    model, writer = model_of(1.0), StateWriter(path, write_after_the_step)
    writer.start(snapshot_of(model, 1))
    with torch.no_grad():
        model.weight.fill_(2.0)  # the next step, in place
    assert not path.exists()
    stepped.set()
    writer.wait()
    assert loaded(path) == (1, 1.0)
    writer.start(snapshot_of(model, 2))
    writer.close()
    assert loaded(path) == (2, 2.0)


def test_an_error_of_writing_is_raised_at_the_next_save(tmp_path: Path) -> None:
    def full(path: Path, snapshot: Snapshot) -> None:
        raise OSError("no space left on device")

    writer = StateWriter(tmp_path / "state", full)
    writer.start(snapshot_of(model_of(1.0), 1))
    with pytest.raises(OSError, match="no space left"):
        writer.start(snapshot_of(model_of(1.0), 2))
    writer.close()


def test_a_flipped_bit_in_a_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_snapshot(path, snapshot_of(model_of(1.0), 1))
    assert loaded(path) == (1, 1.0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the tensors are at the end
    path.write_bytes(data)
    with pytest.raises(ArtifactCorrupt, match="checksum"):
        loaded(path)
