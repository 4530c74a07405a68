"""Where an acceptance window on a cluster begins, whichever pods respond."""

from datetime import UTC, datetime

from eyrie_operator.cluster.endpoints import next_window
from eyrie_operator.endpoints.engine_metrics import EngineCounters, Window

BEGAN, NOW = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC)


def pod(uid: str, restarts: int = 0) -> dict[str, object]:
    return {"kind": "Pod", "metadata": {"uid": uid}, "status": {"containerStatuses": [{"restartCount": restarts}]}}


def test_a_pod_that_does_not_respond_keeps_where_it_began_and_one_that_has_ended_is_forgotten() -> None:
    began = Window(since=BEGAN, counts={name: EngineCounters(rounds=10.0) for name in ("a/0", "b/0", "c/0", "gone/0")})
    counted = {"a/0": EngineCounters(rounds=50.0), "new/0": EngineCounters(rounds=4.0)}
    objects = [pod("a"), pod("b"), pod("c", restarts=1), pod("new"), {"kind": "Service", "metadata": {"uid": "gone"}}]
    found = next_window(began, counted, objects, NOW)
    assert found.since == NOW
    assert found.counts == {"a/0": EngineCounters(rounds=50.0), "b/0": EngineCounters(rounds=10.0),
                            "new/0": EngineCounters(rounds=4.0)}
    assert next_window(None, counted, objects, NOW).counts == counted
