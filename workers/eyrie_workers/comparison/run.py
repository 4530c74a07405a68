"""A whole comparison: train what is chosen, measure all of it, tell what came of it. Killed at any line, it goes on.

    DIR/spec.json                                     what was asked; another question needs another directory
    DIR/regenerate  capture  calibrate/<family>  train/<family>     stages, with their manifests
    DIR/measure/blocks.jsonl                          every block, answered by every variant
    DIR/report.json  report.md  plots/                what came of it, made anew by every run
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
from eyrie_workers.comparison.claims import PAIRS, judge, three_versions
from eyrie_workers.comparison.measuring import Entry, measure
from eyrie_workers.comparison.plan import CompareSpec, Variant, variants_of
from eyrie_workers.comparison.progress import told
from eyrie_workers.comparison.render import markdown
from eyrie_workers.comparison.report import Book, CompareReport, Trained, choose, contests_of, rank
from eyrie_workers.comparison.training import Learnt, Training
from eyrie_workers.drafters.registry import family_named
from eyrie_workers.features.store import FeatureStore
from eyrie_workers.machine.environment import environment
from eyrie_workers.stage_program import Stage, stop_on_signals
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import resolve

SPEC, REPORT, PAGE, PLOTS = "spec.json", "report.json", "report.md", "plots"


def compare(spec: CompareSpec, home: Path, tell: Callable[[str, Path], None]) -> CompareReport:
    """Run it, or what is left of it, and write its reports. Raises EyrieError, Stopped, program.Interrupted."""
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home):
        _settle(spec, home)
        training = Training(spec, home, tell)
        store = training.run()
        stage = Stage(home / "measure")
        stage.out_dir.mkdir(exist_ok=True)
        variants = variants_of([family for family in spec.families if family in training.learnt], spec.benchmark.tree)
        training.measuring(stage.out_dir)
        with stop_on_signals(stage):  # the measuring ends between two variants of a block
            entries = measure(spec, variants, {name: one.directory for name, one in training.learnt.items()},
                              {name: one.checkpoint.digest for name, one in training.learnt.items()},
                              str(training.rows_dir / "held_out.jsonl"), stage)
        report = conclude(spec, training, store, variants, entries, notes_of(stage.out_dir, training))
        write_reports(report, home)
    return report


def conclude(spec: CompareSpec, training: Training, store: CaptureReport, variants: Sequence[Variant],
             entries: Sequence[Entry], notes: Sequence[str]) -> CompareReport:
    """The report, from what the stages left and what was measured."""
    book = Book(entries, spec.benchmark.seed)
    ranked = rank(book.variant(variant) for variant in variants)
    path = resolve(spec.target)
    blocks = sum(run.block.seconds for entry in entries for run in entry.runs.values())
    report = CompareReport(
        target=spec.target.model, target_parameters=num_parameters(path), budget=spec.budget,
        store_tokens=store.tokens, store_bytes=store.bytes, conversations=store.rows, suites=tuple(book.suites),
        temperatures=tuple(book.temperatures), concurrencies=tuple(book.concurrencies),
        max_new_tokens=spec.benchmark.max_new_tokens, variants=ranked,
        trained=tuple(trained(spec, family, one, training.store_dir, path)
                      for family, one in training.learnt.items()),
        failed=training.failed, contests=contests_of(book, ranked, PAIRS), winner=choose(ranked),
        seconds={**training.seconds, "measuring": blocks}, notes=tuple(notes),
        environment=environment(spec.target.dtype))
    report = report.model_copy(update={"rows": three_versions(report), "claims": judge(report)})
    return report.model_copy(update={"verdict": answer(report)})


def trained(spec: CompareSpec, family: str, learnt: Learnt, store_dir: Path, target: Path) -> Trained:
    """What a family's training took."""
    report, store = learnt.report, FeatureStore(store_dir)
    layout = store.format
    layers = family_named(family).layers(layout.chosen_layers, read_config(target).num_layers)
    taught = sum(int(store.tokens(row)[1].sum()) for row in range(store.num_rows))
    return Trained(
        family=family, checkpoint=str(learnt.directory), digest=learnt.checkpoint.digest,
        parameters=report.parameters, epochs=learnt.epochs, steps=report.steps, tokens=report.tokens,
        seconds=report.seconds, cpu_seconds=learnt.cpu_seconds, tokens_per_s=report.tokens_per_s,
        draft_vocab_size=report.vocabulary.draft_vocab_size, layers=layers,
        feature_bytes=layout.stored_as.bytes_of(store.num_tokens, taught, len(layers), layout.hidden_size),
        first_accuracy=learnt.checkpoint.accuracy[0])


def num_parameters(target: Path) -> int:
    """Of the target's weights, from their headers."""
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
    """What makes the figures weaker than they look."""
    notes = ["One training seed for each family: what another seed would change is not in the intervals."]
    tokens = {one.report.tokens for one in training.learnt.values()}
    if len(tokens) > 1:
        notes.append("Equal seconds are unequal tokens: families that learn faster saw more.")
    notes += [f"{family} was not trained. {why}" for family, why in training.failed.items()]
    warned = [record for record in told(measure_dir / "events.jsonl")
              if isinstance(record, EventRecord) and record.reason == "NotQuiet"]
    if warned:
        notes.append(f"The machine was not quiet while measuring: {warned[-1].message}")
    return notes


def write_reports(report: CompareReport, home: Path) -> None:
    """Report, plots and page."""
    from eyrie_workers.comparison.plots import draw

    write_model(home / REPORT, report)
    drawn = draw(report, home / PLOTS)
    write_atomically(home / PAGE, markdown(report, [path.stem for path in drawn if path.suffix == ".svg"]))


def _settle(spec: CompareSpec, home: Path) -> None:
    """Raises Conflict when the directory answers another question."""
    file = home / SPEC
    if file.exists():
        before = CompareSpec.model_validate_json(file.read_bytes())
        if before != spec:
            differing = [name for name in CompareSpec.model_fields if getattr(before, name) != getattr(spec, name)]
            raise Conflict(f"{home} holds a comparison with other settings ({', '.join(differing)})",
                           "give another --out, or the settings it was begun with")
        return
    write_model(file, spec)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    with (home / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another comparison works in {home}", "wait for it, or give another --out") from None
        yield
