"""Answers of earlier jobs are taken over where the same would be generated again, and only there; nothing depends on
the earlier job afterwards."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.artifacts import list_files, read_manifest, read_report, verify_files, write_sealed
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import RegenerateReport
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_pipelines.processes import wait_until
from eyrie_workers.data.rows import AnsweredRow, RowSampling, read_rows
from eyrie_workers.regeneration.answers import GenerationRequest
from eyrie_workers.regeneration.earlier_answers import answer_key
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.regenerate import regenerate
from tests.tiny import chats_file, tiny_target
from tests.workers.regeneration.openai_double import Troubles, openai_double

GREEDY = SamplingSpec(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


def write_spec(out: Path, target: Path, *sources: Path, reuse: tuple[Path, ...] = (),
               data: dict[str, Any] | None = None, dtype: str = "float32", **fields: Any) -> None:
    out.mkdir(parents=True, exist_ok=True)
    spec = RegenerateStage(
        job_id=out.name, target=TargetSpec(model=str(target), dtype=dtype), reuse=tuple(map(str, reuse)),
        data=DataSpec(sources=tuple(DataSource(path=str(path)) for path in sources),
                      **{"held_out_fraction": 0.0} | (data or {})),
        regenerate=RegenerateSpec(**{"max_new_tokens": 12, "concurrency": 4} | fields))
    (out / "spec.json").write_text(spec.model_dump_json())


def run(out: Path) -> int:
    return run_program(RegenerateStage, regenerate,
                       ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])


def rows(out: Path) -> list[AnsweredRow]:
    return list(read_rows(out / "rows.jsonl"))


def generated(out: Path) -> list[AnsweredRow]:
    """Its rows without the note of who generated them."""
    return [row.model_copy(update={"generated_by": ""}) for row in rows(out)]


def report(out: Path) -> RegenerateReport:
    found = read_report(out, RegenerateReport)
    assert isinstance(found, RegenerateReport)
    return found


def events(out: Path, reason: str) -> list[str]:
    records = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [one["message"] for one in records if one.get("reason") == reason]


def regenerated(out: Path, target: Path, *sources: Path, **fields: Any) -> Path:
    write_spec(out, target, *sources, **fields)
    assert run(out) == 0
    return out


def test_a_second_job_takes_over_every_answer_and_its_artifact_is_its_own(tmp_path: Path, target: Path) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 12)
    earlier = regenerated(tmp_path / "job-a", target, chats)
    out = regenerated(tmp_path / "job-b", target, chats, reuse=(earlier,))
    assert generated(out) == rows(earlier)
    assert {row.generated_by for row in rows(out)} == {"job-a"}
    found = report(out)
    assert (found.rows_answered, found.rows_reused, found.rows_resumed, found.tokens_per_s) == (12, 12, 0, 0.0)
    assert events(out, "AnswersReused") == ["12 of 12 answers are those of job job-a"]
    shutil.rmtree(earlier)
    verify_files(read_manifest(out), out)
    third = regenerated(tmp_path / "job-c", target, chats, reuse=(out,))
    assert {row.generated_by for row in rows(third)} == {"job-a"}, "who generated it, not who had it last"


def test_half_of_the_rows_are_there_and_the_others_are_what_a_job_without_reuse_generates(
        tmp_path: Path, target: Path) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 12)
    half = tmp_path / "half.jsonl"
    half.write_text("".join(reversed(chats.read_text().splitlines(keepends=True)[::2])))
    earlier = regenerated(tmp_path / "job-a", target, half)
    alone = regenerated(tmp_path / "alone", target, chats)
    out = regenerated(tmp_path / "job-b", target, chats, reuse=(earlier,))
    assert generated(out) == rows(alone), "sources, lines and order are of this job"
    assert [row.generated_by for row in rows(out)] == ["job-a", ""] * 6
    assert (report(out).rows_answered, report(out).rows_reused) == (12, 6)


def test_several_jobs_complete_each_other(tmp_path: Path, target: Path) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 9)
    lines = chats.read_text().splitlines(keepends=True)
    earlier = []
    for name, part in (("job-a", lines[:4]), ("job-b", lines[2:6])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        earlier.append(regenerated(tmp_path / name, target, tmp_path / f"{name}.jsonl"))
    out = regenerated(tmp_path / "job-c", target, chats, reuse=tuple(earlier))
    assert [row.generated_by for row in rows(out)] == ["job-a"] * 4 + ["job-b"] * 2 + [""] * 3
    assert len({row.id for row in rows(out)}) == 9


@pytest.mark.parametrize("changed", [
    {"sampling": SamplingSpec(temperature=1.3)}, {"sampling": SamplingSpec(temperature=0.7, top_p=0.9)},
    {"seed": 5}, {"max_new_tokens": 11}])
def test_answers_of_another_sampling_are_generated(tmp_path: Path, target: Path, changed: dict[str, Any]) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 6)
    earlier = regenerated(tmp_path / "job-a", target, chats)
    alone = regenerated(tmp_path / "alone", target, chats, **changed)
    out = regenerated(tmp_path / "job-b", target, chats, reuse=(earlier,), **changed)
    assert rows(out) == rows(alone)
    assert events(out, "AnswersReused") == ["0 of 6 answers are those of job job-a"]


def test_a_greedy_answer_does_not_depend_on_the_seed(tmp_path: Path, target: Path) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 6)
    earlier = regenerated(tmp_path / "job-a", target, chats, sampling=GREEDY)
    alone = regenerated(tmp_path / "alone", target, chats, sampling=GREEDY, seed=5)
    out = regenerated(tmp_path / "job-b", target, chats, reuse=(earlier,), sampling=GREEDY, seed=5)
    assert report(out).rows_reused == 6
    assert generated(out) == rows(alone)


def test_the_key_is_of_everything_that_an_answer_depends_on_and_of_a_seed_only_where_one_is_drawn() -> None:
    sampled = RowSampling(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=9)
    greedy = sampled.model_copy(update={"temperature": 0.0})
    asked = GenerationRequest("a", [{"role": "user", "content": "one"}], [], [1, 2], seed=1)
    elsewhere = replace(asked, row_id="b", place=7, max_new_tokens=9)
    assert answer_key("target", asked, sampled) == answer_key("target", elsewhere, sampled)
    assert answer_key("target", asked, greedy) == answer_key("target", replace(asked, seed=2), greedy)
    others = [replace(asked, seed=2), replace(asked, prompt_ids=[2, 1]), replace(asked, tools=[{"type": "function"}]),
              replace(asked, chat_template_kwargs={"thinking": True}),
              replace(asked, messages=[{"role": "system", "content": "one"}])]
    keys = [answer_key("target", one, sampled) for one in (asked, *others)]
    keys += [answer_key("other", asked, sampled), answer_key("target", asked, greedy)]
    keys += [answer_key("target", asked, sampled.model_copy(update=change)) for change in (
        {"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 5}, {"max_new_tokens": 8})]
    assert len(set(keys)) == len(keys)


def test_answers_of_another_target_under_the_same_name_are_generated(tmp_path: Path) -> None:
    target, chats = tiny_target(tmp_path / "model"), chats_file(tmp_path / "chats.jsonl", 4)
    earlier = regenerated(tmp_path / "job-a", target, chats, sampling=GREEDY)
    weights = load_file(target / "model.safetensors")
    save_file({name: -value if value.dtype == torch.float32 else value for name, value in weights.items()},
              target / "model.safetensors", metadata={"format": "pt"})
    out = regenerated(tmp_path / "job-b", target, chats, reuse=(earlier,), sampling=GREEDY)
    (words,) = events(out, "AnswersNotReused")
    assert words == f"the answers in {earlier} are of another target; its answers are generated again"
    assert report(out).rows_reused == 0
    assert generated(out) != rows(earlier)


def write_earlier_version(out: Path) -> None:
    """Rows and manifest as a version without keys wrote them."""
    path = out / "rows.jsonl"
    path.write_text("".join(row.model_dump_json(exclude={"key", "generated_by"}) + "\n" for row in rows(out)))
    manifest = read_manifest(out)
    write_sealed(out / "manifest.json", manifest.model_copy(update={
        "files": list_files(out, [out / entry.path for entry in manifest.files])}))


def test_answers_of_another_dtype_engine_or_version_are_generated(tmp_path: Path, target: Path) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 3)
    dtype = regenerated(tmp_path / "dtype", target, chats, dtype="bfloat16")
    with openai_double(Troubles(know_token_ids=True)) as service:
        endpoint = regenerated(tmp_path / "endpoint", target, chats, engine="openai", base_url=service.url)
    old = regenerated(tmp_path / "old", target, chats)
    write_earlier_version(old)
    out = regenerated(tmp_path / "job-b", target, chats, reuse=(dtype, endpoint, old))
    assert [words[:4] for words in events(out, "AnswersReused")] == ["0 of"] * 3
    assert report(out).rows_reused == 0


def test_an_endpoint_is_asked_only_for_what_no_job_has_answered(tmp_path: Path, target: Path) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 8)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:5]))
    with openai_double(Troubles(know_token_ids=True)) as service:
        fields = {"engine": "openai", "base_url": service.url}
        earlier = regenerated(tmp_path / "job-a", target, few, **fields)
        assert len(service.bodies) == 5
        out = regenerated(tmp_path / "job-b", target, chats, reuse=(earlier,), **fields)
        assert len(service.bodies) == 8
        named = regenerated(tmp_path / "job-c", target, chats, reuse=(out,), served_model="other", **fields)
        assert len(service.bodies) == 16
    assert report(out).rows_reused == 5
    assert report(named).rows_reused == 0


def test_each_turn_is_taken_over_with_the_answers_before_it(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [("user", "one"), ("assistant", "old"), ("user", "two"), ("assistant", "old"), ("user", "three")]
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    with openai_double(Troubles(know_token_ids=True)) as service:
        fields = {"engine": "openai", "base_url": service.url, "turns": "all"}
        earlier = regenerated(tmp_path / "job-a", target, path, **fields)
        out = regenerated(tmp_path / "job-b", target, path, reuse=(earlier,), **fields)
        assert len(service.bodies) == 3
    assert [row.turn for row in rows(out)] == [0, 1, 2]
    assert generated(out) == rows(earlier)


def damage_rows(earlier: Path) -> None:
    path = earlier / "rows.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"line":1,', b'"line":7,'))


def damage_last_line(earlier: Path) -> None:
    path = earlier / "rows.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize(("harm", "words"), [
    (shutil.rmtree, "no manifest at"),
    (lambda earlier: (earlier / "manifest.json").unlink(), "no manifest at"),
    (lambda earlier: (earlier / "manifest.json").write_text("{}"), "is invalid"),
    (lambda earlier: (earlier / "rows.jsonl").unlink(), "rows.jsonl cannot be read: No such file or directory"),
    (lambda earlier: (earlier / "rows.meta.json").unlink(), "rows.meta.json cannot be read"),
    (lambda earlier: (earlier / "rows.meta.json").write_text("{}"), "rows.meta.json differs from the digest"),
    (damage_rows, "line 1 is not an answered row: its checksum differs"),
    (damage_last_line, "rows.jsonl differs from the digest"),
])
def test_an_earlier_job_that_vanished_or_is_damaged_is_left_out_and_its_rows_are_generated(
        tmp_path: Path, target: Path, harm: Any, words: str) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 4)
    earlier = regenerated(tmp_path / "job-a", target, chats)
    whole = rows(earlier)
    harm(earlier)
    out = regenerated(tmp_path / "job-b", target, chats, reuse=(earlier,))
    assert rows(out) == whole, "generated here, to the same answers"
    (said,) = events(out, "AnswersNotReused")
    assert words in said


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_ended_while_it_takes_answers_over_goes_on_and_doubles_none(
        tmp_path: Path, target: Path, end: signal.Signals) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 40)
    lines = chats.read_text().splitlines(keepends=True)
    half = tmp_path / "half.jsonl"
    half.write_text("".join(lines[:20]))
    earlier = regenerated(tmp_path / "job-a", target, half)
    alone = regenerated(tmp_path / "alone", target, chats)
    out = tmp_path / "job-b"
    write_spec(out, target, chats, reuse=(earlier,))
    process = subprocess.Popen(
        [sys.executable, "-m", "eyrie_workers.stages.regenerate", "--spec", str(out / "spec.json"),
         "--out", str(out / "manifest.json")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    ledger = out / "rows.jsonl"
    assert wait_until(lambda: process.poll() is not None or (ledger.exists() and ledger.stat().st_size > 0), 60.0)
    process.send_signal(end)
    process.wait(300)
    with ledger.open("ab") as file:
        file.write(b'{"id": "torn')  # a kill in the middle of a line, made certain
    (out / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(earlier)  # what the ledger has taken over remains, the rest is generated
    assert run(out) == 0
    assert generated(out) == rows(alone)
    assert report(out).rows_reused == sum(row.generated_by == "job-a" for row in rows(out)) >= 1
