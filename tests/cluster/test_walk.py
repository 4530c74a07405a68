"""The walk: from an empty namespace to a promoted drafter that serves, on a real cluster, with everything killed once.

The chart is installed with its bundled stores; two jobs are given, one by each door; Kubeflow's double runs their
stages in pods. On the way the API server, the Celery worker, the leading operator and a stage are killed by SIGKILL,
and Redis and PostgreSQL are away for a while. In the end every posted job has ended as it should, each stage has one
manifest, nothing ran twice, and what serves is as fast as its proof says and says what the bare target says.

One test, because each part needs the one before. What it saw is printed.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from eyrie_api.contract.stages import JOB_STAGES
from eyrie_workers.catalog import STATE_DIR
from tests.cluster.observations import LONG_S, QUESTIONS, Diary, Served, chat, manifest, phase, serving
from tests.cluster.patience import PATIENCE, eventually
from tests.cluster.programs import missing, programs

if os.environ.get("EYRIE_TEST_CLUSTER") == "1":
    try:
        from tests.cluster.release import NAME, Release, installed
    except ImportError as error:
        missing(f"{error.name} is not installed: make test-cluster installs it")

LENIENT = {"min_speedup": 0.1, "require_confidence": False, "max_ttft_p99_ratio": 100.0,
           "min_speedup_changed_prompt": 0.1}
"""A few requests, on a machine that does other things besides: whoever reads the figures judges them, and no test."""

STRICT = {"min_speedup_over_incumbent": 1.2}


def job(name: str, conversations: int, tokens: int, *, strict: bool, **train: Any) -> dict[str, Any]:
    """A small job on the shipped target."""
    return {
        "name": name,
        "target": {"model": "quickstart"},
        "data": {"sources": [{"path": "quickstart"}], "max_conversations": conversations},
        "regenerate": {"max_new_tokens": tokens, "concurrency": 32},
        "drafter": {"draft_vocab_size": 1536},
        "train": {"learning_rate": 2e-3, "num_checkpoints": 1, "max_tokens_per_batch": 1024, "save_every_steps": 10,
                  **train},
        "benchmark": {"suites": [{"name": "chat", "path": "quickstart:chat", "max_prompts": 2, "required": strict}],
                      "temperatures": [0.0], "tree": {"num_steps": 3, "top_k": 1, "num_draft_tokens": 4},
                      "max_new_tokens": 48, "warmup_prompts": 1},
        "tune": {"num_steps": [3, 5], "top_k": [1], "num_draft_tokens": [10], "ngram": False, "max_prompts": 4,
                 "temperatures": [0.0], "concurrencies": [1], "budget_s": 6.0},
        "prove": {"concurrencies": [1], "requests": 8, "most_pairs": 8, "max_new_tokens": 48, "parity_prompts": 4},
        "promotion": STRICT if strict else LENIENT,
        "serve": {"endpoint": "chat", "health_timeout_s": 90 * PATIENCE},
    }


@pytest.fixture
def release(tmp_path: Path) -> Iterator["Release"]:
    """The chart installed, with everything around it, and up."""
    # The second job's measurements would disturb the first's: it waits in line.
    with installed(programs(), tmp_path, {"operator": {"replicas": 2}, "cluster": {"max_runs": 1}}) as made:
        yield made


def test_a_drafter_is_trained_promoted_and_served_while_everything_is_killed_once(release: "Release") -> None:
    say = Diary()
    release.apply("DrafterJob", "first", {"job": job("first", 600, 128, strict=False, epochs=4.0)})
    first = str(eventually(lambda: release.object("drafterjobs", "first").get("status", {}).get("job_id"),
                           "the applied object is a job"))
    eventually(lambda: phase(release, first) == "Running", "the first job runs", every_s=1.0)
    posted = release.rest("/jobs", job("worse", 24, 32, strict=True, max_steps=1))
    assert posted.status == 202, posted.text
    worse = posted.body["id"]
    say(f"job {first} was applied and runs, job {worse} was posted and waits")

    kill_the_api(release, say)
    await_stage(release, first, "capture")
    kill_the_worker(release, say)
    step = kill_the_training(release, first, say)
    kill_the_leader(release, say)
    for store in ("redis", "postgresql"):
        with release.cut(store):
            say(f"{store} is away")
            time.sleep(AWAY_S)
        say(f"{store} is back")

    eventually(lambda: phase(release, first) in ("Succeeded", "Failed"), f"job {first} ends", LONG_S, every_s=2.0)
    status = release.get_json(f"/jobs/{first}")["status"]
    assert status["phase"] == "Succeeded", json.dumps(status, indent=1)
    wait_with_kubectl(release, "first")
    resumed = manifest(release, first, "train/base")["report"]["resumed_from_step"]
    say(f"job {first} succeeded; its training went on from step {resumed}; {status['decision']['reasons']}")
    assert resumed >= step > 0
    assert status["decision"]["verdict"] == "promote"

    drafted = serving(release, "chat", 2)
    before, _ = chat(release, drafted)

    eventually(lambda: phase(release, worse) in ("Succeeded", "Failed"), f"job {worse} ends", LONG_S, every_s=2.0)
    status = release.get_json(f"/jobs/{worse}")["status"]
    assert status["phase"] == "Succeeded", json.dumps(status, indent=1)
    say(f"job {worse} was refused: {status['decision']['reasons']}")
    assert status["decision"]["verdict"] != "promote"
    assert release.get_json("/endpoints/chat")["active_revision"] == 2

    # Now that nothing else runs.
    release.apply("DraftEndpoint", "plain", {"target": {"model": "quickstart"}})
    bare = serving(release, "plain", 1)
    compare(release, drafted, bare, say)
    assert chat(release, drafted)[0] == before
    say(f"the proof, under load: {proven(release, first)}")
    a_broken_drafter_is_rolled_back(release, worse, drafted, say)
    audit(release, {first: 1, worse: 0}, say)
    uninstall(release, say)


AWAY_S = 15.0


def await_stage(release: "Release", job_id: str, stage: str) -> None:
    """Until the stage has begun."""
    def begun() -> bool:
        stages = release.get_json(f"/jobs/{job_id}")["status"]["stages"]
        return any(one["stage"] == stage and one["state"] not in ("Pending", "Skipped") for one in stages)

    eventually(begun, f"stage {stage} of {job_id} begins", LONG_S, every_s=1.0)


# What is killed.

def kill_the_api(release: "Release", say: Diary) -> None:
    before = [one["id"] for one in release.get_json("/jobs")["items"]]
    (pod,) = release.pods(release.part("api"))
    release.kill(pod)
    eventually(lambda: release.restarted(pod), "the API is back", 180.0, every_s=0.5)
    assert [one["id"] for one in release.get_json("/jobs")["items"]] == before
    say("the API server was killed, and knows the same jobs again")


def kill_the_worker(release: "Release", say: Diary) -> None:
    (pod,) = release.pods(release.part("worker"))
    release.kill(pod)
    eventually(lambda: release.restarted(pod), "a worker is back", 180.0, every_s=0.5)
    say("the worker was killed with every chore in hand")


def kill_the_training(release: "Release", job_id: str, say: Diary) -> int:
    """Once its state is in the store; the step it will go on from, at least."""
    state = f"jobs/{job_id}/stages/train/base/{STATE_DIR}/training.safetensors"
    eventually(lambda: state in release.stored(f"jobs/{job_id}/stages"), "the training's state is in the store",
               LONG_S, every_s=1.0)
    pods = [one for one in release.pods("pipeline/runid") if "train" in one.metadata.name
            and one.status.phase == "Running"]
    assert pods, "the training had ended before it could be killed: make it longer"
    (pod,) = pods
    release.kill(pod)
    say(f"the training was killed in {pod.metadata.name}")
    return 10  # train.save_every_steps: the first state


def kill_the_leader(release: "Release", say: Diary) -> None:
    def holder() -> str:
        lease = release.leases.read_namespaced_lease(f"{NAME}-eyrie-operator", release.namespace)
        return str(lease.spec.holder_identity or "")

    before = str(eventually(holder, "an operator leads"))
    (pod,) = [one for one in release.pods(release.part("operator")) if before.startswith(one.metadata.name)]
    release.kill(pod)
    after = str(eventually(lambda: holder() not in ("", before) and holder(), "another operator leads", 180.0))
    say(f"the leading operator was killed; {after} leads in place of {before}")


# What is seen.

def wait_with_kubectl(release: "Release", name: str) -> None:
    """As a script would wait."""
    kubectl = shutil.which(os.environ.get("KUBECTL", "kubectl"))
    if kubectl is not None:
        subprocess.run([kubectl, "-n", release.namespace, "wait", "--for=condition=Succeeded", f"drafterjob/{name}",
                        f"--timeout={int(120 * PATIENCE)}s"], check=True, stdout=subprocess.DEVNULL)
        return
    print("no kubectl (KUBECTL): the condition is looked at instead")
    eventually(lambda: ("Succeeded", "True") in [(one["type"], one["status"]) for one in
                                                 release.object("drafterjobs", name)["status"]["conditions"]],
               "the object shows its success")


def compare(release: "Release", drafted: Served, bare: Served, say: Diary) -> None:
    """The same words from both Services; how much faster is printed, and judged by the job's own proof."""
    ratios = []
    for question in QUESTIONS:
        seen = [(chat(release, drafted, question), chat(release, bare, question)) for _ in range(3)]
        assert len({text for pair in seen for text, _ in pair}) == 1, seen
        fast, slow = (min(seconds for _, seconds in one) for one in zip(*seen, strict=True))
        ratios.append(slow / fast)
    say(f"the same answers from {drafted.url} and {bare.url}, {geometric_mean(ratios):.2f} times as fast: "
        f"{', '.join(f'{one:.2f}' for one in ratios)}")


def proven(release: "Release", job_id: str) -> list[str]:
    """What the job's proof says of the promoted drafter under load."""
    load = manifest(release, job_id, "prove")["report"]["load"]
    return [f"{one['level']:g} at once {one['throughput_ratio']:.2f}x" for one in load["comparisons"]
            if (one["variant"], one["baseline"]) == ("candidate", "off")]


def a_broken_drafter_is_rolled_back(release: "Release", job_id: str, drafted: Served, say: Diary) -> None:
    """A person promotes, over the policy's head, a drafter whose file has been damaged meanwhile."""
    (weights,) = [path for path in release.stored(f"jobs/{job_id}/stages/train") if path.endswith("model.safetensors")]
    code, out = release.execute(release.pod(release.part("s3")), ["sh", "-c", f"echo broken > /data/eyrie/{weights}"])
    assert code == 0, out
    before, _ = chat(release, drafted)
    promoted = release.rest("/endpoints/chat/promote", {"job_id": job_id})
    assert promoted.status == 202, promoted.text
    number = promoted.body["candidate_revision"]
    assert number is not None

    def rejected() -> Any:
        seen = release.get_json("/endpoints/chat")
        revision = next(one for one in seen["revisions"] if one["number"] == number)
        return revision if revision["state"] in ("rejected", "rolled-back") else None

    revision = eventually(rejected, "the broken drafter is given up", LONG_S, every_s=2.0)
    assert release.get_json("/endpoints/chat")["active_revision"] == 2
    assert chat(release, drafted)[0] == before
    say(f"a broken drafter was rolled back, revision 2 serves on: {revision['rejected_reason']}")


def audit(release: "Release", killed: dict[str, int], say: Diary) -> None:
    """Nothing lost, nothing twice: one run per attempt, one pod per box but for those that were killed, one manifest
    per stage. `killed`: the pods that were, by job."""
    jobs = release.get_json("/jobs")["items"]
    assert {one["id"] for one in jobs} == set(killed)
    runs = {one["display_name"]: one for one in release.kubeflow("/runs?page_size=100")["runs"]}
    assert sorted(runs) == sorted(f"{job_id}-1.1" for job_id in killed)
    for job_id, pods in killed.items():
        stages = [path for path in release.stored(f"jobs/{job_id}/stages") if path.endswith("/manifest.json")]
        result = [path.split("/")[3] for path in stages]
        assert sorted(result) == sorted(JOB_STAGES), stages
        tasks = [one for one in runs[f"{job_id}-1.1"]["run_details"]["task_details"] if one.get("child_tasks")]
        more = {one["display_name"]: len(one["child_tasks"]) - 1 for one in tasks}
        assert sum(more.values()) == pods, more
        (prove,) = (one for one in tasks if one["display_name"] == "prove")
        assert (set(prove["inputs"]), set(prove["outputs"])) == ({"winner", "tuning"}, {"proof", "report"})
        listed = release.get_json(f"/jobs/{job_id}")["status"]["stages"]
        assert {one["state"] for one in listed} == {"Succeeded"}, listed
    say(f"{len(jobs)} jobs, {len(runs)} runs, a manifest for each of their {len(JOB_STAGES)} stages")


def uninstall(release: "Release", say: Diary) -> None:
    """What the switches say is kept: definitions and what people applied, volumes and their passwords. Endpoints are
    switched off first, while there is somebody to end their engines."""
    for one in release.objects("draftendpoints"):
        release.custom.delete_namespaced_custom_object("eyrie.dev", "v1alpha1", release.namespace, "draftendpoints",
                                                       one["metadata"]["name"])
    eventually(lambda: not release.objects("draftendpoints"), "the operator lets go of the endpoints", 240.0,
               every_s=1.0)
    eventually(lambda: not release.pods("app.kubernetes.io/part-of=eyrie,app.kubernetes.io/managed-by=eyrie-operator"),
               "their engines end", 240.0, every_s=1.0)
    release.uninstall()
    mine = f"app.kubernetes.io/instance={NAME}"
    eventually(lambda: not release.pods(mine), "no pod is left", 240.0, every_s=1.0)
    assert release.definitions() == {"drafterjobs.eyrie.dev", "draftendpoints.eyrie.dev"}
    assert "first" in {one["metadata"]["name"] for one in release.objects("drafterjobs")}
    secrets = {one.metadata.name for one in release.core.list_namespaced_secret(release.namespace).items}
    assert {f"{NAME}-eyrie-database", f"{NAME}-eyrie-artifacts"} <= secrets
    assert f"{NAME}-eyrie-api-token" not in secrets
    claims = {one.metadata.name for one in
              release.core.list_namespaced_persistent_volume_claim(release.namespace).items}
    assert claims == {f"data-{NAME}-eyrie-{store}-0" for store in ("postgresql", "s3")}
    say("uninstalled: definitions, volumes and their passwords are kept")
