"""Drift to the end: traffic changes, acceptance falls, a job trains on what users ask lately, and is promoted or not.

    python -m benchmarks.drift --out report.json [--scenario moved] [--scenario noisy]

One machine, the shipped target, one endpoint with recorded prompts, and callers as fast as one connection allows.

moved   a drafter is trained on mathematics and serves; callers then ask for code. Expected: an alarm, a job whose
        training continues from the serving drafter, and its drafter in place of the old one, by the canary.
noisy   the same drafter; callers keep asking mathematics, but with a temperature at which no drafter guesses well.
        Expected: an alarm, a job, and nothing promoted, since there is nothing to gain.

Reported are acceptance lengths on prompts that no training has seen: before, fallen, and after. The program ends with 1
when the end is another than expected.
"""

import argparse
import gzip
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import eyrie_workers.quickstart
from eyrie_api.artifacts import code_version
from eyrie_api.client import Client
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.status import Endpoint, Job
from eyrie_workers.machine import client_environment
from tests.waiting import wait_for
from tests.walkthrough.test_one_machine import drafted, finished, plane

CONVERSATIONS = Path(eyrie_workers.quickstart.__file__).parent / "conversations.jsonl.gz"
DRAFT = {"num_steps": 5, "top_k": 1, "num_draft_tokens": 6}
TOKENS = 64
JOB_S, ALARM_S, PROMOTION_S = 1800.0, 600.0, 300.0
MEASURED = 40
"""Prompts per measured acceptance length."""


def prompts_of(category: str) -> list[list[dict[str, str]]]:
    """The first user's turn of each conversation of a category, with the system message if there is one."""
    found = []
    with gzip.open(CONVERSATIONS, "rt") as rows:
        for row in map(json.loads, rows):
            if row["category"] == category and not row.get("tools"):
                messages = row["messages"]
                first = next(number for number, one in enumerate(messages) if one["role"] == "user")
                found.append([{"role": one["role"], "content": one["content"]} for one in messages[:first + 1]])
    return found


def job_of(train_on: Path) -> JobSpec:
    """A short job on the prompts of a file, measured on what it holds out of them."""
    return JobSpec.model_validate({
        "name": "first", "target": {"model": "quickstart", "dtype": "float32"},
        "data": {"sources": [{"path": str(train_on), "format": "messages"}], "held_out_fraction": 0.1},
        "regenerate": {"sampling": {"temperature": 0.7}, "max_new_tokens": 96, "concurrency": 32},
        "drafter": {"draft_vocab_size": 2048},
        "train": {"learning_rate": 2e-3, "epochs": 8.0, "num_checkpoints": 1, "max_tokens_per_batch": 512},
        "benchmark": {"suites": [{"name": "asked", "path": "held-out", "max_prompts": 6}], "tree": DRAFT,
                      "max_new_tokens": TOKENS, "warmup_prompts": 1},
        "tune": {"num_steps": [3, 5], "top_k": [1], "num_draft_tokens": [6], "max_prompts": 4, "concurrencies": [1],
                 "ngram": False, "budget_s": 10.0},
        "prove": {"concurrencies": [1], "requests": 12, "most_pairs": 12, "max_new_tokens": TOKENS,
                  "parity_prompts": 4},
        # Twelve requests on a machine that a caller uses too say little about first tokens.
        "promotion": {"canary": {"shares": [0.3], "min_requests": 5, "max_step_s": 20.0}, "max_ttft_p99_ratio": 10.0,
                      "drift": {"ratio": 0.85, "windows": 2, "window_s": 45.0, "action": "retrain"}},
        "serve": {"record_prompts": 300, "min_acceptance_ratio": 0.1}})


@dataclass
class Callers:
    """One caller that asks prompts in turn, and counts tokens and rounds."""

    client: Client
    temperature: float = 0.0
    prompts: Sequence[list[dict[str, str]]] = ()
    asked: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def ask(self, endpoint: Endpoint, messages: list[dict[str, str]], temperature: float) -> tuple[int, int]:
        """Generated tokens and verify rounds of one answer."""
        answer = httpx.post(f"{endpoint.url}/chat/completions", timeout=120, trust_env=False, json={
            "model": endpoint.model, "messages": messages, "max_tokens": TOKENS, "temperature": temperature,
            "seed": self.asked, "return_spec_tokens_details": True}).raise_for_status().json()
        self.asked += 1
        return answer["usage"]["completion_tokens"], answer["sglext"]["spec_tokens_details"]["spec_verify_ct"]

    def tau(self, endpoint: Endpoint, prompts: Sequence[list[dict[str, str]]], temperature: float) -> float:
        """Acceptance length over prompts, one after the other."""
        pairs = [self.ask(endpoint, one, temperature) for one in prompts]
        return sum(tokens for tokens, _ in pairs) / sum(rounds for _, rounds in pairs)

    @contextmanager
    def requests(self, endpoint: Endpoint, prompts: Sequence[list[dict[str, str]]],
               temperature: float) -> Iterator[None]:
        """Callers ask these prompts again and again within the block."""
        self._stop.clear()

        def ask() -> None:
            number = 0
            while not self._stop.is_set():
                try:
                    self.ask(endpoint, prompts[number % len(prompts)], temperature)
                except httpx.HTTPError:  # an engine is replaced: the same prompt again
                    time.sleep(0.5)
                    continue
                number += 1
                time.sleep(0.1)  # leaves the machine to the job

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(130)


def play(scenario: str, directory: Path) -> dict[str, Any]:
    """One scenario from the first job to its end; what was seen."""
    mathematics = prompts_of("math")
    later = prompts_of("code") if scenario == "moved" else mathematics[400:]
    temperature = 0.0 if scenario == "moved" else 2.0
    file = directory / "mathematics.jsonl"
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in mathematics[:300]))
    seen: dict[str, Any] = {"scenario": scenario, "began": time.monotonic()}

    def note(words: str) -> None:
        print(f"{scenario}: {time.monotonic() - seen['began']:.0f} s: {words}", file=sys.stderr, flush=True)

    with plane(directory / "home") as (client, _):
        callers = Callers(client)
        note("training on mathematics")
        first = finished(client, client.create_job(job_of(file)).id, JOB_S)
        assert first.status.decision is not None, first.status.conditions
        assert first.status.decision.promote, first.status.decision
        endpoint = wait_for(lambda: drafted(client.endpoint("default")), "the drafter serves", PROMOTION_S, every_s=0.2)
        seen["proven"] = _active(endpoint).tau
        seen["before"] = callers.tau(endpoint, mathematics[300:300 + MEASURED], 0.0)
        seen["fallen"] = callers.tau(endpoint, later[-MEASURED:], temperature)
        note(f"serves revision {endpoint.active_revision}; tau {seen['before']:.2f}, on the later requests "
             f"{seen['fallen']:.2f}")
        with callers.requests(endpoint, later[:-MEASURED], temperature):
            started = wait_for(lambda: _retraining(client), "an alarm and a job", ALARM_S, every_s=0.2)
            seen["alarm"] = _history(client, "drift")[0]["message"]
            note(f"{seen['alarm']}")
            second = finished(client, started, JOB_S)
            seen["continued from the serving drafter"] = second.spec.drafter.init_from == _active(endpoint).drafter_dir
            seen["decision"] = _decision(second)
            seen["requests recorded"] = _recorded(directory / "home")
            note(f"job {started} on {seen['requests recorded']} requests: {seen['decision']['verdict']}; "
                 f"{'; '.join(seen['decision']['refused']) or 'nothing refused'}")
            if seen["decision"]["promote"]:
                endpoint = wait_for(lambda: _serves(client.endpoint("default"), second.id),
                                    "the new drafter serves", PROMOTION_S, every_s=0.2)
        seen["after"] = callers.tau(endpoint, later[-MEASURED:], temperature)
        seen["history"] = [one["reason"] for kind in ("canary", "activated", "drift", "retraining", "rolled-back")
                           for one in _history(client, kind)]
        seen["serving job"] = "retrained" if _active(endpoint).job_id == second.id else "first"
        note(f"tau {seen['after']:.2f} by the drafter of the {seen['serving job']} job")
    seen["seconds"] = time.monotonic() - seen.pop("began")
    expected = "retrained" if scenario == "moved" else "first"
    seen["as expected"] = seen["serving job"] == expected
    return seen


def _active(endpoint: Endpoint) -> Any:
    return next(one for one in endpoint.revisions if one.number == endpoint.active_revision)


def _serves(endpoint: Endpoint, job_id: str) -> Endpoint | None:
    return endpoint if _active(endpoint).job_id == job_id else None


def _history(client: Client, kind: str) -> list[dict[str, Any]]:
    path = f"/v1alpha1/endpoints/default/history?kind={kind}&limit=500"
    answer = httpx.get(f"{client.base_url}{path}", trust_env=False).raise_for_status().json()
    return list(answer["items"])


def _recorded(home: Path) -> int:
    """Rows of the copy that the job trained on."""
    return sum(one.read_bytes().count(b"\n") for one in (home / "endpoints/default/traffic").glob("*.jsonl"))


def _retraining(client: Client) -> str | None:
    items = _history(client, "retraining")
    return str(items[-1]["job_id"]) if items else None


def _decision(job: Job) -> dict[str, Any]:
    decision = job.status.decision
    assert decision is not None, job.status.conditions
    refused = [f"{check.name}: {check.words}" for check in decision.checks if not check.passed]
    return {"promote": decision.promote, "verdict": decision.verdict, "refused": refused}


def main(argv: Sequence[str] | None = None) -> int:
    """Play the scenarios; 1 when one ended otherwise than expected."""
    parser = argparse.ArgumentParser(description="Drift to the end, on one machine.")
    parser.add_argument("--scenario", action="append", choices=("moved", "noisy"), help="default: both")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    found = []
    for scenario in given.scenario or ("moved", "noisy"):
        directory = Path(tempfile.mkdtemp(prefix="eyrie-drift-"))
        try:
            found.append(play(scenario, directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    report = {"scenarios": found, "draft": DRAFT, "code_version": code_version(),
              "environment": client_environment().model_dump(mode="json")}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(json.dumps(report, indent=2, default=str))
    return 0 if all(one["as expected"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
