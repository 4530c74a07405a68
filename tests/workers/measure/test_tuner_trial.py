"""The comparison of the tuner with the exhaustive grid, on a tiny target."""

from pathlib import Path

import pytest

from benchmarks.tuner import FINALISTS, GRID, needed_table, parse, run
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_api.errors import InvalidInput
from eyrie_workers.measure.tuner.operating import possible_settings
from tests.workers.measure.tiny_bench import stage_specs


def test_the_grid_is_measured_whole_and_the_finalists_on_blocks_of_their_own(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the lock for measuring alone
    spec = stage_specs(tmp_path, prompts_per_suite=6, max_new_tokens=6)[1]
    tune = spec.tune.model_copy(update={"num_steps": (2,), "temperatures": (0.0,), "concurrencies": (2,),
                                        "max_prompts": 2})
    spec = spec.model_copy(update={"tune": tune})
    report = run(spec, tmp_path / "report.json")
    settings = possible_settings(tune)
    assert {row.setting for row in report.grid} == set(settings)
    (verdict,) = report.verdicts
    assert verdict.trials_possible == len(settings)
    assert 2 <= verdict.trials <= 4  # off, the drafter's best prediction, and two rivals if they could win
    assert verdict.blocks <= verdict.blocks_possible
    assert verdict.best in settings
    assert verdict.behind >= 0.0
    rows = {row.setting: row for row in report.grid}
    assert (rows[OFF].speedup, rows[OFF].tau) == (1.0, 1.0)
    (needed,) = report.needed
    chain = rows[Setting(tree=DraftTreeShape(num_steps=2, num_draft_tokens=3))]
    assert (needed.concurrency, needed.num_steps, needed.tau) == (2, 2, chain.tau)
    asked = chain.tau * spec.min_speedup / chain.speedup  # the same rounds, accepted so much more
    assert needed.measured == (max(1.0, asked) if asked <= 3 else None)
    assert needed_table(report.needed).splitlines()[2].startswith("| 2 | 2 | ")
    work = tmp_path / "report.work"
    grid, finalists = ((work / name).read_text().count("\n") - 1 for name in (GRID, FINALISTS))
    assert grid == len(settings) * 5
    assert finalists % 30 == 0  # two prompts have no interval, so all parts are measured
    again = run(spec, tmp_path / "report.json")  # everything is in the ledgers
    assert again.grid == report.grid
    assert again.verdicts == report.verdicts


def test_an_invalid_grid_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no valid trial"):
        parse(["--drafter", "d", "--out", "o.json", "--concurrencies", "0"])
