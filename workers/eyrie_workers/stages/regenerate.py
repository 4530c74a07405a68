"""Regenerate: the target answers the last assistant turn of every conversation again, or each assistant turn.

A drafter learns to predict the target's output, so it must be trained on the target's output: "you need to regenerate
the final assistant turn using your actual model ... the response might be worse than the original one. It does not
matter" (the second seed). Steps, each resumable:

    read, split, exclude -> selection        (regeneration.selection; held-out prompts are never sent)
    reuse                -> rows.jsonl       (regeneration.earlier_answers; what earlier jobs have answered already)
    replay conversations -> turns            (regeneration.conversation_replay; the last turn, or each in order)
    generate             -> rows.jsonl       (appended and flushed per answer: the ledger of finished rows)
    put in order         -> rows.jsonl, quarantine.jsonl, held_out.jsonl, rows.meta.json

In a pod whose job leaves large files in an artifact store (`catalog.STORE_ADDRESS_FILE`), answers are uploaded part by
part and deleted here, and rows.jsonl is written there (`data.rows`).

Each answer depends on its row alone (the seed is derived from the row's id), so the bytes of the output do not depend
on interruptions. For the same reason the work may be distributed: with EYRIE_SHARD_ROWS set, the shard workers of a
cluster send the requests (`regeneration.sharded`).

    python -m eyrie_workers.stages.regenerate --spec spec.json --out <dir>/manifest.json
"""

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from eyrie_api.artifacts import digest_bytes, digest_model, write_atomically, write_model
from eyrie_api.contract.data import FEW_ROWS
from eyrie_api.contract.model import Digest
from eyrie_api.contract.reports import Lengths, QuarantinedRow, RegenerateReport
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, Conflict, InvalidInput, NoUsableData
from eyrie_workers.data.overlap import BenchmarkPrompts, Runs
from eyrie_workers.data.rows import (
    META,
    ROWS,
    AnsweredRow,
    RowLedger,
    RowSampling,
    RowsMeta,
    open_row_ledger,
    read_meta,
)
from eyrie_workers.data.suites import excluded_prompts
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.regeneration import selection
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    AnswersOfData,
    GeneratedAnswer,
    GenerationClient,
    GenerationFailure,
    GenerationRequest,
)
from eyrie_workers.regeneration.batch import BatchClient
from eyrie_workers.regeneration.conversation_replay import REFUSED, Ended, TurnQueue
from eyrie_workers.regeneration.earlier_answers import answer_key, earlier_answers
from eyrie_workers.regeneration.endpoint import endpoint_of
from eyrie_workers.regeneration.local_engines import EmbeddedClient, sglang_servers
from eyrie_workers.regeneration.online import OnlineClient
from eyrie_workers.regeneration.sharded import ShardingConfig
from eyrie_workers.sglang.servers import ServerHistory
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.stage_program import Result, Stage, run_program
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target, resolve, target_digest
from eyrie_workers.targets.templates import ChatTokenizer

QUARANTINE = "quarantine.jsonl"
BATCH_STATE = "batch.json"
SERVERS = "servers"
_QUARANTINE_REPORTED = 100
_AT_LIMIT = 0.9
"""Share of the answers that end at their limit from which it is reported."""

_MAX_INITIAL_FAILURES = 20
"""Failures before the first answer that end the stage: the request itself is wrong, not these prompts."""


@dataclass
class RowTally:
    finish_reasons: Counter[str] = field(default_factory=Counter)
    outcomes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    answer_lengths: Counter[int] = field(default_factory=Counter)
    retokenized: int = 0
    ids_differ: int = 0
    reused: int = 0

    def add(self, row: AnsweredRow) -> None:
        self.finish_reasons[row.finish_reason] += 1
        self.outcomes[row.source]["answered"] += 1
        self.outcomes[row.source]["truncated"] += row.finish_reason == "length"
        self.prompt_lengths[len(row.prompt_ids)] += 1
        self.answer_lengths[len(row.answer_ids)] += 1
        self.retokenized += not row.ids_exact
        self.ids_differ += row.ids_differ
        self.reused += row.generated_by != ""


@dataclass(frozen=True)
class Rows:
    """The rows that the stage answers, and the ledger of those it has."""

    spec: RegenerateStage
    stage: Stage
    path: Path  # of the target
    summary: selection.SelectionSummary
    tokenizer: ChatTokenizer
    context: int
    target_digest: Digest
    ledger: RowLedger

    @property
    def total(self) -> int:
        """Turns to answer; an upper bound with `turns: all`."""
        return self.summary.turns_selected

    def unanswered(self) -> TurnQueue:
        """The turns that are not in the ledger, in order."""
        return TurnQueue(selection.selected(self.stage.out_dir), self.summary.rows_selected, self.spec.regenerate,
                         self.ledger, self.tokenizer, min(self.spec.data.max_prompt_tokens, self.context - 1))

    def sampling(self, prompt: GenerationRequest) -> RowSampling:
        return RowSampling(**self.spec.regenerate.sampling.model_dump(),
                           max_new_tokens=prompt.max_new_tokens or self.spec.regenerate.max_new_tokens)

    def key(self, prompt: GenerationRequest) -> str:
        """The key of the answer to a prompt (`regeneration.earlier_answers`)."""
        engine, section = _engine_name(self.spec), self.spec.regenerate
        # An endpoint is asked for its model by name.
        served = (section.served_model or self.spec.target.model) if engine in ("openai", "openai-batch") else None
        return answer_key([self.target_digest, self.spec.target.dtype, engine, served], prompt, self.sampling(prompt))


def lengths(counted: Counter[int]) -> Lengths:
    """Quantiles of counted lengths, each a length that occurs."""
    ordered = sorted(counted.elements())

    def quantile(share: float) -> int:
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Lengths(p50=quantile(0.5), p90=quantile(0.9), p99=quantile(0.99), most=ordered[-1])


def regenerate(spec: RegenerateStage, stage: Stage) -> Result:
    """Let the target answer conversations again (see the module's docstring). Raises InvalidInput for data that cannot
    be opened, NoUsableData when no row remains, Transient when an endpoint stays unavailable, Permanent when it refuses
    every request."""
    started = time.monotonic()
    path = resolve(spec.target)
    tokenizer, digest = ChatTokenizer(path), target_digest(path)
    # What the answers are a function of: a directory with those of another target, data or sampling is refused.
    inputs = (spec.data.model_dump_json(), spec.regenerate.sampling.model_dump_json(), spec.exclude_prompts,
              spec.regenerate.max_new_tokens, spec.regenerate.seed, _engine_name(spec), spec.target.dtype,
              spec.regenerate.turns)
    meta = RowsMeta(target_digest=digest, answers_digest=digest_bytes(repr(inputs).encode()))
    if read_meta(stage.out_dir) not in (None, meta):
        raise Conflict(f"{stage.out_dir} holds answers of another target, data or sampling",
                       "give an empty directory, or delete this one")
    write_model(stage.out_dir / META, meta)
    context = read_config(path).max_position_embeddings
    summary = _select(spec, stage, tokenizer, context)
    with open_row_ledger(stage.out_dir / ROWS) as ledger:
        rows = Rows(spec, stage, path, summary, tokenizer, context, digest, ledger)
        resumed = len(ledger)
        if resumed:
            stage.event("Resumed", f"{resumed} of {rows.total} rows were already answered")
        _reuse(rows)
        new_tokens, refused = _ask(rows)
        report = _finish(rows, refused)
    seconds = time.monotonic() - started
    report = report.model_copy(update={"rows_resumed": resumed, "seconds": seconds,
                                       "tokens_per_s": new_tokens / seconds})
    names = (*(() if ledger.in_store else (ROWS,)), META, selection.HELD_OUT, QUARANTINE)
    return Result(report, [stage.out_dir / name for name in names], ledger.in_store)


def _engine_name(spec: RegenerateStage) -> str:
    """Where the answers are generated: the job's engine, unless the section names another; `none` for the data's."""
    return "none" if spec.data.answered else spec.regenerate.engine or spec.engine.kind


def _select(spec: RegenerateStage, stage: Stage, tokenizer: ChatTokenizer,
            context: int) -> selection.SelectionSummary:
    prompts = list(excluded_prompts(spec.exclude_prompts,
                                    lambda text: stage.event("PromptsNotExcluded", text, warning=True), spec.reads))
    rules = selection.Rules(data=spec.data, benchmark=BenchmarkPrompts.of(prompts),
                            max_prompt_tokens=min(spec.data.max_prompt_tokens, context - 1),
                            turns=spec.regenerate.turns, suite_runs=Runs(prompts), reads=spec.reads)
    summary = selection.select(
        stage.out_dir, rules, tokenizer, stage.pause_point,
        lambda read: stage.progress(read, None, "rows", "reading"))
    stage.event("DataSplit", f"{summary.rows_read} rows read: {summary.rows_selected} to answer, "
                f"{summary.rows_held_out} held out, {summary.rows_quarantined} quarantined, "
                f"{summary.duplicates} duplicates", warning=summary.rows_quarantined > 0)
    if summary.equal_prompts:
        stage.event("EqualPrompts", f"{summary.equal_prompts} of {summary.rows_selected} conversations have the prompt "
                    "of another one, token for token: the chat template shows no difference between them", warning=True)
    usable = Counter(row.source for row in selection.selected(stage.out_dir))
    for words in selection.losses(selection.rejected(stage.out_dir), usable):
        stage.event("RowsLost", words, warning=True)
    if summary.rows_selected == 0:
        reasons = Counter(row.reason for row in selection.rejected(stage.out_dir)).most_common(3)
        why = "; ".join(f"{reason} ({count})" for reason, count in reasons)
        raise NoUsableData(f"of {summary.rows_read} rows read none remains to be answered: {summary.rows_quarantined} "
                           f"quarantined{f' ({why})' if why else ''}, {summary.rows_held_out} held out",
                           "correct data.sources, raise data.max_prompt_tokens, or lower data.held_out_fraction")
    return summary


def _reuse(rows: Rows) -> None:
    """Add to the ledger what earlier jobs have answered. A run that was killed here finds it there and goes on."""
    stage = rows.stage
    for directory in map(Path, rows.spec.reuse):
        if len(rows.ledger) == rows.total:
            return
        with ExitStack() as opened:
            try:
                earlier = opened.enter_context(earlier_answers(directory, rows.target_digest, stage.pause_point))
            except (ArtifactMissing, ArtifactCorrupt, Conflict) as error:
                stage.event("AnswersNotReused", f"{error.message}; its answers are generated again", warning=True)
                continue
            before, turns = len(rows.ledger), rows.unanswered()
            for prompt in turns:
                stage.pause_point()
                pending = turns.in_flight(prompt.row_id)
                answer = earlier.find(rows.key(prompt))
                if answer is not None:
                    row = pending.row
                    rows.ledger.append(answer.model_copy(update={
                        "id": prompt.row_id, "source": row.source, "source_name": row.source_name, "line": row.line,
                        "category": row.category, "seed": prompt.seed, "turn": pending.turn,
                        "generated_by": answer.generated_by or earlier.job_id}))
                turns.mark_done(prompt.row_id)
                stage.progress(len(rows.ledger), rows.total, "rows", "reusing")
            stage.event("AnswersReused", f"{len(rows.ledger) - before:,} of {rows.total:,} answers are those of job "
                                         f"{earlier.job_id}")


def _ask(rows: Rows) -> tuple[int, list[QuarantinedRow]]:
    """Answer every turn that is not in the ledger; return tokens generated, rows that failed."""
    # With `turns: all`, conversations may end before `total` turns are answered.
    if len(rows.ledger) == rows.total or next(rows.unanswered(), None) is None:
        return 0, []
    try:
        with _client(rows) as (client, pause):
            return _answer_rest(rows, client, pause)
    except EngineFailed as error:  # servers of this stage: they are started again, once
        rows.stage.event("ServersRestarted", f"{len(rows.ledger)} of {rows.total} rows are answered; {error.message}",
                         warning=True)
    with _client(rows) as (client, pause):
        return _answer_rest(rows, client, pause)


def _answer_rest(rows: Rows, client: GenerationClient,
                 pause: Callable[[], None]) -> tuple[int, list[QuarantinedRow]]:
    total, resumed = rows.total, len(rows.ledger)
    refused: list[QuarantinedRow] = []
    answered = new_tokens = 0
    turns = rows.unanswered()
    rows.stage.progress(resumed, total, "rows", "answering")
    for outcome in client.answers(turns, pause):
        pending = turns.in_flight(outcome.row_id)
        row = pending.row
        if isinstance(outcome, GeneratedAnswer) and outcome.finish_reason == "stop" and len(outcome.answer_ids) == 1:
            outcome = GenerationFailure(outcome.row_id, "the answer is empty", "empty")
        if isinstance(outcome, GenerationFailure):
            refused.append(QuarantinedRow(source=row.source, line=row.line, reason=outcome.reason, kind=outcome.kind))
            if answered == resumed == 0 and len(refused) >= _MAX_INITIAL_FAILURES:
                raise InvalidInput(f"the first {len(refused)} prompts all failed: {outcome.reason}",
                                   "check regenerate.base_url, served_model and the sampling settings")
        else:
            rows.ledger.append(AnsweredRow(
                id=outcome.row_id, source=row.source, source_name=row.source_name, line=row.line,
                category=row.category, prompt_ids=tuple(outcome.prompt_ids), answer_ids=tuple(outcome.answer_ids),
                finish_reason=outcome.finish_reason, text=outcome.text, sampling=rows.sampling(pending.prompt),
                seed=pending.prompt.seed, ids_exact=outcome.ids_exact, ids_differ=outcome.ids_differ,
                reasoning=outcome.reasoning, tool_calls=outcome.tool_calls, turn=pending.turn,
                key=rows.key(pending.prompt)))
            answered += 1
            new_tokens += len(outcome.answer_ids)
        turns.mark_done(outcome.row_id)
        rows.stage.progress(resumed + answered + len(refused), total, "rows", "answering")
        pause()
    return new_tokens, refused


@contextmanager
def _client(rows: Rows) -> Iterator[tuple[GenerationClient, Callable[[], None]]]:
    """The client of the engine that answers, and the `pause` to call between answers."""
    spec, stage, section, engine = rows.spec, rows.stage, rows.spec.regenerate, _engine_name(rows.spec)
    texts = AnswerRetokenizer(rows.tokenizer)

    def warn(reason: str, text: str) -> None:
        stage.event(reason, text, warning=True)

    client: GenerationClient
    if engine == "sglang":
        stage.event("ServersStarting", "SGLang servers of the target are starting")
        history = ServerHistory(stage.out_dir, digest_model(spec))
        with sglang_servers(spec, stage.out_dir / SERVERS, stage, history) as (own, pause):
            stage.event("ServersReady", f"{len(own.endpoints)} SGLang servers answer")
            endpoint = endpoint_of(own, spec.target, rows.context)
            yield OnlineClient(replace(endpoint, native=True), texts, warn), pause
        return
    if engine == "none":
        stage.event("AnswersGiven", "the answers of the data are used, none is generated; they are cut at "
                    f"{section.max_new_tokens} tokens (regenerate.max_new_tokens)")
        client = AnswersOfData(texts, section.max_new_tokens, rows.context)
    elif engine == "embedded":
        target = load_target(rows.path, spec.target.dtype)
        client = EmbeddedClient(Engine(target, None, max_concurrency=section.concurrency), rows.tokenizer, section,
                                rows.context)
    elif section.engine == "openai" and (sharding := ShardingConfig.from_env()).shard_rows is not None:
        from eyrie_workers.shards import sharded_client  # lazy: on one machine Celery is not needed

        client = sharded_client(sharding, spec, rows.context, rows.path, warn)
    elif section.engine == "openai":
        client = OnlineClient(endpoint_of(section, spec.target, rows.context, spec.reads), texts, warn)
    else:
        client = BatchClient(endpoint_of(section, spec.target, rows.context, spec.reads), texts,
                             stage.out_dir / BATCH_STATE, warn)
    yield client, stage.pause_point


def _finish(rows: Rows, refused: list[QuarantinedRow]) -> RegenerateReport:
    """Put the rows in order, write the quarantine, clear the working files."""
    spec, stage, ledger, summary, turns = rows.spec, rows.stage, rows.ledger, rows.summary, rows.unanswered()
    if len(ledger) == 0:
        raise NoUsableData(f"none of {summary.rows_selected} prompts was answered: {refused[0].reason}",
                           "fix what the endpoint reports, then retry")
    tally, ended, cut = RowTally(), Counter[str](), list[QuarantinedRow]()

    def answered_ids() -> Iterator[str]:
        for row in selection.selected(stage.out_dir):
            state = turns.replay(row)
            if state.answered and state.next is not None:
                ended[state.next.reason if isinstance(state.next, Ended) else REFUSED] += 1
            yield from state.answered

    def wanted(row: AnsweredRow) -> bool:
        return spec.regenerate.truncated == "train" or row.finish_reason == "stop"

    for row in ledger.put_in_order(answered_ids(), wanted):
        if wanted(row):
            tally.add(row)
        else:
            cut.append(QuarantinedRow(source=row.source, line=row.line, kind="truncated",
                                      reason=f"its answer was cut at {len(row.answer_ids)} tokens"))
    answered = tally.finish_reasons.total()
    at_limit = len(cut) + tally.finish_reasons["length"]
    if at_limit > _AT_LIMIT * (answered + len(cut)):
        stage.event("AnswersAtLimit", f"{at_limit} of {answered + len(cut)} answers reached their limit of tokens "
                    "without an end: raise regenerate.max_new_tokens, or, if the answers go on with turns of their "
                    "own, add the token that ends a turn to eos_token_id in the target's generation_config.json",
                    warning=True)
    if answered == 0:
        raise NoUsableData(f"all {len(cut)} answers were cut at {spec.regenerate.max_new_tokens} tokens",
                           "raise regenerate.max_new_tokens, or set regenerate.truncated to train")
    # Failures arrive in any order; the file must not depend on it.
    late = sorted([*refused, *cut], key=lambda row: (row.source, row.line, row.reason))
    quarantined = [*selection.rejected(stage.out_dir), *late]
    write_atomically(stage.out_dir / QUARANTINE, "".join(row.model_dump_json() + "\n" for row in quarantined))
    selection.forget(stage.out_dir)
    if answered < FEW_ROWS:
        stage.event("FewRows", f"{answered} answered rows are left to train on, fewer than {FEW_ROWS} (of "
                    f"{summary.rows_read} read, {summary.rows_held_out} are held out and {len(quarantined)} "
                    "cannot be used): expect a weak drafter, and figures that vary by chance; give more "
                    "conversations in data.sources, or raise data.max_conversations", warning=True)
    sources = {source: kinds["answered"] for source, kinds in tally.outcomes.items()}
    reasons = selection.ByReason()
    for quarantined_row in quarantined:
        tally.outcomes[quarantined_row.source][quarantined_row.kind] += 1
        reasons.add(quarantined_row)
    engine = _engine_name(spec)
    return RegenerateReport(
        starts=ServerHistory(stage.out_dir, digest_model(spec)).starts if engine == "sglang" else 0,
        engine=engine, rows_read=summary.rows_read, rows_answered=answered,
        rows_reused=tally.reused, rows_held_out=summary.rows_held_out,
        rows_quarantined=len(quarantined), duplicates=summary.duplicates, near_duplicates=summary.near_duplicates,
        equal_prompts=summary.equal_prompts,
        outcomes={source: dict(kinds) for source, kinds in tally.outcomes.items()}, conversations_ended=dict(ended),
        rows_retokenised=tally.retokenized, rows_ids_differ=tally.ids_differ, overlaps=summary.overlaps,
        prompt_lengths=lengths(tally.prompt_lengths), answer_lengths=lengths(tally.answer_lengths),
        prompt_tokens=sum(tally.prompt_lengths.elements()), answer_tokens=sum(tally.answer_lengths.elements()),
        finish_reasons=dict(tally.finish_reasons), sources=sources, seconds=0.0, tokens_per_s=0.0,
        quarantined=tuple(quarantined[:_QUARANTINE_REPORTED]),
        quarantine_reasons=reasons.commonest(_QUARANTINE_REPORTED))


if __name__ == "__main__":
    sys.exit(run_program(RegenerateStage, regenerate))
