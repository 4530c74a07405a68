"""The drafters these tests serve: really trained, by the stage programs, on answers of the quickstart target.

The demo's recipe at half its length: 480 conversations and 6 epochs of EAGLE-3, about two minutes on two idle cores;
of other families, from the same states, only as much as it takes for drafts to be accepted. They are kept under
`.eyrie/sglang-tests`, by a digest of the code that made them, so that a second run finds them.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import CausalHead, DrafterSpec
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import CaptureStage, RegenerateStage, StageSpec, TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".eyrie" / "sglang-tests"
SUITES = ("chat", "math", "code", "tools")
BLOCK = 4
"""Tokens that a drafter of blocks proposes."""
_TARGET = TargetSpec(model="quickstart", dtype="float32")
_RECIPES: dict[str, tuple[DrafterSpec, TrainSpec]] = {
    # Smaller than the target's vocabulary of 2048, so that the map between the two matters.
    "eagle3": (DrafterSpec(draft_vocab_size=1536),
               TrainSpec(learning_rate=2e-3, epochs=6.0, num_checkpoints=1, max_tokens_per_batch=1024)),
    "eagle1": (DrafterSpec(family="eagle1"),
               TrainSpec(learning_rate=2e-3, epochs=3.0, num_checkpoints=1, max_tokens_per_batch=1024)),
    "standalone": (DrafterSpec(family="standalone"),
                   TrainSpec(learning_rate=2e-3, epochs=3.0, num_checkpoints=1, max_tokens_per_batch=1024)),
    "dflash": (DrafterSpec(family="dflash", max_draft_tokens=BLOCK),
               TrainSpec(learning_rate=2e-3, epochs=4.0, num_checkpoints=1, max_tokens_per_batch=1024)),
    **{head: (DrafterSpec(family="dflash", max_draft_tokens=BLOCK, causal_head=head),
              TrainSpec(learning_rate=2e-3, epochs=4.0, num_checkpoints=1, max_tokens_per_batch=1024))
       for head in get_args(CausalHead)},
    "dspark": (DrafterSpec(family="dspark", max_draft_tokens=BLOCK, markov_head="gated"),
               TrainSpec(learning_rate=2e-3, epochs=4.0, num_checkpoints=1, max_tokens_per_batch=1024)),
}
# What decides a drafter's weights. Engines and measurement do not.
_MAKERS = ("data", "drafters", "hidden_states", "quickstart", "regeneration", "speculation", "stages", "targets",
           "training")


def trained_drafter(family: str = "eagle3") -> Path:
    """The directory of the last checkpoint; trains it when this code has not yet."""
    home = KEPT / f"drafter-{_digest()}"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs at once, the second finds what the first has made
        if not home.exists():
            aside = KEPT / "aside"
            shutil.rmtree(aside, ignore_errors=True)
            _answer(aside)
            for old in KEPT.glob("drafter-*"):
                shutil.rmtree(old)
            aside.rename(home)
        trained = home / family
        if not (trained / "manifest.json").exists():
            shutil.rmtree(trained, ignore_errors=True)
            _train(home, family)
    report = read_manifest(trained / "manifest.json").report
    assert isinstance(report, TrainReport)
    return trained / report.checkpoints[-1].path


def _answer(home: Path) -> None:
    _run(home / "regenerate", RegenerateStage(
        job_id="sglang-tests", target=_TARGET,
        data=DataSpec(sources=(DataSource(path="quickstart"),), max_conversations=480),
        regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.7), max_new_tokens=128, concurrency=32),
        exclude_prompts=tuple(f"quickstart:{name}" for name in SUITES)))
    families = tuple(dict.fromkeys(drafter.family for drafter, _ in _RECIPES.values()))
    _run(home / "capture", CaptureStage(job_id="sglang-tests", target=_TARGET, capture=CaptureSpec(),
                                        rows_dir=str(home / "regenerate"), families=families))


def _train(home: Path, family: str) -> None:
    drafter, train = _RECIPES[family]
    _run(home / family, TrainStage(job_id="sglang-tests", candidate="base", target=_TARGET, drafter=drafter,
                                   train=train, store_dir=str(home / "capture")))


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
