"""Parsing streamed completions: text, tokens and their times, acceptance, incomplete streams."""

import json
import random
from typing import Any

import numpy as np
import pytest

from eyrie_workers.measure.load.completion_stream import read_stream
from eyrie_workers.measure.load.http_client import RequestFailed

Pieces = list[tuple[float, bytes]]


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def chunk(text: str | None = None, finish: str | None = None, usage: int | None = None, **delta: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"id": "one", "choices": [{"index": 0, "delta": {**({"content": text} if text else {}),
                                                                            **delta}, "finish_reason": finish}]}
    if usage is not None:
        value["usage"] = {"completion_tokens": usage}
    return value


def stream(*values: Any) -> Pieces:
    """One chunk per value, one second apart, with [DONE] at the end."""
    return [*((float(at), event(value)) for at, value in enumerate(values)), (float(len(values)), b"data: [DONE]\n\n")]


def test_token_ids_in_the_chunks_are_counted_first() -> None:
    chunks = [chunk("ab", usage=2), chunk("c", usage=3), chunk(finish="stop", usage=4)]
    for value, ids in zip(chunks, ([5, 6], [7], [2]), strict=True):
        value["choices"][0]["token_ids"] = ids
    completion = read_stream(stream(*chunks))
    assert (completion.counting, completion.tokens, completion.token_ids) == ("ids", 4, (5, 6, 7, 2))
    assert completion.gaps_s.tolist() == [0.0, 1.0, 1.0]


def test_cumulative_usage_counts_the_tokens_of_each_chunk() -> None:
    completion = read_stream(stream(chunk(role="assistant"), chunk("a", usage=1), chunk("bcd", usage=4),
                                chunk(finish="stop"), {"id": "one", "choices": [], "usage": {"completion_tokens": 5}}))
    assert (completion.counting, completion.tokens) == ("usage", 5)
    assert completion.first_at == 1.0
    # Three tokens share the second after the first; the end token came with the finish reason.
    assert completion.gaps_s.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])


def test_a_total_alone_is_distributed_by_the_length_of_the_text() -> None:
    completion = read_stream(stream(chunk("aa"), chunk("bbbbbb"), chunk("cc"), chunk(finish="stop", usage=None),
                                {"choices": [], "usage": {"completion_tokens": 5}}))
    assert (completion.counting, completion.tokens) == ("text", 5)
    assert completion.gaps_s.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])


def test_without_any_count_a_chunk_with_text_counts_as_one_token() -> None:
    completion = read_stream(stream(chunk(role="assistant"), chunk("a"), chunk("b"), chunk(finish="stop")))
    assert (completion.counting, completion.tokens) == ("chunks", 2)


def test_the_mean_inter_token_latency_does_not_depend_on_grouping() -> None:
    random_source = random.Random(1)
    for _ in range(50):
        counts = [random_source.randrange(1, 6) for _ in range(random_source.randrange(2, 9))]
        running = np.cumsum(counts)
        completion = read_stream(stream(*(chunk("x", usage=int(n)) for n in running), chunk(finish="length")))
        assert completion.tokens == running[-1]
        assert len(completion.gaps_s) == running[-1] - 1
        assert completion.gaps_s.sum() == pytest.approx(len(counts) - 1)


def test_a_completion_without_tokens_has_no_first_token() -> None:
    completion = read_stream(stream(chunk(role="assistant"), chunk(finish="stop"),
                                {"choices": [], "usage": {"completion_tokens": 0}}))
    assert (completion.tokens, completion.first_at, len(completion.gaps_s)) == (0, None, 0)


def test_a_stream_parses_equally_however_it_is_split_into_reads() -> None:
    whole = b": comment\r\n\r\nevent: message\r\n" + b"".join(
        event(value).replace(b"\n", b"\r\n") for value in (chunk("caf\u00e9 "), chunk("\u2028"), chunk(finish="stop"))
    ) + b"data: [DONE]\r\n\r\n"
    random_source = random.Random(2)
    for _ in range(100):
        cuts = sorted(random_source.sample(range(1, len(whole)), random_source.randrange(1, 20)))
        pieces = [(0.0, whole[a:b]) for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert "caf\u00e9 \u2028" in read_stream(pieces).text


def test_sglang_reports_rounds_and_all_ids_at_the_end() -> None:
    extension = {"spec_tokens_details": {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 0, 2]},
                 "output_ids": [[9, 8, 7]]}
    completion = read_stream(stream(chunk("abc", usage=3), chunk(finish="stop"),
                                {"id": "one", "choices": [], "sglext": extension}))
    assert completion.histogram == (1, 0, 2)
    assert completion.token_ids == (9, 8, 7)


@pytest.mark.parametrize(("details", "histogram", "proposed"), [
    (None, None, False), ({}, None, False), ({"spec_correct_drafts_histogram": [7]}, (7,), False),
    ({"spec_correct_drafts_histogram": [7], "spec_num_proposed_drafts": 35}, (7,), True),
])
def test_rounds_are_those_that_the_server_reports(details: dict[str, Any] | None, histogram: tuple[int, ...] | None,
                                                   proposed: bool) -> None:
    completion = read_stream(stream(chunk("a", usage=1), chunk(finish="stop") | {"sglext": {
        "spec_tokens_details": details}}))
    assert (completion.histogram, completion.proposed) == (histogram, proposed)


def test_completions_that_differ_in_call_ids_only_are_equal() -> None:
    def calling(call_id: str, arguments: str) -> bytes:
        call = {"index": 0, "id": call_id, "function": {"name": "weather", "arguments": arguments}}
        return read_stream(stream(chunk(tool_calls=[call]), chunk(finish="tool_calls"))).digest()

    assert calling("call_1", "{}") == calling("call_2", "{}")
    assert calling("call_1", "{}") != calling("call_1", '{"city": "Oslo"}')


def test_reasoning_and_content_are_different_texts() -> None:
    reasoning = read_stream(stream(chunk(reasoning_content="yes"), chunk(finish="stop")))
    value = read_stream(stream(chunk("yes"), chunk(finish="stop")))
    assert reasoning.tokens == value.tokens == 1
    assert reasoning.digest() != value.digest()


@pytest.mark.parametrize(("pieces", "reason"), [
    ([], "CutShort"),
    ([(0.0, event(chunk("a")))], "CutShort"),
    ([(0.0, event(chunk("a"))), (1.0, b"data: [DONE]\n\n")], "CutShort"),
    ([(0.0, event(chunk("a"))), (1.0, b'data: {"choi')], "CutShort"),
    ([(0.0, b"data: {no json\n\n")], "Malformed"),
    ([(0.0, b"data: \xff\xfe\n\n")], "Malformed"),
    ([(0.0, event([1, 2]))], "Malformed"),
    ([(0.0, event({"choices": [{"delta": {"content": 5}}]}))], "Malformed"),
    ([(0.0, event({"error": {"message": "out of memory"}}))], "ErrorInStream"),
    ([(0.0, event({"object": "error", "message": "aborted"}))], "ErrorInStream"),
    ([(0.0, event(chunk("a"))), (0.0, event(chunk(finish="abort")))], "Aborted"),
])
def test_an_incomplete_stream_fails_with_a_reason(pieces: Pieces, reason: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        read_stream(pieces)
    assert caught.value.reason == reason
