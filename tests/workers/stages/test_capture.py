"""Capture records what Hugging Face computes, exactly at the answer tokens, and survives every kind of end."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.artifacts import read_manifest, read_report, verify_files
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.drafter import PublishedDrafter
from eyrie_api.contract.reports import CaptureReport
from eyrie_api.contract.stages import CaptureStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, DiskFull
from eyrie_api.processes import free_port
from eyrie_workers.data.rows import META, ROWS, AnsweredRow, RowSampling, RowsMeta, read_rows
from eyrie_workers.hidden_states.shard_format import consecutive, shard_name, supervised_positions
from eyrie_workers.hidden_states.store import FeatureStore, StoreDamaged
from eyrie_workers.hidden_states.topk_logits import rebuild_distribution
from eyrie_workers.hidden_states.writer import FeatureWriter
from eyrie_workers.stage_program import Stage, run_program
from eyrie_workers.stages.capture import capture, is_whole, plan_rows, write_shards
from eyrie_workers.targets.loading import load_target, target_digest
from eyrie_workers.targets.state_source import LOGITS, LayersDisagree, compare
from tests.tiny import tiny_target
from tests.waiting import wait_for
from tests.workers.measure.tiny_bench import random_drafter

NOT_THE_ARTIFACT = {"events.jsonl", "manifest.json", "spec.json", ".lock", "failure.json"}


def write_rows(directory: Path, target: Path, num: int, *, longest: int = 60, seed: int = 0) -> list[AnsweredRow]:
    """What regenerate leaves, with random tokens."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    rows = [AnsweredRow(
        id=f"{i:032x}", source="s", line=i + 1, category="", seed=0, text="", finish_reason="length", ids_exact=True,
        prompt_ids=tuple(rng.randrange(320) for _ in range(rng.randrange(1, longest // 2))),
        answer_ids=tuple(rng.randrange(320) for _ in range(rng.randrange(1, longest // 2))),
        sampling=RowSampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=9)) for i in range(num)]
    (directory / ROWS).write_text("".join(row.model_dump_json() + "\n" for row in rows))
    meta = RowsMeta(target_digest=target_digest(target), answers_digest="sha256:" + "0" * 64)
    (directory / META).write_text(meta.model_dump_json())
    return rows


def write_spec(out: Path, target: Path, rows_dir: Path, **fields: Any) -> CaptureStage:
    out.mkdir(parents=True, exist_ok=True)
    spec = CaptureStage(job_id="job", target=TargetSpec(model=str(target)), rows_dir=str(rows_dir),
                        capture=CaptureSpec(**{"codec": "float32", "check_rows": 0} | fields))
    (out / "spec.json").write_text(spec.model_dump_json())
    return spec


def run(out: Path) -> int:
    return run_program(CaptureStage, capture, ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")],
                       is_whole)


def artifact(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()
            if path.is_file() and path.name not in NOT_THE_ARTIFACT}


def failure(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "failure.json").read_text()))


def test_states_of_earlier_jobs_are_copied_row_by_row_and_only_the_others_are_computed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 60)
    how: dict[str, Any] = {"shard_size_bytes": 2**16, "batch_tokens": 128, "codec": "int8"}
    write_spec(tmp_path / "alone", target, tmp_path / "rows", **how)
    assert run(tmp_path / "alone") == 0
    wanted = artifact(tmp_path / "alone")

    def captured(name: str, *earlier: str, num_rows: int = 60, **fields: Any) -> CaptureReport:
        rows = tmp_path / f"rows-{num_rows}"
        write_rows(rows, target, num_rows)
        spec = write_spec(tmp_path / name, target, rows, **how | fields)
        spec = spec.model_copy(update={"reuse": tuple(str(tmp_path / one) for one in earlier)})
        (tmp_path / name / "spec.json").write_text(spec.model_dump_json())
        assert run(tmp_path / name) == 0
        report = read_manifest(tmp_path / name).report
        assert isinstance(report, CaptureReport)
        return report

    # Some of the rows, in shards of another size; then more of them from two jobs, one of which is not there.
    assert captured("some", num_rows=25, shard_size_bytes=2**17).rows_reused == 0
    more = captured("more", "none", "some")
    assert more.rows_reused == 25
    whole = captured("whole", "more")
    assert 0 < more.bytes_reused < whole.bytes_reused <= whole.bytes
    assert whole.bytes_reused > 0.9 * whole.bytes  # all but headers and digests
    assert artifact(tmp_path / "more") == wanted
    said = (tmp_path / "more" / "events.jsonl").read_text()
    assert ("StatesNotReused" in said, "25 of 60 rows" in said) == (True, True)
    # Another format is left out; a damaged row is computed.
    assert captured("other", "more", codec="bfloat16").rows_reused == 0
    states = next((tmp_path / "some").glob("shard-*"))
    data = bytearray(states.read_bytes())
    data[len(data) // 2] ^= 1
    states.write_bytes(bytes(data))
    assert captured("damaged", "some").rows_reused == 24
    assert "1 rows of earlier jobs cannot be read" in (tmp_path / "damaged" / "events.jsonl").read_text()
    assert artifact(tmp_path / "damaged") == wanted
    # All rows: the target is not even loaded.
    monkeypatch.setattr("eyrie_workers.targets.state_source.open_source", None)
    monkeypatch.setattr("eyrie_workers.targets.state_source.reference_states", None)
    assert captured("all", "more", check_rows=4).rows_reused == 60
    assert artifact(tmp_path / "all") == wanted


def test_a_row_with_other_tokens_than_an_earlier_jobs_is_computed(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 20)
    write_spec(tmp_path / "before", target, tmp_path / "rows")
    assert run(tmp_path / "before") == 0
    write_rows(tmp_path / "rows", target, 20, seed=1)  # the same ids
    write_spec(tmp_path / "alone", target, tmp_path / "rows")
    spec = write_spec(tmp_path / "out", target, tmp_path / "rows")
    (tmp_path / "out" / "spec.json").write_text(
        spec.model_copy(update={"reuse": (str(tmp_path / "before"),)}).model_dump_json())
    for name in ("alone", "out"):
        assert run(tmp_path / name) == 0
    assert artifact(tmp_path / "out") == artifact(tmp_path / "alone")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_captured_states_equal_hugging_face_hidden_states(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    target = tiny_target(tmp_path / "target", family, num_layers=5)
    rows = write_rows(tmp_path / "rows", target, 9)
    write_spec(tmp_path / "out", target, tmp_path / "rows", aux_layers=(0, 2, 5), batch_tokens=64)
    assert run(tmp_path / "out") == 0
    store = FeatureStore(tmp_path / "out")
    assert not list(store.damage())
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert store.num_rows == 9
    for i, row in enumerate(rows):
        got = store.read([i])
        assert store.row_ids[i] == row.id
        assert got.token_ids.tolist() == [*row.prompt_ids, *row.answer_ids]
        assert got.loss_mask.tolist() == [False] * len(row.prompt_ids) + [True] * len(row.answer_ids)
        with torch.no_grad():
            reference = model(got.token_ids[None], output_hidden_states=True)
        wanted = torch.stack([reference.hidden_states[layer][0] for layer in (0, 2, 5)], dim=1)
        # Two orders of float32 summation over 32 to 64 terms, through five layers.
        torch.testing.assert_close(got.aux, wanted, atol=1e-4, rtol=1e-4)
        taught = supervised_positions(got.loss_mask)
        logits = got.last[taught] @ model.lm_head.weight.T.detach()
        torch.testing.assert_close(logits, reference.logits[0][taught], atol=1e-4, rtol=1e-4)


def test_a_damaged_shard_captured_through_transformers_is_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", "gemma2")  # an architecture that the reference does not compute
    write_rows(tmp_path / "rows", target, 30)
    write_spec(tmp_path / "out", target, tmp_path / "rows", shard_size_bytes=2**16, batch_tokens=128, check_rows=1)
    assert run(tmp_path / "out") == 0
    report = read_manifest(tmp_path / "out").report
    assert isinstance(report, CaptureReport)
    assert (report.source, report.shards > 2) == ("transformers", True)
    before = artifact(tmp_path / "out")
    (tmp_path / "out" / shard_name(1)).unlink()
    for name in ("manifest.json", "index.json"):
        (tmp_path / "out" / name).unlink(missing_ok=True)
    assert run(tmp_path / "out") == 0
    assert artifact(tmp_path / "out") == before


def test_the_report_counts_what_the_store_holds(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    rows = write_rows(tmp_path / "rows", target, 30)
    write_spec(tmp_path / "out", target, tmp_path / "rows", codec="bfloat16", shard_size_bytes=2**16)
    assert run(tmp_path / "out") == 0
    manifest = read_manifest(tmp_path / "out")
    verify_files(manifest, tmp_path / "out")
    report, store = manifest.report, FeatureStore(tmp_path / "out")
    assert isinstance(report, CaptureReport)
    assert (report.rows, report.tokens) == (30, store.num_tokens)
    assert report.supervised_tokens == sum(int(store.read([i]).loss_mask.sum()) for i in range(30)) \
        == sum(len(row.answer_ids) for row in rows)
    assert report.shards > 1
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.states"))
    assert report.layers.aux_layers == store.format.aux_layers
    assert report.layers.reason
    assert store.read([0]).aux.dtype == torch.bfloat16


def test_the_layers_of_a_head_that_training_continues_from_are_stored(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    head = random_drafter(tmp_path / "head", target, layers=(0, 3))
    write_rows(tmp_path / "rows", target, 4)
    spec = write_spec(tmp_path / "out", target, tmp_path / "rows")
    spec = spec.model_copy(update={"families": (), "init_from": (PublishedDrafter(path=str(head)),)})
    (tmp_path / "out" / "spec.json").write_text(spec.model_dump_json())
    assert run(tmp_path / "out") == 0
    assert FeatureStore(tmp_path / "out").format.aux_layers == (0, 3)


def test_batch_size_and_shard_size_do_not_change_the_states(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 12)
    write_spec(tmp_path / "one", target, tmp_path / "rows", batch_tokens=64, shard_size_bytes=2**16)
    write_spec(tmp_path / "other", target, tmp_path / "rows", batch_tokens=4096)
    assert (run(tmp_path / "one"), run(tmp_path / "other")) == (0, 0)
    one, other = FeatureStore(tmp_path / "one"), FeatureStore(tmp_path / "other")
    for i in range(12):
        torch.testing.assert_close(one.read([i]).last, other.read([i]).last, atol=1e-5, rtol=1e-5)


def test_long_rows_are_cut_and_rows_without_an_answer_left_are_counted(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    rows = write_rows(tmp_path / "rows", target, 40, longest=60)
    write_spec(tmp_path / "out", target, tmp_path / "rows", max_length=16)
    assert run(tmp_path / "out") == 0
    report, store = read_report(tmp_path / "out", CaptureReport), FeatureStore(tmp_path / "out")
    assert isinstance(report, CaptureReport)
    assert report.rows_dropped == sum(len(row.prompt_ids) >= 16 for row in rows) > 0
    assert report.rows + report.rows_dropped == 40
    assert max(store.lengths) == 16
    assert all(bool(store.read([i]).loss_mask.any()) for i in range(store.num_rows))


def test_rows_of_another_target_are_refused(tmp_path: Path) -> None:
    target, other = tiny_target(tmp_path / "target"), tiny_target(tmp_path / "other", seed=1)
    write_rows(tmp_path / "rows", other, 3)
    write_spec(tmp_path / "out", target, tmp_path / "rows")
    assert run(tmp_path / "out") != 0
    assert failure(tmp_path / "out")["reason"] == "Conflict"
    assert not list((tmp_path / "out").glob("*.states"))


def test_missing_rows_and_nothing_to_record_are_named(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_spec(tmp_path / "out", target, tmp_path / "nowhere")
    assert run(tmp_path / "out") == 66
    assert failure(tmp_path / "out")["hint"] == "run regenerate first"
    write_rows(tmp_path / "rows", target, 0)
    write_spec(tmp_path / "out", target, tmp_path / "rows")
    assert run(tmp_path / "out") == 65
    assert failure(tmp_path / "out")["reason"] == "NoUsableData"


def test_other_rows_in_a_half_filled_directory_are_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 5)
    write_spec(tmp_path / "out", target, tmp_path / "rows")
    assert run(tmp_path / "out") == 0
    (tmp_path / "out" / "manifest.json").unlink()
    text = (tmp_path / "rows" / ROWS).read_text().splitlines(keepends=True)
    (tmp_path / "rows" / ROWS).write_text("".join(reversed(text)))
    assert run(tmp_path / "out") != 0
    assert "other rows" in failure(tmp_path / "out")["message"]


@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_capture_run_again_makes_exactly_the_damaged_shard_again(tmp_path: Path, harm: str) -> None:
    target, out = tiny_target(tmp_path / "target"), tmp_path / "out"
    write_rows(tmp_path / "rows", target, 60)
    write_spec(out, target, tmp_path / "rows", codec="int8", shard_size_bytes=2**16)
    assert run(out) == 0
    before, manifest = artifact(out), (out / "manifest.json").read_bytes()
    before_rows = FeatureStore(out).num_rows
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("*.states")}
    assert len(written) > 2
    path = out / shard_name(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[:-100])
    with pytest.raises(StoreDamaged, match="shard-00001"):
        FeatureStore(out).read(range(before_rows))
    assert run(out) == 0
    assert artifact(out) == before
    assert (out / "manifest.json").read_bytes() == manifest, "the same bytes are the same artifact"
    again = {path.name: path.stat().st_mtime_ns for path in out.glob("*.states")}
    assert [name for name in again if again[name] != written[name]] == [shard_name(1)]
    assert not list(FeatureStore(out).damage())


def test_states_are_compared_with_transformers_before_anything_is_stored(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", num_layers=5)
    write_rows(tmp_path / "rows", target, 3)
    write_spec(tmp_path / "out", target, tmp_path / "rows", check_rows=2, aux_layers=(1, 3))
    assert run(tmp_path / "out") == 0
    report = read_report(tmp_path / "out", CaptureReport)
    assert isinstance(report, CaptureReport)
    assert set(report.checked) == {"1", "3"}
    assert all(error < 1e-5 for error in report.checked.values())
    assert report.states_error == {"1": 0.0, "3": 0.0, "final": 0.0}


def test_states_of_the_next_layer_and_logits_of_another_head_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = {layer: torch.randn(9, 8, generator=generator) for layer in (*range(4), LOGITS)}
    right, logits = [torch.stack([layers[1], layers[2]], dim=1)], [layers[LOGITS]]
    agreements = compare(right, logits, [layers], (1, 2), "float32")
    assert all(agreement.error == 0.0 < 0.5 < agreement.neighbour for agreement in agreements)
    with pytest.raises(LayersDisagree, match="layer 2"):
        compare([torch.stack([layers[1], layers[3]], dim=1)], logits, [layers], (1, 2), "float32")
    with pytest.raises(LayersDisagree, match="logits differ"):
        compare(right, [0.5 * layers[LOGITS]], [layers], (1, 2), "float32")


def test_a_budget_of_bytes_decides_the_codec_before_anything_is_stored(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 200)
    write_spec(tmp_path / "out", target, tmp_path / "rows", max_bytes=1_200_000)
    assert run(tmp_path / "out") == 0
    report = read_report(tmp_path / "out", CaptureReport)
    assert isinstance(report, CaptureReport)
    assert report.codec != "float32"
    assert report.bytes < 1_200_000 * 1.1
    write_spec(tmp_path / "none", target, tmp_path / "rows", max_bytes=2**16)
    assert run(tmp_path / "none") != 0
    assert failure(tmp_path / "none")["reason"] == "DiskTooSmall"
    assert not list((tmp_path / "none").glob("*.states"))


def test_an_opinion_holds_the_likeliest_tokens_and_exactly_the_mass_of_the_rest(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 6)
    write_spec(tmp_path / "plain", target, tmp_path / "rows")
    write_spec(tmp_path / "topk", target, tmp_path / "rows", final_state="topk", final_top_k=8, draft_vocab_size=50)
    assert (run(tmp_path / "plain"), run(tmp_path / "topk")) == (0, 0)
    plain, store = FeatureStore(tmp_path / "plain"), FeatureStore(tmp_path / "topk")
    head, ids = load_target(target).lm_head_weight, torch.tensor(store.format.draft_ids)
    packed = store.read(range(6))
    assert packed.topk_logits is not None
    assert packed.last.shape[1] == 0
    rebuilt = rebuild_distribution(packed.topk_logits, 50)
    rows = [plain.read([i]) for i in range(6)]
    logits = torch.cat([row.last[supervised_positions(row.loss_mask)] for row in rows]) @ head.T
    wanted = logits[:, ids].softmax(-1)
    torch.testing.assert_close(rebuilt.sum(-1), torch.ones(rebuilt.shape[0]), atol=1e-6, rtol=0)
    kept = torch.zeros_like(wanted, dtype=torch.bool).scatter_(1, wanted.topk(8).indices, True)
    torch.testing.assert_close((rebuilt * ~kept).sum(-1), (wanted * ~kept).sum(-1), atol=1e-6, rtol=1e-5)
    # float16 keeps a logit to one part in 2048.
    torch.testing.assert_close(rebuilt[kept], wanted[kept], atol=1e-5, rtol=5e-3)
    torch.testing.assert_close(packed.topk_logits.mass, logits.softmax(-1)[:, ids].sum(-1), atol=1e-5, rtol=1e-5)
    first = logits.argmax(-1)
    assert torch.equal(packed.topk_logits.choice >= 0, torch.isin(first, ids))
    inside = packed.topk_logits.choice >= 0
    assert torch.equal(ids[packed.topk_logits.choice[inside]], first[inside])


def start(out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "eyrie_workers.stages.capture", "--spec", str(out / "spec.json"),
         "--out", str(out / "manifest.json")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for_shards(process: subprocess.Popen[bytes], out: Path, shards: int) -> None:
    wait_for(lambda: len(list(out.glob("shard-*.states"))) >= shards, f"{shards} shards", every_s=0.002,
             process=process)


def end_after(process: subprocess.Popen[bytes], out: Path, shards: int, number: signal.Signals) -> int:
    """Send a signal as soon as so many shards are in place."""
    wait_for_shards(process, out, shards)
    process.send_signal(number)
    return process.wait(300)


@pytest.mark.slow
def test_a_program_terminated_and_killed_midway_ends_with_the_same_bytes(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 250)
    for name in ("whole", "broken"):
        write_spec(tmp_path / name, target, tmp_path / "rows", shard_size_bytes=2**16, batch_tokens=64)
    assert run(tmp_path / "whole") == 0
    broken = tmp_path / "broken"
    for num_shards, number, code in ((2, signal.SIGTERM, 143), (4, signal.SIGKILL, -9)):
        assert end_after(start(broken), broken, num_shards, number) == code
        assert not (broken / "manifest.json").exists()
    shards_before = len(list(broken.glob("shard-*.states")))
    assert 4 <= shards_before < len(list((tmp_path / "whole").glob("shard-*.states")))
    assert start(broken).wait(300) == 0
    assert artifact(broken) == artifact(tmp_path / "whole")
    events = [json.loads(line) for line in (broken / "events.jsonl").read_text().splitlines()]
    assert any(event.get("reason") == "Resumed" for event in events)


def test_an_error_of_a_writer_thread_ends_the_stage_and_the_next_run_completes_the_store(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 120)
    for name in ("whole", "broken"):
        write_spec(tmp_path / name, target, tmp_path / "rows", shard_size_bytes=2**16, batch_tokens=64)
    assert run(tmp_path / "whole") == 0
    flushed, flush = count(1), os.fsync

    def full_at_the_third(file: int) -> None:
        if next(flushed) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_at_the_third)
        assert run(tmp_path / "broken") == DiskFull.exit_code
    assert not list((tmp_path / "broken").glob(".shard-*")), "the shards that failed are deleted"
    assert 2 <= len(list((tmp_path / "broken").glob("shard-*"))) < len(list((tmp_path / "whole").glob("shard-*")))
    assert run(tmp_path / "broken") == 0
    assert artifact(tmp_path / "broken") == artifact(tmp_path / "whole")


def capture_share(out: Path, share: tuple[int, int]) -> None:
    """What one of several processes captures."""
    spec = CaptureStage.model_validate_json((out / "spec.json").read_text())
    target = load_target(Path(spec.target.model))
    plan = plan_rows(read_rows(Path(spec.rows_dir) / ROWS), spec.capture.max_length)
    fmt = FeatureStore(out.parent / "whole").format
    write_shards(spec, Stage(out, quiet=True), plan, lambda: target, FeatureWriter(out, fmt, alone=False), share)


def test_shards_do_not_depend_on_the_number_of_processes_nor_on_a_change_of_it(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 120)
    for name in ("whole", "three", "changed"):
        write_spec(tmp_path / name, target, tmp_path / "rows", shard_size_bytes=2**16, batch_tokens=64)
    assert run(tmp_path / "whole") == 0
    for rank in (2, 0, 1):
        capture_share(tmp_path / "three", (rank, 3))
    capture_share(tmp_path / "changed", (1, 2))  # the other one was killed
    num_shards = len(list((tmp_path / "whole").glob("shard-*")))
    assert len(list((tmp_path / "changed").glob("shard-*"))) == num_shards // 2 > 1
    for rank in (0, 1, 2):
        capture_share(tmp_path / "changed", (rank, 3))
    for name in ("three", "changed"):
        assert run(tmp_path / name) == 0
        assert artifact(tmp_path / name) == artifact(tmp_path / "whole")


def ranks(out: Path, num: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num), "-m",
            "eyrie_workers.stages.capture", "--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")]


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_changes_no_byte_whatever_number_of_ranks_resumes(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 400)
    for name in ("whole", "broken"):
        write_spec(tmp_path / name, target, tmp_path / "rows", shard_size_bytes=2**16, batch_tokens=64)
    assert run(tmp_path / "whole") == 0
    broken, wanted = tmp_path / "broken", artifact(tmp_path / "whole")
    killed_after, killed = random.randrange(1, len(wanted) // 2), random.randrange(2)
    launcher = subprocess.Popen(ranks(broken, 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ONE_THREAD)
    wait_for_shards(launcher, broken, killed_after)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[killed]), signal.SIGKILL)
    assert launcher.wait(300) != 0
    case = f"rank {killed} killed after {killed_after} shards"
    assert not (broken / "manifest.json").exists(), case
    shutil.copytree(broken, tmp_path / "alone")
    assert run(tmp_path / "alone") == 0
    assert artifact(tmp_path / "alone") == wanted, case
    subprocess.run(ranks(broken, 4), check=True, timeout=300, stdout=subprocess.DEVNULL, env=ONE_THREAD)
    assert artifact(broken) == wanted, case


def test_an_error_of_one_rank_alone_is_in_failure_json(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 20)
    out = tmp_path / "out"
    write_spec(out, target, tmp_path / "rows")
    damaged = shutil.copytree(target, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no header")
    write_spec(tmp_path / "other", damaged, tmp_path / "rows")  # what rank 1 finds on its machine
    port = free_port()  # of a range that no connection of this machine is given a port of
    programs = [subprocess.Popen(
        [sys.executable, "-m", "eyrie_workers.stages.capture", "--spec", str(tmp_path / name / "spec.json"),
         "--out", str(out / "manifest.json")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=ONE_THREAD | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        for rank, name in enumerate(("out", "other"))]
    codes = [program.wait(300) for program in programs]
    assert codes[0] != 0, "rank 0 lost its peer"
    assert codes[1] == ArtifactCorrupt.exit_code
    assert failure(out)["reason"] == "ArtifactCorrupt"
    assert str(damaged) in failure(out)["message"]


@pytest.mark.slow
def test_two_processes_write_the_store_of_one(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", target, 120)
    for name in ("whole", "two"):
        write_spec(tmp_path / name, target, tmp_path / "rows", shard_size_bytes=2**16, batch_tokens=64)
    assert run(tmp_path / "whole") == 0
    out = tmp_path / "two"
    subprocess.run(ranks(out, 2), check=True, timeout=300, stdout=subprocess.DEVNULL, env=ONE_THREAD)
    assert artifact(out) == artifact(tmp_path / "whole")
    one, two = (read_report(tmp_path / name, CaptureReport) for name in ("whole", "two"))
    assert isinstance(one, CaptureReport)
    assert isinstance(two, CaptureReport)
    timed = {"seconds": 0.0, "tokens_per_s": 0.0, "prefill_tokens_per_s": 0.0}
    assert two.model_copy(update=timed) == one.model_copy(update=timed)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert sum(event.get("reason") == "LayersChosen" for event in events) == 1, "rank 0 alone writes events"


@given(lengths=st.lists(st.integers(1, 300), max_size=50), batch=st.integers(1, 1000))
def test_batches_cover_every_row_once_within_the_limit(lengths: list[int], batch: int) -> None:
    plan = list(consecutive(lengths, batch))
    assert [i for rows in plan for i in rows] == list(range(len(lengths)))
    assert all(len(rows) == 1 or sum(lengths[i] for i in rows) <= batch for rows in plan)


@given(lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20), longest=st.integers(1, 80))
def test_a_plan_keeps_only_rows_with_an_answer_and_accounts_for_the_others(lengths: list[tuple[int, int]],
                                                                         longest: int) -> None:
    sampling = RowSampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=9)
    rows = [AnsweredRow(id=str(i), source="s", line=1, category="", prompt_ids=(1,) * p, answer_ids=(1,) * a, text="",
                        finish_reason="stop", sampling=sampling, seed=0, ids_exact=True)
            for i, (p, a) in enumerate(lengths)]
    plan = plan_rows(iter(rows), longest)
    assert len(plan.rows) + plan.rows_dropped == len(rows)
    assert all(row.num_prompt_tokens < row.num_tokens <= longest for row in plan.rows)
    assert plan.rows_cut == sum(p < longest < p + a for p, a in lengths)
