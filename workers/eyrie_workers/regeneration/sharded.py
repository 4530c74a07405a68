"""Distributed regeneration: shards of prompts, each answered by one worker. The Celery transport is in `shards`.

A request to an endpoint is mostly waiting: one CPU worker keeps hundreds of them in flight, and a dozen workers keep a
pool of GPU endpoints busy. The stage splits its prompts into shards by their position in the selection, writes each to
the artifact store, sends a message with its name, and reads the answers as shards finish:

    <prefix>/tokenizer/...          to tokenize answers of endpoints that return text only
    <prefix>/in/<shard>.jsonl       prompts
    <prefix>/done/<shard>.jsonl     a report, then one line per outcome: one conditional write
    <prefix>/failed/<shard>.json    a permanent error

A shard's name consists of its number and a digest of its prompts and their generation parameters. A message may
therefore be delivered twice, even to two workers at once: a worker that finds the shard done does nothing, and of two
that finish the second fails its conditional write. A stage that was killed sends only the shards that are not done. A
lost message is sent again when no shard has finished for `resend_after_s`, the queue is empty and no worker holds the
shard's lock.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import Field

from eyrie_api.artifacts import digest_bytes, digest_model
from eyrie_api.artifacts.store import AlreadyWritten, ArtifactStore, from_variables
from eyrie_api.contract.model import FromVariables, Frozen
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError, Permanent, Transient
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    GeneratedAnswer,
    GenerationFailure,
    GenerationOutcome,
    GenerationRequest,
    WaitingRequests,
    sleep_in_slices,
)
from eyrie_workers.regeneration.endpoint import endpoint_of
from eyrie_workers.regeneration.online import OnlineClient
from eyrie_workers.targets.templates import ChatTokenizer

_LARGEST_TOKENIZER_FILE = 64 * 2**20
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


class ShardingConfig(FromVariables):
    """Settings of a deployment's shards, read from EYRIE_SHARD_* by the stage and by the shard workers."""

    shard_rows: int | None = Field(None, ge=1, le=100_000)
    """Prompts per shard, 64 for example; None disables sharding. A worker that dies loses the answers of its shard
    only."""

    shard_window: int = Field(256, ge=1, le=100_000)
    """Most shards sent whose answers have not been read; bounds the memory of the stage."""

    shard_visibility_timeout_s: float = Field(120.0, ge=2.0)
    """Seconds without a renewal of its lock after which a shard is delivered to another worker."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "ShardingConfig":
        """Read EYRIE_SHARD_ROWS and so on. Raises InvalidInput naming the invalid variable."""
        return from_variables(cls, "EYRIE_", environ)


class ShardMessage(Frozen):
    """A message: the location of a shard and its generation parameters. It names the variable of the API key and never
    contains the key."""

    store_url: str
    prefix: str
    shard: str
    target: TargetSpec
    regenerate: RegenerateSpec
    context: int | None
    reads: ReadRules | None = None

    def key(self, kind: str) -> str:
        """Key of one of its objects: `in`, `done` or `failed`."""
        return f"{self.prefix}/{kind}/{self.shard}.{'json' if kind == 'failed' else 'jsonl'}"


class ShardReport(Frozen):
    """First line of a finished shard."""

    shard: str
    num_outcomes: int
    warnings: tuple[tuple[str, str], ...]


class ShardFailure(Frozen):
    """A permanent error of a shard: the content of its `failed` object."""

    reason: str
    message: str
    hint: str


class ShardQueue(Protocol):
    """Delivers shards to workers. Its methods raise Transient while the broker is unavailable."""

    def send(self, order: ShardMessage) -> None:
        """Enqueue a shard."""

    def length(self) -> int:
        """Number of messages that no worker has received."""

    def is_held(self, order: ShardMessage) -> bool:
        """Whether a worker holds the shard's lock."""


@dataclass
class ShardedClient:
    """`GenerationClient` over shard workers, used by the stage."""

    order: ShardMessage  # the message of every shard, with an empty `shard`
    store: ArtifactStore
    queue: ShardQueue
    sharding: ShardingConfig
    tokenizer_dir: Path
    warn: Callable[[str, str], None]
    poll_s: float = 1.0
    resend_after_s: float = 300.0
    _open: dict[str, frozenset[str]] = field(default_factory=dict)
    """Shards sent whose answers have not been read, each with the ids of its rows."""

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        """See `GenerationClient`. Raises Permanent when a worker has reported that a shard cannot be answered."""
        self.publish_tokenizer()
        try:
            yield from self._answers(prompts, pause)
            self.store.delete_all(self.order.prefix)
        finally:
            # After a stop or an error, shards are left open. Deleting their prompts turns queued messages into no-ops.
            # A worker that has already read its prompts still writes `done`, which the next run finds.
            with suppress(EyrieError):
                for shard in self._open:
                    self.store.delete(self._order(shard).key("in"))

    def _answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        shard_rows = self.sharding.shard_rows or 1
        waiting = WaitingRequests(prompts)
        last_progress_s, warned = time.monotonic(), set[str]()
        while True:
            while len(self._open) < self.sharding.shard_window and (group := next_shard(waiting, shard_rows)):
                pause()
                self._submit(group[0].place // shard_rows, group)
            if not self._open:
                return
            names = (Path(stored.key).stem for stored in self.store.list(f"{self.order.prefix}/done"))
            finished = [name for name in names if name in self._open]
            for shard in finished:
                key = self._order(shard).key("done")
                report, outcomes = read_outcomes(self.store.read(key), key)
                if report.shard != shard or {outcome.row_id for outcome in outcomes} != self._open[shard]:
                    self.store.delete(key)
                    raise ArtifactCorrupt(f"{key} answers other prompts than were sent",
                                          "retry the job: it is sent anew")
                for reason, text in report.warnings:
                    if reason not in warned:
                        warned.add(reason)
                        self.warn(reason, text)
                yield from outcomes
                # The consumer has stored every outcome when it requests the next one: the objects can be deleted.
                for kind in ("in", "done"):
                    self.store.delete(self._order(shard).key(kind))
                del self._open[shard]
            if finished:
                last_progress_s = time.monotonic()
                continue
            for stored in self.store.list(f"{self.order.prefix}/failed"):
                if (name := Path(stored.key).stem) in self._open:
                    failure = ShardFailure.model_validate_json(self.store.read(stored.key))
                    raise Permanent(f"shard {name}: {failure.reason}: {failure.message}", failure.hint)
            if time.monotonic() - last_progress_s > self.resend_after_s:
                # A message that waits in the queue, or whose shard a worker holds, is not lost.
                lost = [] if self.queue.length() > 0 else [
                    order for order in map(self._order, sorted(self._open)) if not self.queue.is_held(order)]
                if lost:
                    self.warn("ShardsSentAgain", f"nothing has come for {self.resend_after_s:g} s: {len(lost)} shards "
                              "that no worker holds are sent again")
                for order in lost:
                    self.queue.send(order)
                last_progress_s = time.monotonic()
            sleep_in_slices(self.poll_s, pause)

    def _submit(self, number: int, prompts: list[GenerationRequest]) -> None:
        order = self._order(shard_name(self.order, number, prompts))
        self._open[order.shard] = frozenset(prompt.row_id for prompt in prompts)
        self.store.delete(order.key("failed"))  # of an earlier run: it would end this one
        # A shard that is done needs no message: it was answered for an earlier run that was killed.
        if self.store.stat(order.key("done")) is None:
            lines = "".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts)
            self.store.write(order.key("in"), lines.encode())
            self.queue.send(order)

    def publish_tokenizer(self) -> None:
        for path in sorted(path for pattern in _TOKENIZER_FILES for path in self.tokenizer_dir.glob(pattern)):
            if path.stat().st_size <= _LARGEST_TOKENIZER_FILE:
                self.store.upload(f"{self.order.prefix}/tokenizer/{path.name}", path)

    def _order(self, shard: str) -> ShardMessage:
        return self.order.model_copy(update={"shard": shard})


def next_shard(waiting: WaitingRequests, shard_rows: int) -> list[GenerationRequest]:
    """The next prompts, all of one shard; empty while no prompt is available."""
    numbers = set[int]()

    def is_of_shard(prompt: GenerationRequest) -> bool:
        numbers.add(prompt.place // shard_rows)
        return len(numbers) == 1

    return waiting.take_while(is_of_shard)


def shard_name(order: ShardMessage, number: int, prompts: list[GenerationRequest]) -> str:
    """`<number>-<digest>`; the digest is of prompts and generation parameters, so other parameters give another shard.
    """
    how = digest_model(order.regenerate) + digest_model(order.target)
    asked = json.dumps([[prompt.row_id, prompt.prompt_ids, prompt.seed] for prompt in prompts])
    return f"{number:06d}-{hashlib.sha256((how + asked).encode()).hexdigest()[:16]}"


def answer_shard(order: ShardMessage, store: ArtifactStore, cache: Path, pause: Callable[[], None]) -> bool:
    """Answer one shard in a worker and write its outcomes. False when there was nothing to do, or it failed for good.

    cache   directory for tokenizers, used by this worker only
    pause   called several times a second while requests are in flight

    Raises Transient when the endpoint stays unavailable. A permanent error is written to `failed` instead of raised.
    """
    try:
        if store.stat(order.key("done")) is not None:
            return False
        try:
            prompts = [GenerationRequest(**json.loads(line)) for line in store.read(order.key("in")).splitlines()]
        except ArtifactMissing:  # the stage has read the answers or has stopped, and deleted the prompts
            return False
        warnings: list[tuple[str, str]] = []
        tokenizer = AnswerRetokenizer(ChatTokenizer(_tokenizer(order, store, cache)))
        engine = OnlineClient(endpoint_of(order.regenerate, order.target, order.context, order.reads), tokenizer,
                              lambda reason, text: warnings.append((reason, text)))
        outcomes = {outcome.row_id: outcome for outcome in engine.answers(iter(prompts), pause)}
        report = ShardReport(shard=order.shard, num_outcomes=len(outcomes), warnings=tuple(warnings))
        store.write_once(order.key("done"), write_outcomes(report, [outcomes[p.row_id] for p in prompts]))
    except AlreadyWritten:
        return False  # race: another worker answered the same shard and finished first
    except Transient:
        raise
    except EyrieError as error:
        failure = ShardFailure(reason=error.reason, message=error.message, hint=error.hint)
        store.write(order.key("failed"), failure.model_dump_json().encode())
        return False
    return True


def write_outcomes(report: ShardReport, outcomes: list[GenerationOutcome]) -> bytes:
    lines = [report.model_dump_json(), *(
        json.dumps({"answered": isinstance(outcome, GeneratedAnswer), **asdict(outcome)}) for outcome in outcomes)]
    return "".join(line + "\n" for line in lines).encode()


def read_outcomes(data: bytes, key: str) -> tuple[ShardReport, list[GenerationOutcome]]:
    """The inverse of `write_outcomes`. Raises ArtifactCorrupt."""
    try:
        first, *rest = data.splitlines()
        report = ShardReport.model_validate_json(first)
        outcomes: list[GenerationOutcome] = []
        for fields in map(json.loads, rest):
            outcomes.append(GeneratedAnswer(**fields | {"tool_calls": tuple(fields["tool_calls"])})
                            if fields.pop("answered") else GenerationFailure(**fields))
        if len(outcomes) != report.num_outcomes:
            raise ValueError(f"{len(outcomes)} outcomes instead of {report.num_outcomes}")
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactCorrupt(f"{key} is not a finished shard: {error}", "delete it and retry the job") from error
    return report, outcomes


def _tokenizer(order: ShardMessage, store: ArtifactStore, cache: Path) -> Path:
    """The tokenizer's directory, downloaded once per worker and job. `.whole` marks a complete download."""
    directory = cache / digest_bytes(f"{order.store_url} {order.prefix}".encode()).removeprefix("sha256:")[:16]
    if not (directory / ".whole").exists():
        for stored in store.list(f"{order.prefix}/tokenizer"):
            store.download(stored.key, directory / Path(stored.key).name)
        (directory / ".whole").touch()
    return directory
