"""The records of a stage's `events.jsonl`."""

from pathlib import Path

from eyrie_api.contract.records import STAGE_RECORD, StageRecord


def stage_records(path: Path) -> list[StageRecord]:
    """All of them; an incomplete last line is skipped."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [STAGE_RECORD.validate_json(line) for line in lines if line.endswith("}")]
