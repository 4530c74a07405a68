"""The rehearsal: the seed's job, at the size of two processor cores, from an empty namespace to answers.

    make rehearse-seed [SHORT=1]

`docs/examples/olmo-3.1-32b.yaml` with the overlay `rehearsal.yaml` (`seed_job`) is posted to the chart's API on a
cluster that is part of this machine. The stages are tasks of Kubeflow's double, in pods; answers, benchmarks, tuning
and proof are SGLang's, in the stages' pods; the endpoint's engines are SGLang in pods of their own, to which an init
container brings our model package. In the end the drafted endpoint answers what one without a drafter answers.

Where no speed-up is measured, the job may end without a promotion, for its speed alone (`SPEED`). A person then
promotes the best drafter, as `eyrie endpoints promote` does; the summary says which it was.

Prints a diary and a summary, writes both as JSON, and ends with 1 if anything is not as it should be. `CANNOT_SHOW` is
part of the summary.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import write_atomically
from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.contract.stages import JOB_STAGES
from eyrie_operator.manifests.deployment import ENDPOINT_LABEL, REVISION_LABEL
from tests.cluster.observations import QUESTIONS, Diary, Served, chat, serving
from tests.cluster.patience import PATIENCE
from tests.cluster.programs import ROOT, Programs, programs
from tests.cluster.release import Release, installed
from tests.cluster.seed_job import BUCKET, SEED, seed_job, write_sources
from tests.sglang.servers import sglang_python

TARGETS = ROOT / ".eyrie" / "rehearsal"
TARGET_TOKENS = {"target": 300_000, "target-short": 60_000}
"""What the target of each form is trained on, by its directory's name."""

ENVIRONMENT = ROOT / "tests" / "sglang" / "environment"
PROGRAM_SECRET = "sglang-program"
JOB_S = 7200.0
SPEED = frozenset({"speculation-pays", "suite", "load", "load-suite", "ttft"})
"""Promotion checks that two shared cores explain."""

TOOL_QUESTION = "Put birthday party in my calendar for Saturday at 15:15."

CANNOT_SHOW = (
    "GPUs: no CUDA kernel ran, memory and speed are a CPU's, tensor parallelism and the placement on H200 are replaced",
    "SGLang's own image: SGLang 0.5.23 ran from a virtual environment of the node, its CPU kernels replaced by "
    "stand-ins that verify greedily",
    "our images: pods run this machine's programs in an empty image (the walk has run in the images: "
    "docs/helm_operations.md)",
    "real Kubeflow: its double (tests/kubeflow) read the compiled pipeline and made the pods",
    "a real object store: rclone's S3 server over a directory of this machine, without conditional writes",
    "the Hub: the target is a local directory, and Dolci's two data sets are rows of the quickstart corpus in Dolci's "
    "form, in a bucket; of the suites only the held-out prompts were measured",
    "hardware compared: there is one kind of node, so prove.hardware is left out",
    "the size: 32 billion parameters, 500,000 conversations of 2048 tokens, bfloat16, temperature 0.6 while measuring",
    "a canary's share of the requests: without a Gateway the Service changes to a healthy revision at once",
    "a current Kubernetes: the cluster of tests is 1.20, with one node",
)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Rehearse the seed's job on a cluster of this machine.")
    parser.add_argument("--short", action="store_true", help="two candidates, a tenth of the conversations")
    parser.add_argument("--out", type=Path, default=ROOT / ".eyrie" / "bench" / "rehearsal.json", help="JSON to write")
    args = parser.parse_args()
    say = Diary()
    target = TARGETS / ("target-short" if args.short else "target")
    train_target(target, say)
    job, replaced = seed_job(target, short=args.short)
    print(f"{SEED.relative_to(ROOT)}, in which {len(replaced)} fields are replaced:")
    print("".join(f"  {line}\n" for line in replaced), end="")
    ran = on_this_machine(target)
    with tempfile.TemporaryDirectory() as directory:
        def around(release: Release) -> None:
            bucket = Path(directory) / "s3" / BUCKET
            tools = write_sources(bucket, job["data"]["max_conversations"])
            say(f"conversations are in the bucket {BUCKET}; with tools: {tools}")
            release.core.create_namespaced_secret(release.namespace, {
                "metadata": {"name": PROGRAM_SECRET}, "stringData": {"program": str(ENVIRONMENT / "serve")}})

        with installed(ran, Path(directory), values(), around) as release:
            say("the chart is installed, with its stores and Kubeflow's double")
            summary = rehearse(release, job, say)
    summary["replaced"], summary["cannot_show"] = replaced, CANNOT_SHOW
    print("\n".join(("", *lines(summary))))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, json.dumps(summary, indent=1) + "\n")
    say(f"done; {args.out} has all of it")


def train_target(target: Path, say: Diary) -> None:
    """A small Olmo 3, trained once; what was begun is continued."""
    card = target / "card.json"
    if card.is_file() and json.loads(card.read_text())["finished"]:
        return
    say("training the target, a small Olmo 3")
    subprocess.run([sys.executable, "-m", "tests.cluster.seed_target", "--out", str(target), "--tokens",
                    str(TARGET_TOKENS[target.name])], check=True, cwd=ROOT)
    say("the target is trained")


def on_this_machine(target: Path) -> Programs:
    """The pods' programs, and with them SGLang and the target."""
    ran = programs()
    if not ran.on_host:
        raise SystemExit("the nodes are not this machine, whose SGLang and target the pods use: unset EYRIE_TEST_IMAGE")
    venv = sglang_python().parents[1]
    return replace(ran, paths=(*ran.paths, *((str(path), str(path)) for path in (venv, ENVIRONMENT, target))))


def values() -> dict[str, Any]:
    """Of the chart. Stages' pods are told which SGLang to start as their image would know it; the variable comes by a
    Secret because a placement takes no plain one."""
    patience_s = 600.0 * PATIENCE
    return {"cluster": {
        "stages": {"secret_variables": [{"variable": SGLANG_PROGRAM, "secret": PROGRAM_SECRET, "key": "program"}]},
        "serving": {"python": [str(ENVIRONMENT / "python")], "hardware_profile": "cpu",
                    "startup_timeout_s": patience_s}}}


def rehearse(release: Release, job: Mapping[str, Any], say: Diary) -> dict[str, Any]:
    """From the posted job to compared answers. Raises AssertionError where something is not as it should be."""
    posted = release.rest("/jobs", dict(job))
    assert posted.status == 202, posted.text
    job_id = posted.body["id"]
    say(f"POST /v1alpha1/jobs -> 202, job {job_id}")
    status = follow(release, job_id, say)
    assert status["phase"] == "Succeeded", json.dumps(status, indent=1)
    report = release.get_json(f"/jobs/{job_id}/report")
    decision, name = status["decision"], job["serve"]["endpoint"]
    if decision["verdict"] == "promote":
        say(f"promoted: {'; '.join(decision['reasons'])}")
    else:
        refused_for_speed(decision, report)
        say(f"not promoted, for its speed on this machine: {'; '.join(decision['reasons'])}")
        serving(release, name, 1)
        by_hand = release.rest(f"/endpoints/{name}/promote", {"job_id": job_id})
        assert by_hand.status == 202, by_hand.text
        say("a person promotes the best drafter: POST .../promote -> 202")
    drafted = serving(release, name, 2)
    say(f"revision 2 of endpoint {name} serves at {drafted.url}")
    brought = init_containers(release, f"{ENDPOINT_LABEL}={name},{REVISION_LABEL}=2")
    release.apply("DraftEndpoint", "bare", {
        "target": job["target"], "serve": {"engine": job["engine"], "max_concurrency": 2}})
    bare = serving(release, "bare", 1)
    say(f"the bare target serves at {bare.url}")
    answers = compare(release, drafted, bare)
    say(f"{len(answers)} answers of both Services are equal")
    audit(report, job)
    return {"job": job_id, "decision": decision, "seconds_by_stage": report["seconds"], "report": report,
            "init_containers": brought, "endpoint": release.get_json(f"/endpoints/{name}"), "answers": answers}


def follow(release: Release, job_id: str, say: Diary) -> dict[str, Any]:
    """Until the job has ended; every change of a stage goes into the diary. Returns the job's status."""
    seen: dict[str, str] = {}
    end = time.monotonic() + JOB_S * PATIENCE
    while time.monotonic() < end:
        status: dict[str, Any] = release.get_json(f"/jobs/{job_id}")["status"]
        for one in status["stages"]:
            name = "/".join(filter(None, (one["stage"], one["key"])))
            if seen.get(name, "Pending") != one["state"]:
                seen[name] = one["state"]
                say(f"{name}: {one['state']}{': ' + str(one['message']) if one.get('message') else ''}")
        if status["phase"] in ("Succeeded", "Failed", "Cancelled"):
            return status
        time.sleep(3.0)
    raise AssertionError(f"job {job_id} has not ended within {JOB_S * PATIENCE:.0f} s\n{release.diagnosis()}")


def refused_for_speed(decision: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """The drafter was measured as too slow, or tuning chose no speculation; no other check failed."""
    failed = {check["name"].partition(":")[0] for check in decision["checks"] if not check["passed"]}
    assert failed, json.dumps(report, indent=1)
    assert failed <= SPEED, json.dumps(report, indent=1)


def init_containers(release: Release, selector: str) -> list[str]:
    """Names of the init containers of the endpoint's engine, all of which have ended well."""
    (pod,) = release.pods(selector)
    ended = {one.name: one.state.terminated for one in pod.status.init_container_statuses or ()}
    assert set(ended) == {"fetch-drafter", "bring-plugin"}, ended
    assert all(one is not None and one.exit_code == 0 for one in ended.values()), ended
    return sorted(ended)


def compare(release: Release, drafted: Served, bare: Served) -> dict[str, str]:
    """The same words from both Services, for each question."""
    answers: dict[str, str] = {}
    for question in (*QUESTIONS, TOOL_QUESTION):
        texts = [chat(release, endpoint, question)[0] for endpoint in (drafted, bare)]
        assert texts[0] == texts[1], (question, texts)
        assert texts[0].strip(), question
        answers[question] = texts[0]
    assert len(set(answers.values())) > 1, answers
    return answers


def audit(report: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """Nothing left out: every candidate trained, every checkpoint benchmarked in SGLang, tuned, proven."""
    candidates = math.prod(len(axis["values"]) for axis in job["sweep"]["axes"])
    assert len(report["train"]) == candidates, report["train"]
    exported = {one["name"] for train in report["train"] for one in train["checkpoints"]}
    assert len(exported) == candidates * job["train"]["num_checkpoints"], exported
    assert {one["checkpoint"] for one in report["benchmark"]} == exported
    assert all(one["lossless"] for one in report["benchmark"]), report["benchmark"]
    assert report["tune"]["map"]["trials_measured"] > 1, report["tune"]
    assert report["prove"]["engine"] == "sglang", report["prove"]
    if report["prove"]["use"]["setting"]["method"] != "off":
        assert report["prove"]["parity"]["passed"], report["prove"]["parity"]
    assert set(report["seconds"]) >= set(JOB_STAGES), report["seconds"]


def lines(summary: Mapping[str, Any]) -> Sequence[str]:
    """The summary for readers. Pure."""
    report = summary["report"]
    answered, captured, tuned, proof = (report[name] for name in ("regenerate", "capture", "tune", "prove"))
    point = tuned["map"]["points"][0]
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in summary["seconds_by_stage"].items())
    return (
        f"regenerate: {answered['rows_answered']} answers in {answered['engine']}, {answered['rows_held_out']} prompts "
        f"held out, {answered['rows_quarantined']} rows quarantined",
        f"capture: {captured['tokens']} tokens of {captured['rows']} rows, {captured['bytes'] / 2**20:.1f} MiB in "
        f"{captured['codec']}, {captured['bytes_per_token']:.0f} bytes a token, layers "
        f"{captured['layers']['aux_layers']}",
        f"train: {len(report['train'])} drafters, "
        f"{sum(len(one['checkpoints']) for one in report['train'])} checkpoints",
        *(f"benchmark: {one['checkpoint']} tau {one['cells'][0]['tau']:.2f}, {one['cells'][0]['speedup']:.2f}x, "
          f"{sum(cell['identical'] for cell in one['cells'])} of {sum(cell['prompts'] for cell in one['cells'])} "
          "answers identical" for one in report["benchmark"]),
        f"tune: {tuned['map']['trials_measured']} of {tuned['map']['trials_possible']} points measured; at "
        f"{point['concurrency']} at once {label(point['setting'])}, {point['speedup']:.2f}x",
        f"prove: {proven(proof)}",
        f"decision: {summary['decision']['verdict']}: {'; '.join(summary['decision']['reasons'])}",
        "serve: revisions " + ", ".join(f"{one['number']} {one['state']}" for one in summary["endpoint"]["revisions"])
        + f"; init containers {', '.join(summary['init_containers'])}; {len(summary['answers'])} answers by the "
        "Service equal to the bare target's",
        f"seconds: {seconds}",
        "This cannot show:",
        *(f"  - {line}" for line in summary["cannot_show"]),
    )


def proven(proof: Mapping[str, Any]) -> str:
    """What the proof found, in words."""
    parity = proof["parity"]
    if parity is None:
        return f"nothing: {proof['skipped']}"
    ratios = (f"{one['level']:g} at once {one['throughput_ratio']:.2f}x" for one in proof["load"]["comparisons"]
              if (one["variant"], one["baseline"]) == ("candidate", "off"))
    return (f"{parity['identical']} of {parity['prompts']} answers identical, tau {parity['tau']:.3f} in SGLang and "
            f"{parity['reference_tau']} in Eyrie's engine; {', '.join(ratios)}")


def label(setting: Mapping[str, Any]) -> str:
    """As `Setting.label`."""
    tree = setting["tree"]
    return setting["method"] if tree is None else f"{tree['num_steps']}/{tree['top_k']}/{tree['num_draft_tokens']}"


if __name__ == "__main__":
    main()
