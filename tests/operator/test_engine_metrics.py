"""What is read of an engine's metrics page, ours or SGLang's."""

from eyrie_operator.endpoints.engine_metrics import EngineCounters, increase, read_metrics

OURS = """# HELP eyrie_requests_total Requests ended, by finish reason.
eyrie_requests_total{finish_reason="stop"} 5.0
eyrie_requests_total{finish_reason="length"} 2.0
eyrie_requests_total{finish_reason="error"} 1.0
eyrie_drafted_rounds_total 10.0
eyrie_drafted_round_tokens_total 31.0
eyrie_generated_tokens_total 99.0
eyrie_accepted_tokens_total{position="1"} 9.0
eyrie_accepted_tokens_total{position="3"} 4.0
eyrie_accepted_tokens_total{position="2"} 8.0
"""
SGLANG = """sglang:spec_verify_calls_total{model_name="m"} 4.0
sglang:generation_tokens_total{model_name="a b"} 1.2e+01
sglang:http_responses_total{endpoint="/v1/chat/completions",method="POST",status_code="200"} 7.0
sglang:http_responses_total{endpoint="/v1/chat/completions",method="POST",status_code="500"} 2.0
sglang:http_responses_total{endpoint="/v1/chat/completions",method="POST",status_code="400"} 1.0
sglang:http_responses_total{endpoint="/health",method="GET",status_code="503"} 40.0
"""


def test_rounds_tokens_answers_and_failures_of_our_engine() -> None:
    assert read_metrics(OURS) == EngineCounters(rounds=10, tokens=31, answered=7, failed=1, accepted=(9, 8, 4),
                                                generated=99)


def test_of_sglang_probes_do_not_count_and_a_client_s_mistake_is_no_failure() -> None:
    assert read_metrics(SGLANG) == EngineCounters(rounds=4, tokens=12, answered=8, failed=2, generated=12)


def test_a_restarted_engine_counts_from_zero_and_an_ended_one_not_at_all() -> None:
    since = {"a": EngineCounters(rounds=100, tokens=300, generated=400), "gone": EngineCounters(rounds=50, tokens=60)}
    now = {"a": EngineCounters(rounds=110, tokens=330, generated=450),
           "b": EngineCounters(rounds=5, tokens=6, generated=8)}
    assert increase(now, since) == EngineCounters(rounds=15, tokens=36, generated=58)


def test_accepted_tokens_are_counted_by_position_over_all_engines() -> None:
    since = {"a": EngineCounters(rounds=10, tokens=19, accepted=(6, 3))}
    now = {"a": EngineCounters(rounds=20, tokens=40, accepted=(12, 7, 1)),
           "b": EngineCounters(rounds=5, tokens=8, accepted=(3,))}
    assert increase(now, since).accepted == (9, 4, 1)
