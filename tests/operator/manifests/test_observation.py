"""What workloads and pods look like to the plan: when an engine is healthy, when it is given up, and what is said."""

from datetime import UTC, datetime
from typing import Any

import pytest

from eyrie_operator.endpoints.plan import ObservedEngine
from eyrie_operator.manifests.deployment import ENTRY, REVISION_LABEL, ROLE_LABEL
from eyrie_operator.manifests.rollout import CRASHES, NO_REVISION, drafter_failure, observe_endpoint
from tests.operator.manifests.samples import deployment, endpoint, one, pods, render

BORN = "2026-01-02T00:00:00Z"


def seen(status: dict[str, Any], pod_status: dict[str, Any] | None = None, *, serving: int | None = None,
         replicas: int = 2, **pod_metadata: Any) -> ObservedEngine:
    """The engine of revision 1, as rendered, with these statuses."""
    rendered = render(endpoint(active=1), deployment(replicas=2))
    workload = one(rendered, "Deployment")
    workload["metadata"] |= {"creationTimestamp": BORN, "generation": 1}
    workload["status"] = {"observedGeneration": 1} | status
    pod = {"apiVersion": "v1", "kind": "Pod", **pods(rendered)[0], "status": pod_status or {}}
    pod["metadata"] = {"name": "p", **pod["metadata"], **pod_metadata}
    entry = next(each for each in rendered if each["metadata"]["labels"].get(ROLE_LABEL) == ENTRY)
    entry["spec"]["selector"][REVISION_LABEL] = NO_REVISION if serving is None else str(serving)
    [engine] = observe_endpoint([*rendered, pod], replicas=replicas).engines
    return engine


def container(restarts: int = 0, **state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "engine", "restartCount": restarts, **state}]}


@pytest.mark.parametrize(("program", "code", "damaged"), [
    ("fetch-drafter", 74, True), ("verify-drafter", 66, True), ("fetch-drafter", 75, False), ("engine", 74, False)])
def test_a_drafter_is_damaged_where_the_program_that_brings_it_ends_with_that_code(
        program: str, code: int, damaged: bool) -> None:
    ended = {"terminated": {"exitCode": code, "message": "model.safetensors differs"}}
    pod = {"kind": "Pod", "metadata": {"labels": {REVISION_LABEL: "2"}},
           "status": {"initContainerStatuses": [{"name": program, "restartCount": 1, "state": {}, "lastState": ended}]}}
    said = f"{program} ended with exit code {code}: model.safetensors differs"
    assert drafter_failure([pod], 2) == (said if damaged else "")
    assert drafter_failure([pod], 1) == ""


LOOPING = {"state": {"waiting": {"reason": "CrashLoopBackOff"}},
           "lastState": {"terminated": {"exitCode": 70, "message": "out of\nmemory"}}}


@pytest.mark.parametrize(("serving", "available", "state"), [
    (None, 1, "starting"), (None, 2, "healthy"), (1, 1, "healthy"), (1, 0, "starting")])
def test_a_serving_revision_needs_one_replica_and_one_on_trial_all(serving: int | None, available: int,
                                                                   state: str) -> None:
    assert seen({"availableReplicas": available}, serving=serving).state == state


def test_a_status_of_an_older_spec_says_nothing_of_this_one() -> None:
    assert seen({"availableReplicas": 2, "observedGeneration": 0}).state == "starting"


def test_an_engine_that_keeps_ending_is_dead_and_its_last_words_are_kept() -> None:
    engine = seen({}, container(CRASHES, **LOOPING))
    assert engine.state == "dead"
    assert engine.message == "engine ended with exit code 70: out of memory"
    assert engine.started_at == datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(("conditions", "since"), [
    ([{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-03T00:00:00Z"}], 3),
    ([{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-03T00:00:00Z"}], None), ([], 4)])
def test_an_engine_is_unready_since_a_pod_lost_its_readiness_or_was_created(
        conditions: list[dict[str, str]], since: int | None) -> None:
    engine = seen({"availableReplicas": 1}, {"conditions": conditions}, creationTimestamp="2026-01-04T00:00:00Z")
    assert engine.unready_since == (None if since is None else datetime(2026, 1, since, tzinfo=UTC))


def test_one_end_is_not_death() -> None:
    assert seen({}, container(1, **LOOPING)).state == "starting"


def test_a_replica_that_answers_keeps_its_revision_alive_though_another_keeps_ending() -> None:
    assert seen({"availableReplicas": 1}, container(CRASHES, **LOOPING), serving=1).state == "healthy"
    assert seen({"availableReplicas": 1}, container(CRASHES, **LOOPING)).state == "starting"


def test_what_may_be_repaired_from_outside_is_waited_for_and_said() -> None:
    pulling = seen({}, container(state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}))
    assert (pulling.state, pulling.message) == ("starting", "engine is waiting: ImagePullBackOff no such image")
    pending = seen({}, {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                        "message": "0/3 nodes: no GPU", "lastTransitionTime": BORN}]})
    assert pending.state == "starting"
    assert pending.message.startswith("no node fits: 0/3 nodes: no GPU")
    assert pending.wait is not None
    assert (pending.wait.reason, pending.wait.since) == ("WaitingForNodes", datetime(2026, 1, 2, tzinfo=UTC))


def test_pods_that_are_leaving_do_not_speak_for_their_revision() -> None:
    assert seen({}, container(CRASHES, **LOOPING), deletionTimestamp=BORN).state == "starting"
