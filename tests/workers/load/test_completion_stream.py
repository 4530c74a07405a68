"""Reading a streamed answer: text, tokens and their times, acceptance, and streams that are not whole."""

import json
import random
from typing import Any

import numpy as np
import pytest

from eyrie_workers.load.completion_stream import read_stream
from eyrie_workers.load.endpoint_url import RequestFailed

Pieces = list[tuple[float, bytes]]


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def chunk(text: str | None = None, finish: str | None = None, usage: int | None = None, **delta: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"id": "one", "choices": [{"index": 0, "delta": {**({"content": text} if text else {}),
                                                                            **delta}, "finish_reason": finish}]}
    if usage is not None:
        said["usage"] = {"completion_tokens": usage}
    return said


def stream(*values: Any) -> Pieces:
    """One piece per value, a second apart, properly ended."""
    return [*((float(at), event(value)) for at, value in enumerate(values)), (float(len(values)), b"data: [DONE]\n\n")]


def test_token_ids_in_the_chunks_are_counted_first() -> None:
    chunks = [chunk("ab", usage=2), chunk("c", usage=3), chunk(finish="stop", usage=4)]
    for said, ids in zip(chunks, ([5, 6], [7], [2]), strict=True):
        said["choices"][0]["token_ids"] = ids
    answer = read_stream(stream(*chunks))
    assert (answer.counting, answer.tokens, answer.token_ids) == ("ids", 4, (5, 6, 7, 2))
    assert answer.gaps_s.tolist() == [0.0, 1.0, 1.0]


def test_running_usage_tells_how_many_tokens_came_together() -> None:
    answer = read_stream(stream(chunk(role="assistant"), chunk("a", usage=1), chunk("bcd", usage=4),
                                chunk(finish="stop"), {"id": "one", "choices": [], "usage": {"completion_tokens": 5}}))
    assert (answer.counting, answer.tokens) == ("usage", 5)
    assert answer.first_at == 1.0
    # Three tokens share the second after the first; the end token came with the finish reason.
    assert answer.gaps_s.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])


def test_a_total_alone_is_shared_out_by_the_length_of_the_text() -> None:
    answer = read_stream(stream(chunk("aa"), chunk("bbbbbb"), chunk("cc"), chunk(finish="stop", usage=None),
                                {"choices": [], "usage": {"completion_tokens": 5}}))
    assert (answer.counting, answer.tokens) == ("text", 5)
    assert answer.gaps_s.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])


def test_without_any_count_a_chunk_with_text_is_a_token() -> None:
    answer = read_stream(stream(chunk(role="assistant"), chunk("a"), chunk("b"), chunk(finish="stop")))
    assert (answer.counting, answer.tokens) == ("chunks", 2)


def test_the_mean_gap_is_the_same_however_tokens_were_bundled() -> None:
    chance = random.Random(1)
    for _ in range(50):
        counts = [chance.randrange(1, 6) for _ in range(chance.randrange(2, 9))]
        running = np.cumsum(counts)
        answer = read_stream(stream(*(chunk("x", usage=int(n)) for n in running), chunk(finish="length")))
        assert answer.tokens == running[-1]
        assert len(answer.gaps_s) == running[-1] - 1
        assert answer.gaps_s.sum() == pytest.approx(len(counts) - 1)


def test_an_answer_without_tokens_has_no_first_token() -> None:
    answer = read_stream(stream(chunk(role="assistant"), chunk(finish="stop"),
                                {"choices": [], "usage": {"completion_tokens": 0}}))
    assert (answer.tokens, answer.first_at, len(answer.gaps_s)) == (0, None, 0)


def test_a_stream_reads_the_same_wherever_the_network_cut_it() -> None:
    whole = b": comment\r\n\r\nevent: message\r\n" + b"".join(
        event(value).replace(b"\n", b"\r\n") for value in (chunk("caf\u00e9 "), chunk("\u2028"), chunk(finish="stop"))
    ) + b"data: [DONE]\r\n\r\n"
    chance = random.Random(2)
    for _ in range(100):
        cuts = sorted(chance.sample(range(1, len(whole)), chance.randrange(1, 20)))
        pieces = [(0.0, whole[a:b]) for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert "caf\u00e9 \u2028" in read_stream(pieces).text


def test_sglang_tells_rounds_and_all_ids_at_the_end() -> None:
    extension = {"spec_tokens_details": {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 0, 2]},
                 "output_ids": [[9, 8, 7]]}
    answer = read_stream(stream(chunk("abc", usage=3), chunk(finish="stop"),
                                {"id": "one", "choices": [], "sglext": extension}))
    assert answer.histogram == (1, 0, 2)
    assert answer.token_ids == (9, 8, 7)


@pytest.mark.parametrize(("details", "histogram", "proposed"), [
    (None, None, False), ({}, None, False), ({"spec_correct_drafts_histogram": [7]}, (7,), False),
    ({"spec_correct_drafts_histogram": [7], "spec_num_proposed_drafts": 35}, (7,), True),
])
def test_rounds_are_taken_as_the_server_tells_them(details: dict[str, Any] | None, histogram: tuple[int, ...] | None,
                                                   proposed: bool) -> None:
    answer = read_stream(stream(chunk("a", usage=1), chunk(finish="stop") | {"sglext": {
        "spec_tokens_details": details}}))
    assert (answer.histogram, answer.proposed) == (histogram, proposed)


def test_two_answers_with_different_call_ids_are_the_same_answer() -> None:
    def calling(call_id: str, arguments: str) -> bytes:
        call = {"index": 0, "id": call_id, "function": {"name": "weather", "arguments": arguments}}
        return read_stream(stream(chunk(tool_calls=[call]), chunk(finish="tool_calls"))).digest()

    assert calling("call_1", "{}") == calling("call_2", "{}")
    assert calling("call_1", "{}") != calling("call_1", '{"city": "Oslo"}')


def test_thought_and_said_are_different_texts() -> None:
    thought = read_stream(stream(chunk(reasoning_content="yes"), chunk(finish="stop")))
    said = read_stream(stream(chunk("yes"), chunk(finish="stop")))
    assert thought.tokens == said.tokens == 1
    assert thought.digest() != said.digest()


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
def test_a_stream_that_is_no_whole_answer_fails_with_a_reason(pieces: Pieces, reason: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        read_stream(pieces)
    assert caught.value.reason == reason
