"""The frame of stage programs: what it does before any work."""

from pathlib import Path

import pytest

from eyrie_api.artifacts import MANIFEST, write_model
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.stages import BenchmarkStage, CaptureStage, ProveStage, TuneStage
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_workers.stage_program import Result, Stage, run_program
from tests.api.artifacts.test_directories import a_stage

READ = {"rows_dir": CaptureStage, "drafter_dir": BenchmarkStage, "rival_dir": ProveStage,
        "held_out_file": TuneStage}
"""What stages read of earlier ones by its path, with one of the specs that name it."""


class Reads(Frozen):
    """A spec with one input of each kind."""

    rows_dir: str | None = None
    drafter_dir: str | None = None
    rival_dir: str | None = None
    held_out_file: str | None = None


@pytest.mark.parametrize("field", READ)
def test_a_stage_whose_input_differs_from_its_manifest_ends_before_any_work(
        field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert field in READ[field].model_fields
    made = a_stage(tmp_path / "stages" / "train" / "base")
    given = made / "shards" / "1.bin" if field.endswith("_file") else made
    worked: list[str] = []

    def work(_spec: Reads, _stage: Stage) -> Result:
        worked.append("worked")
        raise ArtifactMissing("nothing is made here")

    def run() -> int:
        out = tmp_path / "out"
        write_model(out / "spec.json", Reads.model_validate({field: str(given)}))
        return run_program(Reads, work, ["--spec", str(out / "spec.json"), "--out", str(out / MANIFEST)])

    assert (run(), worked) == (ArtifactMissing.exit_code, ["worked"])
    data = bytearray((made / "shards" / "1.bin").read_bytes())
    data[-1] ^= 1
    (made / "shards" / "1.bin").write_bytes(data)
    capsys.readouterr()
    assert (run(), worked) == (ArtifactCorrupt.exit_code, ["worked"])
    assert "1.bin" in capsys.readouterr().err
