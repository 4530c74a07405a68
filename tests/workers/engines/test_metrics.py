"""Metrics of verify rounds."""

from eyrie_workers.engines.engine_thread import EngineMetrics


def counted(metrics: EngineMetrics) -> dict[str, float]:
    lines = [line.split() for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_rounds_that_drafted_are_counted_apart_from_plain_rounds() -> None:
    metrics = EngineMetrics()
    metrics.rounds([3, 0], [5, 5])
    metrics.rounds([0, 0, 0], [0, 0, 0])  # too many requests for drafting to pay
    metrics.rounds([], [])
    seen = counted(metrics)
    assert seen["eyrie_verify_rounds_total"] == 5
    assert seen["eyrie_drafted_rounds_total"] == 2
    assert seen["eyrie_drafted_round_tokens_total"] == 5
    assert seen["eyrie_acceptance_length"] == 1.6
