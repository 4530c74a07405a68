"""A job on an image without a network: `python3 -m benchmarks.gpu.pack.job TO OUT [--seconds 540] [--file JOB]`.

TO is where `unpack` put both packs. Run in a checkout, by the image's Python. Without --file it makes the published
target from the pack and runs `job.yaml` in real SGLang. At the end, or when the time is over, OUT has what is there:
job.txt, plan.txt, logs.txt (the end of every log and all events) and reports.tar.gz. The control plane and the job go
on behind a run that was too short: run it again to wait on, with --seconds 0 to collect.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.image import ROOT, path_of

_LOG_BYTES, _REPORT_BYTES = 60_000, 4_000_000


def environment(to: Path) -> dict[str, str]:
    """Eyrie from this checkout, its libraries from the pack; torch and transformers from the image."""
    given = {"EYRIE_SGLANG_PROGRAM": str(to / "sglang"), "EYRIE_HOME": str(to / "home"), "HF_HUB_OFFLINE": "1",
             "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1", "COLUMNS": "160"}
    return {**given, **os.environ, "PYTHONPATH": path_of(to / "job")}


def collect(home: Path, out: Path) -> None:
    """What the job has written so far."""
    logs = [home / "plane.log", *sorted(file for pattern in ("*.log", "log.txt", "*.jsonl", "failure.json")
                                        for file in home.glob(f"jobs/**/{pattern}") if "rows" not in file.name)]
    with (out / "logs.txt").open("wb") as text:
        for file in filter(Path.is_file, logs):
            text.write(f"\n# {file.relative_to(home)}\n".encode() + file.read_bytes()[-_LOG_BYTES:])
    with tarfile.open(out / "reports.tar.gz", "w:gz") as tar:
        for file in home.glob("jobs/**/*.json"):
            if file.stat().st_size < _REPORT_BYTES:
                tar.add(file, file.relative_to(home))


def main(argv: Sequence[str]) -> int:
    """The program; 0 if the job succeeded."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.pack.job")
    parser.add_argument("to", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--file", type=Path, help="another job, whose target is not made")
    given = parser.parse_args(argv)
    began = time.monotonic()
    to, out = given.to.resolve(), given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    variables = environment(to)

    def python(*words: str, into: Path | None = None, limit_s: float | None = None) -> int:
        try:
            with (into or Path(os.devnull)).open("w") as file:
                return subprocess.run([sys.executable, "-m", *words], env=variables, cwd=ROOT, timeout=limit_s,
                                      stdout=file if into else None, check=False).returncode
        except subprocess.TimeoutExpired:
            return 124

    eyrie, target = "eyrie_operator.command", to / "target"
    if given.file is None and python("benchmarks.published.target", str(target), "--packages", str(to / "packages")):
        return 1
    if python(eyrie, "up", "--detach"):
        return 1
    name = to / "job-started"
    if not name.exists():
        job = ["--file", str(given.file)] if given.file else [
            "--file", str(Path(__file__).with_name("job.yaml")), "--target", str(target)]
        if python(eyrie, "plan", *job, into=out / "plan.txt") or python(eyrie, "train", *job, "--no-watch"):
            return 1
        name.touch()
    left = given.seconds - (time.monotonic() - began)
    ended = python(eyrie, "watch", limit_s=left) if left > 0 else 124
    python(eyrie, "jobs", into=out / "job.txt")
    collect(Path(variables["EYRIE_HOME"]), out)
    print(f"{'the job goes on' if ended == 124 else f'the job ended with exit code {ended}'}; {out} has the rest")
    return ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
