"""The job of docs/examples/published.yaml on this machine, without a model hub: `make demo-published`.

    python -m benchmarks.published.demo [--short] [--engine sglang] [--packages DIR]

The example names the Hub's model and data sets; here the target is `target.py`'s (kept in .eyrie/published), and
`LOCAL` has a file of the same prompts for each data set. All else is the example's. The job runs as `eyrie demo` runs
its own, in .eyrie/demo-published, and the endpoint keeps running. Too little memory or disk is refused before anything
starts.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.target import require_room
from eyrie_api.cli.spec import build_job, validate
from eyrie_api.cli.verbs import Screen
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.job import JobSpec
from eyrie_api.errors import EyrieError, report_error
from eyrie_operator.cli.demo import play, stop

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/published.yaml"
HOME, TARGET = Path(".eyrie/demo-published"), Path(".eyrie/published/target")

_DATA = Path(__file__).with_name("data")
_GPTEACHER = "https://raw.githubusercontent.com/teknium1/GPTeacher/main"
LOCAL = {
    "openai/gsm8k": _DATA / "gsm8k_train.jsonl.gz",
    f"{_GPTEACHER}/Codegen/codegen-instruct.json": _DATA / "codegen.jsonl.gz",
    f"{_GPTEACHER}/Roleplay/roleplay-simple-deduped-roleplay-instruct.json": _DATA / "roleplay.jsonl.gz",
    "openai/gsm8k:test": _DATA / "gsm8k_test.jsonl.gz",
    "openai/openai_humaneval": _DATA / "humaneval.jsonl.gz",
    "HuggingFaceH4/mt_bench_prompts": _DATA / "mt_bench.jsonl.gz",
}
"""The files with the prompts of the data sets that the example names."""

SHORT = ("data.max_conversations=160", "regenerate.max_new_tokens=64", "train.epochs=4", "train.num_checkpoints=1",
         "benchmark.max_new_tokens=48", "tune.num_steps=[2, 3]", "tune.max_prompts=2", "tune.budget_s=10",
         "prove.requests=8", "prove.most_pairs=16", "prove.max_new_tokens=32", "prove.parity_prompts=4")
_SHORT_PROMPTS = 2
"""Of each suite. Every stage stays, and each is smaller; its drafter need not pay."""

_GIB = 2**30
DISK_BYTES, MEMORY_BYTES = 4 * _GIB, 8 * _GIB


def local_job(target: Path, *, short: bool = False, engine: EngineKind = "embedded") -> JobSpec:
    """The example's job with the files of this checkout in place of the Hub's data sets. Pure but for reading it."""
    document = build_job(file=EXAMPLE, target=str(target.resolve()), settings=(
        f"engine.kind={engine}", *(SHORT if short else ()))).model_dump(mode="json", exclude_unset=True)
    sources, suites = document["data"]["sources"], document["benchmark"]["suites"]
    for named in (*sources, *suites):
        named["path"] = str(LOCAL[named["path"]])
        named.pop("config", None)
    if short:
        for suite in suites:
            suite["max_prompts"] = _SHORT_PROMPTS
    return validate(document)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the target if it is missing, and run the job; the exit code."""
    parser = argparse.ArgumentParser(description="The whole job on SmolLM2-135M-Instruct, dequantised from Q4_1.")
    parser.add_argument("--short", action="store_true", help="fewer conversations, steps and prompts: for CI")
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--packages", type=Path, help="directory of the target's packages, in place of the network")
    parser.add_argument("--stop", action="store_true", help="stop the endpoint that an earlier run left")
    options = parser.parse_args(argv)
    screen = Screen()
    try:
        if options.stop:
            stop(HOME, screen)
            return 0
        require_room(HOME, DISK_BYTES, MEMORY_BYTES)
        # In a process of its own: what converting has used would stay in this one while the job runs.
        packages = () if options.packages is None else ("--packages", str(options.packages))
        if code := subprocess.run([sys.executable, "-m", "benchmarks.published.target", TARGET, *packages]).returncode:
            return code
        play(HOME, screen, local_job(TARGET, short=options.short, engine=options.engine))
    except EyrieError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
