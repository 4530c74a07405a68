"""Capture: records the target's hidden states (aux layers and final) over its own answers.

    rows.jsonl -> shards planned -> target forward over whole rows, teacher forced -> features/

The output is determined before the first forward pass, by the rows' lengths alone: which rows share a shard, which rows
of a shard share a forward pass, and how states are stored (`contract.capture`: the spec's codec, or the best that fits
`max_bytes`). A shard is the unit of work: a killed program loses the open shard and repeats exactly its passes, so the
bytes do not depend on interruptions. A run over a finished store with damage notes writes the damaged shards again and
no others. `sources.json` names the source of every row, for training runs on mixes of them
(`hidden_states.row_sources`).

`capture.source` names what computes the states (`targets.state_source`). Before anything is stored, those of a few rows
are compared with what `transformers` returns (`targets.state_source`).

In a pod whose job leaves the states in an artifact store (`catalog.STORE_ADDRESS_FILE`), shards are uploaded, verified
and deleted here one by one: a process needs space for two, whatever the size of the store, and a new pod finds in the
store what is done.

With `capture.mode: stream` no states are computed here: the output is a plan (`hidden_states.streaming`), and training
computes the states.

Rows are stored end to end, never padded. The loss mask is True exactly at answer tokens; the prompt is recorded because
the drafter attends to it. Rows longer than `max_length` are cut at the end, and a row whose answer is cut away entirely
is dropped; both are counted in the report.

    python -m eyrie_workers.stages.capture --spec spec.json --out <dir>/manifest.json

On several GPUs, one process each (`stages.rank_program`), every process writes its own shards; rank 0 checks the layers
before and composes the index after. The bytes do not depend on the number of processes, and a run interrupted on one
number resumes on another:

    torchrun --nproc-per-node N -m eyrie_workers.stages.capture --spec spec.json --out <dir>/manifest.json
"""

# T tokens of a row, A aux layers, H hidden

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path

import torch

from eyrie_api.artifacts import digest_model
from eyrie_api.artifacts.store import StoreUnavailable
from eyrie_api.contract.capture import (
    ID_AND_MASK_BYTES,
    CaptureSpec,
    StateSourceName,
    StoredAs,
    candidates,
    choose,
    final_codec,
)
from eyrie_api.contract.reports import CaptureReport, LayerChoice
from eyrie_api.contract.stages import CaptureStage
from eyrie_api.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    Conflict,
    DiskTooSmall,
    EyrieError,
    InvalidInput,
    NoUsableData,
)
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.quantised import quantisation_config
from eyrie_api.planning.target_config import choose_source
from eyrie_api.planning.training_cost import usable_bytes
from eyrie_api.quantities import size
from eyrie_workers.data.rows import META, ROWS, AnsweredRow, read_meta, read_rows
from eyrie_workers.drafters.family import layers_of
from eyrie_workers.drafters.published import layers_of_head
from eyrie_workers.hidden_states.codecs import relative_error, zero_share
from eyrie_workers.hidden_states.row_sources import read_row_sources, write_row_sources
from eyrie_workers.hidden_states.shard_format import StoreFormat, TokenRow, consecutive, plan_shards
from eyrie_workers.hidden_states.storage_backend import open_backend
from eyrie_workers.hidden_states.store import EarlierStates, FeatureStore
from eyrie_workers.hidden_states.streaming import STREAM, TOKENS, TargetPass, compute_pass, read_plan, write_plan
from eyrie_workers.hidden_states.writer import BackgroundWriter, FeatureWriter
from eyrie_workers.hidden_states.writer import is_whole as store_is_whole
from eyrie_workers.machine import cpu_count
from eyrie_workers.sglang.capture_states import TOKENS_BEHIND_PROMPT, SglangStates
from eyrie_workers.sglang.local_hardware import detect_hardware, gpu_groups, visible_gpus
from eyrie_workers.sglang.profiles import weights_on_disk
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan
from eyrie_workers.speculation.engine import EngineStats, PhaseClock
from eyrie_workers.stage_program import Result, Stage
from eyrie_workers.stages.layer_probe import probe_layers, rows_to_probe
from eyrie_workers.stages.rank_program import run_ranks
from eyrie_workers.targets import draft_vocabulary, state_source
from eyrie_workers.targets.config import TargetConfig, choose_aux_layers, read_config, read_json
from eyrie_workers.targets.device import default_device
from eyrie_workers.targets.loading import load_target, resolve, special_token_ids, target_digest
from eyrie_workers.targets.state_source import StateSource
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext, threads_of_process

# Tokens of a row compared with transformers: enough to distinguish layers; attention cost grows with the square.
_CHECKED_TOKENS = 256

_CONCURRENT_ROWS = {"cpu": 1, "gpu": 16}
"""Rows that a SGLang server prefills at a time; its KV pool holds as many of the longest. SGLang batches rows as
they arrive, and a row's rounding depends on its batch: on a CPU, where batches gain nothing, rows are computed
one by one, so that a resumed capture gives the same bytes; on a GPU it may differ by rounding."""

_MAX_ZERO_SHARE = {"float32": 0.0, "bfloat16": 0.0, "int8": 0.2, "fp8": 0.2, "int4": 0.4}
"""Share of values stored as 0 above which capture warns. Gaussian states: 1 % in int8, 10 % in int4."""


@dataclass(frozen=True)
class RowPlan:
    """The size of one row in the store. All plans fit in memory; the token ids are read again."""

    row_id: str
    num_tokens: int
    num_prompt_tokens: int
    source_name: str = ""

    @property
    def num_supervised(self) -> int:
        """Positions before an answer token: those with a final state."""
        return self.num_tokens - max(1, self.num_prompt_tokens)


@dataclass(frozen=True)
class CapturePlan:
    """The recorded rows, and the numbers of rows that `max_length` cuts or drops."""

    rows: tuple[RowPlan, ...]
    rows_cut: int
    rows_dropped: int

    @property
    def lengths(self) -> list[int]:
        return [row.num_tokens for row in self.rows]

    @property
    def supervised(self) -> list[int]:
        return [row.num_supervised for row in self.rows]


def plan_rows(rows: Iterator[AnsweredRow], max_length: int) -> CapturePlan:
    """Cut each row at `max_length` tokens; drop rows without an answer token before it."""
    kept: list[RowPlan] = []
    cut = dropped = 0
    for row in rows:
        prompt, whole = len(row.prompt_ids), len(row.prompt_ids) + len(row.answer_ids)
        if prompt >= max_length:
            dropped += 1
            continue
        cut += whole > max_length
        kept.append(RowPlan(row.id, min(whole, max_length), prompt, sys.intern(row.source_name)))
    return CapturePlan(tuple(kept), cut, dropped)


def plan_format(spec: CaptureSpec, plan: CapturePlan, target: TargetConfig, path: Path, aux_layers: tuple[int, ...],
                digest: str, rows: Iterable[AnsweredRow], always: Sequence[int],
                fused_layers: tuple[int, ...] | None = None) -> StoreFormat:
    """The format of the planned rows. Raises DiskTooSmall when no codec fits `max_bytes`.

    path     of the target, whose sizes decide on a draft vocabulary that the spec leaves open
    fused_layers  those of `aux_layers` selected for fusing, if not all.
    rows     the answered rows, read only where top-k logits need a draft vocabulary.
    always   tokens that the draft vocabulary always contains.
    """
    vocabulary = draft_vocabulary.choose_size(target.vocab_size, spec.draft_vocab_size)
    wanted = StoredAs(spec.codec, spec.final_state, min(spec.final_top_k, vocabulary), vocabulary)
    sizes = (sum(plan.lengths), sum(plan.supervised), len(aux_layers), target.hidden_size)
    chosen = choose(wanted, spec.max_bytes, *sizes)
    if chosen is None:
        smallest = min(way.bytes_of(*sizes) for way in candidates(wanted))
        raise DiskTooSmall(f"{sizes[0]} tokens need {smallest} bytes in the smallest codec, capture.max_bytes is "
                           f"{spec.max_bytes}", "raise capture.max_bytes, or lower data.max_conversations")
    draft_ids: tuple[int, ...] = ()
    if chosen.final_state == "topk":
        counts = draft_vocabulary.AnswerCounts(target.vocab_size)
        for row_plan, row in _kept(iter(rows), plan):
            answer = torch.tensor(row.answer_ids[: row_plan.num_tokens - row_plan.num_prompt_tokens])
            counts.add(row.source_name, torch.bincount(answer, minlength=target.vocab_size))
        size = spec.draft_vocab_size or draft_vocabulary.default_size(counts, target_facts(path), always)
        draft_ids = tuple(draft_vocabulary.build(counts.total_V, size, always).ids.tolist())
    return StoreFormat(aux_layers=aux_layers, fused_layers=() if fused_layers in (None, aux_layers) else fused_layers,
                       hidden_size=target.hidden_size, codec=chosen.codec, target_digest=digest,
                       final_state=chosen.final_state, top_k=chosen.top_k, draft_ids=draft_ids)


@dataclass
class _Capture:
    """What the steps of one capture share, and the results of the work for the report."""

    spec: CaptureStage
    stage: Stage
    path: Path  # of the target
    plan: CapturePlan
    fmt: StoreFormat
    source: StateSourceName
    opened: contextlib.ExitStack  # stops the server of the states, where there is one
    checked: tuple[state_source.LayerAgreement, ...] = ()
    files: list[Path] = field(default_factory=list)
    size_bytes: int = 0
    shards: int = 0
    repaired: tuple[str, ...] = ()
    seconds: float = 0.0

    @cached_property
    def history(self) -> ServerHistory:
        return ServerHistory(self.stage.out_dir, digest_model(self.spec))

    def write_store(self, dist: DistContext) -> "_Work":
        """Write this process's shards; rank 0 checks the layers before, and composes the index after."""
        spec, stage, fresh = self.spec, self.stage, False
        if dist.is_main:
            # Opening the store deletes the hidden files of a killed run: before another process writes its own.
            writer = FeatureWriter(stage.out_dir, self.fmt)
            for name, why in writer.damaged.items():
                stage.event("ShardDamaged", f"{name} is written again: {why}", warning=True)
            fresh = not writer.shards
            stage.pause_point()
        earlier, wanted = EarlierStates(), {row.row_id for row in self.plan.rows}
        for directory in map(Path, spec.reuse):
            try:
                earlier.add(FeatureStore(directory), self.fmt, wanted)
            except (ArtifactMissing, ArtifactCorrupt, StoreUnavailable, OSError) as error:
                reason = error.message if isinstance(error, EyrieError) else str(error)
                stage.event("StatesNotReused", f"{reason}; the states are computed", warning=True)
        target = cache(lambda: self.load_checked(fresh=fresh) if dist.is_main else self.open_target())
        # Where earlier jobs have every row, the target is loaded for a row that turns out to differ, or not at all.
        if dist.size > 1 or not earlier.has_all([row.row_id for row in self.plan.rows]):
            target()
        dist.broadcast(None)
        if not dist.is_main:
            writer = FeatureWriter(stage.out_dir, self.fmt, alone=False)
        damaged, began = tuple(sorted(writer.damaged)), time.monotonic()
        work = write_shards(spec, stage, self.plan, target, writer, (dist.rank, dist.size), earlier)
        if earlier.num_unreadable:
            stage.event("StatesNotReused", f"{earlier.num_unreadable:,} rows of earlier jobs cannot be read; their "
                        "states are computed", warning=True)
        # Every process waits here until all shards are on disk.
        counts = dist.all_sum(torch.tensor([work.tokens, work.prefill_s, work.rows_reused, work.bytes_reused],
                                           dtype=torch.float64, device="cpu"))
        work.tokens, work.prefill_s = int(counts[0]), float(counts[1]) / dist.size
        work.rows_reused, work.bytes_reused = int(counts[2]), int(counts[3])
        self.seconds = time.monotonic() - began
        if dist.is_main:
            writer = FeatureWriter(stage.out_dir, self.fmt)  # with the shards of the other processes
            self.files, self.repaired = writer.finish(), damaged
            self.size_bytes, self.shards = writer.size_bytes, len(writer.shards)
            if work.rows_reused:
                stage.event("StatesReused", f"the states of {work.rows_reused:,} of {len(self.plan.rows):,} rows, "
                            f"{size(work.bytes_reused)} of {size(self.size_bytes)}, are copied from earlier jobs")
        return work

    def write_stream_plan(self) -> None:
        """With `mode: stream`: the plan from which training computes the states."""
        assert self.source != "sglang"  # refused by the contract
        if self.spec.capture.check_rows:
            self.load_checked(fresh=True)
        rows = _kept(read_rows(Path(self.spec.rows_dir) / ROWS), self.plan)
        write_plan(self.stage.out_dir, self.fmt,
                   ((of.row_id, (row.prompt_ids + row.answer_ids)[:of.num_tokens], of.num_prompt_tokens)
                    for of, row in rows), source=self.source, batch_tokens=self.spec.capture.batch_tokens,
                   buffer_bytes=self.spec.capture.stream_buffer_bytes)
        self.files = [self.stage.out_dir / STREAM, self.stage.out_dir / TOKENS]
        self.size_bytes = sum(path.stat().st_size for path in self.files)
        self.stage.event("StreamPlanned", f"no states are stored: training computes those of {len(self.plan.rows)} "
                         "rows as it goes")

    def load_checked(self, *, fresh: bool) -> StateSource:
        """The target, once its states were compared with `transformers`, which is done once per store."""
        spec, stage = self.spec, self.stage
        if not (fresh and spec.capture.check_rows):
            return self.open_target()
        is_quantised = quantisation_config(read_json(self.path / "config.json")) is not None
        if self.source == "sglang" and (is_quantised or not _fits_device(self.path)):
            stage.event("LayersNotChecked", "the states are not compared with those of transformers, which computes "
                        "other ones, since this target is quantised, or cannot hold it on one GPU", warning=True)
            return self.open_target()
        kept = _kept(read_rows(Path(spec.rows_dir) / ROWS), self.plan)
        samples = [torch.tensor((row.prompt_ids + row.answer_ids)[:min(of.num_tokens, _CHECKED_TOKENS)])
                   for of, row in islice(kept, spec.capture.check_rows)]
        if self.source == "transformers":
            own = state_source.load_transformers_target(self.path, spec.target.dtype)
            for tokens in samples:
                own.verify(tokens)
            stage.event("LayersAgree", f"states and logits of {len(samples)} rows, as captured through transformers, "
                                       "are those that its model returns")
            return own
        # Their model is freed before ours is loaded: the device need not hold both.
        theirs = state_source.reference_states(self.path, spec.target.dtype, samples, self.fmt.aux_layers,
                                               default_device())
        stage.pause_point()
        target = self.open_target()
        aux, last = target.packed_states(samples, self.fmt.aux_layers)
        lengths = [len(tokens) for tokens in samples]
        logits = [target.output_head.logits(row[-state_source.CHECKED_LOGITS:]).cpu()
                  for row in last.split(lengths)]
        self.checked = state_source.compare(aux.cpu().split(lengths), logits, theirs, self.fmt.aux_layers,
                                            spec.target.dtype)
        worst = max(layer.error for layer in self.checked)
        nearest = min(layer.neighbour for layer in self.checked)
        stage.event("LayersAgree", f"aux states and logits of {len(samples)} rows agree with transformers, states to "
                                   f"{worst:.1g}; the distance to an adjacent layer is {nearest:.2g}")
        return target

    def open_target(self) -> StateSource:
        """The target, not compared."""
        if self.source != "sglang":
            return state_source.open_source(self.source, self.spec.target)
        tp_size = self.spec.engine.tp_size
        rows = _CONCURRENT_ROWS["cpu" if detect_hardware().platform == "cpu" else "gpu"]
        servers = ServerPlan("sglang", self.spec.target, rows, engine=self.spec.engine,
                             gpu_groups=gpu_groups(visible_gpus(), tp_size, tp_size)[:1])
        return self.opened.enter_context(SglangStates(
            servers, self.fmt.aux_layers, max(self.plan.lengths), self.stage.out_dir / "servers", self.stage,
            self.history))


@dataclass
class _Work:
    tokens: int = 0
    rows_reused: int = 0
    bytes_reused: int = 0
    prefill_s: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)


def capture(spec: CaptureStage, stage: Stage, dist: DistContext = SINGLE_PROCESS) -> Result:
    """Record the target's hidden states over its own answers (see the module's docstring). Raises ArtifactMissing
    without rows, Conflict for rows of another target, NoUsableData when no row remains, LayersDisagree when the states
    differ from those of `transformers`."""
    started = time.monotonic()
    if dist.size > 1:
        torch.set_num_threads(threads_of_process(cpu_count(), os.environ))
    # 1. The rows, which must be answers of this target.
    rows_dir = Path(spec.rows_dir)
    path = resolve(spec.target)
    # Rank 0 alone reads the whole target for its digest: eight processes would read it eight times from one disk.
    digest, config = dist.on_main(lambda: target_digest(path)), read_config(path)
    meta = read_meta(rows_dir)
    if meta is None:
        raise ArtifactMissing(f"no {META} in {rows_dir}: the target of the rows is unknown", "run regenerate first")
    if meta.target_digest != digest:
        raise Conflict(f"the rows in {rows_dir} were answered by another target ({meta.target_digest}) than "
                       f"{spec.target.model!r} ({digest})",
                       "regenerate with this target, or name the one that answered")
    streams, model = spec.capture.mode == "stream", read_json(path / "config.json")
    source = choose_source(model, spec.capture.source, engine=spec.engine.kind,
                           streams=streams, fits_device=_fits_device(path))
    if source != "sglang" and quantisation_config(model) is not None:
        stage.event("WeightsDequantised", f"the states are those of the target's quantised weights, computed in "
                    f"{spec.target.dtype}: what a serving engine quantises besides is not in them")
    max_length, limit = spec.capture.max_length, "capture.max_length"
    longest_prompt = config.max_position_embeddings - TOKENS_BEHIND_PROMPT
    if source == "sglang" and max_length > longest_prompt:
        max_length, limit = longest_prompt, "the longest prompt that SGLang takes,"
    plan = plan_rows(read_rows(rows_dir / ROWS), max_length)
    if not plan.rows:
        raise NoUsableData(f"none of the rows in {rows_dir} has an answer token within {limit} {max_length}",
                           "raise capture.max_length")
    if plan.rows_cut or plan.rows_dropped:
        stage.event("RowsCut", f"{plan.rows_cut} rows are cut at {limit} {max_length}, {plan.rows_dropped} left out "
                    "because their prompt alone reaches it", warning=True)
    if source == "sglang" and dist.size > 1:
        raise InvalidInput(f"capture.source sglang on {dist.size} processes: one process starts the server",
                           "set the GPUs of the capture stage to engine.tp_size, and its processes to 1")
    # 2. The layers that the drafters read.
    choice = choose_aux_layers(config.num_layers, config.layer_types, spec.capture.aux_layers)
    stage.event("LayersChosen", f"aux hidden states {list(choice.aux_layers)}: {choice.reason}")
    if spec.capture.probe_layers and dist.is_main and not (
            open_backend(stage.out_dir).shards() or is_whole(stage.out_dir)):
        probe = probe_layers(load_target(path, spec.target.dtype), rows_to_probe(rows_dir), choice.aux_layers)
        stage.event("LayersProbed", probe.summary())
        stage.pause_point()
    named = choose_aux_layers(config.num_layers, override=spec.aux_layers).aux_layers if spec.aux_layers else ()
    of_families = layers_of(spec.families, choice.aux_layers, config.num_layers)
    of_heads = {layer for head in spec.init_from for layer in layers_of_head(head, path)}
    layers = tuple(sorted({*of_families, *named, *of_heads})) or choice.aux_layers
    # 3. The format, and the states or the plan of them.
    how = spec.capture.model_copy(update={"max_bytes": None}) if streams else spec.capture
    fmt = plan_format(how, plan, config, path, layers, digest, read_rows(rows_dir / ROWS),
                      [*config.eos_token_ids, *special_token_ids(path)], fused_layers=choice.aux_layers)
    if (fmt.stored_as.codec, fmt.stored_as.final_state) != (spec.capture.codec, spec.capture.final_state):
        stage.event("CodecChosen", f"states are stored as {fmt.stored_as.name}: capture.codec {spec.capture.codec} "
                    f"with final_state {spec.capture.final_state} does not fit capture.max_bytes "
                    f"{spec.capture.max_bytes}", warning=True)
    work = _Work()
    with contextlib.ExitStack() as opened:
        states = _Capture(spec, stage, path, plan, fmt, source, opened)
        if not streams:
            work = states.write_store(dist)
        elif dist.is_main:
            states.write_stream_plan()
    tokens = sum(plan.lengths)
    if dist.is_main:
        states.files.append(write_row_sources(stage.out_dir, [row.source_name for row in plan.rows]))
    return Result(CaptureReport(
        rows=len(plan.rows), tokens=tokens,
        supervised_tokens=sum(row.num_tokens - row.num_prompt_tokens for row in plan.rows),
        bytes=states.size_bytes, bytes_per_token=states.size_bytes / tokens, shards=states.shards,
        rows_reused=work.rows_reused, bytes_reused=work.bytes_reused,
        layers=LayerChoice(aux_layers=layers, reason=choice.reason), hidden_size=fmt.hidden_size,
        source=source, codec=fmt.codec, final_state=fmt.final_state, states_error=work.errors,
        checked={str(layer.layer): layer.error for layer in states.checked}, repaired_shards=states.repaired,
        restarts=states.history.restarts if source == "sglang" else 0,
        rows_cut=plan.rows_cut, rows_dropped=plan.rows_dropped, seconds=time.monotonic() - started,
        tokens_per_s=work.tokens / states.seconds if states.seconds else 0.0,
        prefill_tokens_per_s=work.tokens / work.prefill_s if work.prefill_s else 0.0),
        states.files)


def is_whole(directory: Path) -> bool:
    """Whether a finished store without damage notes, or a plan, exists, and the sources of its rows are readable."""
    backend = open_backend(directory)
    try:
        read_row_sources(backend)
        return store_is_whole(directory) or read_plan(backend) is not None
    except ArtifactCorrupt:
        return False


def _fits_device(path: Path) -> bool:
    """Whether one GPU can hold the target's weights; on a CPU nothing else could hold more."""
    machine = detect_hardware()
    return machine.platform == "cpu" or weights_on_disk(path) <= usable_bytes(int(machine.memory_gib * 2**30))


def write_shards(spec: CaptureStage, stage: Stage, plan: CapturePlan, target: Callable[[], StateSource],
                 writer: FeatureWriter, share: tuple[int, int] = (0, 1),
                 earlier: EarlierStates | None = None) -> _Work:
    """Capture the shards of a share that are missing or damaged.

    target   loads it when it is first called
    earlier  states that need not be computed
    share    the number of this process and of all. Process r takes every shard n with n % size == r: whichever shards
             an interruption on another number of processes left, the missing ones are divided nearly equally.
    """
    rank, processes = share
    shards = list(plan_shards(plan.lengths, writer.format, spec.capture.shard_size_bytes, plan.supervised))
    if any(number >= len(shards) for number in writer.shards):
        raise Conflict(f"{stage.out_dir} holds hidden states of other rows than {spec.rows_dir}",
                       "capture into an empty directory, or delete this one")
    if done := writer.num_rows:
        stage.event("Resumed", f"{done} of {len(plan.rows)} rows were captured before")
    earlier, work, stats, fmt = earlier or EarlierStates(), _Work(), EngineStats(), writer.format
    clock: PhaseClock | None = None
    answered = _kept(read_rows(Path(spec.rows_dir) / ROWS), plan)
    total, passed = sum(plan.lengths), 0
    stage.progress(0, total, "tokens")
    with BackgroundWriter(writer) as background:
        for number, shard in enumerate(shards):
            # Rows are consumed for skipped shards too, so that `answered` stays in step with the plan.
            rows = [TokenRow(of.row_id, torch.tensor((row.prompt_ids + row.answer_ids)[:of.num_tokens]),
                             torch.arange(of.num_tokens) >= of.num_prompt_tokens)
                    for of, row in islice(answered, len(shard))]
            lengths = [row.token_ids.numel() for row in rows]
            if writer.holds(number, [row.row_id for row in rows]) or number % processes != rank:
                passed += sum(lengths)
                continue
            background.begin(number, rows)
            at = 0
            while at < len(rows):
                stage.pause_point()
                copied = earlier.find(rows[at])
                if copied is not None:
                    background.put(copied, 1)
                    work.rows_reused += 1
                    work.bytes_reused += (sum(part.nbytes for part in copied.values())
                                          + lengths[at] * ID_AND_MASK_BYTES)
                    passed += lengths[at]
                    at += 1
                else:
                    # Up to the first row that an earlier job may have: without earlier jobs, all passes are full.
                    stop = at + 1
                    while stop < len(rows) and not earlier.has_all([rows[stop].row_id]):
                        stop += 1
                    first = next(consecutive(lengths[at:stop], spec.capture.batch_tokens))
                    batch = rows[at:at + first.stop]
                    clock = clock or PhaseClock(stats, target().device)
                    begin = clock.mark()
                    computed = compute_pass(target(), batch, fmt)
                    clock.count("prefill_s", begin, clock.mark())
                    clock.settle()
                    if not work.errors:  # the codec's error is measured on the first pass
                        work.errors = _codec_errors(computed, fmt, stage)
                    background.put(computed.encode(fmt), len(batch))
                    work.tokens += sum(row.token_ids.numel() for row in batch)
                    at += len(batch)
                stage.progress(passed + work.tokens, total, "tokens")
            background.end()
        background.finish()
    if clock is not None:
        clock.settle(wait=True)
    work.prefill_s = stats.prefill_s
    return work


def _codec_errors(computed: TargetPass, fmt: StoreFormat, stage: Stage) -> dict[str, float]:
    """Relative error of the codec per layer, over the tokens of one pass; an event names the layers where outliers
    round most other values to 0."""
    vectors = {str(layer): (computed.aux[:, place], fmt.codec) for place, layer in enumerate(fmt.aux_layers)}
    shares = ", ".join(f"{share:.0%} of layer {layer}" for layer, (states, codec) in vectors.items()
                       if (share := zero_share(states, codec)) > _MAX_ZERO_SHARE[codec])
    if shares:
        stage.event("StatesDrowned", f"{shares} is stored as 0 because of outliers: capture.codec fp8 keeps both",
                    warning=True)
    if fmt.final_state == "keep":
        vectors["final"] = computed.last[computed.supervised], final_codec(fmt.codec)
    errors = {name: relative_error(*coded) for name, coded in vectors.items()}
    return {name: float(error.square().mean().sqrt()) if error.numel() else 0.0 for name, error in errors.items()}


def _kept(rows: Iterator[AnsweredRow], plan: CapturePlan) -> Iterator[tuple[RowPlan, AnsweredRow]]:
    """The planned rows with their tokens, read a second time so that all tokens need not stay in memory."""
    planned = iter(plan.rows)
    wanted = next(planned, None)
    for row in rows:
        if wanted is not None and row.id == wanted.row_id:
            yield wanted, row
            wanted = next(planned, None)


if __name__ == "__main__":
    sys.exit(run_ranks(CaptureStage, capture, sys.argv[1:], is_whole))
