"""Damaged files at rest: each is detected and named, or made again; none is used: `make campaign-corruption`.

A file is flipped (one bit), truncated, emptied, or replaced by an older one (the same file of another checkpoint, the
first half of the lines), and what reads it runs. Parts: the home of a control plane (`corruption_home`), the records of
a served endpoint (`corruption_endpoint`), objects of an S3 store (`corruption_store`), the model cache of a cluster
(`corruption_cache`), and here the files of stages. A real job runs once, small, with the programs of every stage; then
one of its files is damaged and the program that reads it runs, alone:

    input   a file of a finished stage; the next stage runs from the beginning
    own     a file of a stage that was killed before its manifest; that stage runs again and resumes

Rules: a program that does not finish says which file is damaged, as an error with a hint and not as a traceback; one
that finishes has used nothing of the damage: files that are functions of the spec are those of the whole job, byte by
byte, and no line of a ledger that the damage made is left.

    python -m benchmarks.campaigns.corruption [--seed 1] [--seconds 600] [--parts home,store] [--world DIR] [--out FILE]
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.campaigns.corruption_cache import ModelCache
from benchmarks.campaigns.corruption_damage import DAMAGES, GOOD, Damage, Part, Verdict, damage_bytes
from benchmarks.campaigns.corruption_endpoint import EndpointRecords
from benchmarks.campaigns.corruption_home import Home
from benchmarks.campaigns.corruption_store import StoreObjects
from benchmarks.campaigns.live_servers import scratch
from benchmarks.campaigns.report import ROOT, Campaign, options
from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.stages import StageName
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from eyrie_workers.catalog import CATALOG
from eyrie_workers.hidden_states.store import FeatureStore, StoreDamaged
from tests.pipelines.conftest import job_file

WORLD_S = 1800.0
"""For the job; ten minutes were not enough on a crowded machine. With --world the next campaign continues the job."""

CASE_S = 180.0
PARTS = ("home", "endpoint", "store", "cache", "stages")
EXAMPLE = ROOT / "docs/examples/smallest.yaml"

Use = Literal["input", "own"]

_NOT_READ = re.compile(
    r"(^|/)(\.lock|log\.txt|events\.jsonl|README\.md|spec\.json|failure\.json|report\.json|servers?/.*|variants/.*"
    r"|.*-results\.json|quarantine\.jsonl)$")
"""Written for people and for the control plane: no stage reads them again. A spec is written before each start."""

_INPUTS = ("rows_dir", "store_dir", "drafter_dir", "tune_dir", "held_out_file")
"""Fields of the stages' specs."""

_MEASURED = ("benchmark", "tune", "prove")
"""Stages whose artifacts hold seconds, so that a second run does not give the same bytes."""


@dataclass(frozen=True)
class Case:
    """One file of the world, and the stage directory whose program reads it."""

    runs: str
    use: Use
    file: str

    @property
    def stage(self) -> StageName:
        """The program's stage."""
        return self.runs.split("/")[0]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.runs}, {self.use} {self.file}"


def _program(module: str, directory: str) -> None:
    log = os.open(f"{directory}/campaign.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [module, "--spec", f"{directory}/spec.json", "--out", f"{directory}/manifest.json"]
    os.environ |= {"EYRIE_DEVICE": "cpu"}
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Programs:
    """Stage programs as forks of a server that has imported them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([stage.module for stage in CATALOG.values()])

    def run(self, stage: StageName, directory: Path) -> int | None:
        """Run a stage's program; None after CASE_S."""
        process = self._context.Process(target=_program, args=(CATALOG[stage].module, str(directory)))
        process.start()
        process.join(CASE_S)
        if process.is_alive():
            process.terminate()
            process.join(10.0)
            process.kill()
            return None
        return process.exitcode


class StageOfAJob:
    """A finished job, and a copy to restore it from."""

    def __init__(self, path: Path) -> None:
        self.job, self.kept, self._programs = path / "job", path / "kept", Programs()

    def build(self) -> None:
        """Run the job, unless an earlier campaign did."""
        if self.kept.exists():
            return
        self.job.mkdir(parents=True, exist_ok=True)
        wanted = yaml.safe_load(EXAMPLE.read_text())
        wanted["data"]["max_conversations"] = 60
        wanted["train"] |= {"max_steps": 12, "num_checkpoints": 2}
        wanted["benchmark"]["suites"][0]["path"] = "held-out"
        local.start(self.job, job_file(JobSpec.model_validate(wanted)))
        if not wait_until(lambda: local.observe(self.job).state != "running", WORLD_S):
            local.stop(self.job)
        if local.observe(self.job).state != "succeeded":
            raise SystemExit(f"the job did not finish: see {self.job}/run/pipeline.log")
        shutil.copytree(self.job, self.kept.with_name("copying"), dirs_exist_ok=True)
        self.kept.with_name("copying").rename(self.kept)

    def restore(self) -> None:
        """Undo what the last case did."""
        shutil.rmtree(self.job / "stages")
        shutil.copytree(self.kept / "stages", self.job / "stages")

    def files(self) -> list[Case]:
        """Every file that a stage reads, with the stage."""
        stages = self.kept / "stages"
        manifests = sorted(stages.rglob("manifest.json"))
        directories = [manifest.parent.relative_to(stages).as_posix() for manifest in manifests]
        found = []
        for runs in directories:
            files = self._files(runs)
            found += [Case(runs, "own", file) for file in files if not file.endswith("manifest.json")]
            spec = json.loads((stages / runs / "spec.json").read_text())
            for name in _INPUTS:
                if not spec.get(name):
                    continue
                path = Path(spec[name]).relative_to(self.job / "stages")
                owner = next(one for one in directories if path.is_relative_to(one))
                # What a measurement left to resume from is not read by the next stage.
                read = {file for file in self._files(owner) if Path(file).is_relative_to(path)
                        and owner.split("/")[0] not in _MEASURED}
                # A store has digests of its own, and who reads it does not read the manifest.
                manifest = f"{owner}/manifest.json"
                read = read - {manifest} if name == "store_dir" else read | {manifest}
                found += [Case(runs, "input", file) for file in read]
        return sorted(found, key=lambda case: (case.runs, case.use, case.file))

    def damaged(self, file: Case, damage: Damage, rng: random.Random) -> bytes | None:
        """The file's bytes after the damage; None where this damage does not apply."""
        path = self.kept / "stages" / file.file
        data = path.read_bytes()
        if damage != "older":
            return damage_bytes(data, damage, rng)
        if file.use == "own":
            return None  # an older file of an unfinished stage is what a kill leaves
        siblings = [one for one in path.parent.parent.glob(f"*/{path.name}") if one.read_bytes() != data]
        if siblings:
            return siblings[0].read_bytes()
        if path.suffix == ".jsonl":
            lines = data.splitlines(keepends=True)
            return b"".join(lines[:len(lines) // 2])
        return None

    def try_case(self, file: Case, data: bytes) -> Verdict:
        """Damage, run, judge: `refused`, `made again`, or the rule that was broken, with facts."""
        self.restore()
        stages, directory = self.job / "stages", self.job / "stages" / file.runs
        (directory / "manifest.json").unlink()
        if file.use == "input":
            for path in directory.iterdir():
                if path.name != "spec.json":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        path = stages / file.file
        path.write_bytes(data)
        code = self._programs.run(file.stage, directory)
        if code is None:
            return "a program ends", {}
        if code != 0:
            return _judge_error(path, directory, code)
        return _judge_result(file, data, self)

    def close(self) -> None:
        """Each program ended with its case."""

    def _files(self, directory: str) -> list[str]:
        stages = self.kept / "stages"
        return sorted(name for path in (stages / directory).rglob("*") if path.is_file() and path.stat().st_size
                      if not _NOT_READ.search(name := path.relative_to(stages).as_posix()))


def _judge_error(path: Path, directory: Path, code: int) -> Verdict:
    file = directory / "failure.json"
    log = (directory / "campaign.log").read_text(errors="replace")[-1500:]
    if not file.exists():
        return "an error is one of ours, not a traceback", {"code": str(code), "log": log}
    failure = json.loads(file.read_text())
    text = failure["message"] + failure["hint"]
    if path.name not in text and path.parent.name not in text:
        return "an error names the file", {"reason": failure["reason"], "message": failure["message"]}
    return "refused", {}


def _judge_result(case: Case, data: bytes, world: StageOfAJob) -> Verdict:
    stages, kept = world.job / "stages", world.kept / "stages"
    path, whole = stages / case.file, (kept / case.file).read_bytes()
    if case.use == "input":
        return "damage is not used", {"finished": "the stage"}
    after = path.read_bytes() if path.exists() else b""
    made = set(data.splitlines()) - set(whole.splitlines())
    if path.suffix == ".jsonl" and (left := made & set(after.splitlines())):
        return "damage is not used", {"left": repr(left)[:300]}
    if path.suffix == ".states" and after == data:
        # Capture that resumes does not read finished shards again, which may be terabytes: their reader finds it.
        try:
            for damage in FeatureStore(path.parent).damage():
                raise StoreDamaged(str(path.parent), damage)
        except StoreDamaged as error:
            return ("refused", {}) if path.name in str(error) else ("an error names the file", {"message": str(error)})
    if path.suffix != ".jsonl" and after == data:
        return "damage is not used", {"left": "the file as it was damaged"}
    if case.stage not in _MEASURED:
        before, now = (read_manifest(root / case.runs) for root in (kept, stages))
        if before.files != now.files:
            wrong = [one.path for one in now.files if one not in before.files]
            return "a stage that finishes has the files of the whole job", {"differ": str(wrong)}
    return "made again", {}


@contextlib.contextmanager
def _world_at(path: Path | None) -> Iterator[Path]:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
        return
    with scratch("corruption") as temporary:
        yield temporary


def _parts(names: list[str], path: Path) -> dict[str, Part]:
    home = Home(path / "home")
    makers: dict[str, Callable[[], Part]] = {
        "home": lambda: home, "endpoint": lambda: EndpointRecords(path / "endpoint"),
        "store": lambda: StoreObjects(home), "cache": lambda: ModelCache(path / "cache"),
        "stages": lambda: StageOfAJob(path)}
    if "store" in names:
        home.build()
    return {name: makers[name]() for name in PARTS if name in names}


class _Queue:
    """Every file of a part with every damage, in an order of the seed, and the seconds that its cases took."""

    def __init__(self, name: str, part: Part, seed: int) -> None:
        self.name, self.part, self.seconds, self.done = name, part, 0.0, 0
        self._rng = random.Random(f"{seed} {name}")
        self._todo = [(file, damage) for file in part.files() for damage in DAMAGES]
        self._rng.shuffle(self._todo)
        self.possible = len(self._todo)

    def take(self) -> tuple[Any, Damage, bytes] | None:
        """The next case that applies; None after the last."""
        while self._todo:
            file, damage = self._todo.pop()
            data = self.part.damaged(file, damage, self._rng)
            if data is not None:
                return file, damage, data
        return None


def _cases(queues: Sequence[_Queue], campaign: Campaign) -> Iterator[tuple[_Queue, Any, Damage, bytes]]:
    """Cases until the time is over. Parts share the time, not the cases: those of some are a hundred times as long."""
    waiting = list(queues)
    while waiting and not campaign.is_over:
        queue = min(waiting, key=lambda one: one.seconds)
        case = queue.take()
        if case is None:
            waiting.remove(queue)
            continue
        began = time.monotonic()
        yield queue, *case
        queue.seconds += time.monotonic() - began
        queue.done += 1


def main() -> int:
    """Run the campaign."""
    parser = options("corruption", "Damaged files at rest, and the programs that read them.", 600.0)
    parser.add_argument("--world", type=Path, help="keep the jobs there, and use them again")
    parser.add_argument("--parts", default=",".join(PARTS),
                        help=f"of {', '.join(PARTS)} (default: all; the job of the stages takes minutes to make)")
    wanted = parser.parse_args()
    campaign = Campaign("corruption", wanted.seed, wanted.seconds, wanted.out)
    counts = Counter[str]()
    with _world_at(wanted.world) as path, contextlib.ExitStack() as stack:
        parts = _parts(wanted.parts.split(","), path)
        for part in parts.values():
            stack.callback(part.close)
            part.build()
        built_s, queues = campaign.elapsed_s, [_Queue(name, part, wanted.seed) for name, part in parts.items()]
        for queue, file, damage, data in _cases(queues, campaign):
            verdict, facts = queue.part.try_case(file, data)
            counts[f"{queue.name}: {damage}: {verdict}"] += 1
            print(f"corruption: {counts.total()}: {queue.name}, {file} {damage}: {verdict}", file=sys.stderr,
                  flush=True)
            if verdict not in GOOD:
                campaign.add_finding(verdict, part=queue.name, file=str(file), damage=damage, **facts)
    return campaign.finish({
        "cases": counts.total(), "possible": sum(queue.possible for queue in queues), "building, s": round(built_s),
        "cases and seconds of": {queue.name: [queue.done, round(queue.seconds, 1)] for queue in queues},
        "verdicts": dict(sorted(counts.items()))})



if __name__ == "__main__":
    sys.exit(main())
