"""The whole route on one machine: one REST call in, a measured drafter behind a stable URL out. Nothing is faked.

A tiny random target of another family than the shipped one, with a tokenizer of its own, so that nothing leans on the
quickstart. Its drafter cannot be fast, and what the job decides of it is not prescribed: it is then promoted by hand,
as anybody may. What is shown is the way, not a figure.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.artifacts import read_manifest
from eyrie_api.client import Client
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.reports import RegenerateReport
from eyrie_api.contract.status import Endpoint, Job
from tests.tiny import chats_file, tiny_target
from tests.waiting import wait_for

STAGES = ("regenerate", "capture", "train", "benchmark", "tune", "prove")


def eyrie(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    return subprocess.run([sys.executable, "-m", "eyrie_operator.command", *arguments], text=True, capture_output=True,
                          check=False, timeout=240,
                          # Of its own: the lock of measurements is in it, for which tests would wait.
                          env=os.environ | {"EYRIE_HOME": str(home), "TMPDIR": str(home.parent)})


def up(home: Path) -> tuple[str, int]:
    """Start the control plane of a home; its URL and process id."""
    started = eyrie(home, "up", "--detach", "--port", "0", "--json")
    assert started.returncode == 0, started.stderr
    result = json.loads(started.stdout)
    return result["url"], result["pid"]


@contextmanager
def plane(home: Path) -> Iterator[tuple[Client, int]]:
    """A control plane of its own home; down at the end, whatever happened."""
    url, pid = up(home)
    try:
        with Client(url) as client:
            yield client, pid
    finally:
        with Client(url) as client:
            try:
                for endpoint in client.endpoints().items:
                    client.off(endpoint.name)
                wait_for(lambda: not _engines(home), "engines off", every_s=0.2)
            finally:
                eyrie(home, "down")


def _engines(home: Path) -> list[str]:
    """Engine processes of this home."""
    shown = subprocess.run(["ps", "-eo", "args"], text=True, capture_output=True, check=True).stdout
    return [line for line in shown.splitlines() if str(home) in line and "engines.server" in line]


def job_spec(tmp: Path, **changes: Any) -> JobSpec:
    """A job of seconds: every stage, each as small as it can be."""
    target = tiny_target(tmp / "target", "qwen3", vocab_size=400, num_layers=6)
    suite = tmp / "suite.jsonl"
    suite.write_text("".join(
        json.dumps({"id": f"s{i}", "messages": [{"role": "user", "content": f"Name {i} towns."}]}) + "\n"
        for i in range(2, 8)))
    return JobSpec.model_validate({
        "target": {"model": str(target)},
        "data": {"sources": [{"path": str(chats_file(tmp / "chats.jsonl", 40))}], "held_out_fraction": 0.1},
        "regenerate": {"max_new_tokens": 24, "concurrency": 8, "sampling": {"temperature": 1.0}},
        "drafter": {"draft_vocab_size": 128},
        "train": {"max_steps": 6, "epochs": 50, "ttt_length": 3, "max_tokens_per_batch": 256, "num_checkpoints": 1,
                  "save_every_steps": 2},
        "benchmark": {"suites": [{"name": "towns", "path": str(suite), "max_prompts": 2}], "max_new_tokens": 16,
                      "tree": {"num_steps": 2, "top_k": 1, "num_draft_tokens": 3}, "warmup_prompts": 0},
        "tune": {"num_steps": [2, 3], "top_k": [1, 2], "num_draft_tokens": [6], "max_prompts": 2,
                 "concurrencies": [1, 2]},
        "prove": {"concurrencies": [1, 2], "requests": 4, "most_pairs": 3, "max_new_tokens": 8, "parity_prompts": 2},
        "promotion": {"canary": {"shares": []}},
        "serve": {"health_timeout_s": 300},
    } | changes)


def drafted(endpoint: Endpoint) -> Endpoint | None:
    """The endpoint, once it serves a drafter."""
    active = next((one for one in endpoint.revisions if one.number == endpoint.active_revision), None)
    return endpoint if active is not None and active.checkpoint is not None else None


def finished(client: Client, job_id: str, seconds: float = 1500) -> Job:
    """The job once it is over."""
    def over() -> Job | None:
        job = client.job(job_id)
        return job if job.status.finished_at is not None else None

    return wait_for(over, f"{job_id} is over", seconds, every_s=0.5)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a machine that is held up is waited for
def test_a_job_killed_while_it_trains_goes_on_is_decided_and_its_drafter_serves(tmp_path: Path) -> None:
    """kill -9 of the control plane and of everything the run started. Each stage has tests of its own that kill it."""
    home = tmp_path / "home"
    url, pid = up(home)
    with Client(url) as client:
        job_id = client.create_job(job_spec(tmp_path)).id
    stages = home / "jobs" / job_id / "stages"
    wait_for(lambda: list((stages / "train").rglob("events.jsonl")), "training begun", 300)
    run = json.loads((home / "jobs" / job_id / "run" / "run.json").read_text())
    os.kill(pid, signal.SIGKILL)
    with _already_gone():  # the run may have ended in between, which is as good a moment as any
        os.killpg(run["process"]["pid"], signal.SIGKILL)
    manifests = {path: path.stat().st_mtime_ns for path in stages.rglob("manifest.json")}
    with plane(home) as (client, _):
        check_decided(client, finished(client, job_id))
        check_served(client, job_id)
        check_reused(client, job_id, home)
    assert manifests
    assert {path: path.stat().st_mtime_ns for path in manifests} == manifests, "a finished stage was made again"


def check_decided(client: Client, done: Job) -> None:
    """Every stage succeeded, and a decision was made of the measured candidates."""
    conditions = {one.type: one for one in done.status.conditions}
    assert conditions["Succeeded"].status == "True", conditions
    assert done.status.decision is not None
    assert done.status.decision.checks
    assert {stage.stage for stage in done.status.stages} == set(STAGES)
    assert all(stage.state == "Succeeded" for stage in done.status.stages)
    board = client.leaderboard()
    assert board
    assert all(entry.lossless for entry in board if entry.job_id == done.id)


def check_served(client: Client, job_id: str) -> None:
    """The endpoint answers with the job's drafter after a promotion by hand; the report names it."""
    client.promote("default", job_id=job_id)
    endpoint = wait_for(lambda: drafted(client.endpoint("default")), "the drafter serves", 300, every_s=0.2)
    answer = httpx.post(f"{endpoint.url}/chat/completions", timeout=120, json={
        "model": endpoint.model, "messages": [{"role": "user", "content": "Name three towns."}],
        "max_tokens": 12, "temperature": 0, "return_spec_tokens_details": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] >= 1
    assert answer.json()["sglext"]["spec_tokens_details"]["spec_verify_ct"] >= 1
    report = client.report(job_id)
    assert report.benchmark
    assert report.tune is not None
    assert report.prove is not None
    assert report.prove.skipped or (report.prove.parity and report.prove.parity.identical == 2), report.prove
    assert report.endpoint == endpoint.name


def check_reused(client: Client, job_id: str, home: Path) -> None:
    """The same job again takes over every answer of the first."""
    again = client.create_job(client.job(job_id).spec).id
    manifest = home / "jobs" / again / "stages/regenerate/manifest.json"
    wait_for(manifest.exists, "the second job's answers", 300)
    client.cancel(again)
    report = read_manifest(manifest).report
    assert isinstance(report, RegenerateReport)
    assert report.rows_reused == report.rows_answered > 0


@contextmanager
def _already_gone() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        return
