"""`helm upgrade` under a running job and a serving endpoint, there and back: `make campaign-upgrade-cluster`.

The old version is that of `tests.campaigns.upgrade`, with its chart. It is installed on a cluster of this machine with
the bundled stores (PostgreSQL, Redis, S3) and Kubeflow's double; pods of the old version mount the old checkout where
those of the new one mount ours. A DraftEndpoint serves the quickstart target. Then twice, old to new and new to old:

    a small job is posted; once its capture runs, the release is upgraded to the other version's chart and programs,
    which migrates the tables (forth) or finds newer ones (back), and replaces API, workers, operator and engines

Rules, after each: every pod becomes ready; the API is the other version's; the job succeeds with one end and each stage
finished once; jobs that had ended and the endpoint's revision are as they were; the endpoint answers the same greedy
text. Chats are sent by the Service all the time: engines are replaced one by one, so each is answered, or is one of
those refused or cut off that are counted; an answer with another text or another status is never given.

    python -m tests.campaigns.cluster_upgrade [--seed 1] [--seconds 2400] [--out FILE]

The whole is played once, `--seconds` bounds the waits. Without git's history it exits with 75.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from eyrie_pipelines.processes import wait_until
from tests.campaigns.live_servers import scratch
from tests.campaigns.report import Campaign, options
from tests.campaigns.upgrade import CANNOT_RUN, Chats, NoHistory, OldVersion, check_out
from tests.cluster.observations import Served, serving
from tests.cluster.programs import Programs, programs
from tests.cluster.release import CHART, Release, installed

ENDPOINT = "steady"
VALUES: Mapping[str, Any] = {"operator": {"replicas": 1}, "cluster": {"max_runs": 1}}
_QUESTION = "What is two and two?"


def body_of(number: int) -> dict[str, Any]:
    """A small job with answers of its own; nothing is promoted. As a user writes it, without the defaults, some of
    which are of fields that the old version does not have."""
    return {
        "name": f"upgraded-{number}", "target": {"model": "quickstart"},
        "data": {"sources": [{"path": "quickstart"}], "max_conversations": 24},
        "regenerate": {"max_new_tokens": 24 + number, "concurrency": 8},
        "drafter": {"draft_vocab_size": 1536},
        "train": {"max_steps": 4, "num_checkpoints": 1, "max_tokens_per_batch": 1024},
        "benchmark": {"suites": [{"name": "chat", "path": "quickstart:chat", "max_prompts": 2, "required": False}],
                      "temperatures": [0.0], "tree": {"num_steps": 3, "top_k": 1, "num_draft_tokens": 4},
                      "max_new_tokens": 24, "warmup_prompts": 1},
        "tune": {"num_steps": [3], "top_k": [1], "num_draft_tokens": [4], "ngram": False, "max_prompts": 2,
                 "temperatures": [0.0], "concurrencies": [1], "budget_s": 6.0},
        "prove": {"loads": [1], "requests": 4, "max_new_tokens": 24, "parity_prompts": 2},
        "promotion": {"mode": "never"}, "serve": {"enabled": False}}


def ask(release: Release, served: Served) -> tuple[str, str]:
    """One chat from inside the cluster, as `Chats` takes it."""
    answer = release.ask(f"{served.url}/chat/completions", {
        "model": served.model, "temperature": 0, "max_tokens": 16,
        "messages": [{"role": "user", "content": _QUESTION}]})
    if answer.status == 200:
        return "answered", str(answer.body["choices"][0]["message"]["content"])
    if answer.status in (0, 502, 503):
        return "disconnected" if answer.status == 0 else str(answer.status), ""
    return "wrong", f"{answer.status}: {answer.text[:300]}"


class Upgrades:
    """A release, and the versions that it has in turn."""

    def __init__(self, campaign: Campaign, release: Release, old: OldVersion, ours: Programs) -> None:
        self.campaign, self.release, self.old, self.ours = campaign, release, old, ours
        self.is_new = False
        self.ended: dict[str, dict[str, Any]] = {}
        """Jobs that have ended, as they were shown then."""

        self.steps: list[dict[str, Any]] = []

    def begin(self) -> None:
        """An endpoint serves, and one job ends under the old version."""
        self.release.apply("DraftEndpoint", ENDPOINT, {"target": {"model": "quickstart"}})
        self.served = serving(self.release, ENDPOINT, 1)
        self.text = ask(self.release, self.served)[1]
        self._check_job(self._submit())

    def replace(self) -> None:
        """Upgrade the release to the other version while a job runs."""
        began, before = time.monotonic(), self._code_version()
        job_id = self._submit()
        self._await(lambda: self._begun(job_id), f"the capture of job {job_id} begins")
        with Chats(partial(ask, self.release, self.served)) as chats:
            self.is_new = not self.is_new
            tree, chart = (self.ours, CHART) if self.is_new else (self.ours.of(self.old.tree),
                                                                  self.old.tree / "helm" / "eyrie")
            self.release.upgrade(tree, chart, VALUES)
            self._await(self._is_ready, "every pod of the new version is ready")
            upgraded_s = time.monotonic() - began
            after = self._code_version()
            self._check_job(job_id)
        done = {"to": "new" if self.is_new else "old", "seconds": round(time.monotonic() - began, 1),
                "until ready": round(upgraded_s, 1), "chats": dict(chats.seen), "code": [before, after]}
        self.steps.append(done)
        print(f"upgrade: {done}", file=sys.stderr, flush=True)
        if before == after:
            self._find("the API is the other version's", **done)
        if chats.wrong or set(chats.texts) != {self.text}:
            self._find("the endpoint answers as before, or says that it is to be repeated", **done,
                       wrong=chats.wrong[:3], texts=dict(chats.texts), wanted=self.text)
        shown = self.release.get_json(f"/endpoints/{ENDPOINT}")
        if shown["active_revision"] != 1 or len(shown["revisions"]) != 1:
            self._find("the endpoint has the revision it had", shown=shown)
        for ended, was in self.ended.items():
            if (now := self._shown(ended)) != was:
                self._find("a job that had ended is as it was", job=ended, before=was, after=now)

    def _code_version(self) -> str:
        """Of the API that answers."""
        found = ""

        def answered() -> bool:
            nonlocal found
            answer = self.release.rest("/version", base="")
            found = str(answer.body["code_version"]) if answer.status == 200 else ""
            return bool(found)

        self._await(answered, "the API says its version")
        return found

    def _find(self, rule: str, **facts: object) -> None:
        self.campaign.add_finding(rule, version="new" if self.is_new else "old", old=self.old.commit, **facts)

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        if not wait_until(condition, max(120.0, self.campaign.seconds - self.campaign.elapsed_s)):
            self._find(what, diagnosis=self.release.diagnosis()[-4000:])
            raise SystemExit(self.campaign.finish({"upgrades": self.steps}))

    def _is_ready(self) -> bool:
        """Every Deployment and StatefulSet runs what it should, and nothing else."""
        sets = [*self.release.apps.list_namespaced_deployment(self.release.namespace).items,
                *self.release.apps.list_namespaced_stateful_set(self.release.namespace).items]
        return all(one.status.observed_generation == one.metadata.generation
                   and (one.status.ready_replicas or 0) == one.spec.replicas
                   and (one.status.updated_replicas or 0) == one.spec.replicas
                   and (one.status.replicas or 0) == one.spec.replicas for one in sets)

    def _submit(self) -> str:
        posted = self.release.rest("/jobs", body_of(len(self.ended)))
        if posted.status != 202:
            raise AssertionError(f"a job is refused: {posted.status} {posted.text}")
        return str(posted.body["id"])

    def _begun(self, job_id: str) -> bool:
        stages = self.release.get_json(f"/jobs/{job_id}")["status"]["stages"]
        return any(one["stage"] == "capture" and one["state"] == "Running" for one in stages)

    def _events(self, job_id: str) -> list[dict[str, Any]]:
        return list(self.release.get_json(f"/jobs/{job_id}/events?limit=500")["items"])

    def _shown(self, job_id: str) -> dict[str, Any]:
        status = self.release.get_json(f"/jobs/{job_id}")["status"]
        return {"phase": status["phase"], "finished_at": status["finished_at"],
                "stages": [(one["stage"], one["key"], one["state"]) for one in status["stages"]],
                "reasons": dict(Counter(one["reason"] for one in self._events(job_id)))}

    def _check_job(self, job_id: str) -> None:
        """Wait for the job's end, then look at its history."""
        self._await(lambda: self.release.get_json(f"/jobs/{job_id}")["status"]["finished_at"] is not None,
                    f"job {job_id} ends")
        shown = self.ended[job_id] = self._shown(job_id)
        events = self._events(job_id)
        finished = Counter((one["stage"], one["key"]) for one in events if one["reason"] == "StageFinished")
        succeeded = {(stage, key) for stage, key, state in shown["stages"] if state == "Succeeded"}
        if shown["phase"] != "Succeeded" or shown["reasons"].get("Succeeded") != 1 or finished != Counter(succeeded):
            self._find("a job ends as if nothing had happened", job=job_id, shown=shown, finished=str(finished),
                       warnings=[one["message"] for one in events if one["type"] == "Warning"])


def main() -> int:
    """Run the campaign."""
    parser = options("cluster_upgrade", "helm upgrade under a job and an endpoint, there and back.", 2400.0)
    wanted = parser.parse_args()
    campaign = Campaign("cluster_upgrade", wanted.seed, wanted.seconds, wanted.out)
    ours = programs()
    if not ours.on_host:
        print("upgrade: cannot run: the pods' image has one version (unset EYRIE_TEST_IMAGE)", file=sys.stderr)
        return CANNOT_RUN
    with scratch("cluster-upgrade") as path:
        try:
            old = check_out(path / "old", "helm/eyrie")
        except NoHistory as error:
            print(f"upgrade: cannot run: {error}", file=sys.stderr)
            return CANNOT_RUN
        (path / "stores").mkdir()
        with installed(ours.of(old.tree), path / "stores", VALUES, chart=old.tree / "helm" / "eyrie") as release:
            upgrades = Upgrades(campaign, release, old, ours)
            upgrades.begin()
            for number in range(2):
                upgrades.replace()
                campaign.print_progress(number + 1, "of 2 upgrades")
    return campaign.finish({"old version": {"commit": old.commit, "date": old.date},
                            "newest migration": old.migration, "upgrades": upgrades.steps,
                            "jobs": len(upgrades.ended)})


if __name__ == "__main__":
    sys.exit(main())
