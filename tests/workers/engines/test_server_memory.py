"""How many servers fit, computed before the first one starts."""

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_workers.sglang.process import loading_phase
from eyrie_workers.sglang.profiles import PROCESSES_BYTES, kv_bytes_per_token, num_that_fit, server_bytes

GIB = 2**30


def test_keys_and_values_of_a_token_follow_from_the_config() -> None:
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert kv_bytes_per_token(config, "bfloat16") == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token({"text_config": config | {"head_dim": 64}}, "float32") == 2 * 32 * 8 * 64 * 4


def test_a_server_on_a_cpu_needs_its_processes_too_and_one_that_does_not_fit_is_refused() -> None:
    one = server_bytes("sglang", "cpu", 3 * GIB, GIB, ngram=False)
    assert one == 4 * GIB + PROCESSES_BYTES["sglang"]
    assert num_that_fit(2 * one + 1, one) == 2
    with pytest.raises(InvalidInput, match=r"needs about 6\.5 GiB of memory and 2\.0 GiB are available"):
        num_that_fit(2 * GIB, one)


def test_the_phase_of_a_starting_server_is_read_from_its_log() -> None:
    lines = ["server_args=...", "[2026] Load weight begin. avail mem=9 GB", "[2026] Load weight end. elapsed=1 s"]
    assert [loading_phase(lines[:end]) for end in (1, 2, 3)] == ["importing", "loading weights", "weights loaded"]
