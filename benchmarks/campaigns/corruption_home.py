"""Damaged files of a control plane's home: part of `benchmarks.campaigns.corruption`.

Three jobs with rehearsed stages: one has ended; one was killed with its run and the control plane while it trained; the
run of one failed while the control plane was down. One file is damaged, then the control plane is started. Rules: it
starts, or refuses with an error that names the database; the jobs and their files are answered without a 5xx, but for
the error that says which file is damaged; no file is served that differs from its digest; a job that had ended is as
it was; one that had not ends as if nothing had happened, or failed for a reason that names the file; one that had
failed ends with the reason of its stage, or after another run. A job that the database has lost is named in the log,
and so is a log of the database of which a flipped bit loses rows. `eyrie doctor` names a record of a run that is
emptied or cut.

The database is replaced by one from before the jobs: alone, with the log of the newer one, as by a careless restore, or
with its log. An older log is one that has lost its last frames.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.campaigns.chaos import rehearsed
from benchmarks.campaigns.corruption_damage import Damage, Verdict, damage_bytes
from benchmarks.campaigns.live_servers import Plane
from eyrie_api.artifacts import digest_bytes
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.database.engine import Database
from eyrie_operator.doctor import Home as DoctorsHome
from eyrie_operator.doctor import examine
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from tests.pipelines.conftest import Rehearsal, job_file, spec_of

END_S = 120.0
_WITH_LOG = "eyrie.db and its log"
_DATABASE = ("eyrie.db", "eyrie.db-wal", _WITH_LOG)
_BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")


class Home:
    """A home with both jobs, at rest, and copies of it to damage."""

    def __init__(self, path: Path) -> None:
        self.path, self.home, self.kept, self._names = path, path / "home", path / "kept", path / "jobs.json"
        self.older = path / "older"
        self.ended, self.killed, self.failed = "", "", ""

    def build(self) -> None:
        """Make the jobs, and kill everything; unless an earlier campaign did."""
        if self._names.exists():
            self.ended, self.killed, self.failed = json.loads(self._names.read_text())
            return
        for directory in (self.home, self.kept, self.older):
            shutil.rmtree(directory, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.older.mkdir()
        with rehearsed(self.path) as rehearsal:
            self._make_jobs(rehearsal)
        shutil.copytree(self.home, self.kept)  # not another place: specs hold absolute paths
        self._names.write_text(json.dumps([self.ended, self.killed, self.failed]))

    def _make_jobs(self, rehearsal: Rehearsal) -> None:
        rehearsal.plan(train__base=["ok", "hang", "permanent", "ok"])
        plane = Plane(self.home)
        assert plane.start() is None, plane.log.read_text()[-2000:]
        plane.terminate()
        shutil.copy(self.home / "eyrie.db", self.older)
        assert plane.start() is None, plane.log.read_text()[-2000:]
        self.ended = self._submit(plane)
        assert wait_until(lambda: _phase(plane, self.ended) == "Succeeded", END_S), _phase(plane, self.ended)
        plane.terminate()  # its log is in the database now
        assert plane.start() is None, plane.log.read_text()[-2000:]
        shutil.copy(self.home / "eyrie.db-wal", self.older)
        self.killed, self.failed = self._submit(plane), self._submit(plane)
        training = self.home / "jobs" / self.killed / "stages/train/base/spec.json"
        assert wait_until(training.exists, END_S)
        assert wait_until(lambda: rehearsal.starts()[-1:] == ["train/base"], END_S)
        plane.kill()
        for pid in local.live_processes(self.home / "jobs" / self.killed):
            os.kill(pid, signal.SIGKILL)
        directory = self.home / "jobs" / self.failed
        directory.mkdir(exist_ok=True)
        local.start(directory, job_file(JobSpec.model_validate(_BODY), job_id=self.failed))
        assert wait_until(lambda: local.observe(directory).state != "running", END_S)
        assert local.observe(directory).state == "failed", local.observe(directory)
        plane.http.close()

    def _submit(self, plane: Plane) -> str:
        return str(plane.http.post("/v1alpha1/jobs", json=_BODY).json()["id"])

    def files(self) -> list[str]:
        """What the control plane or the runs read, relative to the home."""
        wanted = [self.kept / name for name in _DATABASE]
        for job in (self.ended, self.killed, self.failed):
            directory = self.kept / "jobs" / job
            wanted += [directory / name for name in ("job.json", "outcome.json", "run/run.json", "run/result.json",
                                                     "run/failure.json")]
            wanted += [path for pattern in ("**/manifest.json", "**/events.jsonl", "**/failure.json", "**/spec.json",
                                            "regenerate/*.jsonl")
                       for path in sorted((directory / "stages").glob(pattern))]
        return [_WITH_LOG, *dict.fromkeys(path.relative_to(self.kept).as_posix() for path in wanted
                                          if path.is_file() and path.stat().st_size)]

    def damaged(self, name: str, damage: Damage, rng: random.Random) -> bytes | None:
        """The file's bytes after the damage; an older one of a job is the other jobs'."""
        if name == _WITH_LOG:
            return (self.older / "eyrie.db").read_bytes() if damage == "older" else None
        path = self.kept / name
        older = self.older / name
        if path.name in ("job.json", "outcome.json", "run.json", "result.json", "manifest.json"):
            below = Path(*Path(name).parts[2:])
            others = (self.kept / "jobs" / job / below for job in (self.ended, self.killed, self.failed))
            older = next((one for one in others if one != path and one.is_file()), older)
        return damage_bytes(path.read_bytes(), damage, rng, older)

    def try_case(self, name: str, data: bytes) -> Verdict:
        """Damage a copy, start the control plane on it, judge."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.kept, self.home)
        if name == _WITH_LOG:
            for log in self.home.glob("eyrie.db-*"):
                log.unlink()
        (self.home / ("eyrie.db" if name == _WITH_LOG else name)).write_bytes(data)
        if unnamed := self._unnamed(name, data):
            return "the doctor names an emptied or cut record", {"found": unnamed}
        loses = name == "eyrie.db-wal" and self._is_flipped(data) and _rows(self.home) != _rows(self.kept)
        plane = Plane(self.home)
        plane.log.unlink(missing_ok=True)
        try:
            with rehearsed(self.path):
                code = plane.start()
            if loses and "eyrie.db-wal" not in plane.log.read_text() and code is None:
                return "a log that has lost commits is named", {"log": plane.log.read_text()[-1500:]}
            if code is not None:
                said = plane.log.read_text()[-1500:]
                if name in _DATABASE and code > 0 and "eyrie.db" in said and "Traceback" not in said:
                    return "refused", {}
                return "the control plane starts, or names the database", {"code": code, "log": said}
            return next(self._broken(plane, name), ("answered", {}))
        finally:
            plane.close()

    def _unnamed(self, name: str, data: bytes) -> list[str]:
        """What the doctor finds, where it does not name a record of a run that is no JSON any more."""
        with contextlib.suppress(ValueError):
            json.loads(data)
            return []
        if Path(name).name != "job.json" and Path(name).parent.name != "run":
            return []
        database = Database(f"sqlite:///{self.home / 'eyrie.db'}")
        try:
            found = [one.where for one in examine(DoctorsHome(self.home, database, digests=False))]
        finally:
            database.close()
        return [] if name in found else found or ["nothing"]

    def _is_flipped(self, data: bytes) -> bool:
        whole = (self.kept / "eyrie.db-wal").read_bytes()
        return len(whole) == len(data) and sum(one != other for one, other in zip(whole, data, strict=True)) == 1

    def _broken(self, plane: Plane, name: str) -> Iterator[Verdict]:
        jobs = (self.ended, self.killed, self.failed)
        for job in jobs:
            yield from self._errors(plane, job)
        lost = [job for job in jobs if _phase(plane, job) == "status 404"]
        if lost and name not in _DATABASE:
            yield "no job is lost", {"jobs": lost}
        for job in lost:
            if f"jobs/{job}" not in plane.log.read_text():
                yield "a job that the database has lost is named", {"job": job, "log": plane.log.read_text()[-1500:]}
        if name not in _DATABASE and (phase := _phase(plane, self.ended)) != "Succeeded":
            yield "a job that had ended is as it was", {"phase": phase}
        path = Path(name)
        for job in (one for one in jobs if one not in lost):
            if not _ends(plane, job):
                yield "a job ends", {"job": plane.http.get(f"/v1alpha1/jobs/{job}").json()}
                continue
            status = plane.http.get(f"/v1alpha1/jobs/{job}").json()["status"]
            words = (path.name, path.parent.name, *(("LossDiverged",) if job == self.failed else ()))
            if status["phase"] == "Failed" and not any(one in json.dumps(status["conditions"]) for one in words):
                yield "a failure names the file", {"conditions": status["conditions"]}
            yield from self._errors(plane, job)

    def close(self) -> None:
        """Nothing runs between two cases."""

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


def _rows(home: Path) -> list[str]:
    """All rows, as SQLite reads a copy of the database and its log; the error where it does not."""
    with tempfile.TemporaryDirectory() as copy:
        for name in ("eyrie.db", "eyrie.db-wal"):
            shutil.copy(home / name, copy)
        with contextlib.closing(sqlite3.connect(Path(copy) / "eyrie.db")) as database:
            try:
                return list(database.iterdump())
            except sqlite3.DatabaseError as error:
                return [str(error)]


def _names_damage(answer: httpx.Response) -> bool:
    """The one answer with a status of 500 that is asked for: the server's own file is damaged, and which."""
    return bool(answer.json().get("type") == "urn:eyrie:problem:ArtifactCorrupt")


def _phase(plane: Plane, job: str) -> str:
    answer = plane.http.get(f"/v1alpha1/jobs/{job}")
    return str(answer.json()["status"]["phase"]) if answer.status_code == 200 else f"status {answer.status_code}"


def _ends(plane: Plane, job: str) -> bool:
    return wait_until(lambda: _phase(plane, job) in ("Succeeded", "Failed"), END_S)
