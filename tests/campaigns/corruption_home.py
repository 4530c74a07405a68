"""The second half of `tests.campaigns.corruption`: damaged files of a control plane's home.

Two jobs with rehearsed stages: one has ended, one was killed with its run and the control plane while it trained. One
file is damaged, then the control plane is started. Rules: it starts, or refuses with an error that names the database;
both jobs and their files are answered without a 5xx, but for the error that says which file is damaged; no file is
served that differs from its digest; a job that had ended is as it was; one that had not ends as if nothing had
happened, or failed for a reason that names the file.
"""

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx

from eyrie_api.artifacts import digest_bytes
from eyrie_api.v1alpha1.serving import ServeSpec
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from tests.campaigns.chaos import rehearsed
from tests.campaigns.live_servers import Plane
from tests.pipelines.conftest import Rehearsal, spec_of

END_S = 120.0
_DATABASE = ("eyrie.db", "eyrie.db-wal")
_BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")

Verdict = tuple[str, dict[str, object]]


class Home:
    """A home with both jobs, at rest, and copies of it to damage."""

    def __init__(self, path: Path) -> None:
        self.path, self.home, self.kept, self._names = path, path / "home", path / "kept", path / "jobs.json"
        self.ended, self.killed = "", ""

    def build(self) -> None:
        """Make both jobs, and kill everything; unless an earlier campaign did."""
        if self._names.exists():
            self.ended, self.killed = json.loads(self._names.read_text())
            return
        for directory in (self.home, self.kept):
            shutil.rmtree(directory, ignore_errors=True)
        self.home.mkdir(parents=True)
        with rehearsed(self.path) as rehearsal:
            self._make_jobs(rehearsal)
        shutil.copytree(self.home, self.kept)  # not another place: specs hold absolute paths
        self._names.write_text(json.dumps([self.ended, self.killed]))

    def _make_jobs(self, rehearsal: Rehearsal) -> None:
        plane = Plane(self.home)
        assert plane.start() is None, plane.log.read_text()[-2000:]
        self.ended = plane.http.post("/v1alpha1/jobs", json=_BODY).json()["id"]
        assert wait_until(lambda: _phase(plane, self.ended) == "Succeeded", END_S), _phase(plane, self.ended)
        rehearsal.plan(train__base=["ok", "hang", "ok"])
        self.killed = plane.http.post("/v1alpha1/jobs", json=_BODY).json()["id"]
        training = self.home / "jobs" / self.killed / "stages/train/base/spec.json"
        assert wait_until(training.exists, END_S)
        assert wait_until(lambda: rehearsal.starts()[-1:] == ["train/base"], END_S)
        plane.kill()
        for pid in local.live_processes(self.home / "jobs" / self.killed):
            os.kill(pid, signal.SIGKILL)
        plane.http.close()

    def files(self) -> list[str]:
        """What the control plane or the runs read, relative to the home."""
        wanted = [self.kept / name for name in _DATABASE]
        for job in (self.ended, self.killed):
            directory = self.kept / "jobs" / job
            wanted += [directory / name for name in ("job.json", "outcome.json", "run/run.json", "run/result.json")]
            wanted += [path for pattern in ("**/manifest.json", "**/events.jsonl", "regenerate/*.jsonl")
                       for path in sorted((directory / "stages").glob(pattern))]
        return list(dict.fromkeys(path.relative_to(self.kept).as_posix() for path in wanted
                                  if path.is_file() and path.stat().st_size))

    def damaged(self, name: str, damage: str, rng: random.Random) -> bytes | None:
        """The file's bytes after the damage; there is no older file here."""
        data = bytearray((self.kept / name).read_bytes())
        if damage == "flipped":
            bit = rng.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            return bytes(data)
        return {"truncated": bytes(data[:rng.randrange(1, max(2, len(data)))]), "emptied": b""}.get(damage)

    def try_case(self, name: str, data: bytes) -> Verdict:
        """Damage a copy, start the control plane on it, judge."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.kept, self.home)
        (self.home / name).write_bytes(data)
        plane = Plane(self.home)
        plane.log.unlink(missing_ok=True)
        try:
            with rehearsed(self.path):
                code = plane.start()
            if code is not None:
                said = plane.log.read_text()[-1500:]
                if name in _DATABASE and code > 0 and "eyrie.db" in said and "Traceback" not in said:
                    return "refused", {}
                return "the control plane starts, or names the database", {"code": code, "log": said}
            return next(self._broken(plane, name), ("answered", {}))
        finally:
            plane.close()

    def _broken(self, plane: Plane, name: str) -> Iterator[Verdict]:
        for job in (self.ended, self.killed):
            yield from self._errors(plane, job)
        if name not in _DATABASE and (phase := _phase(plane, self.ended)) != "Succeeded":
            yield "a job that had ended is as it was", {"phase": phase}
        if plane.http.get(f"/v1alpha1/jobs/{self.killed}").status_code == 404:
            return  # a database that lost it: `eyrie doctor` reports the directory
        if not wait_until(lambda: _phase(plane, self.killed) in ("Succeeded", "Failed"), END_S):
            yield "a job ends", {"job": plane.http.get(f"/v1alpha1/jobs/{self.killed}").json()["status"]}
        status = plane.http.get(f"/v1alpha1/jobs/{self.killed}").json()["status"]
        path = Path(name)
        if status["phase"] == "Failed" and not any(one in json.dumps(status["conditions"])
                                                   for one in (path.name, path.parent.name)):
            yield "a failure names the file", {"conditions": status["conditions"]}
        yield from self._errors(plane, self.killed)

    def _errors(self, plane: Plane, job: str) -> Iterator[Verdict]:
        base = f"/v1alpha1/jobs/{job}"
        for path in ("", "/events", "/metrics", "/logs", "/artifacts", "/report"):
            answer = plane.http.get(base + path, headers={"Accept": "application/json"}, timeout=30.0)
            if answer.status_code >= 500 and not _names_damage(answer):
                yield "no answer is a 5xx", {"path": path, "status": answer.status_code, "body": answer.text[:500]}
        listed = plane.http.get(f"{base}/artifacts")
        for file in listed.json()["items"] if listed.status_code == 200 else ():
            answer = plane.http.get(file["url"])
            if answer.status_code >= 500 and not _names_damage(answer):
                yield "no answer is a 5xx", {"path": file["url"], "status": answer.status_code,
                                             "body": answer.text[:500]}
            if answer.status_code == 200 and digest_bytes(answer.content) != file["sha256"]:
                yield "no file is served that differs from its digest", {"path": file["url"]}


def _names_damage(answer: httpx.Response) -> bool:
    """The one answer with a status of 500 that is asked for: the server's own file is damaged, and which."""
    return bool(answer.json().get("type") == "urn:eyrie:problem:ArtifactCorrupt")


def _phase(plane: Plane, job: str) -> str:
    answer = plane.http.get(f"/v1alpha1/jobs/{job}")
    return str(answer.json()["status"]["phase"]) if answer.status_code == 200 else f"status {answer.status_code}"
