"""Candidates with mixes of the sources: one regeneration, one capture, and each trains on the rows of its mix."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.records import STAGE_RECORD, EventRecord
from eyrie_api.contract.reports import SourceRows
from eyrie_api.contract.stages import CaptureStage, ComparedMix, RegenerateStage, RowDraw, TrainStage
from eyrie_api.errors import ArtifactCorrupt, NoUsableData
from eyrie_api.planning.resolve import derive
from eyrie_pipelines import stage_specs
from eyrie_pipelines.runner import JobFile
from eyrie_workers.catalog import stage_dir
from eyrie_workers.data.rows import ROWS, read_rows
from eyrie_workers.drafters.card import read_card
from eyrie_workers.hidden_states.row_sources import SOURCES, read_row_sources
from eyrie_workers.hidden_states.storage_backend import LocalBackend
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages import capture, regenerate, train
from eyrie_workers.stages.sweep import group_candidates
from eyrie_workers.training.batches import choose_rows, require_one_batch, split_rows
from tests.tiny import tiny_target
from tests.workers.stages.test_train import report_of, weights

PROGRAMS: dict[str, tuple[type[Frozen], Any, Callable[[Path], bool] | None]] = {
    "regenerate": (RegenerateStage, regenerate.regenerate, None),
    "capture": (CaptureStage, capture.capture, capture.is_whole),
    "train": (TrainStage, train.train, None)}
MIXES = [{"chats": 1, "tools": 1}, {"chats": 3, "tools": 1}]


def chats(path: Path, num: int, subject: str) -> Path:
    path.write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"{subject} {number}, and {7 * number} more?"},
        {"role": "assistant", "content": "Yes."}]}) + "\n" for number in range(num)))
    return path


def a_job(directory: Path, **sections: Any) -> tuple[JobFile, Path]:
    """A job over 44 conversations of two sources, the second with a third of the first's, and its directory."""
    target = tiny_target(directory / "target")
    data = {"sources": [{"path": str(chats(directory / "chats.jsonl", 33, "Sum")), "weight": 3},
                        {"path": str(chats(directory / "calls.jsonl", 11, "Call")), "name": "tools"}],
            "held_out_fraction": 0.0}
    spec = JobSpec.model_validate({
        "target": {"model": str(target), "dtype": "float32"}, "data": data,
        "regenerate": {"max_new_tokens": 12}, "capture": {"codec": "float32", "check_rows": 0},
        "drafter": {"draft_vocab_size": 64},
        "train": {"ttt_length": 3, "epochs": 2, "max_tokens_per_batch": 96, "threads": 1, "num_checkpoints": 1},
        "sweep": {"axes": [{"field": "data.mix", "values": MIXES}]}} | sections)
    return JobFile(id="job-1", resolved=derive(spec)), directory / "jobs" / "job-1"


def run(spec: Frozen, directory: Path) -> int:
    """One stage program, in this process."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "spec.json").write_text(spec.model_dump_json())
    kind, work, is_whole = PROGRAMS[spec.stage]  # type: ignore[attr-defined]
    more = () if is_whole is None else (is_whole,)
    return run_program(kind, work, ["--spec", str(directory / "spec.json"),
                                    "--out", str(directory / "manifest.json")], *more)


def make_store(job: JobFile, job_dir: Path) -> Path:
    assert run(stage_specs.regenerate_spec(job, job_dir), stage_dir(job_dir, "regenerate")) == 0
    assert run(stage_specs.capture_spec(job, job_dir), stage_dir(job_dir, "capture")) == 0
    return stage_dir(job_dir, "capture")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFile, Path]:
    """A job of two mixes, trained."""
    job, job_dir = a_job(tmp_path_factory.mktemp("mixes"))
    make_store(job, job_dir)
    for candidate in job.resolved.candidates:
        spec = stage_specs.train_spec(job, job_dir, candidate.name)
        assert run(spec, stage_dir(job_dir, "train", candidate.name)) == 0
    return job, job_dir


def sources_of(job_dir: Path) -> list[str]:
    found = read_row_sources(LocalBackend(stage_dir(job_dir, "capture")))
    assert found is not None
    return found


def test_the_capture_names_the_source_of_every_row_as_the_rows_do(trained: tuple[JobFile, Path]) -> None:
    _, job_dir = trained
    rows = list(read_rows(stage_dir(job_dir, "regenerate") / ROWS))
    store = stage_dir(job_dir, "capture")
    assert FeatureStore(store).row_ids == [row.id for row in rows]
    assert sources_of(job_dir) == [row.source_name for row in rows]
    assert {(row.source_name, Path(row.source).name) for row in rows} == {
        ("chats", "chats.jsonl"), ("tools", "calls.jsonl")}
    assert SOURCES in {entry.path for entry in read_manifest(store).files}


def test_two_mixes_train_from_one_capture_on_the_same_number_of_rows_in_their_shares(
        trained: tuple[JobFile, Path]) -> None:
    job, job_dir = trained
    lengths, sources = FeatureStore(stage_dir(job_dir, "capture")).lengths, sources_of(job_dir)
    available = Counter(sources[row] for row in split_rows(len(sources), 0)[0])
    assert 8 <= available["tools"] <= 11
    size = 2 * available["tools"]  # all tools, in the mix of one to one
    expected = {"c1-mix-chats-1-tools-1": (size // 2, size // 2),
                "c2-mix-chats-3-tools-1": (size - size // 4, size // 4)}
    assert [one.name for one in job.resolved.candidates] == list(expected)
    for name, (of_chats, of_tools) in expected.items():
        directory = stage_dir(job_dir, "train", name)
        spec = stage_specs.train_spec(job, job_dir, name)
        rows, _ = choose_rows(spec.rows, sources, len(sources), spec.train.seed)
        report = report_of(directory)
        assert report.rows == size
        assert abs(report.sources["chats"].rows - of_chats) <= 1
        assert report.sources["chats"].rows + report.sources["tools"].rows == size
        assert abs(report.sources["tools"].rows - of_tools) <= 1
        for source in ("chats", "tools"):
            mine = [row for row in rows if sources[row] == source]
            assert report.sources[source] == SourceRows(rows=len(mine), tokens=sum(lengths[row] for row in mine))
        assert report.tokens == 2 * sum(lengths[row] for row in rows), "every row of the mix in each of two epochs"
        card = read_card(directory / report.checkpoints[0].path)
        assert card is not None
        assert card.data is not None
        assert (card.data.rows, card.data.tokens) == (size, sum(lengths[row] for row in rows))
        events = [STAGE_RECORD.validate_json(line) for line in (directory / "events.jsonl").read_text().splitlines()]
        assert [f"trains on {size} of {sum(available.values())} captured rows" in event.message for event in events
                if isinstance(event, EventRecord) and event.reason == "RowsDrawn"] == [True]


def test_both_are_evaluated_on_the_same_rows_and_differ_in_no_more_than_their_mixes(
        trained: tuple[JobFile, Path]) -> None:
    job, job_dir = trained
    sources = sources_of(job_dir)
    (one, held_out), (other, also_held_out) = (
        choose_rows(stage_specs.train_spec(job, job_dir, candidate.name).rows, sources, len(sources), 0)
        for candidate in job.resolved.candidates)
    assert held_out == also_held_out
    assert not set(held_out) & {*one, *other}
    assert {row for row in one if sources[row] == "chats"} < {row for row in other if sources[row] == "chats"}
    assert {row for row in other if sources[row] == "tools"} < {row for row in one if sources[row] == "tools"}


def test_what_comes_before_training_is_the_same_with_and_without_mixes(
        trained: tuple[JobFile, Path], tmp_path: Path) -> None:
    job, job_dir = trained
    plain = JobFile(id="job-1", resolved=derive(job.spec.model_copy(update={
        "sweep": job.spec.sweep.model_copy(update={"axes": ()})})))
    assert stage_specs.regenerate_spec(plain, job_dir) == stage_specs.regenerate_spec(job, job_dir)
    assert stage_specs.capture_spec(plain, job_dir) == stage_specs.capture_spec(job, job_dir)
    based = plain.model_copy(update={"spec": plain.spec.model_copy(update={
        "data": plain.spec.data.model_copy(update={"mix": {"chats": 1.0, "tools": 2.0}})})})
    assert stage_specs.regenerate_spec(based, job_dir) == stage_specs.regenerate_spec(job, job_dir)
    # Run again, capture finds its manifest: the bytes stay.
    store = stage_dir(job_dir, "capture")
    before = (store / "manifest.json").read_bytes()
    assert run(stage_specs.capture_spec(job, job_dir), store) == 0
    assert (store / "manifest.json").read_bytes() == before
    # Without a mix a candidate trains on all rows but those held out, and reports them by source too.
    assert run(stage_specs.train_spec(plain, job_dir, "base"), tmp_path / "base") == 0
    report, sources = report_of(tmp_path / "base"), sources_of(job_dir)
    assert report.rows == len(split_rows(len(sources), 0)[0])
    assert {name: rows.rows for name, rows in report.sources.items()} == Counter(
        sources[row] for row in split_rows(len(sources), 0)[0])


def test_a_stream_draws_the_same_rows_and_trains_the_same_drafters_as_a_store(
        trained: tuple[JobFile, Path], tmp_path: Path) -> None:
    job, job_dir = trained
    streamed = stage_specs.capture_spec(job, job_dir)
    streamed = streamed.model_copy(update={"capture": streamed.capture.model_copy(update={"mode": "stream"})})
    assert run(streamed, tmp_path / "stream") == 0
    name = job.resolved.candidates[1].name
    spec = stage_specs.train_spec(job, job_dir, name).model_copy(update={"store_dir": str(tmp_path / "stream")})
    assert run(spec, tmp_path / "train") == 0
    stored = stage_dir(job_dir, "train", name)
    assert report_of(tmp_path / "train").sources == report_of(stored).sources
    ours, theirs = weights(tmp_path / "train"), weights(stored)
    assert ours.keys() == theirs.keys()
    assert all(ours[one][key].equal(theirs[one][key]) for one in ours for key in ours[one])


def test_candidates_of_different_mixes_share_no_batches(trained: tuple[JobFile, Path]) -> None:
    job, job_dir = trained
    specs = {one.name: stage_specs.train_spec(job, job_dir, one.name) for one in job.resolved.candidates}
    assert [*group_candidates(specs).values()] == [["c1-mix-chats-1-tools-1"], ["c2-mix-chats-3-tools-1"]]


def draw(mix: dict[str, float], *others: tuple[dict[str, float], int], train_seed: int = 0) -> RowDraw:
    compared = ((mix, train_seed), *others)
    return RowDraw(mix=mix, seed=0, compared=tuple(ComparedMix(mix=one, train_seed=seed) for one, seed in compared))


def test_candidates_of_other_seeds_hold_out_other_rows_and_still_train_on_as_many() -> None:
    sources = ["chats"] * 300 + ["tools"] * 100
    mixes = [({"chats": 1.0, "tools": 1.0}, 0), ({"chats": 1.0, "tools": 1.0}, 1), ({"chats": 1.0, "tools": 2.0}, 2)]
    sizes, held_out = set(), set()
    for mix, seed in mixes:
        rows, held = choose_rows(draw(mix, *mixes, train_seed=seed), sources, 400, seed)
        sizes.add(len(rows))
        held_out.add(tuple(held))
        assert not set(rows) & set(held)
    assert len(sizes) == 1
    assert len(held_out) == 3


def test_a_mix_of_a_source_without_captured_rows_is_refused_by_its_name() -> None:
    with pytest.raises(NoUsableData, match=r"data\.mix .*no captured row is of tools") as caught:
        choose_rows(draw({"chats": 1.0, "tools": 1.0}), ["chats"] * 40, 40, 0)
    assert "data.sources" in caught.value.hint
    with pytest.raises(NoUsableData, match="does not name the sources"):
        choose_rows(draw({"chats": 1.0, "tools": 1.0}), None, 40, 0)


def test_a_mix_that_leaves_less_than_one_batch_is_refused_with_the_numbers() -> None:
    lengths = [10] * 40
    rows, _ = choose_rows(draw({"chats": 1.0, "tools": 1.0}), ["chats"] * 36 + ["tools"] * 4, 40, 0)
    with pytest.raises(NoUsableData, match=rf"leaves {len(rows)} rows of {10 * len(rows)} tokens.*512") as caught:
        require_one_batch(draw({"chats": 1.0, "tools": 1.0}), rows, lengths, 512)
    assert "lower train.max_tokens_per_batch" in caught.value.hint
    require_one_batch(draw({"chats": 1.0, "tools": 1.0}), rows, lengths, 10 * len(rows))
    require_one_batch(None, rows, lengths, 512)


def test_the_train_program_refuses_a_mix_of_less_than_one_batch(
        trained: tuple[JobFile, Path], tmp_path: Path) -> None:
    job, job_dir = trained
    spec = stage_specs.train_spec(job, job_dir, job.resolved.candidates[0].name)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"max_tokens_per_batch": 16_384})})
    assert run(spec, tmp_path / "out") != 0
    failure = json.loads((tmp_path / "out" / "failure.json").read_text())
    assert failure["reason"] == "NoUsableData"
    assert "fewer than one batch" in failure["message"]


def test_damaged_sources_are_found_and_capture_writes_them_again(tmp_path: Path) -> None:
    job, job_dir = a_job(tmp_path)
    store = make_store(job, job_dir)
    whole = (store / SOURCES).read_bytes()
    assert whole.count(b"    1,\n") > 1
    (store / SOURCES).write_bytes(whole.replace(b"    1,\n", b"    0,\n", 1))
    with pytest.raises(ArtifactCorrupt, match="its digest differs") as caught:
        read_row_sources(LocalBackend(store))
    assert "retry the job" in caught.value.hint
    assert run(stage_specs.capture_spec(job, job_dir), store) == 0
    assert (store / SOURCES).read_bytes() == whole
    with pytest.raises(ArtifactCorrupt, match="of 44 rows, and the store has 45"):
        read_row_sources(LocalBackend(store), 45)
