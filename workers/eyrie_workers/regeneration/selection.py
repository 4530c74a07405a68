"""Sorts every input row, before any is answered: selected, held out, quarantined or a duplicate.

    read, mix -> malformed? quarantine -> duplicate id? count -> cannot be rendered, or too long? quarantine
              -> held out by hash? held_out.jsonl -> overlaps a benchmark? quarantine -> near duplicate? count
              -> selection.jsonl

The selection is complete when `selection.json` exists, which is written last. A restarted stage reads it instead of the
sources, so it answers the same rows even if a source has changed, and the total is known from the first answer, for the
ETA. In a pod whose job leaves large files in an artifact store, selection.jsonl is there (`stored_files`). Rows are
streamed; only the ids seen (and the signatures of near-duplicate detection) are kept in memory.
"""

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TextIO, TypeVar

from pydantic import ValidationError

from eyrie_api.artifacts import write_model
from eyrie_api.contract.data import DataSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.reports import QuarantinedRow, QuarantineKind, QuarantineReason, SampledRow
from eyrie_api.conversation import NO_ANSWER, Conversation
from eyrie_api.errors import InvalidInput, NoChatTemplate
from eyrie_workers.catalog import SELECTION_FILE
from eyrie_workers.data.overlap import RUN_WORDS, BenchmarkPrompts, NearDuplicates, Runs, is_held_out
from eyrie_workers.data.readers import check_source, read_conversations
from eyrie_workers.data.rows import SelectedRow
from eyrie_workers.regeneration.conversation_replay import first_turn, num_turns
from eyrie_workers.stored_files import open_binary, put_in_place
from eyrie_workers.targets.templates import ChatTokenizer

T = TypeVar("T")


def mix(streams: Sequence[Iterator[T | QuarantinedRow]], weights: Sequence[float], seed: int) \
        -> Iterator[T | QuarantinedRow]:
    """Rows of all streams in one, lazily; rows of one stream keep their order.

    Each position is drawn among the streams that still have rows, with their weights, so any prefix has the same
    expected shares. Unreadable rows do not count as a position: a source with many of them keeps its share.
    """
    rng = Random(f"mix:{seed}")
    live = list(range(len(streams)))
    while live:
        source = rng.choices(live, [weights[number] for number in live])[0]
        for row in streams[source]:
            yield row
            if not isinstance(row, QuarantinedRow):
                break
        else:
            live.remove(source)


HELD_OUT = "held_out.jsonl"
SELECTED = SELECTION_FILE
REJECTED = "selection.quarantine.jsonl"
SUMMARY = "selection.json"
REPORTED_LOSS = 0.05  # share of a source's rows beyond which their loss is reported before anything is answered
_SAMPLES = 3
_NUMBER = re.compile(r"\d+")


class SelectionSummary(Frozen):
    """Counts of the selection, written last: the file exists only when the selection is complete."""

    rows_read: int = 0
    rows_selected: int = 0
    rows_held_out: int = 0
    rows_quarantined: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    turns_selected: int = 0
    """Upper bound of the turns to answer; larger than `rows_selected` with `turns: all`."""

    equal_prompts: int = 0
    """Selected rows whose prompt has the tokens of an earlier row's prompt: the template shows no difference."""

    overlaps: dict[str, int] = {}


@dataclass(frozen=True)
class Rules:
    """The criteria of the selection."""

    data: DataSpec
    benchmark: BenchmarkPrompts
    max_prompt_tokens: int  # the spec's limit, or the target's context minus one token if that is less
    turns: str = "last"
    suite_runs: Runs = field(default_factory=Runs)  # word n-grams of the benchmark suites' prompts
    reads: ReadRules | None = None


def select(directory: Path, rules: Rules, tokenizer: ChatTokenizer, pause: Callable[[], None],
           progress: Callable[[int], None]) -> SelectionSummary:
    """Read the sources and write the selection into `directory`, unless it exists already. Raises InvalidInput when a
    source cannot be opened, NoChatTemplate when the target has no chat template."""
    try:
        return SelectionSummary.model_validate_json((directory / SUMMARY).read_bytes())
    except (FileNotFoundError, ValidationError):
        pass
    for source in rules.data.sources:
        check_source(source, rules.reads)
    with _Divider(directory, rules, tokenizer) as divider:
        for row in _drawn(rules):
            pause()
            divider.take(row)
            progress(divider.rows_read)
    summary = divider.summary()
    # A second pass over the selection: rows that share a word n-gram with a held-out prompt.
    with (directory / HELD_OUT).open("rb") as file:
        runs = Runs(json.loads(line)["messages"] for line in file)
    shared = 0
    for selected_row in selected(directory):
        pause()
        shared += runs.overlap(selected_row.messages)
    if shared:
        summary = summary.model_copy(update={"overlaps": summary.overlaps | {"held-out": shared}})
    write_model(directory / SUMMARY, summary)
    return summary


def selected(directory: Path) -> Iterator[SelectedRow]:
    with open_binary(directory / SELECTED) as file:
        for line in file:
            yield SelectedRow.model_validate_json(line)


def rejected(directory: Path) -> Iterator[QuarantinedRow]:
    with (directory / REJECTED).open("rb") as file:
        for line in file:
            yield QuarantinedRow.model_validate_json(line)


class ByReason:
    """Unusable rows counted per reason, with the first `_SAMPLES` of each."""

    def __init__(self) -> None:
        self._rows: Counter[tuple[QuarantineKind, str]] = Counter()
        self._samples: dict[tuple[QuarantineKind, str], list[SampledRow]] = defaultdict(list)

    @property
    def rows(self) -> int:
        return self._rows.total()

    def add(self, row: QuarantinedRow) -> None:
        key = (row.kind, _NUMBER.sub("N", row.reason))
        self._rows[key] += 1
        if len(self._samples[key]) < _SAMPLES:
            self._samples[key].append(SampledRow(source=row.source, line=row.line))

    def commonest(self, most: int) -> tuple[QuarantineReason, ...]:
        """Reasons by their number of rows; of equal ones, the first seen first."""
        return tuple(QuarantineReason(reason=reason, kind=kind, rows=rows, samples=tuple(self._samples[kind, reason]))
                     for (kind, reason), rows in self._rows.most_common(most))


def losses(rejected_rows: Iterable[QuarantinedRow], usable: Mapping[str, int]) -> list[str]:
    """A sentence for each source that loses more than `REPORTED_LOSS` of its rows: reasons by number, with the first
    lines of each. Pure.

    usable   rows to answer, by source
    """
    by_source: dict[str, ByReason] = defaultdict(ByReason)
    for row in rejected_rows:
        if row.kind in ("malformed", "too-long"):
            by_source[row.source].add(row)
    sentences = []
    for source, reasons in by_source.items():
        lost = reasons.rows
        total = lost + usable.get(source, 0)
        if lost > REPORTED_LOSS * total:
            words = "; ".join(
                f"{reason.reason} ({reason.rows} rows, lines {', '.join(str(row.line) for row in reason.samples)})"
                for reason in reasons.commonest(5))
            sentences.append(f"{source}: {lost} rows ({lost / total:.0%}) cannot be used, {total - lost} are answered: "
                         f"{words}")
    return sentences


def forget(directory: Path) -> None:
    """Remove the working files. The summary goes first: after a kill in between, the next run selects again."""
    for name in (SUMMARY, SELECTED, REJECTED):
        (directory / name).unlink(missing_ok=True)


def _drawn(rules: Rules) -> Iterator[Conversation | QuarantinedRow]:
    """The mixture of the sources, ended after `max_conversations` usable rows."""
    data = rules.data
    streams = [_named(read_conversations(source, rules.reads), name)
               for source, name in zip(data.sources, data.source_names, strict=True)]
    left = data.max_conversations
    for row in mix(streams, [source.weight for source in data.sources], data.seed):
        yield row
        if isinstance(row, Conversation):
            left -= 1
            if left == 0:
                return


def _named(rows: Iterator[Conversation | QuarantinedRow], name: str) -> Iterator[Conversation | QuarantinedRow]:
    for row in rows:
        yield row if isinstance(row, QuarantinedRow) else replace(row, source_name=name)


class _Divider:
    """Writes each row to its file. Temporary files are renamed on success and deleted on an exception."""

    def __init__(self, directory: Path, rules: Rules, tokenizer: ChatTokenizer) -> None:
        self._directory, self._rules, self._tokenizer = directory, rules, tokenizer
        self._sources = {source.path: source for source in rules.data.sources}
        self._files: dict[str, TextIO] = {}
        self._written = {SELECTED: 0, HELD_OUT: 0, REJECTED: 0}
        self._seen: set[bytes] = set()
        self._prompts: set[bytes] = set()  # digests of the token ids of selected prompts
        self._duplicates = self._near = self._turns = self._overlaps = 0
        threshold = rules.data.near_duplicates
        self._like = None if threshold is None else NearDuplicates(threshold)

    @property
    def rows_read(self) -> int:
        return sum(self._written.values()) + self._duplicates + self._near

    def __enter__(self) -> "_Divider":
        self._files = {name: self._aside(name).open("w", encoding="utf-8") for name in self._written}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if kind is None:
                # The selection alone grows with the data; held-out prompts are read by stages that have their file.
                place = put_in_place if name == SELECTED else os.replace
                place(self._aside(name), self._directory / name)
            else:
                self._aside(name).unlink()

    def summary(self) -> SelectionSummary:
        return SelectionSummary(rows_read=self.rows_read, rows_selected=self._written[SELECTED],
                                rows_held_out=self._written[HELD_OUT], rows_quarantined=self._written[REJECTED],
                                duplicates=self._duplicates, near_duplicates=self._near, turns_selected=self._turns,
                                equal_prompts=self._written[SELECTED] - len(self._prompts),
                                overlaps={"suites": self._overlaps} if self._overlaps else {})

    def take(self, row: Conversation | QuarantinedRow) -> None:
        if isinstance(row, QuarantinedRow):
            return self._write(REJECTED, row.model_dump())
        if (key := bytes.fromhex(row.id)) in self._seen:
            self._duplicates += 1
            return None
        self._seen.add(key)
        # As the template has it, also where an endpoint renders the messages.
        as_system = {"role": "system"} if not self._tokenizer.form.developer else {}
        messages = [message | as_system if message["role"] == "developer" else message for message in row.prompt]
        tools, source = list(row.tools), self._sources[row.source]
        if row.answer is None and self._rules.data.answered:
            return self._reject(row, NO_ANSWER)
        try:
            prompt_ids = self._tokenizer.render(first_turn(messages, self._rules.turns), tools or None,
                                                variables=source.chat_template_kwargs)
        except NoChatTemplate:
            raise
        except InvalidInput as error:
            return self._reject(row, error.message)
        if len(prompt_ids) > self._rules.max_prompt_tokens:
            return self._reject(row, f"prompt of {len(prompt_ids)} tokens, more than {self._rules.max_prompt_tokens}",
                                "too-long")
        if is_held_out(row.prompt, self._rules.data.held_out_fraction):
            return self._write(HELD_OUT, {"id": row.id, "messages": messages, **({"tools": tools} if tools else {}),
                                          "category": row.category})
        if self._rules.benchmark.overlap(row.prompt):
            return self._reject(row, "its prompt occurs in a benchmark suite", "benchmark")
        overlaps = self._rules.suite_runs.overlap(row.prompt)
        if overlaps and self._rules.data.overlaps == "drop":
            return self._reject(row, f"{RUN_WORDS} words in a row occur in a benchmark suite", "benchmark")
        if self._like is not None:
            asked = "\n".join(message["content"] for message in messages if message["role"] == "user")
            if self._like.seen(self._tokenizer.encode(asked)):
                self._near += 1
                return None
        self._overlaps += overlaps
        self._turns += num_turns(messages, self._rules.turns)
        self._prompts.add(hashlib.sha256(repr(prompt_ids).encode()).digest()[:16])
        return self._write(SELECTED, {"id": row.id, "source": row.source, "source_name": row.source_name,
                                      "line": row.line, "category": row.category, "messages": messages,
                                      "tools": tools, "prompt_ids": prompt_ids,
                                      "chat_template_kwargs": source.chat_template_kwargs,
                                      "max_new_tokens": source.max_new_tokens,
                                      **({"answer": row.answer} if self._rules.data.answered else {})})

    def _reject(self, row: Conversation, reason: str, kind: QuarantineKind = "malformed") -> None:
        self._write(REJECTED, QuarantinedRow(source=row.source, line=row.line, reason=reason, kind=kind).model_dump())

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(value) + "\n")
        self._written[name] += 1

    def _aside(self, name: str) -> Path:
        return self._directory / f".{name}.part"
