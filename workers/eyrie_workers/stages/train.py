"""Trains one drafter on captured hidden states and exports checkpoints of it along the way.

    captured states + the target's embedding and output matrix -> draft vocabulary -> drafter
        -> checkpoints/<candidate>-step-<n>/

Every step is a function of the state before it and its number (`training.loop`), so an interruption costs the steps
since the last save and changes nothing else: the exported drafters are the same to the last bit. Between two steps, in
this order: evaluate, export, save. The reports of exported checkpoints are part of the saved state; an export that no
save followed is repeated, with the same bytes.

    state/training.safetensors     what an interrupted run resumes from
    checkpoints/<name>/            drafters in the format that serving engines load

    python -m eyrie_workers.stages.train --spec spec.json --out <dir>/manifest.json

On several GPUs or processes, on one node or many (`training.distributed`):

    torchrun --nproc-per-node N -m eyrie_workers.stages.train --spec spec.json --out <dir>/manifest.json

Rank 0 is the stage program: lock, events, checkpoints, manifest. The other ranks read the same store and write nothing.
`max_tokens_per_batch` is the whole step's on every rank, so a run interrupted on four processes may resume on one where
the spec gives it; its default depends on the number of GPUs. A step of more tokens than `max_tokens_per_gpu` for each
process is computed in micro-batches.
"""

import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyrie_api.artifacts import code_version, digest_bytes, digest_directory
from eyrie_api.contract.reports import CheckpointReport, SourceRows, TrainReport, VocabularyReport
from eyrie_api.contract.stages import TrainStage
from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.errors import ArtifactCorrupt, Conflict, NoUsableData
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.sglang_support import require_mtp_layer
from eyrie_api.planning.target_files import dense_bytes, stored_tensors
from eyrie_api.planning.training_cost import streamed_bytes, usable_bytes
from eyrie_api.planning.training_defaults import TrainingOnGpus, tokens_per_step, with_tokens
from eyrie_workers.catalog import STATE_DIR
from eyrie_workers.drafters.card import Card, DataIdentity, identify
from eyrie_workers.drafters.checkpoint import files_of
from eyrie_workers.drafters.family import FamilyImplementation, family_named
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.drafters.published import Head, load_head
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.hidden_states.row_sources import read_row_sources
from eyrie_workers.hidden_states.storage_backend import open_backend
from eyrie_workers.hidden_states.streaming import StreamedFeatures
from eyrie_workers.machine import cpu_count
from eyrie_workers.stage_program import Result, Stage
from eyrie_workers.stages.rank_program import run_ranks
from eyrie_workers.targets import draft_vocabulary
from eyrie_workers.targets.config import TargetConfig, read_config, read_json
from eyrie_workers.targets.device import default_device, device_scope, target_device
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import resolve, special_token_ids, target_digest
from eyrie_workers.training import batches
from eyrie_workers.training.batches import Features
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext, threads_of_process
from eyrie_workers.training.evaluation import Evaluation, evaluate
from eyrie_workers.training.loop import StepReport, Trainer
from eyrie_workers.training.numerics import peak_flops
from eyrie_workers.training.state import Moments, StateWriter, load_state, take_snapshot, trainable_parameters
from eyrie_workers.training.trackers import Trackers, require_trackers

NUM_EVALUATIONS = 10
"""Evenly spaced evaluations of a run; those before an export are additional."""

_NUM_LOGGED_STEPS = 200
_NO_PART_OF_THE_RESULT = ("threads", "trackers", "save_every_s", "save_every_steps")
"""Fields of `TrainSpec` on which the trained bits do not depend."""


def train(spec: TrainStage, stage: Stage, dist: DistContext = SINGLE_PROCESS) -> Result:
    run = prepare(spec, stage, dist)
    run.run()
    return run.result()


def prepare(spec: TrainStage, stage: Stage, dist: DistContext = SINGLE_PROCESS,
            embeddings: TargetEmbeddings | None = None, features: Features | None = None,
            digest: str | None = None) -> "TrainingRun":
    """Everything before the next optimizer step: the first one, or the first after the saved state.

    embeddings, features  of the target and of spec.store_dir, if another run of this process has opened them already.
    digest                of the target, if it is known; else rank 0 reads the whole target for it.
    """
    require_trackers(spec.train.trackers, os.environ)
    device = default_device()
    torch.set_num_threads(spec.train.threads or threads_of_process(cpu_count(), os.environ))
    path, store = resolve(spec.target), features or batches.open_features(spec.store_dir, spec.target)
    # Rank 0 alone: eight processes would read the target eight times from one disk.
    if store.format.target_digest != (digest or dist.on_main(lambda: target_digest(path))):
        raise Conflict(f"the hidden states in {spec.store_dir} were captured from another target than "
                       f"{spec.target.model!r}", "capture again from this target")
    if store.num_rows == 0:
        raise NoUsableData(f"the store in {spec.store_dir} holds no row", "give more conversations")
    config, family = read_config(path), family_named(spec.drafter.family)
    head = load_head(spec.drafter, family, path) if spec.drafter.init_from else None
    if head is not None:
        spec = spec.model_copy(update={"drafter": head.spec})
    sources = read_row_sources(open_backend(spec.store_dir), store.num_rows)
    train_rows, held_out = batches.choose_rows(spec.rows, sources, store.num_rows, spec.train.seed)
    # Defaults of the family, of the hardware and of the data, for the fields that the spec leaves unset.
    given, train_spec = spec, with_tokens(spec.train, dist.size if device.type == "cuda" else 0,
                                          sum(store.lengths[row] for row in train_rows))
    if train_spec.learning_rate is None:
        train_spec = train_spec.model_copy(update={"learning_rate": family.default_rate(config.hidden_size)})
    drafter_spec = spec.drafter
    if drafter_spec.max_draft_tokens is None:
        drafter_spec = drafter_spec.model_copy(update={"max_draft_tokens": train_spec.ttt_length})
    spec = spec.model_copy(update={"train": train_spec, "drafter": drafter_spec})
    fused = (head.layers if head is not None else None) or spec.drafter.aux_layers or store.format.chosen_layers
    layers = family.layers(fused, config.num_layers)
    columns = _columns(layers, store, spec)
    step_tokens = tokens_per_step(spec.train)
    batches.require_one_batch(spec.rows, train_rows, store.lengths, step_tokens)
    vocabulary, vocabulary_report = _build_vocabulary(
        spec, stage, store, train_rows, held_out, sources, config, path, whole=family.row.whole_vocabulary,
        kept=head.vocabulary if head is not None else None)
    embeddings = embeddings or read_target_embeddings(path, config.tie_word_embeddings, device)
    if family.row.of_target:
        require_mtp_layer(read_json(path / "config.json"), stored_tensors(path))
    if head is None:
        drafter = family.create(spec.drafter, config, embeddings, layers, vocabulary, spec.train.seed)
    else:
        drafter = head.module
        stage.event("InitialisedFrom", f"training continues from {spec.drafter.init_from} ({head.digest}): "
                                       f"layers {list(layers)}, {vocabulary.size} draft tokens")
    dtype = fastest_dtype(device) if spec.train.dtype == "auto" else getattr(torch, spec.train.dtype)
    if device.type == "cuda":
        spec = _fit_memory(spec, family, drafter, embeddings, store, dtype, dist, path,
                           is_open=given.train.max_tokens_per_gpu is None)
    # Rows are cut to what one process computes at a time.
    most, whole = spec.train.max_tokens_per_gpu, store.lengths
    lengths = whole if most is None else [min(length, most) for length in whole]
    if num_cut := sum(cut < length for cut, length in zip(lengths, whole, strict=True)):
        stage.event("RowsCut", f"{num_cut} of {store.num_rows} rows are longer than train.max_tokens_per_gpu {most}: "
                    f"the {sum(whole) - sum(lengths)} tokens behind it are not trained on", warning=True)
    of_sources = batches.rows_by_source(sources, train_rows, lengths)
    if spec.rows is not None:
        parts = ", ".join(f"{name} {rows.rows} rows of {rows.tokens} tokens" for name, rows in of_sources.items())
        stage.event("RowsDrawn", f"trains on {len(train_rows)} of {store.num_rows - len(held_out)} captured rows, with "
                                 f"the shares of data.mix: {parts}")
    schedule = batches.Schedule(train_rows, lengths, step_tokens, spec.train.epochs, spec.train.seed,
                                spec.train.max_steps)
    drafter.to(device)
    with device_scope(device):
        objective = family.objective(drafter, embeddings, spec.train, max(lengths), dtype)

    trainer = Trainer(objective, schedule, spec.train, batches.BatchLoader(schedule, store, dist, most), dist, columns)
    evaluation_rows = held_out or train_rows  # a single row is both trained and evaluated on
    cuts = batches.cut_evenly([lengths[row] for row in evaluation_rows],
                              min(step_tokens, most or step_tokens))
    used = lengths if spec.rows is None else [lengths[row] for row in train_rows]
    # No clock and no path on the card, not that of the head either: the same run writes the same bytes.
    card = Card(
        family=family.name, candidate=spec.candidate,
        target=identify(path, spec.target, digest=store.format.target_digest),
        data=DataIdentity(store_digest=store.digest, rows=len(used), tokens=sum(used), longest_row=max(used)),
        drafter=spec.drafter.model_copy(update={"init_from": None, "init_revision": None}),
        init_digest=head.digest if head is not None else None, aux_layers=layers,
        train=spec.train.model_dump(mode="json", exclude=set(_NO_PART_OF_THE_RESULT)),
        draft_vocabulary_coverage=vocabulary_report.coverage, code_version=code_version())
    run = TrainingRun(
        spec, stage, family, drafter, trainer, digest=_run_digest(spec, store, dtype, head, train_rows), dtype=dtype,
        tokens_per_step=sum(lengths[row] for row in train_rows) * spec.train.epochs / schedule.num_steps_of_epochs,
        held_out=lambda: (batches.first_tokens(store.read(evaluation_rows[cut.start:cut.stop]), most)
                          for cut in cuts[dist.rank::dist.size]),
        columns=columns, embeddings=embeddings, vocabulary=vocabulary_report, card=card, sources=of_sources,
        num_rows=len(train_rows))
    run.resume()
    if dist.is_main and spec.train.trackers:
        # The same for a resumed run, and for no other: the digest is that of its state.
        key = digest_bytes(f"{spec.job_id}/{spec.candidate}/{run.digest}".encode()).removeprefix("sha256:")[:16]
        run.trackers = Trackers(
            spec.train.trackers, stage, key=key, job_id=spec.job_id, candidate=spec.candidate,
            resumed_from=run.resumed_from, settings={
                "family": family.name, "target": spec.target.model, **spec.train.model_dump(mode="json")})
    return run


def main(argv: Sequence[str]) -> int:
    """The program of every rank; returns the exit code."""
    return run_ranks(TrainStage, train, argv)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Arithmetic of the matrix products in training: bfloat16 on a GPU and where the CPU multiplies it natively, else
    float32.

    Parameters, the residual stream, norms, softmax and loss stay in float32 either way.
    """
    native = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def _fit_memory(spec: TrainStage, family: FamilyImplementation, drafter: nn.Module, embeddings: TargetEmbeddings,
                store: Features, dtype: torch.dtype, dist: DistContext, path: Path, *, is_open: bool) -> TrainStage:
    """The spec with as many tokens at a time as a GPU of rank 0's size holds, where the job leaves them open: by its
    size, not by what is free of it, so that a resumed run computes the same. Raises GpuTooSmall when a step needs
    more than the GPU has free. The target's two matrices are on it; the target that computes streamed states, unless it
    has a device of its own, will be."""
    if family.trained is None:
        return spec
    device, tied = embeddings.embed.device, embeddings.lm_head is embeddings.embed
    free, whole = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    matrices = embeddings.embed.nbytes + (0 if tied else embeddings.lm_head.nbytes)
    num_supervised = sum(int(store.tokens(row)[1].sum()) for row in range(store.num_rows))
    trained, held, streamed = replace(family.trained(drafter), tied=tied), 0, 0
    if isinstance(store, StreamedFeatures) and target_device() in (None, device):
        weights = dense_bytes(path, read_json(path / "config.json"), spec.target.dtype)
        streamed = streamed_bytes(trained, weights, ELEMENT_BYTES[spec.target.dtype], len(store.format.aux_layers) + 1,
                                  store.plan.batch_tokens, store.plan.buffer_bytes)
        held = weights if store.is_loaded else 0  # by another candidate of this process
    training = TrainingOnGpus(
        trained, spec.train, dist.size,
        supervised_share=num_supervised / sum(store.lengths), row_tokens=sum(store.lengths) / store.num_rows,
        compute_bytes=dtype.itemsize, top_k=store.format.top_k if store.format.draft_ids else None,
        streamed_bytes=streamed)
    if is_open:
        training = dist.on_main(lambda: training.fitted(whole, usable_bytes(whole), max(store.lengths)))
    training.require(whole, str(device), free + unused + matrices + held)
    return spec.model_copy(update={"train": training.train})


def _columns(layers: tuple[int, ...], store: Features, spec: TrainStage) -> tuple[int, ...]:
    """Positions of a family's layers among the store's. Raises Conflict when one was not captured."""
    held = store.format.aux_layers
    missing = [layer for layer in layers if layer not in held]
    if missing:
        raise Conflict(f"the store in {spec.store_dir} holds layers {list(held)}; drafter.family "
                       f"{spec.drafter.family!r} reads {missing} too",
                       f"capture again with {spec.drafter.family!r} among the families and with these layers")
    return tuple(held.index(layer) for layer in layers)


def _build_vocabulary(spec: TrainStage, stage: Stage, store: Features, rows: Sequence[int], held_out: Sequence[int],
                      sources: Sequence[str] | None, config: TargetConfig, path: Path, *, whole: bool,
                      kept: DraftVocabulary | None = None) -> tuple[DraftVocabulary, VocabularyReport]:
    answers = draft_vocabulary.AnswerCounts(config.vocab_size)
    for row in rows:
        answers.add("" if sources is None else sources[row],
                    draft_vocabulary.count_tokens(*store.tokens(row), config.vocab_size))
    counts, unseen = answers.total_V, torch.zeros(config.vocab_size, dtype=torch.int64)
    for row in held_out:
        unseen += draft_vocabulary.count_tokens(*store.tokens(row), config.vocab_size)
    if int(counts.sum()) == 0:
        raise NoUsableData(f"no row of {spec.store_dir} holds an answer token", "capture rows with answers")
    always = [*config.eos_token_ids, *special_token_ids(path)]
    wanted = config.vocab_size if whole else spec.drafter.draft_vocab_size
    if kept is not None:
        if store.format.draft_ids and kept.ids.tolist() != list(store.format.draft_ids):
            raise Conflict(f"drafter.init_from has a draft vocabulary of {kept.size} tokens, and the store in "
                           f"{spec.store_dir} keeps top-k logits over {len(store.format.draft_ids)} others",
                           "capture with final_state keep")
        vocabulary = kept
    elif store.format.draft_ids:  # the stored top-k logits are over these tokens alone
        if wanted not in (None, len(store.format.draft_ids)):
            raise Conflict(f"the drafter's vocabulary is {wanted}, and the store in {spec.store_dir} "
                           f"keeps top-k logits over {len(store.format.draft_ids)} draft tokens",
                           "leave drafter.draft_vocab_size out, or capture with final_state keep")
        vocabulary = DraftVocabulary(torch.tensor(store.format.draft_ids), config.vocab_size)
    else:
        vocabulary = draft_vocabulary.build(counts, wanted or draft_vocabulary.default_size(
            answers, target_facts(path), always), always)
    report = VocabularyReport(
        draft_vocab_size=vocabulary.size, vocab_size=config.vocab_size,
        coverage=draft_vocabulary.coverage(counts, vocabulary),
        coverage_curve=draft_vocabulary.coverage_curve(counts, always),
        held_out_coverage=draft_vocabulary.coverage(unseen, vocabulary) if int(unseen.sum()) else None,
        coverage_by_source={} if kept is not None or sources is None else {
            source: min(1.0, float(covered_V[vocabulary.size - 1]))
            for source, covered_V in answers.unseen_coverage(always).items()})
    others = [f"{report.held_out_coverage:.2%} of the held-out rows"] if report.held_out_coverage is not None else []
    others += [f"{covered:.2%} of answers like those of {source}" for source, covered in
               report.coverage_by_source.items()]
    stage.event("DraftVocabularyBuilt", f"{vocabulary.size} of {config.vocab_size} tokens cover {report.coverage:.2%} "
                f"of the answers{''.join(f', {other}' for other in others)}", warning=report.coverage < 0.95)
    return vocabulary, report


def _run_digest(spec: TrainStage, store: Features, dtype: torch.dtype, head: Head | None,
                train_rows: Sequence[int]) -> str:
    """Digest of everything that the trained bits depend on, except the machine."""
    payload = spec.model_dump(mode="json", exclude={"job_id", "store_dir", "target", "rows"})
    if spec.rows is not None:
        payload["rows"] = digest_bytes(json.dumps(train_rows).encode())
    for name in _NO_PART_OF_THE_RESULT:
        payload["train"].pop(name)
    payload["drafter"].pop("init_revision")  # `init_from` becomes the digest of what it names
    if head is None:
        payload["drafter"].pop("init_from")
    else:
        payload["drafter"]["init_from"] = head.digest
    payload |= {"store": store.digest, "target": store.format.target_digest, "dtype": str(dtype)}
    return digest_bytes(json.dumps(payload, sort_keys=True).encode())


@dataclass
class TrainingRun:
    """A training run: what is logged, evaluated, exported and saved between steps, and when."""

    spec: TrainStage
    stage: Stage
    family: FamilyImplementation
    drafter: nn.Module
    trainer: Trainer
    digest: str
    dtype: torch.dtype
    tokens_per_step: float
    held_out: Callable[[], Iterator[PackedBatch]]
    """Documents of the evaluation, with every layer of the store."""

    columns: tuple[int, ...]
    """Positions of the family's layers among the store's."""

    embeddings: TargetEmbeddings
    vocabulary: VocabularyReport
    card: Card
    """Of a checkpoint, but for its step, epoch and tokens."""

    num_rows: int
    """Rows trained on."""

    sources: dict[str, SourceRows]
    """These rows by source, where it is known."""

    clock: Callable[[], float] = time.monotonic
    """Seconds; decides when a state is saved."""

    def __post_init__(self) -> None:
        self.reports: list[CheckpointReport] = []
        self.best, self.evaluations_since_best, self.stopped_early = 0.0, 0, False
        self.speedups: dict[int, float] = {}
        """Simulated speed-up at each step that was evaluated."""

        self.resumed_from = 0
        self._exported = self._evaluated = 0
        self.rung_steps: frozenset[int] = frozenset()
        """Steps of a sweep with further evaluations."""

        self._state_file = self.stage.out_dir / STATE_DIR / "training.safetensors"
        self._state_writer = StateWriter(self._state_file)
        self._saved_at = self.clock()
        self._dist = self.trainer.dist
        self._peak, _ = peak_flops(self.dtype, next(self.drafter.parameters()).device)
        self.trackers: Trackers | None = None

    @property
    def device(self) -> torch.device:
        return self.embeddings.lm_head.device

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of all processes together, averaged over the run so far."""
        counters = self.trainer.counters
        return counters.flops / max(counters.seconds, 1e-9) / (self._peak * self._dist.size)

    def resume(self) -> None:
        notes: dict[str, Any] | None = None
        moments: Moments = [{} for _ in trainable_parameters(self.drafter)]
        if self._dist.is_main:
            saved = load_state(self._state_file, self.drafter, self.digest)
            if saved is not None:
                self.trainer.counters, notes, moments = saved
                # Checkpoints of an earlier run go into the manifest, which would give damaged ones a digest.
                for report in map(CheckpointReport.model_validate, notes["checkpoints"]):
                    directory = self.stage.out_dir / report.path
                    if digest_directory(directory) != report.digest:
                        raise ArtifactCorrupt(f"{directory} differs from the checkpoint that was written there",
                                              "delete the train stage's directory and retry the job: it trains again")
        # Rank 0 alone reads the state file; the others receive its contents.
        notes = self._dist.broadcast(notes)
        if notes is None:
            return
        self.trainer.counters, moments = self._dist.broadcast_state(self.drafter, moments, self.trainer.counters)
        self.trainer.optimizer.restore(moments)
        self.reports = [CheckpointReport.model_validate(report) for report in notes["checkpoints"]]
        self.best, self.evaluations_since_best = notes.get("best", 0.0), notes.get("evaluations_since_best", 0)
        self.stopped_early = notes.get("stopped_early", False)
        self.speedups = {int(step): speedup for step, speedup in notes.get("standing", {}).items()}
        self.resumed_from = self.trainer.counters.step
        self._count_points()
        self.stage.event("Resumed", f"resuming from step {self.trainer.counters.step}")

    @property
    def finished(self) -> bool:
        return self.trainer.finished or self.stopped_early

    def _passed(self, points: int) -> int:
        """How many of so many evenly spaced points of the run are behind it."""
        return bisect_right(batches.checkpoint_steps(self.trainer.num_steps, points), self.trainer.counters.step)

    @property
    def _export_due(self) -> bool:
        return self.trainer.finished or self._passed(self.spec.train.num_checkpoints) > self._exported

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows the step just done."""
        return (self._export_due or self._passed(NUM_EVALUATIONS) > self._evaluated
                or self.trainer.counters.step in self.rung_steps)

    def _count_points(self) -> None:
        """What was due after the step just done is done."""
        self._exported = max(self._exported, self._passed(self.spec.train.num_checkpoints))
        self._evaluated = max(self._evaluated, self._passed(NUM_EVALUATIONS))

    def run(self) -> None:
        """Train until finished. Raises LossDiverged, and Interrupted after a save when a stop was requested."""
        try:
            while not self.finished:
                self.after_step(self.trainer.step())
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading batches ahead, wait for the last state to be on disk, and a limited time for the trackers."""
        self.trainer.loader.close()
        try:
            self._state_writer.close()
        finally:
            if self.trackers is not None:
                self.trackers.close(finished=self.finished)

    def stop_early(self, why: str) -> None:
        """Make the step just done the last: export a checkpoint, save."""
        step = self.trainer.counters.step
        self.stopped_early = True
        self.stage.event("StoppedEarly", why)
        if step not in {report.step for report in self.reports}:
            self._export(step, self.trainer.schedule.at(step - 1).epoch, self._evaluate())
        self.save()

    def after_step(self, report: StepReport, evaluation: Evaluation | None = None) -> None:
        """Evaluate, export, save and stop as scheduled. Raises Interrupted after a save when a stop was requested.

        evaluation  the one scheduled after this step, where it has been computed already (`stages.sweep`).
        """
        trainer, began, export_due = self.trainer, time.perf_counter(), self._export_due
        self._log(report)
        if self.evaluation_due:
            self._after_evaluation(report, evaluation or self._evaluate(), export_due)
        self._count_points()
        if trainer.finished and report.step < trainer.schedule.num_steps:
            self.stage.event("TimeLimitReached", f"train.max_seconds {self.spec.train.max_seconds} ended training "
                                                 f"after {report.step} of {trainer.schedule.num_steps} steps")
        # A signal may reach one rank only, or ranks at different steps: the step at which all stop is agreed here.
        # So is the step at which the state is saved, by the clock of rank 0.
        train = self.spec.train
        save_due = self.clock() - self._saved_at >= train.save_every_s or (
            train.save_every_steps is not None and report.step % train.save_every_steps == 0)
        stopping, due = self._dist.any_of(self.stage.stop_requested, self._dist.is_main and save_due)
        if stopping or due or self.stopped_early or export_due:
            self.save()
        self.stage.progress(trainer.counters.tokens, round(self.tokens_per_step * trainer.num_steps), "tokens",
                            f"step {report.step} of {trainer.num_steps}, loss {trainer.counters.loss_ema:.3f}")
        if stopping and not self.finished:
            self.stage.stop_requested = True
            self._state_writer.wait()
            self.stage.pause_point()
        trainer.uncounted_s += time.perf_counter() - began

    def save(self) -> None:
        """Write the state after the step just done, in the background."""
        self._saved_at = self.clock()
        moments = self.trainer.optimizer.moments()  # a collective: every rank sends what it owns
        if self._dist.is_main:
            self._state_writer.start(take_snapshot(
                self.drafter, moments, self.trainer.counters, self.digest,
                {"checkpoints": [report.model_dump(mode="json") for report in self.reports], "best": self.best,
                 "evaluations_since_best": self.evaluations_since_best, "stopped_early": self.stopped_early,
                 "standing": {str(step): speedup for step, speedup in self.speedups.items()}}))

    def _log(self, report: StepReport) -> None:
        if report.step % max(1, self.trainer.num_steps // _NUM_LOGGED_STEPS) and not self.trainer.finished:
            return
        counters = self.trainer.counters
        seconds = max(counters.seconds, 1e-9)
        for name, value in (
                ("loss", report.loss), ("learning_rate", report.learning_rate), ("grad_norm", report.grad_norm),
                ("tokens_per_s", counters.tokens / seconds), ("mfu", self.mfu),
                ("padding_share", 1 - counters.supervised_tokens / max(1, counters.computed_tokens)),
                ("data_wait_share", counters.data_wait_s / seconds)):
            self.stage.metric(name, report.step, value)

    def _evaluate(self) -> Evaluation:
        return evaluate(self.trainer.objective, (batch.with_layers(self.columns) for batch in self.held_out()),
                        self._dist.all_sum)

    def _after_evaluation(self, report: StepReport, evaluation: Evaluation, export_due: bool) -> None:
        for index, (accuracy, acceptance) in enumerate(zip(evaluation.accuracy, evaluation.acceptance, strict=True)):
            self.stage.metric(f"accuracy/{index}", report.step, accuracy)
            self.stage.metric(f"acceptance/{index}", report.step, acceptance)
        self.stage.metric("theoretical_speedup", report.step, evaluation.theoretical_speedup)
        self.stage.metric("evaluation_loss", report.step, evaluation.loss)
        speedup, patience = evaluation.theoretical_speedup, self.spec.train.early_stop_patience
        self.speedups[report.step] = speedup
        self.evaluations_since_best = 0 if speedup > self.best else self.evaluations_since_best + 1
        self.best = max(self.best, speedup)
        if patience is not None and self.evaluations_since_best >= patience and not self.trainer.finished:
            self.stopped_early = True
            self.stage.event("StoppedEarly", f"no evaluation since step {report.step} was better than {self.best:.2f}: "
                                             f"{patience} in a row")
        if self._dist.is_main and (export_due or self.stopped_early):
            self._export(report.step, report.epoch, evaluation)

    def _export(self, step: int, epoch: float, evaluation: Evaluation) -> None:
        name = f"{self.spec.candidate}-step-{step}"
        directory = self.stage.out_dir / "checkpoints" / name
        card = self.card.model_copy(update={"step": step, "epoch": round(epoch, 4),
                                            "tokens": self.trainer.counters.tokens})
        self.trainer.objective.calibrate(evaluation.temperatures)
        self.family.save(directory, self.drafter, self.spec.target.dtype, card)
        self.reports.append(CheckpointReport(
            name=name, candidate=self.spec.candidate, step=step, path=f"checkpoints/{name}",
            digest=digest_directory(directory), epoch=epoch, loss=evaluation.loss,
            accuracy=evaluation.accuracy, conditional_acceptance=evaluation.acceptance,
            theoretical_speedup=evaluation.theoretical_speedup))
        self.stage.event("CheckpointExported", f"{name}: theoretical speed-up {evaluation.theoretical_speedup:.2f}, "
                                               f"first-step accuracy {evaluation.accuracy[0]:.3f}")

    def result(self) -> Result:
        counters, trainer = self.trainer.counters, self.trainer
        seconds = max(counters.seconds, 1e-9)
        return Result(
            report=TrainReport(
                candidate=self.spec.candidate, family=self.family.name, steps=counters.step, tokens=counters.tokens,
                supervised_tokens=counters.supervised_tokens, seconds=counters.seconds,
                tokens_per_s=counters.tokens / seconds,
                padding_share=1 - counters.supervised_tokens / max(1, counters.computed_tokens),
                data_wait_share=min(1.0, counters.data_wait_s / seconds), vocabulary=self.vocabulary,
                checkpoints=tuple(self.reports), resumed_from_step=self.resumed_from,
                parameters=sum(parameter.numel() for parameter in self.drafter.parameters()), mfu=self.mfu,
                processes=trainer.dist.size, stopped_early=self.stopped_early, rows=self.num_rows,
                sources=self.sources, init_from=self.spec.drafter.init_from, init_digest=self.card.init_digest),
            files=[file for report in self.reports for file in files_of(self.stage.out_dir / report.path)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
