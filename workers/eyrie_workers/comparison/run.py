"""A whole comparison: train the chosen families, measure all variants, write the report. Resumable at any point.

    DIR/spec.json                                     the spec; a directory is of one spec
    DIR/regenerate  capture  calibrate/<family>  train/<family>     stages, with their manifests
    DIR/rivals/<name>                                 drafters that are measured and not trained
    DIR/measure/blocks.jsonl                          every block, answered by every variant
    DIR/report.json  report.html  report.md  plots/   the results, rewritten by every run
"""

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

from eyrie_api.artifacts import write_atomically, write_model
from eyrie_api.errors import Conflict
from eyrie_api.v1alpha1.records import EventRecord
from eyrie_api.v1alpha1.reports import CaptureReport
from eyrie_workers.comparison.answer import answer
from eyrie_workers.comparison.claims import PAIRS, evaluate_claims, three_versions
from eyrie_workers.comparison.measuring import Entry, measure
from eyrie_workers.comparison.page import html
from eyrie_workers.comparison.plan import CompareSpec, variants_of
from eyrie_workers.comparison.plots import draw
from eyrie_workers.comparison.progress import stage_records
from eyrie_workers.comparison.render import markdown
from eyrie_workers.comparison.report import CompareReport, MeasuredBlocks, Trained, choose, pair_comparisons, rank
from eyrie_workers.comparison.training import TrainedDrafter, Training
from eyrie_workers.drafters.checkpoint.card import weights_digest
from eyrie_workers.drafters.published import adopt, fetch
from eyrie_workers.drafters.registry import family_named
from eyrie_workers.features.store import FeatureStore
from eyrie_workers.machine.environment import environment
from eyrie_workers.measurement.benchmark.variants import Variant
from eyrie_workers.stage_program import Stage, stop_on_signals
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import resolve

SPEC, REPORT, PAGE, MARKDOWN, PLOTS, RIVALS = (
    "spec.json", "report.json", "report.html", "report.md", "plots", "rivals")


def compare(spec: CompareSpec, home: Path, on_begin: Callable[[str, Path], None]) -> CompareReport:
    """Run the comparison, or what is left of it, and write its reports.

    on_begin  called with each stage that begins, and its directory

    Raises EyrieError, Stopped, stage_program.Interrupted.
    """
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    with _directory_lock(home):
        _check_spec(spec, home)
        rivals = _adopt_rivals(spec, home)  # before anything is trained: one that does not fit ends the comparison
        training = Training(spec, home, on_begin)
        store = training.run()
        stage = Stage(home / "measure")
        stage.out_dir.mkdir(exist_ok=True)
        variants = variants_of([family for family in spec.families if family in training.drafters],
                               spec.benchmark.tree, rivals)
        directories = {name: home / RIVALS / name for name in rivals}
        training.measuring(stage.out_dir)
        with stop_on_signals(stage):  # the measurement ends before the next variant
            entries = measure(spec, variants,
                              {name: one.directory for name, one in training.drafters.items()} | directories,
                              {name: one.checkpoint.digest for name, one in training.drafters.items()}
                              | {name: weights_digest(path) for name, path in directories.items()},
                              str(training.rows_dir / "held_out.jsonl"), stage)
        report = conclude(spec, training, store, variants, entries, notes_of(stage.out_dir, training))
        write_reports(report, home)
    return report


def _adopt_rivals(spec: CompareSpec, home: Path) -> dict[str, str]:
    """Copy each rival's drafter to `home`; returns name -> family. Raises as `drafters.published`."""
    target = resolve(spec.target)
    return {rival.checkpoint: adopt(fetch("--rival", str(rival.path), rival.revision),
                                    home / RIVALS / rival.checkpoint, target).name for rival in spec.rivals}


def conclude(spec: CompareSpec, training: Training, store: CaptureReport, variants: Sequence[Variant],
             entries: Sequence[Entry], notes: Sequence[str]) -> CompareReport:
    """The report, from the stages' reports and the measured entries."""
    measured_blocks = MeasuredBlocks(entries, spec.benchmark.seed)
    ranked = rank(measured_blocks.variant(variant) for variant in variants)
    path = resolve(spec.target)
    blocks = sum(run.block.seconds for entry in entries for run in entry.runs.values())
    report = CompareReport(
        target=spec.target.model, target_parameters=num_parameters(path), budget=spec.budget,
        store_tokens=store.tokens, store_bytes=store.bytes, conversations=store.rows,
        suites=tuple(measured_blocks.suites), temperatures=tuple(measured_blocks.temperatures),
        concurrencies=tuple(measured_blocks.concurrencies),
        max_new_tokens=spec.benchmark.max_new_tokens, variants=ranked,
        trained=tuple(trained(spec, family, one, training.store_dir, path)
                      for family, one in training.drafters.items()),
        failed=training.failed, contests=pair_comparisons(measured_blocks, ranked, PAIRS), winner=choose(ranked),
        seconds={**training.seconds, "measuring": blocks}, notes=tuple(notes),
        environment=environment(spec.target.dtype))
    report = report.model_copy(update={"rows": three_versions(report), "claims": evaluate_claims(report)})
    return report.model_copy(update={"verdict": answer(report)})


def trained(spec: CompareSpec, family: str, drafters: TrainedDrafter, store_dir: Path, target: Path) -> Trained:
    """One family's drafter and the cost of its training."""
    report, store = drafters.report, FeatureStore(store_dir)
    layout = store.format
    layers = family_named(family).layers(layout.chosen_layers, read_config(target).num_layers)
    taught = sum(int(store.tokens(row)[1].sum()) for row in range(store.num_rows))
    return Trained(
        family=family, checkpoint=str(drafters.directory), digest=drafters.checkpoint.digest,
        parameters=report.parameters, epochs=drafters.epochs, steps=report.steps, tokens=report.tokens,
        seconds=report.seconds, cpu_seconds=drafters.cpu_seconds, tokens_per_s=report.tokens_per_s,
        draft_vocab_size=report.vocabulary.draft_vocab_size, layers=layers,
        feature_bytes=layout.stored_as.bytes_of(store.num_tokens, taught, len(layers), layout.hidden_size),
        first_accuracy=drafters.checkpoint.accuracy[0])


def num_parameters(target: Path) -> int:
    """Number of the target's parameters, from the headers of its safetensors files."""
    total = 0
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                size = 1
                for extent in weights.get_slice(name).get_shape():
                    size *= extent
                total += size
    return total


def notes_of(measure_dir: Path, training: Training) -> list[str]:
    """Limits of the figures."""
    notes = ["One training seed for each family: the intervals do not include the variation between seeds."]
    tokens = {one.report.tokens for one in training.drafters.values()}
    if len(tokens) > 1:
        notes.append("Equal seconds are unequal tokens: families that train faster saw more.")
    notes += [f"{family} was not trained. {why}" for family, why in training.failed.items()]
    warned = [record for record in stage_records(measure_dir / "events.jsonl")
              if isinstance(record, EventRecord) and record.reason == "MachineBusy"]
    if warned:
        notes.append(f"Other work ran on the machine while measuring: {warned[-1].message}")
    return notes


def write_reports(report: CompareReport, home: Path) -> None:
    """Write report.json, the plots, report.md and report.html."""
    write_model(home / REPORT, report)
    drawn = draw(report, home / PLOTS)
    write_atomically(home / MARKDOWN, markdown(report, [path.stem for path in drawn if path.suffix == ".svg"]))
    write_atomically(home / PAGE, html(report))


def _check_spec(spec: CompareSpec, home: Path) -> None:
    """Write the spec to the directory. Raises Conflict when the directory has another one."""
    file = home / SPEC
    if file.exists():
        before = CompareSpec.model_validate_json(file.read_bytes())
        if before != spec:
            differing = [name for name in CompareSpec.model_fields if getattr(before, name) != getattr(spec, name)]
            raise Conflict(f"{home} has a comparison with other settings ({', '.join(differing)})",
                           "give another --out, or the settings it was started with")
        return
    write_model(file, spec)


@contextmanager
def _directory_lock(home: Path) -> Iterator[None]:
    # The kernel releases the lock when its holder exits, however it exits.
    with (home / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another comparison runs in {home}", "wait for it, or give another --out") from None
        yield
