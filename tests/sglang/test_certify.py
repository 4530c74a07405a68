"""`eyrie certify` with the real SGLang: one trained drafter in three published forms, by the real command and job, and
the servers that the job starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import BenchmarkReport, TuneReport
from eyrie_api.planning.drafter_rules import LAYER_IDS
from eyrie_workers.drafters.checkpoint import read_weights
from eyrie_workers.drafters.export import to_speculators
from eyrie_workers.targets.config import read_json
from tests.sglang.servers import ROOT, TARGET
from tests.workers.drafters.published_forms import Published

SETTINGS = ("engine.kind=sglang", "target.dtype=float32", "benchmark.max_new_tokens=24", "benchmark.warmup_prompts=0",
            "benchmark.temperatures=[0.0]", "benchmark.tree={num_steps: 3, top_k: 1, num_draft_tokens: 4}",
            "tune.num_steps=[3]", "tune.top_k=[1]", "tune.ngram=false", "tune.concurrencies=[1]",
            "tune.max_prompts=2", "tune.budget_s=2", "prove.concurrencies=[1]", "prove.requests=4",
            "prove.most_pairs=4", "prove.max_new_tokens=24", "prove.parity_prompts=2")
FORMS = ("sglang", "model-optimizer", "speculators")


def write_forms(drafter: Path, directory: Path) -> list[Path]:
    """SpecForge's, with SGLang's names and the layer ids in eagle_config; Model Optimizer's, with layers by number and
    no t2d; speculators'."""
    config, tensors = read_json(drafter / "config.json"), read_weights(drafter)
    del config[LAYER_IDS]  # vLLM's; eagle_config has SGLang's
    Published(config, tensors).write(directory / FORMS[0])
    Published(config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
                       if name != "t2d"}).write(directory / FORMS[1])
    to_speculators(drafter, directory / FORMS[2], target=str(TARGET), num_steps=3)
    return [directory / form for form in FORMS]


def starts_of(home: Path) -> list[tuple[str, str, int]]:
    """Stage, drafter, and servers that it started, of the only job, in order of time."""
    (job,) = (home / "jobs").iterdir()
    manifests = [read_manifest(file.parent) for file in (job / "stages").rglob("manifest.json")]
    found = []
    for manifest in sorted(manifests, key=lambda manifest: manifest.started_at):
        report = manifest.report
        assert isinstance(report, BenchmarkReport | TuneReport | ProveReport)
        started = report.starts if isinstance(report, ProveReport) else report.engine and report.engine.starts
        found.append((manifest.stage, report.checkpoint, started or 0))
    return found


@pytest.mark.slow
def test_three_published_forms_of_a_drafter_are_measured_tuned_and_proven_alike_in_sglang(
        tmp_path: Path, drafter: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Name {number} towns."}) + "\n" for number in range(2, 6)))
    arguments = ["certify", *write_forms(drafter, tmp_path / "forms"), "--target", "quickstart", "--prompts", prompts,
                 *(part for setting in SETTINGS for part in ("--set", setting)), "--json"]
    variables = {name: value for name, value in os.environ.items() if name != "EYRIE_SERVER"}
    done = subprocess.run([sys.executable, "-m", "eyrie_operator.command", *map(str, arguments)], cwd=tmp_path,
                          text=True, capture_output=True, check=False, timeout=1100, env=variables | {
                              "EYRIE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path),
                              "EYRIE_SGLANG_PROGRAM": str(ROOT / "tests" / "sglang" / "environment" / "serve")})
    assert done.stdout, done.stderr[-3000:]
    certificate: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == certificate["exit_code"], done.stderr[-3000:]
    # How fast a drafter is next to other work is not what this test decides.
    assert certificate["verdict"] in ("faster", "not-faster", "undecided"), certificate["summary"]
    assert certificate["refused"] == []
    entries = {entry["checkpoint"]: entry for entry in certificate["leaderboard"]}
    assert set(entries) == set(FORMS)
    assert all(entry["lossless"] for entry in entries.values())
    # The same weights, so the same rounds, whatever their names were. The best one was measured again, elsewhere.
    assert [entry["tuned"] for entry in entries.values()].count(True) == 1
    assert len({entry["tau"] for entry in entries.values() if not entry["tuned"]}) == 1
    assert certificate["best"]["tau"] > 1.2
    # One server without a drafter for all stages, one for each drafter. Tuning has the last one's again, if it is the
    # best; what it chose is proven in the server that it was measured in, if it is to be proven at all.
    benchmarks, (tuned, proven) = (starts := starts_of(tmp_path / "home"))[:3], starts[3:]
    assert [number for _, _, number in benchmarks] == [2, 1, 1]
    assert (tuned[2], proven[2]) == (int(tuned[1] != benchmarks[-1][1]), 0)
