"""Records what the target computes on its own answers: aux hidden states and the final state of every token.

    rows.jsonl -> shards planned -> target forward over whole rows, teacher forced -> features/

Everything about the output is decided before the first forward pass, from the rows' lengths alone: which rows share a
shard, and within a shard which rows share a forward pass. A shard is the unit of work: killed at any line, the program
loses the open shard and repeats exactly its passes, so the bytes do not depend on how often it was interrupted.

Rows are laid end to end, never padded. The loss mask is True exactly at answer tokens; the prompt is recorded because
the drafter attends to it. Rows longer than `max_length` are cut at the end, and a row whose answer is cut away entirely
is left out; both are counted in the report.

    python -m eyrie_workers.stages.capture --spec spec.json --out <dir>/manifest.json
"""

# T tokens of a row, A aux layers, H hidden

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyrie_api.errors import ArtifactMissing, Conflict, NoUsableData
from eyrie_api.v1alpha1.reports import CaptureReport, LayerChoice
from eyrie_api.v1alpha1.stages import CaptureStage
from eyrie_workers.features.layout import FeatureRow, StoreLayout, plan_shards
from eyrie_workers.features.writer import FeatureWriter
from eyrie_workers.regeneration.rows import META, ROWS, AnsweredRow, read_meta, read_rows
from eyrie_workers.stages.program import Result, Stage, run_program
from eyrie_workers.targets.layers import choose_aux_layers
from eyrie_workers.targets.loading import load_target, resolve, target_digest
from eyrie_workers.targets.model import TargetModel


@dataclass(frozen=True)
class RowPlan:
    """What is recorded of one row; small, so that all rows fit in memory while their ids do not have to."""

    row_id: str
    num_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True)
class CapturePlan:
    """Which rows are recorded, how long each is, and how many lose something to `max_length`."""

    rows: tuple[RowPlan, ...]
    rows_cut: int
    rows_dropped: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each recorded row."""
        return [row.num_tokens for row in self.rows]


def plan_rows(rows: Iterator[AnsweredRow], max_length: int) -> CapturePlan:
    """Cut each row at `max_length` tokens; leave out rows that keep no answer token."""
    kept: list[RowPlan] = []
    cut = dropped = 0
    for row in rows:
        prompt, whole = len(row.prompt_ids), len(row.prompt_ids) + len(row.answer_ids)
        if prompt >= max_length:
            dropped += 1
            continue
        cut += whole > max_length
        kept.append(RowPlan(row.id, min(whole, max_length), prompt))
    return CapturePlan(tuple(kept), cut, dropped)


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Consecutive rows per forward pass, at most `batch_tokens` tokens or a single longer row."""
    start, size = 0, 0
    for row, length in enumerate(lengths):
        if row > start and size + length > batch_tokens:
            yield range(start, row)
            start, size = row, 0
        size += length
    if start < len(lengths):
        yield range(start, len(lengths))


def capture_rows(target: TargetModel, rows: Sequence[tuple[RowPlan, AnsweredRow]], layout: StoreLayout) \
        -> list[FeatureRow]:
    """One teacher-forced pass over some rows; states in the stored dtype, on the CPU."""
    token_ids = [torch.tensor((row.prompt_ids + row.answer_ids)[: plan.num_tokens]) for plan, row in rows]
    states = target.hidden_states(token_ids, layout.aux_layers)
    return [
        FeatureRow(plan.row_id, tokens, torch.arange(plan.num_tokens) >= plan.num_prompt_tokens,
                   aux.to("cpu", layout.dtype), last.to("cpu", layout.dtype))
        for (plan, _), tokens, (aux, last) in zip(rows, token_ids, states, strict=True)
    ]


def capture(spec: CaptureStage, stage: Stage) -> Result:
    """Record the target's hidden states over its own answers (see the module's essay).

    Raises ArtifactMissing without rows, Conflict for rows of another target, NoUsableData when nothing is left.
    """
    started = time.monotonic()
    rows_dir = Path(spec.rows_dir)
    path = resolve(spec.target)
    digest = target_digest(path)
    _check_rows_are_of(digest, rows_dir, spec.target.model)
    plan = plan_rows(read_rows(rows_dir / ROWS), spec.capture.max_length)
    if not plan.rows:
        raise NoUsableData(f"none of the rows in {rows_dir} has an answer token within capture.max_length "
                           f"{spec.capture.max_length}", "raise capture.max_length")
    if plan.rows_cut or plan.rows_dropped:
        stage.event("RowsCut", f"{plan.rows_cut} rows are cut at capture.max_length {spec.capture.max_length}, "
                    f"{plan.rows_dropped} left out because their prompt alone reaches it", warning=True)
    stage.pause_point()
    target = load_target(path, spec.target.dtype)
    choice = choose_aux_layers(target.config.num_layers, target.config.layer_types, spec.capture.aux_layers)
    stage.event("LayersChosen", f"aux hidden states {list(choice.aux_layers)}: {choice.reason}")
    layout = StoreLayout(aux_layers=choice.aux_layers, hidden_size=target.config.hidden_size,
                         codec=spec.capture.codec, target_digest=digest)
    writer = FeatureWriter(stage.out_dir, layout)
    num_new = _write_shards(spec, stage, plan, target, writer)
    seconds = time.monotonic() - started
    tokens, size = sum(plan.lengths), sum(shard.size_bytes for shard in writer.index.shards)
    return Result(CaptureReport(
        rows=len(plan.rows), tokens=tokens,
        supervised_tokens=sum(row.num_tokens - row.num_prompt_tokens for row in plan.rows),
        bytes=size, bytes_per_token=size / tokens, shards=len(writer.index.shards),
        layers=LayerChoice(aux_layers=choice.aux_layers, reason=choice.reason), hidden_size=layout.hidden_size,
        codec=layout.codec, rows_cut=plan.rows_cut, rows_dropped=plan.rows_dropped, seconds=seconds,
        tokens_per_s=num_new / seconds), writer.paths)


def _write_shards(spec: CaptureStage, stage: Stage, plan: CapturePlan, target: TargetModel,
                  writer: FeatureWriter) -> int:
    """Capture the shards that are not there yet; return the tokens captured now."""
    done = writer.num_rows
    if writer.row_ids != [row.row_id for row in plan.rows[:done]]:
        raise Conflict(f"{stage.out_dir} holds hidden states of other rows than {spec.rows_dir}",
                       "capture into an empty directory, or delete this one")
    if done:
        stage.event("Resumed", f"{done} of {len(plan.rows)} rows were captured before")
    answered = _kept(read_rows(Path(spec.rows_dir) / ROWS), plan)
    lengths = plan.lengths
    total, resumed = sum(lengths), sum(lengths[:done])
    captured = resumed
    stage.progress(captured, total, "tokens")
    for shard in plan_shards(lengths, writer.layout, spec.capture.shard_size_bytes):
        rows = [next(answered) for _ in shard]
        if shard.stop <= done:
            continue
        features: list[FeatureRow] = []
        for batch in plan_batches([row.num_tokens for row, _ in rows], spec.capture.batch_tokens):
            stage.pause_point()
            features += capture_rows(target, [rows[i] for i in batch], writer.layout)
            captured += sum(rows[i][0].num_tokens for i in batch)
            stage.progress(captured, total, "tokens")
        writer.write_shard(features)
    return captured - resumed


def _kept(rows: Iterator[AnsweredRow], plan: CapturePlan) -> Iterator[tuple[RowPlan, AnsweredRow]]:
    """The planned rows with their tokens, read a second time so that all tokens need not stay in memory."""
    planned = iter(plan.rows)
    wanted = next(planned, None)
    for row in rows:
        if wanted is not None and row.id == wanted.row_id:
            yield wanted, row
            wanted = next(planned, None)


def _check_rows_are_of(digest: str, rows_dir: Path, model: str) -> None:
    meta = read_meta(rows_dir)
    if meta is None:
        raise ArtifactMissing(f"no {META} in {rows_dir}: nothing says which target answered", "run regenerate first")
    if meta.target_digest != digest:
        raise Conflict(f"the rows in {rows_dir} were answered by another target ({meta.target_digest}) than "
                       f"{model!r} ({digest})", "regenerate with this target, or name the one that answered")


if __name__ == "__main__":
    sys.exit(run_program(CaptureStage, capture))
