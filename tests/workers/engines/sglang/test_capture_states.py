"""Capture through SGLang, as far as it needs no server."""

from eyrie_workers.sglang.capture_states import texts_that_fit


def test_a_pass_is_split_where_its_states_do_not_fit_the_memory_together() -> None:
    lengths, token_bytes = [1000, 1000, 10], 2**12
    assert texts_that_fit(lengths, token_bytes, 2**30) == 3
    assert texts_that_fit(lengths, token_bytes, 2**23) == 2
    assert texts_that_fit(lengths, token_bytes, 2**21) == 0
