"""What is counted of rounds."""

from eyrie_workers.engines.metrics import EngineMetrics


def counted(meters: EngineMetrics) -> dict[str, float]:
    lines = [line.split() for line in meters.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_rounds_that_drafted_are_told_from_plain_ones_whatever_was_accepted() -> None:
    meters = EngineMetrics()
    meters.rounds([3, 0], [5, 5])
    meters.rounds([0, 0, 0], [0, 0, 0])  # too many requests for drafting to pay
    meters.rounds([], [])
    seen = counted(meters)
    assert seen["eyrie_verify_rounds_total"] == 5
    assert seen["eyrie_drafted_rounds_total"] == 2
    assert seen["eyrie_drafted_round_tokens_total"] == 5
    assert seen["eyrie_acceptance_length"] == 1.6
