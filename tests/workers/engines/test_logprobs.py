"""Response objects of log probabilities, from plain values."""

import json

from eyrie_workers.engines.responses import LogprobEntry, chat_logprobs, completion_logprobs
from eyrie_workers.targets.templates import TokenText

A, PART, UNKNOWN = TokenText("a", b"a"), TokenText("\ufffd", b"\xe2\x82"), TokenText("\ufffd", None)


def test_chat_completions_give_text_and_bytes() -> None:
    entry = LogprobEntry(PART, -0.5, ((PART, -0.5), (UNKNOWN, -2.0)), text_offset=3)
    assert chat_logprobs([entry]) == {"refusal": None, "content": [{
        "token": "\ufffd", "logprob": -0.5, "bytes": [0xE2, 0x82], "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xE2, 0x82]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": None}]}]}


def test_completions_spell_parts_of_characters_in_bytes_and_list_the_token_itself() -> None:
    first = LogprobEntry(PART, -4.0, ((A, -0.5), (UNKNOWN, -2.0)), text_offset=0)
    second = LogprobEntry(A, -0.25, (), text_offset=1)
    assert completion_logprobs([first, second]) == {
        "tokens": ["bytes:\\xe2\\x82", "a"], "token_logprobs": [-4.0, -0.25],
        "top_logprobs": [{"a": -0.5, "\ufffd": -2.0, "bytes:\\xe2\\x82": -4.0}, {"a": -0.25}], "text_offset": [0, 1]}


def test_of_two_tokens_with_one_spelling_the_more_probable_one_is_listed() -> None:
    entry = LogprobEntry(A, -3.0, ((A, -0.5),), text_offset=0)
    found = completion_logprobs([entry])
    assert found["top_logprobs"] == [{"a": -0.5}]
    assert found["token_logprobs"] == [-3.0]


def test_an_impossible_alternative_is_a_number_that_json_has() -> None:
    entry = LogprobEntry(A, -0.5, ((A, -0.5), (PART, float("-inf"))), text_offset=0)
    json.dumps([chat_logprobs([entry]), completion_logprobs([entry])], allow_nan=False)
    assert chat_logprobs([entry])["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
