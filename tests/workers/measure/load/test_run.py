"""Complete load tests against the stub server, on real sockets."""

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from eyrie_api.contract.load import LoadLevel, LoadReport, LoadSpec, ServiceLevel
from eyrie_api.errors import InvalidInput
from eyrie_workers.measure.load.client import EndpointUnusable, LoadClient, LoadEndpoint, LoadRequest, RequestResult
from eyrie_workers.measure.load.report_statistics import LevelResults
from eyrie_workers.measure.load.run import run_load, run_load_in_turn
from eyrie_workers.measure.load.schedule import RequestLevel, arrivals
from tests.servers.stub_openai_server import DIALECTS, FAULTS, Timing
from tests.workers.measure.load.servers import fault, prompts, replying, responding

ONE_USER = LoadSpec(concurrencies=(1,), requests=4, max_new_tokens=9)
HANGS = ("stall", "silence")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with responding(tmp_path_factory.mktemp("responder"), Timing(bundle=3)) as address:
        yield address


@pytest.fixture(scope="module")
def plain_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with responding(tmp_path_factory.mktemp("plain")) as address:
        yield address


def only(levels: tuple[LoadLevel, ...]) -> LoadLevel:
    (level,) = levels
    return level


def server_notes(report: LoadReport) -> list[str]:
    """The notes about servers, without those about the generator and its machine, which depend on their load."""
    return [note for note in report.notes if ": the server " in note]


def test_256_streams_complete_with_every_token_and_round_counted(url: str) -> None:
    spec = LoadSpec(concurrencies=(256,), requests=512, max_new_tokens=24, warmup_requests=0)
    level = only(run_load([LoadEndpoint("candidate", url, "m")], prompts(64), spec).levels)
    assert (level.total.requests, level.total.completed, level.total.failed) == (512, 512, {})
    assert level.total.output_tokens == 512 * 24
    assert level.total.accepted_histogram == (0, 0, 512 * 8)
    assert level.total.tau == 3.0
    assert sum(part.completed for part in level.by_category.values()) == 512


def test_servers_in_turn_are_compared_with_the_baseline_before_and_after_them(url: str, plain_url: str) -> None:
    order: list[str] = []

    def ready(name: str) -> LoadEndpoint:
        order.append(name)
        return LoadEndpoint(name, plain_url if name == "off" else url, "m")

    done: list[tuple[int, int]] = []
    report = run_load_in_turn(["off", "candidate", "incumbent"], ready, prompts(2), ONE_USER,
                              on_progress=lambda so_far, total, _: done.append((so_far, total)))
    assert order == ["off", "candidate", "incumbent", "off"]
    assert {level.variant: level.total.completed for level in report.levels} == {
        "off": 8, "candidate": 4, "incumbent": 4}
    assert [(one.variant, one.baseline, one.compared) for one in report.comparisons] == [
        ("candidate", "off", 2), ("incumbent", "off", 2)]
    assert done[-1][0] == done[-1][1]
    assert done == sorted(done)


def test_every_fault_is_counted_by_its_reason_and_other_requests_complete(url: str) -> None:
    kinds = [kind for kind in FAULTS if kind not in HANGS]
    spec = LoadSpec(concurrencies=(8,), requests=2 * (len(kinds) + 1), max_new_tokens=24, warmup_requests=0,
                    timeout_s=20.0)
    report = run_load([LoadEndpoint("candidate", url, "m")], [*prompts(1, "t"), *map(fault, kinds)], spec)
    total = only(report.levels).total
    assert total.completed >= 2  # the prompts in turn by category: one of the two has a single prompt
    assert total.requests - total.completed == sum(total.failed.values())
    # Once in fifty times aiohttp 3.14 goes on waiting after a malformed chunk size: then it is a Timeout.
    assert total.failed.keys() - {"Timeout"} == {"Reset", "CutShort", "Malformed", "ErrorInStream", "Aborted",
                                                 "NotAStream", "Http429", "Http500", "Http503"}
    assert total.output_tokens == 24 * total.completed
    assert any("out of memory" in note for note in report.notes)


def test_a_hanging_server_fails_its_requests_and_not_the_test(url: str) -> None:
    spec = LoadSpec(concurrencies=(4,), requests=8, warmup_requests=0, timeout_s=8.0)
    harmless = prompts(1, "z")
    first_prompt, *hanging = [*harmless, *map(fault, HANGS)]
    total = only(run_load([LoadEndpoint("candidate", url, "m")], [first_prompt, *hanging], spec).levels).total
    assert total.failed.keys() == {"Timeout"}
    assert total.failed["Timeout"] >= 4


def test_a_variant_is_compared_with_the_baseline_at_every_level(url: str, plain_url: str) -> None:
    spec = LoadSpec(concurrencies=(1, 2), rates_per_s=(200.0,), requests=6, repeats=2, max_new_tokens=9,
                    slo=ServiceLevel(end_to_end_s=60.0))
    calls: list[tuple[int, int, str]] = []
    report = run_load(
        [LoadEndpoint("off", plain_url, "m", what="no drafter"), LoadEndpoint("candidate", url, "m")],
        prompts(6),
        spec,
        on_progress=lambda done, total, words: calls.append((done, total, words)),
    )
    assert [(level.variant, level.mode, level.level) for level in report.levels] == [
        ("off", "closed", 1.0), ("candidate", "closed", 1.0), ("off", "closed", 2.0), ("candidate", "closed", 2.0),
        ("off", "open", 200.0), ("candidate", "open", 200.0)]
    assert all(level.total.completed == 12 for level in report.levels)
    assert all((level.total.tau is None) == (level.variant == "off") for level in report.levels)
    assert all((level.total.goodput_per_s or 0.0) > 0.0 for level in report.levels)
    assert [(c.variant, c.baseline, c.compared, c.identical) for c in report.comparisons] == [
        ("candidate", "off", 6, 6)] * 3
    assert report.variants["off"] == f"no drafter ({plain_url})"
    assert server_notes(report) == []
    # Six levels and variants of two repeats of six, two warm-up questions each.
    assert calls[-1][:2] == (6 * (2 * 6 + 2), 6 * (2 * 6 + 2))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_detected_and_missing_token_counts_are_noted(dialect: str, tmp_path: Path) -> None:
    with responding(tmp_path, Timing(bundle=3, dialect=dialect)) as address:
        report = run_load([LoadEndpoint("candidate", address, "m")], prompts(4), ONE_USER)
    total = only(report.levels).total
    assert total.completed == 4
    # Only a server that tells no counts at all is counted wrong, and then the report says so.
    assert total.output_tokens == (4 * 3 if dialect == "bare" else 4 * 9)
    assert (total.tau is not None) == (dialect in ("sglang", "eyrie"))
    assert len(server_notes(report)) == (dialect in ("openai", "mute", "bare"))


def test_an_exception_of_the_pause_point_ends_the_test(tmp_path: Path) -> None:
    class Interrupted(BaseException):
        pass

    polls = 0

    def pause_point() -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            raise Interrupted

    with responding(tmp_path, Timing(ttft_s=3600.0)) as address, pytest.raises(Interrupted):
        run_load([LoadEndpoint("candidate", address, "m")], prompts(1), ONE_USER, pause_point=pause_point)
    assert polls == 3


def test_an_api_key_is_sent_and_not_part_of_any_message() -> None:
    refusal = b'{"error": {"message": "Incorrect API key provided: sk-hidden"}}'
    answer = b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%b" % (len(refusal), refusal)
    variant = LoadEndpoint("off", "", "m", "sk-hidden")
    with replying([answer]) as (address, carried), pytest.raises(EndpointUnusable) as caught:
        run_load([LoadEndpoint("off", address, "m", "sk-hidden")], prompts(1), ONE_USER)
    assert carried == [1]
    assert "hidden" not in repr(variant)
    assert "answered 401" in caught.value.message
    assert "Incorrect API key provided: ***" in caught.value.message
    assert "--api-key-env" in caught.value.hint


def test_credentials_in_a_url_do_not_reach_the_report(url: str) -> None:
    report = run_load([LoadEndpoint("off", url.replace("http://", "http://me:hidden@"), "m")], prompts(1), ONE_USER)
    assert report.variants == {"off": url}
    assert "hidden" not in report.model_dump_json()


def test_an_unreachable_endpoint_is_named() -> None:
    with pytest.raises(EndpointUnusable, match=r"variant 'off': http://127\.0\.0\.1:1/v1 is not reachable"):
        run_load([LoadEndpoint("off", "http://127.0.0.1:1/v1", "m")], prompts(1), ONE_USER)


def test_an_error_unrelated_to_optional_fields_is_reported_with_the_servers_message() -> None:
    said = b'{"error": {"message": "context of 4 tokens"}}'
    answer = b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
    with replying([answer] * 8) as (address, carried), pytest.raises(EndpointUnusable, match="context of 4 tokens"):
        run_load([LoadEndpoint("off", address, "m")], prompts(1), ONE_USER)
    assert carried == [3]  # with everything, with what every server knows, with nothing extra


def test_invalid_variants_and_prompts_are_rejected(url: str) -> None:
    variant = LoadEndpoint("candidate", url, "m")
    with pytest.raises(InvalidInput, match="no variant 'off' to compare with"):
        run_load([variant, LoadEndpoint("other", url, "m")], prompts(1), ONE_USER)
    with pytest.raises(InvalidInput, match="different names"):
        run_load([variant, variant], prompts(1), ONE_USER, baseline="candidate")
    with pytest.raises(InvalidInput, match="at least one prompt"):
        run_load([variant], [], ONE_USER)


def test_an_open_loop_measures_from_the_due_time_and_not_from_the_send_time(plain_url: str) -> None:
    async def late_by(seconds: float) -> RequestResult:
        client, request = LoadClient(LoadEndpoint("off", plain_url, "m"), ONE_USER), LoadRequest(prompts(1)[0], 0, 0)
        await client.probe(request)
        raw = await client.send(request, time.perf_counter() - seconds)
        await client.pool.close()
        with pytest.raises(StopIteration) as end:  # a short answer is read in one slice
            next(client.read(raw))
        result: RequestResult = end.value.value
        return result

    result = asyncio.run(late_by(7.0))
    assert result.ttft_s is not None
    assert 7.0 <= result.ttft_s <= result.end_to_end_s


def test_an_open_loop_sends_every_request_once(plain_url: str) -> None:
    spec = LoadSpec(concurrencies=(), rates_per_s=(200.0,), requests=20, max_new_tokens=4, warmup_requests=0)
    level = only(run_load([LoadEndpoint("off", plain_url, "m")], prompts(4), spec).levels)
    assert (level.mode, level.level, level.total.completed) == ("open", 200.0, 20)
    assert level.total.seconds >= arrivals(spec, RequestLevel("open", 200.0), 0, 20)[-1]


def test_a_level_ends_when_it_is_clear_and_the_next_is_measured(url: str, plain_url: str) -> None:
    spec = LoadSpec(concurrencies=(1, 2), requests=1, repeats=9, max_new_tokens=9, warmup_requests=0)
    seen: list[tuple[float, int]] = []

    def is_clear(levels: Sequence[LevelResults]) -> bool:
        assert [level.variant for level in levels] == ["off", "candidate"]
        assert len({len(level.block_s) for level in levels}) == 1  # whole pairs
        seen.append((levels[0].level.value, len(levels[0].block_s)))
        return len(levels[0].block_s) == 6

    report = run_load([LoadEndpoint("off", plain_url, "m"), LoadEndpoint("candidate", url, "m")], prompts(24), spec,
                      is_clear=is_clear)
    assert seen == [(level, pairs) for level in (1.0, 2.0) for pairs in range(1, 7)]
    assert [(level.level, level.total.completed) for level in report.levels] == [
        (1.0, 6), (1.0, 6), (2.0, 24), (2.0, 24)]
    assert [pair.pairs for pair in report.comparisons] == [6, 6]


class RestartingServers:
    """Stub servers that a load test may flush and restart. The candidate's ends after some of its flushes."""

    def __init__(self, directory: Path, ends_after: Collection[int] = ()) -> None:
        self.directory, self.ends_after = directory, ends_after
        self.flushes: list[str] = []
        self.started: list[str] = []
        self.running: dict[str, tuple[str, ExitStack]] = {}

    def flushed(self, name: str) -> str:
        self.flushes.append(name)
        if name not in self.running:
            stack = ExitStack()
            self.started.append(name)
            directory = self.directory / f"{name}-{len(self.started)}"
            directory.mkdir()
            self.running[name] = stack.enter_context(responding(directory, Timing())), stack
        url, stack = self.running[name]
        if name == "candidate" and self.flushes.count(name) in self.ends_after:
            stack.close()
        return url

    def has_ended(self, name: str) -> bool:
        del self.running[name]
        return True

    def load(self, repeats: int) -> LoadReport:
        spec = LoadSpec(concurrencies=(1,), requests=2, repeats=repeats, max_new_tokens=4, warmup_requests=1)
        endpoints = [LoadEndpoint(name, self.flushed(name), "m") for name in ("off", "candidate")]
        self.flushes.clear()
        try:
            return run_load(endpoints, prompts(24), spec, own=self)
        finally:
            for _, stack in self.running.values():
                stack.close()


def test_our_own_servers_are_flushed_after_the_warm_up_and_before_each_block(tmp_path: Path) -> None:
    own = RestartingServers(tmp_path)
    report = own.load(3)
    # Before the warm-up, to have them ready, and after it; the order turns round from block to block.
    assert own.flushes == ["off", "off", "candidate", "candidate", "candidate", "off", "off", "candidate"]
    assert own.started == ["off", "candidate"]
    assert {level.variant: level.total.completed for level in report.levels} == {"off": 6, "candidate": 6}


def test_a_block_in_which_a_server_ended_is_measured_again_in_all_variants_by_a_warm_server(tmp_path: Path) -> None:
    own = RestartingServers(tmp_path, ends_after=[3])  # in its second block
    report = own.load(3)
    assert own.started == ["off", "candidate", "candidate"]
    assert own.flushes[4:] == ["candidate", "off", "candidate", "candidate", "off", "off", "candidate"]
    assert {level.variant: (level.total.completed, level.total.failed) for level in report.levels} == {
        "off": (6, {}), "candidate": (6, {})}
    assert {level.variant: level.total.requests for level in report.levels} == {"off": 6, "candidate": 6}


def test_where_a_server_ends_in_the_repetition_too_its_failed_requests_end_the_level(tmp_path: Path) -> None:
    own = RestartingServers(tmp_path, ends_after=[3, 5])
    report = own.load(9)
    by_variant = {level.variant: level.total for level in report.levels}
    assert (by_variant["off"].completed, by_variant["off"].failed) == (4, {})
    assert (by_variant["candidate"].completed, sum(by_variant["candidate"].failed.values())) == (2, 2)
