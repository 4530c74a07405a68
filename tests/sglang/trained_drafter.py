"""The drafter these tests serve: really trained, by the stage programs, on answers of the quickstart target.

The demo's recipe at half its length: 480 conversations and 6 epochs, about two minutes on two idle cores. It is kept
under `.eyrie/sglang-tests`, by a digest of the code that made it, so that a second run finds it.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from eyrie_api.artifacts import read_manifest
from eyrie_api.v1alpha1.job import (
    CaptureSpec,
    DataSource,
    DataSpec,
    DrafterSpec,
    RegenerateSpec,
    SamplingSpec,
    TargetSpec,
    TrainSpec,
)
from eyrie_api.v1alpha1.reports import TrainReport
from eyrie_api.v1alpha1.stages import CaptureStage, RegenerateStage, StageSpec, TrainStage

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".eyrie" / "sglang-tests"
SUITES = ("chat", "math", "code", "tools")
_TARGET = TargetSpec(model="quickstart", dtype="float32")
# What decides the drafter's weights. Engines and measurement do not.
_MAKERS = ("conversations", "drafters", "features", "quickstart", "regeneration", "speculation", "stages", "targets",
           "training")


def trained_drafter() -> Path:
    """The directory of the last checkpoint; trains it when this code has not yet."""
    home = KEPT / f"drafter-{_digest()}"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs at once, the second finds what the first has made
        if not home.exists():
            aside = KEPT / "aside"
            shutil.rmtree(aside, ignore_errors=True)
            _train(aside)
            for old in KEPT.glob("drafter-*"):
                shutil.rmtree(old)
            aside.rename(home)
    report = read_manifest(home / "train" / "manifest.json").report
    assert isinstance(report, TrainReport)
    return home / "train" / report.checkpoints[-1].path


def _train(home: Path) -> None:
    _run(home / "regenerate", RegenerateStage(
        job_id="sglang-tests", target=_TARGET,
        data=DataSpec(sources=(DataSource(path="quickstart"),), max_conversations=480),
        regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.7), max_new_tokens=128, concurrency=32),
        exclude_prompts=tuple(f"quickstart:{name}" for name in SUITES)))
    _run(home / "capture", CaptureStage(job_id="sglang-tests", target=_TARGET, capture=CaptureSpec(),
                                        rows_dir=str(home / "regenerate")))
    _run(home / "train", TrainStage(
        job_id="sglang-tests", candidate="base", target=_TARGET, store_dir=str(home / "capture"),
        # Smaller than the target's vocabulary of 2048, so that the map between the two matters.
        drafter=DrafterSpec(draft_vocab_size=1536),
        train=TrainSpec(learning_rate=2e-3, epochs=6.0, num_checkpoints=1, max_tokens_per_batch=1024)))


def _run(out: Path, spec: StageSpec) -> None:
    out.mkdir(parents=True)
    (out / "spec.json").write_text(spec.model_dump_json())
    subprocess.run([sys.executable, "-m", f"eyrie_workers.stages.{spec.stage}", "--spec", str(out / "spec.json"),
                    "--out", str(out / "manifest.json")], check=True, timeout=900, stdout=subprocess.DEVNULL,
                   env=os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))})


def _digest() -> str:
    """Of the code and of this recipe."""
    workers = ROOT / "workers" / "eyrie_workers"
    files = [Path(__file__), *sorted(file for name in _MAKERS for file in (workers / name).rglob("*.py"))]
    held = [[str(file.relative_to(ROOT)), hashlib.sha256(file.read_bytes()).hexdigest()] for file in files]
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:16]
