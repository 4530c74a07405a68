"""Peak memory of the stage that regenerates answers, in the embedded engine.

    python -m benchmarks.regeneration_memory --target DIR --data FILE... [--conversations 96] [--tokens 160]

Runs the stage as a job does, in a process of its own, and prints its largest resident set next to the most that a plan
of the same lengths allows: the target's weights, keys and values of `regenerate.concurrency` texts as long as the
longest one, and 1 GB (`planning.plan_work.regeneration_bytes`).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eyrie_api.artifacts import write_model
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.plan_work import regeneration_bytes
from eyrie_workers.targets.loading import resolve, weight_bytes


def main(argv: list[str] | None = None) -> int:
    """Print figures as a JSON object."""
    parser = argparse.ArgumentParser(description="Peak memory of regeneration in the embedded engine.")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--conversations", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument("--concurrency", type=int, default=24)
    given = parser.parse_args(argv)
    target = TargetSpec(model=given.target, dtype="float32")
    spec = RegenerateStage(
        job_id="memory", target=target, reads=None,
        data=DataSpec(sources=tuple(DataSource(path=str(Path(path).resolve())) for path in given.data),
                      max_conversations=given.conversations, held_out_fraction=0.0),
        regenerate=RegenerateSpec(max_new_tokens=given.tokens, concurrency=given.concurrency,
                                  sampling=SamplingSpec(temperature=0.7)))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory / "spec.json", spec)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "eyrie_workers.stages.regenerate", "--spec", str(directory / "spec.json"),
                        "--out", str(directory / "out" / "manifest.json")], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        rows = [json.loads(line) for line in (directory / "out" / "rows.jsonl").read_text().splitlines()]
    path = resolve(target)
    longest = max(len(row["prompt_ids"]) + len(row["answer_ids"]) for row in rows)
    weights = weight_bytes(path, "float32")
    planned = regeneration_bytes(target_facts(path), weights, "float32", given.concurrency, longest)
    print(json.dumps({
        "rows": len(rows), "longest_text": longest, "answer_tokens": sum(len(row["answer_ids"]) for row in rows),
        "seconds": round(seconds), "weights_gb": round(weights / 1e9, 2), "planned_gb": round(planned / 1e9, 2),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 2)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
