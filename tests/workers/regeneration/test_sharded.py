"""Regeneration in shards: a real Redis, real prefork workers, an endpoint double; killed, cut off, begun again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import AlreadyWritten, ArtifactStore, StoreOptions
from eyrie_api.chores.broker import SHARD_QUEUE, BrokerUnavailable, TaskLocks
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, InvalidInput, Permanent
from eyrie_workers.regeneration.answers import (
    GeneratedAnswer,
    GenerationFailure,
    GenerationOutcome,
    GenerationRequest,
)
from eyrie_workers.regeneration.sharded import (
    ShardedClient,
    ShardingConfig,
    ShardMessage,
    ShardReport,
    answer_shard,
    read_outcomes,
    shard_name,
    write_outcomes,
)
from eyrie_workers.shards import CeleryShards, broker_url
from eyrie_workers.targets.templates import ChatTokenizer
from tests.servers.processes import kept
from tests.servers.redis import Redis
from tests.tiny import tiny_target
from tests.waiting import wait_for
from tests.workers.regeneration.openai_double import Service, Troubles, answer_text, openai_double, question

LONG_S = 120.0
ROWS, SHARD_ROWS = 22, 4
VISIBILITY_S = 60.0
"""Longer than any test of this file waits: a machine that stops for a while is no dead worker."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def prompts(target: Path, num: int = ROWS) -> list[GenerationRequest]:
    tokenizer = ChatTokenizer(target)
    made = []
    for place in range(num):
        messages = [{"role": "user", "content": f"What is {place}?"}]
        made.append(GenerationRequest(f"{place:032x}", messages, [], tokenizer.render(messages), seed=100 + place,
                                      place=place))
    return made


class World:
    """A cluster's parts: Redis, a store, workers; and the stage's engine."""

    def __init__(self, redis: Redis, directory: Path, target: Path, visibility_s: float) -> None:
        self.redis, self.directory, self.target, self.visibility_s = redis, directory, target, visibility_s
        self.sharding = ShardingConfig(shard_rows=SHARD_ROWS, shard_visibility_timeout_s=visibility_s)
        self.store: ArtifactStore = open_store(str(directory / "store"), StoreOptions())
        self.queue = CeleryShards(redis.url, self.sharding)
        self.warnings: list[str] = []
        self._workers: list[subprocess.Popen[bytes]] = []

    def engine(self, service: Service, **changes: object) -> ShardedClient:
        spec = RegenerateSpec(engine="openai", base_url=service.url, concurrency=2, max_retries=1,
                              sampling=SamplingSpec(temperature=0.7), max_new_tokens=16)
        order = ShardMessage(store_url=self.store.url, prefix="jobs/j/shards", shard="", regenerate=spec,
                           target=TargetSpec(model="org/name"), context=None)
        return ShardedClient(**{  # type: ignore[arg-type]
            "order": order, "store": self.store, "queue": self.queue, "sharding": self.sharding, "poll_s": 0.1,
            "tokenizer_dir": self.target, "warn": lambda reason, _: self.warnings.append(reason)} | changes)

    def worker(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, "EYRIE_BROKER_URL": self.redis.url, "EYRIE_ARTIFACTS_URL": self.store.url,
               "EYRIE_SHARD_VISIBILITY_TIMEOUT_S": str(self.visibility_s), "TMPDIR": str(self.directory)}
        process = subprocess.Popen(kept([sys.executable, "-m", "eyrie_workers.shards", "--concurrency", "2"]), env=env,
                                   start_new_session=True)
        self._workers.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LONG_S)

    def end(self) -> None:
        for process in self._workers:
            self.kill(process)


@pytest.fixture
def world(redis: Redis, tmp_path: Path, target: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(redis, tmp_path, target, getattr(request, "param", VISIBILITY_S))
    yield made
    made.end()


class RunningClient:
    """A stage that regenerates in a thread instead of a program."""

    def __init__(self, engine: ShardedClient, asked: list[GenerationRequest]) -> None:
        self.outcomes: list[GenerationOutcome] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(engine, asked), daemon=True)
        self._thread.start()

    def _ask(self, engine: ShardedClient, asked: list[GenerationRequest]) -> None:
        def pause() -> None:
            if self._stop.is_set():
                raise InterruptedError("asked to stop")

        try:
            for outcome in engine.answers(iter(asked), pause):
                self.outcomes.append(outcome)
        except BaseException as error:  # noqa: BLE001 - re-raised in the test
            self.error = error

    def end(self) -> list[GenerationOutcome]:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.outcomes

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LONG_S)


def assert_answered(outcomes: list[GenerationOutcome], asked: list[GenerationRequest]) -> None:
    assert sorted(outcome.row_id for outcome in outcomes) == [prompt.row_id for prompt in asked], "each exactly once"
    by_id = {outcome.row_id: outcome for outcome in outcomes}
    for prompt in asked:
        answer = by_id[prompt.row_id]
        assert isinstance(answer, GeneratedAnswer)
        assert answer.text == answer_text({"messages": prompt.messages, "seed": prompt.seed})


def test_shards_are_answered_by_workers_and_taken_in_whole(world: World, target: Path) -> None:
    asked = prompts(target)
    with openai_double(Troubles(decline={"What is 7?": 400})) as service:
        world.worker()
        outcomes = RunningClient(world.engine(service), asked).end()
        assert sum(service.attempts.values()) == ROWS
    assert [o.row_id for o in outcomes if isinstance(o, GenerationFailure)] == [asked[7].row_id]
    assert_answered([o for o in outcomes if isinstance(o, GeneratedAnswer)], [*asked[:7], *asked[8:]])
    assert world.warnings == ["TokenIdsNotReturned"], "one event, not one per shard"
    assert list(world.store.list()) == [], "nothing is left lying"
    assert world.queue.length() == 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [10.0], indirect=True)
def test_a_shard_whose_worker_was_killed_is_answered_by_another_and_finished_ones_are_not_asked_again(
        world: World, target: Path) -> None:
    asked, gate = prompts(target), threading.Event()
    with openai_double(Troubles(gate=gate, before_gate=3 * SHARD_ROWS)) as service:
        running = RunningClient(world.engine(service), asked)
        first = world.worker()  # its two processes finish two shards at least before all they ask is held back
        wait_for(lambda: len(running.outcomes) >= 2 * SHARD_ROWS and service.at_once > 0, "two shards are answered")
        world.kill(first)
        finished = {outcome.row_id for outcome in running.outcomes}
        gate.set()
        world.worker()
        outcomes = running.end()
    assert_answered(outcomes, asked)
    for prompt in asked:
        if prompt.row_id in finished:
            assert service.attempts[question({"messages": prompt.messages})] == 1


@pytest.mark.slow
@pytest.mark.parametrize("world", [12.0], indirect=True)
def test_a_shard_that_takes_longer_than_the_visibility_timeout_is_not_asked_twice(world: World, target: Path) -> None:
    asked, gate = prompts(target, SHARD_ROWS), threading.Event()
    with openai_double(Troubles(gate=gate)) as service:
        running = RunningClient(world.engine(service), asked)
        world.worker()
        world.worker()  # idle, and ready to take what is handed out again
        wait_for(lambda: service.at_once == 2, "two requests")
        time.sleep(1.5 * world.visibility_s)  # longer than a message stays invisible
        gate.set()
        assert_answered(running.end(), asked)
        assert set(service.attempts.values()) == {1}


def test_a_stage_that_was_stopped_goes_on_with_what_its_workers_have_finished_since(
        world: World, target: Path) -> None:
    asked, gate = prompts(target, 2 * SHARD_ROWS), threading.Event()
    with openai_double(Troubles(gate=gate)) as service:
        running = RunningClient(world.engine(service), asked)
        world.worker()
        # Two at once of each shard: a worker that has not read its prompts when the stage stops finds none.
        wait_for(lambda: service.at_once == 4, "requests of both shards")
        running.stop()
        assert isinstance(running.error, InterruptedError)
        gate.set()
        wait_for(lambda: len(list(world.store.list("jobs/j/shards/done"))) == 2, "both shards are done")
        again = RunningClient(world.engine(service), asked)
        assert_answered(again.end(), asked)
        assert set(service.attempts.values()) == {1}


def test_messages_that_a_redis_forgot_are_sent_again(world: World, target: Path) -> None:
    asked = prompts(target)
    with openai_double() as service:
        running = RunningClient(world.engine(service, resend_after_s=0.5), asked)
        wait_for(lambda: world.queue.length() == 6, "six messages")
        world.redis.kill()
        world.redis.start()
        world.worker()
        wait_for(lambda: not running._thread.is_alive(), "the stage ends")
        if isinstance(running.error, BrokerUnavailable):  # it looked while Redis was away: the stage is retried
            running = RunningClient(world.engine(service, resend_after_s=0.5), asked)
        assert_answered(running.end(), asked)


def test_a_shard_that_can_never_be_answered_ends_the_stage_with_the_reason(world: World, target: Path) -> None:
    with openai_double(Troubles(api_key="sesame")) as service:
        world.worker()
        with pytest.raises(Permanent, match="401"):
            RunningClient(world.engine(service), prompts(target)).end()
        service.troubles.api_key = None
        assert_answered(RunningClient(world.engine(service), prompts(target)).end(), prompts(target))


def test_an_endpoint_that_is_away_for_a_while_is_asked_again(world: World, target: Path) -> None:
    with openai_double(Troubles(everything=503)) as service:
        running = RunningClient(world.engine(service), prompts(target, SHARD_ROWS))
        world.worker()
        wait_for(lambda: len(service.bodies) >= 2, "two requests")
        service.troubles.everything = None
        assert_answered(running.end(), prompts(target, SHARD_ROWS))


# Without workers.


def an_order(store: ArtifactStore, service_url: str, asked: list[GenerationRequest]) -> ShardMessage:
    spec = RegenerateSpec(engine="openai", base_url=service_url, concurrency=2)
    order = ShardMessage(store_url=store.url, prefix="p", shard="", regenerate=spec,
                           target=TargetSpec(model="org/name"),
                       context=None)
    return order.model_copy(update={"shard": shard_name(order, 0, asked)})


def test_the_second_of_two_workers_on_one_shard_writes_nothing(tmp_path: Path, target: Path) -> None:
    store, asked = open_store(str(tmp_path), StoreOptions()), prompts(target, 3)
    with openai_double() as service:
        order = an_order(store, service.url, asked)
        engine = ShardedClient(order, store, queue=None, sharding=ShardingConfig(shard_rows=8),  # type: ignore[arg-type]
                               tokenizer_dir=target, warn=lambda *_: None)
        engine.publish_tokenizer()
        assert not answer_shard(order, store, tmp_path / "cache", lambda: None), "its input was taken in and cleared"
        store.write(order.key("in"), "".join(json.dumps(vars(prompt)) + "\n" for prompt in asked).encode())
        overtaken = iter([True])

        def overtake() -> None:
            if next(overtaken, False):
                store.write_once(order.key("done"), b"the other's\n")

        assert not answer_shard(order, store, tmp_path / "cache", overtake)
        assert store.read(order.key("done")) == b"the other's\n"
        with pytest.raises(AlreadyWritten):
            store.write_once(order.key("done"), b"ours")
        assert not answer_shard(order, store, tmp_path / "cache", lambda: None)


def test_the_name_of_a_shard_says_what_is_asked_and_how(target: Path) -> None:
    asked = prompts(target, 3)
    store = open_store("/tmp", StoreOptions())
    name = shard_name(an_order(store, "http://a/v1", asked), 0, asked)
    assert name == shard_name(an_order(store, "http://a/v1", asked), 0, prompts(target, 3))
    assert name != shard_name(an_order(store, "http://b/v1", asked), 0, asked)
    assert name != shard_name(an_order(store, "http://a/v1", asked), 0, asked[:2])


def test_outcomes_survive_being_written_down_and_torn_ones_are_reported() -> None:
    report = ShardReport(shard="0-a", num_outcomes=2, warnings=(("Why", "because"),))
    outcomes = [GeneratedAnswer("a", [1], [2, 3], "stop", "x \u2028 \u00e9", True), GenerationFailure("b", "no")]
    data = write_outcomes(report, outcomes)
    assert read_outcomes(data, "k") == (report, outcomes)
    for torn in (b"", data[: len(data) // 2], data.rsplit(b"\n", 2)[0] + b"\n", b"{}\n"):
        with pytest.raises(ArtifactCorrupt):
            read_outcomes(torn, "k")


def test_holds_keep_a_second_message_away_and_let_the_first_come_back(redis: Redis) -> None:
    locks = TaskLocks(redis.url, visibility_timeout_s=60.0)
    assert locks.take("x", "first")
    assert not locks.take("x", "second")
    assert locks.take("x", "first"), "the same message, handed out again"
    locks.renew("x", "first")
    assert locks.is_held("x")
    locks.release("x")
    assert not locks.is_held("x")
    assert locks.take("x", "second")
    redis.kill()
    with pytest.raises(BrokerUnavailable):
        locks.take("x", "third")


def test_what_is_not_set_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYRIE_BROKER_URL", raising=False)
    with pytest.raises(InvalidInput, match="broker"):
        broker_url()
    assert ShardingConfig.from_env({}).shard_rows is None
    assert ShardingConfig.from_env({"EYRIE_SHARD_ROWS": "64"}).shard_rows == 64
    with pytest.raises(InvalidInput, match="EYRIE_SHARD_ROWS = '0'"):
        ShardingConfig.from_env({"EYRIE_SHARD_ROWS": "0"})


def test_the_queue_has_the_name_that_scalers_use(world: World, target: Path) -> None:
    """KEDA asks Redis itself: LLEN of this list."""
    import redis as client

    world.queue.send(an_order(world.store, "http://127.0.0.1:1/v1", prompts(target, 1)))
    assert client.Redis.from_url(world.redis.url).llen(SHARD_QUEUE) == world.queue.length() == 1
    assert SHARD_QUEUE == "eyrie-shards"
    assert not world.queue.is_held(an_order(world.store, "http://127.0.0.1:1/v1", prompts(target, 1)))
