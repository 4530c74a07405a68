"""Times whole requests of many drafters: each prompt through every variant before the next prompt begins.

The order of variants changes from prompt to prompt (`eyrie_workers.measure.intervals`). Prefill is included,
concurrency is 1, and every variant begins with an untimed request. Each prompt is a line of the ledger, from which an
interrupted run resumes.

`ladder` trains the drafters of two experiments: of one architecture and different quality, some of them good at the
first position only, or trained on very little data.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.experiments.workspace import CHAIN, Trained, Workspace
from eyrie_api.artifacts import digest_bytes, digest_directory
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import CheckpointReport
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.machine import machine_lock
from eyrie_workers.measure.intervals import FloatArray, interleaved
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.targets.config import read_config

OFF = "off"
TEMPERATURES = (0.0, 1.0)


class Timed(Frozen):
    """One prompt through one variant."""

    tokens: int
    seconds: float
    rounds: int
    accepted: int


class Turn(Frozen):
    """One prompt through all variants."""

    prompt: str
    temperature: float
    variants: dict[str, Timed]


@dataclass(frozen=True)
class Rung:
    """One checkpoint of the ladder."""

    name: str
    run: str
    path: Path
    checkpoint: CheckpointReport


def ladder(workspace: Workspace) -> list[Rung]:
    """Drafters that differ in steps, data, unrolled depth and width."""
    whole, few = workspace.store(workspace.rows()), workspace.store(workspace.rows(workspace.scale.conversations // 4))
    width = read_config(workspace.path).intermediate_size
    runs: dict[str, Trained] = {
        "all data": workspace.train(whole),
        "little data": workspace.train(few),
        "one step trained": workspace.train(whole, checkpoints=2, settings={"single_step_ratio": 1.0}),
        "narrow": workspace.train(whole, drafter=DrafterSpec(intermediate_size=width // 4), checkpoints=1),
        "wide": workspace.train(whole, drafter=DrafterSpec(intermediate_size=2 * width), checkpoints=1),
    }
    return [Rung(f"{name}, step {checkpoint.step}", name, trained.path(checkpoint), checkpoint)
            for name, trained in runs.items() for checkpoint in trained.report.checkpoints]


def time_all(workspace: Workspace, rungs: Sequence[Rung], shape: DraftTreeShape = CHAIN) -> list[Turn]:
    """Every prompt at every temperature through the undrafted engine and every rung."""
    drafters = [digest_directory(rung.path) for rung in rungs]
    key = digest_bytes(repr((drafters, workspace.scale, workspace.spec, shape)).encode())
    file = workspace.work / f"timed-{key[7:23]}.jsonl"
    workspace.work.mkdir(parents=True, exist_ok=True)
    turns = [Turn.model_validate_json(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(turn.prompt, turn.temperature) for turn in turns}
    engines = {OFF: Engine(workspace.target)} | {
        rung.name: Engine(workspace.target, open_drafter(rung.path, workspace.target)) for rung in rungs}
    with machine_lock(lambda: None):
        for number, prompt in enumerate(workspace.prompts(max(1, workspace.scale.prompts // 2))):
            for temperature in TEMPERATURES:
                request = workspace.request(prompt, temperature)
                if (request.id, temperature) in done:
                    continue
                if number == 0:
                    for name, engine in engines.items():
                        engine.generate([request], None if name == OFF else shape)
                variants = {}
                for name in interleaved(list(engines), number):
                    began = time.perf_counter()
                    (answer,) = engines[name].generate([request], None if name == OFF else shape)
                    accepted = sum(k * count for k, count in enumerate(answer.accepted_histogram))
                    variants[name] = Timed(tokens=len(answer.token_ids), seconds=time.perf_counter() - began,
                                       rounds=answer.rounds, accepted=accepted)
                turns.append(Turn(prompt=request.id, temperature=temperature, variants=variants))
                with file.open("a") as ledger:
                    ledger.write(turns[-1].model_dump_json() + "\n")
            print(f"prompt {number + 1}: {len(engines)} variants timed", flush=True)
    return turns


def fields_of(turns: Sequence[Turn], names: Sequence[str], temperature: float) -> FloatArray:
    """[N prompts, variants, 4]: tokens, seconds, rounds, accepted, for resampling prompts. The first variant is
    undrafted."""
    columns = ("tokens", "seconds", "rounds", "accepted")
    return np.array([[[getattr(turn.variants[name], field) for field in columns] for name in (OFF, *names)]
                     for turn in turns if turn.temperature == temperature], dtype=np.float64)


def tau_and_speed(sums: FloatArray) -> tuple[FloatArray, FloatArray]:
    """tau and tokens per second of every drafted variant, from sums [variants, 4]."""
    drafted = sums[1:]
    return 1.0 + drafted[:, 3] / np.maximum(drafted[:, 2], 1.0), drafted[:, 0] / drafted[:, 1]


def speedups(sums: FloatArray) -> FloatArray:
    """Of every drafted variant over the undrafted one."""
    return np.asarray(tau_and_speed(sums)[1] / (sums[0, 0] / sums[0, 1]))


def by_name(rungs: Sequence[Rung], values: FloatArray) -> Mapping[str, float]:
    """Figures by rung."""
    return {rung.name: float(value) for rung, value in zip(rungs, values, strict=True)}
