"""The shared preparation, with the shipped target and next to no data."""

import json
from pathlib import Path

from eyrie_workers.conversations.rows import ROWS, read_rows
from tests.benchmarks.experiments import on_policy
from tests.benchmarks.experiments.account import Account
from tests.benchmarks.experiments.place import Place, Scale
from tests.benchmarks.experiments.program import README, carry_out, command_line

SMALL = Scale(conversations=6, steps=2, seeds=1, prompts=1, tokens=6)


def test_an_experiment_runs_whole_shares_what_is_made_and_writes_its_account(tmp_path: Path) -> None:
    place = Place(tmp_path / "work", SMALL, threads=1)
    rows = place.rows()
    few = place.rows(2)
    whole = (rows / ROWS).read_bytes().splitlines()
    assert (few / ROWS).read_bytes().splitlines() == whole[:2]

    foreign = list(read_rows(on_policy.off_policy_rows(place, rows) / ROWS))
    own = list(read_rows(rows / ROWS))
    assert [row.prompt_ids for row in foreign] == [row.prompt_ids for row in own]
    assert all(row.answer_ids[-1] in place.tokenizer.eos_ids for row in foreign)
    assert [row.answer_ids for row in foreign] != [row.answer_ids for row in own]

    told = command_line("").parse_args(["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")])
    carry_out(on_policy.NAME, on_policy.CLAIM, lambda _: on_policy.measure(place), told)
    account = Account.model_validate(json.loads((tmp_path / "out" / "on_policy.json").read_text()))
    assert len(account.table) == 2
    assert account.found[0] in (tmp_path / "out" / README).read_text()

    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    again = on_policy.measure(Place(tmp_path / "work", SMALL, threads=1))
    assert tuple(again.found) == account.found
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")} == made
