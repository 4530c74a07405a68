"""Records with a digest of their own: damage is found, and other versions' records are read."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.artifacts import MANIFEST, read_manifest, read_sealed, write_model, write_sealed
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import RegenerateReport
from eyrie_api.contract.tuning import TuneSpec
from eyrie_api.errors import ArtifactCorrupt
from tests.api.samples import finish_stage

REGENERATED = RegenerateReport(rows_read=9, rows_answered=9, rows_held_out=0, rows_quarantined=0, prompt_tokens=1,
                               answer_tokens=1, finish_reasons={}, sources={}, seconds=1.0, tokens_per_s=1.0)


class Before(Frozen):
    """What a version wrote that had one field only."""

    budget_s: float


@settings(deadline=None)
@given(bit=st.integers(0, 100_000))
def test_a_flipped_bit_changes_nothing_that_is_read_or_is_an_error(
        tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    path, spec = tmp_path_factory.mktemp("sealed") / "spec.json", TuneSpec(budget_s=1.25)
    write_sealed(path, spec)
    data = bytearray(path.read_bytes())
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    with suppress(ValueError):
        assert read_sealed(bytes(data), TuneSpec) == spec


def test_a_number_changed_in_a_manifest_is_found(tmp_path: Path) -> None:
    finish_stage(tmp_path, "regenerate", REGENERATED, {"rows.jsonl": b"{}"}, "j")
    file, before = tmp_path / MANIFEST, read_manifest(tmp_path)
    write_sealed(file, before)
    assert read_manifest(tmp_path) == before
    file.write_text(file.read_text().replace('"rows_read": 9', '"rows_read": 8'))
    with pytest.raises(ArtifactCorrupt, match="its digest differs"):
        read_manifest(tmp_path)


def test_what_an_earlier_version_wrote_without_a_digest_is_read(tmp_path: Path) -> None:
    path, spec = tmp_path / "spec.json", TuneSpec()
    write_model(path, spec)
    assert read_sealed(path.read_bytes(), TuneSpec) == spec


def test_what_a_version_with_fewer_fields_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    write_sealed(path, Before(budget_s=2.0))
    assert read_sealed(path.read_bytes(), TuneSpec) == TuneSpec(budget_s=2.0)
