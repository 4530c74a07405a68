"""The directory that `eyrie compare-hardware --proof` names."""

from pathlib import Path

import pytest

from eyrie_api.errors import ArtifactMissing, InvalidInput
from eyrie_workers.hardware.measuring import Proof
from tests.api.samples import benchmark_report, finish_stage


def test_the_directory_of_another_stage_is_refused_with_the_one_to_name(tmp_path: Path) -> None:
    finish_stage(tmp_path / "benchmark", "benchmark", benchmark_report("c", {"chat": (2.0,)}), {"cells": b""}, "j")
    with pytest.raises(InvalidInput, match="not the directory of a prove stage") as refused:
        Proof.read(tmp_path / "benchmark")
    assert "stages/prove" in refused.value.hint
    with pytest.raises(ArtifactMissing):
        Proof.read(tmp_path / "nothing")
