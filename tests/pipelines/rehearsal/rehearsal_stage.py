"""A stage program on the real frame that does no work and behaves as its file says: for tests of what runs stages.

It is a program of its own, started by the real command line; only the table of stages points here (see `rehearsal`).
What it does is read from `$EYRIE_REHEARSAL/plan.json`, {"<stage>[/<key>]": [word, ...]}: one word per start, the last
one repeating; words are ok, transient, permanent, crash, hang, stubborn, die, further (dies one step further each
time), fill (its disk has no free byte once its manifest is written), meet (waits until two stages of its kind run).
Every start is noted in `starts.log`, with its CUDA_VISIBLE_DEVICES in `gpus.log`.
Told `--train DIR` several times, it is the program that trains candidates together: all in turn, whichever fails.
Started by torchrun, every rank is noted in `ranks.log` with its EYRIE_DEVICE, and rank 0 alone goes on.
"""

import atexit
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.hardware import HardwareMeasurement
from eyrie_api.contract.load import LoadCell, LoadComparison, LoadLevel, LoadReport, LoadSpec, Quantiles
from eyrie_api.contract.model import Interval
from eyrie_api.contract.prove import ParityReport, ProveReport
from eyrie_api.contract.reports import (
    BenchmarkReport,
    CaptureReport,
    CellReport,
    CheckpointReport,
    Environment,
    LayerChoice,
    RegenerateReport,
    TrainReport,
    TuneCell,
    TuneReport,
    VocabularyReport,
)
from eyrie_api.contract.stages import (
    BenchmarkStage,
    CaptureStage,
    HardwareStage,
    ProveStage,
    RegenerateStage,
    StageReport,
    StageSpec,
    TrainStage,
    TuneStage,
)
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import LossDiverged, Transient
from eyrie_workers.catalog import LOAD_RESULTS_FILE
from eyrie_workers.stage_program import Result, Stage, run_program

HOME = Path(os.environ.get("EYRIE_REHEARSAL", "."))
ENVIRONMENT = Environment(hardware="rehearsal", cpu_count=1, threads=1, torch="none", python="3", dtype="float32",
                          code_version="0", date="2026-01-01")


def benchmark_report(checkpoint: str, speedup: float) -> BenchmarkReport:
    tree = DraftTreeShape()
    cells = tuple(
        CellReport(suite=suite, temperature=temperature, tree=tree, prompts=2, tokens=20, tau=2.5,
                   acceptance=(0.8, 0.7), accepted_histogram=(1, 2, 3), tokens_per_s=100.0 * speedup,
                   baseline_tokens_per_s=100.0, speedup=speedup, speedup_interval=Interval(low=speedup, high=speedup),
                   ttft_s=0.1, baseline_ttft_s=0.1, identical=2)
        for suite in ("chat", "math", "code", "tools") for temperature in (0.0, 1.0))
    return BenchmarkReport(checkpoint=checkpoint, candidate="base", path="", cells=cells, lossless=True,
                           speedup=speedup, baseline_tokens_per_s=100.0, transformers_generate_tokens_per_s=90.0,
                           transformers_baseline_tokens_per_s=95.0, transformers_prompts=4,
                           environment=ENVIRONMENT, seconds=1.0)


def train_report(spec: TrainStage) -> TrainReport:
    checkpoints = tuple(
        CheckpointReport(name=f"{spec.candidate}-step-{step}", candidate=spec.candidate, step=step,
                         path=f"checkpoints/{spec.candidate}-step-{step}", digest="sha256:" + "0" * 64, epoch=1.0,
                         loss=1.0, accuracy=(0.5,), conditional_acceptance=(0.5,), theoretical_speedup=1.5)
        for step in (10, 20))
    vocabulary = VocabularyReport(draft_vocab_size=4, vocab_size=8, coverage=0.9, coverage_curve={4: 0.9})
    return TrainReport(candidate=spec.candidate, family=spec.drafter.family, steps=20, tokens=1, supervised_tokens=1,
                       seconds=1.0, tokens_per_s=1.0, padding_share=0.0, data_wait_share=0.0, vocabulary=vocabulary,
                       checkpoints=checkpoints)


def load_report(loads: tuple[int, ...], variants: tuple[str, ...], speedup: float) -> LoadReport:
    """Every drafted variant `speedup` times faster than `off` at every load, and the candidate first of them."""
    seconds = Quantiles(mean=0.1, p50=0.1, p90=0.1, p99=0.1)
    levels = tuple(
        LoadLevel(variant=variant, mode="closed", level=load, total=LoadCell(
            requests=8, completed=8, output_tokens=64, seconds=1.0, tokens_per_s=64.0, tokens_per_s_per_user=64.0,
            ttft_s=seconds, inter_token_s=seconds, end_to_end_s=seconds))
        for load in loads for variant in variants)
    comparisons = tuple(
        LoadComparison(variant=variant, baseline="off", mode="closed", level=load, throughput_ratio=speedup,
                       throughput_interval=Interval(low=speedup, high=speedup), user_ratio=speedup,
                       user_interval=Interval(low=speedup, high=speedup), ttft_p99_ratio=1.0, compared=8, identical=8)
        for load in loads for variant in variants if variant != "off")
    return LoadReport(
        model="rehearsal",
        spec=LoadSpec(concurrencies=loads),
        variants=dict.fromkeys(variants, "rehearsed"),
        levels=levels,
        comparisons=comparisons,
        environment=ENVIRONMENT,
        seconds=1.0,
    )


def prove_report(spec: ProveStage) -> ProveReport:
    tree = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=8)
    parity = ParityReport(engine="embedded", prompts=2, identical=2, tree=tree, histogram=(1, 2, 3),
                          reference_histogram=(1, 2, 3), tau=2.5, tau_interval=Interval(low=2.4, high=2.6),
                          reference_tau=2.5, passed=True, reasons=("rehearsed",))
    others = {"incumbent": spec.incumbent, "rival": spec.rival_dir}
    variants = ("off", "candidate", *(name for name, given in others.items() if given is not None))
    return ProveReport(checkpoint=spec.checkpoint, path=spec.drafter_dir, engine=spec.engine.kind,
                       use=DrafterUse(drafter_dir=spec.drafter_dir, setting=Setting(tree=tree)), parity=parity,
                       load=load_report(spec.prove.concurrencies, variants, 2.5), environment=ENVIRONMENT, seconds=1.0,
                       changed_prompt=load_report(spec.prove.concurrencies[:1], variants, 2.0))


def hardware_report(spec: HardwareStage) -> HardwareMeasurement:
    baseline, own = f"{spec.baseline}/off", (f"{spec.profile.name}/off", f"{spec.profile.name}/drafted")
    load = load_report(spec.load.concurrencies, own, 2.0)
    comparisons = tuple(one.model_copy(update={"baseline": baseline}) for one in load.comparisons
                        if one.variant != baseline)
    return HardwareMeasurement(profile=spec.profile.served_on(()),
                               load=load.model_copy(update={"comparisons": comparisons}))


def report_of(spec: StageSpec) -> StageReport:
    if isinstance(spec, RegenerateStage):
        return RegenerateReport(rows_read=1, rows_answered=1, rows_held_out=1, rows_quarantined=0, prompt_tokens=1,
                                answer_tokens=1, finish_reasons={}, sources={}, seconds=1.0, tokens_per_s=1.0)
    if isinstance(spec, CaptureStage):
        return CaptureReport(source="reference", rows=1, tokens=1, supervised_tokens=1, bytes=1,
                             bytes_per_token=1.0, shards=1,
                             layers=LayerChoice(aux_layers=(1,), reason="rehearsal"), hidden_size=1, codec="float32",
                             seconds=1.0, tokens_per_s=1.0)
    if isinstance(spec, TrainStage):
        return train_report(spec)
    if isinstance(spec, BenchmarkStage):
        # The later checkpoint is the better one, so that selection has something to choose.
        report = benchmark_report(spec.checkpoint, 2.0 + int(spec.checkpoint.rsplit("-", 1)[1]) / 100)
        return report if spec.source is None else report.model_copy(update={
            "rival": spec.brought is None, "family": "eagle3"})
    if isinstance(spec, ProveStage):
        return prove_report(spec)
    if isinstance(spec, HardwareStage):
        return hardware_report(spec)
    tree = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=8)
    cell = TuneCell(tree=tree, tau=2.5, tau_by_temperature={"0.0": 2.6, "1.0": 2.4}, tokens_per_s=1.0, speedup=2.5,
                    speedup_by_temperature={"0.0": 2.6, "1.0": 2.4}, speedup_interval=Interval(low=2.0, high=3.0),
                    identical=2, prompts=2)
    tuned = TuneReport(checkpoint=spec.checkpoint, path=spec.drafter_dir, cells=(cell,), winner=tree,
                       finding="rehearsed", final=benchmark_report(spec.checkpoint, 2.5), environment=ENVIRONMENT,
                       seconds=1.0)
    if spec.rival is None:
        return tuned
    name = spec.rival.checkpoint
    return tuned.model_copy(update={"rival": tuned.model_copy(update={
        "checkpoint": name, "path": spec.rival.drafter_dir, "final": benchmark_report(name, 2.5)})})


def behave(name: str, stage: Stage) -> None:
    with (HOME / "starts.log").open("a") as log:
        log.write(name + "\n")
    with (HOME / "gpus.log").open("a") as log:
        log.write(f"{name} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    words = json.loads((HOME / "plan.json").read_text()).get(name, ["ok"])
    starts = (HOME / "starts.log").read_text().splitlines().count(name)
    word = words[min(starts, len(words)) - 1]
    if word == "transient":
        raise Transient("the bucket refused the write", "will retry")
    if word == "permanent":
        raise LossDiverged("loss was nan at step 3", "lower train.learning_rate")
    if word == "crash":
        raise RuntimeError("an index was out of range")
    if word == "further":
        stage.progress(starts, starts, "steps")
    if word in ("die", "further"):
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "fill":
        atexit.register(fill, stage.out_dir / "filler")
    if word == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while word in ("hang", "stubborn") or (word == "wait" and not (HOME / "go").exists()):
        stage.pause_point()
        time.sleep(0.02)
    while word == "meet" and (HOME / "starts.log").read_text().count(name.split("/")[0] + "/") < 2:
        stage.pause_point()
        time.sleep(0.02)


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


def work(spec: StageSpec, stage: Stage) -> Result:
    """Behave as planned, then leave a valid report."""
    key = getattr(spec, "checkpoint", None) if spec.stage == "benchmark" else getattr(spec, "candidate", None)
    key = spec.profile.name if isinstance(spec, HardwareStage) else key
    name = f"{spec.stage}/{key}" if spec.stage in ("train", "benchmark", "hardware") else spec.stage
    stage.progress(0, 1, "rows")
    behave(name, stage)
    stage.metric(f"{spec.stage}/loss", 1, 0.5)
    stage.event("Rehearsed", name)
    report = report_of(spec)
    return Result(report, leave_files(stage.out_dir, report))


def leave_files(directory: Path, report: StageReport) -> list[Path]:
    """Small files where the real stages leave large ones."""
    names = {"regenerate": ["rows.jsonl", "rows.meta.json", "held_out.jsonl"],
             "capture": ["shard-000000.safetensors", "index.json"]}
    result = names.get(directory.name, [])
    if isinstance(report, HardwareMeasurement):
        result = [LOAD_RESULTS_FILE]
    if isinstance(report, TrainReport):
        result = [f"{one.path}/config.json" for one in report.checkpoints]
    for name in result:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"{name} of {directory.name}\n")
    return [directory / name for name in result]


if __name__ == "__main__":
    kinds = {"regenerate": RegenerateStage, "capture": CaptureStage, "train": TrainStage, "benchmark": BenchmarkStage,
             "tune": TuneStage, "prove": ProveStage, "hardware": HardwareStage}
    if "--train" in sys.argv:
        with (HOME / "sweeps.log").open("a") as log:
            log.write(" ".join(sys.argv[sys.argv.index("--rungs"):]) + "\n")
        places = [Path(value) for word, value in itertools.pairwise(sys.argv) if word == "--train"]
        codes = [run_program(TrainStage, work, ["--spec", str(place / "spec.json"), "--out",
                                                str(place / "manifest.json")]) for place in places]
        sys.exit(next((code for code in codes if code), 0))
    if "RANK" in os.environ:
        with (HOME / "ranks.log").open("a") as ranks:
            ranks.write(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {os.environ.get('EYRIE_DEVICE')}\n")
        if os.environ["RANK"] != "0":
            sys.exit(0)
    result = json.loads(Path(sys.argv[sys.argv.index("--spec") + 1]).read_text())["stage"]
    sys.exit(run_program(kinds[result], work))
