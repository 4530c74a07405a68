"""A running job and a serving endpoint while the version is replaced, there and back: `make campaign-upgrade`.

The old version is the last commit before the newest migration was added, taken from git's history and run with this
environment's packages. On one home, with an endpoint that serves the quickstart target and a job whose stages do no
work (`tests.pipelines.rehearsal`; `train` waits, so that the job is running when its plane ends):

    old -> new, by SIGTERM      the job goes on from its last finished stage, endpoint and tables are the new version's
    new -> old, by SIGTERM      what docs/operations.md promises: the old version runs on the new tables
    old -> new, by SIGKILL      run, gateway and engine of the old version go on, and the new plane finds them
    new -> old, by SIGKILL      the same back

Rules, after each: the plane starts; the job succeeds with one end, one decision and each stage finished once; jobs that
had ended and the endpoint's revision are as they were; the endpoint answers the same greedy text as before. Chats are
sent all the time, one connection each: after SIGTERM the endpoint stops with its plane, so a connection may be refused
or end with its engine until the next plane serves, and a 503 says that it is to be repeated; after SIGKILL every chat
is answered. Without the history (a shallow clone, no git) the campaign cannot run and exits with 75.

    python -m tests.campaigns.upgrade [--seed 1] [--seconds 240] [--once] [--out FILE]

`--once` leaves out the two replacements by SIGKILL. The whole is played once, `--seconds` bounds the waits.
"""

import contextlib
import io
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import versions
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.serving import ServeSpec
from eyrie_operator.embedded.processes import endpoint_dir, read_port
from eyrie_operator.embedded.routing import ROUTE_FILE
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from tests.campaigns.chaos import rehearsed
from tests.campaigns.live_servers import PACKAGES, Plane, scratch
from tests.campaigns.report import ROOT, Campaign, options
from tests.pipelines.conftest import Rehearsal, spec_of

CANNOT_RUN = 75
ENDPOINT = "steady"
# As a user writes it: without the defaults, some of which are of fields that the old version does not have.
_BODY = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json", exclude_defaults=True)
_CHAT = {"model": ENDPOINT, "messages": [{"role": "user", "content": "What is two and two?"}], "max_tokens": 8,
         "temperature": 0}

Signal = Literal["SIGTERM", "SIGKILL"]


class NoHistory(Exception):
    """The old version cannot be had; the message says why."""


@dataclass(frozen=True)
class OldVersion:
    """A checkout of the last commit whose newest migration is the one before ours."""

    commit: str
    date: str
    tree: Path
    migration: str
    """File name of our newest migration."""


def check_out(path: Path, *besides: str) -> OldVersion:
    """Take the old version's packages, and what else is named, from git's history into `path`. Raises NoHistory."""
    folder = Path(versions.__file__).parent
    before, newest = sorted(one.name for one in folder.glob("v[0-9]*.py"))[-2:]
    commit = _last_with(before, folder.relative_to(ROOT).as_posix())
    archive = _git_bytes("archive", "--format=tar", commit, "--", *PACKAGES, *besides)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(path, filter="data")
    return OldVersion(commit[:7], _git("show", "-s", "--format=%cs", commit).strip(), path, newest)


def _last_with(migration: str, folder: str) -> str:
    """The last commit of the main line whose newest migration this is: branches may have given its number, or the next
    one, to another. Raises NoHistory."""
    for commit in _git("rev-list", "--first-parent", "HEAD", "--", folder).split():
        parent = _git("rev-parse", "--verify", f"{commit}^").strip()
        names = [Path(one).name for one in _git("ls-tree", "--name-only", parent, "--", f"{folder}/").split()]
        if max(one for one in names if one.startswith("v0")) == migration:
            return parent
    raise NoHistory(f"git knows no commit whose newest migration is {migration}")


def _git_bytes(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise NoHistory("there is no git on this machine") from error
    if done.returncode:
        raise NoHistory(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout


def _git(*arguments: str) -> str:
    return _git_bytes(*arguments).decode()


class Chats:
    """A client that sends the same greedy chat again and again, a connection each, and counts what it gets.

    `ask` sends one, and returns what came of it: `answered` and the text, what may be repeated (`refused`,
    `disconnected`, `502`, `503`), or `wrong` and why. What it raises ends the chats, and is raised at the end.
    """

    def __init__(self, ask: Callable[[], tuple[str, str]]) -> None:
        self._ask, self.seen, self.texts = ask, Counter[str](), Counter[str]()
        self.wrong: list[str] = []
        self._over, self._executor = threading.Event(), ThreadPoolExecutor(1)

    def __enter__(self) -> "Chats":
        self._client = self._executor.submit(self._repeat)
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._executor.shutdown()
        self._client.result()

    def _repeat(self) -> None:
        while not self._over.wait(0.1):
            kind, said = self._ask()
            self.seen[kind] += 1
            if kind == "answered":
                self.texts[said] += 1
            elif kind == "wrong":
                self.wrong.append(said)


def ask(url: str) -> tuple[str, str]:
    """One chat, as `Chats` takes it."""
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=_CHAT, timeout=60.0, trust_env=False)
    except httpx.ConnectError:
        return "refused", ""
    except httpx.TransportError as error:
        return "disconnected", repr(error)
    if answer.status_code == 200:
        return "answered", str(answer.json()["choices"][0]["message"]["content"])
    if answer.status_code in (502, 503) and "error" in answer.json():
        return str(answer.status_code), ""
    return "wrong", f"{answer.status_code}: {answer.text[:300]}"


class Replacement:
    """One home, its plane, and the versions that run on it in turn."""

    def __init__(self, campaign: Campaign, home: Path, old: OldVersion, rehearsal: Rehearsal) -> None:
        self.campaign, self.home, self.old, self.rehearsal = campaign, home, old, rehearsal
        self.plane = Plane(home)
        self.ended: dict[str, dict[str, Any]] = {}
        """Jobs that have ended, as they were shown then."""

        self.steps: list[dict[str, Any]] = []

    @property
    def version(self) -> str:
        """Of the plane that runs."""
        return "new" if self.plane.tree is None else "old"

    @property
    def url(self) -> str:
        """Of the endpoint's gateway."""
        return f"http://127.0.0.1:{read_port(endpoint_dir(self.home, ENDPOINT))}"

    def begin(self) -> bool:
        """Start the old version with an endpoint that serves, and one job that ends under it."""
        self.plane.tree = self.old.tree
        self.plane.add_endpoint(ENDPOINT, "quickstart", port=0, max_concurrency=2)
        if not self._start() or not self._serves():
            return False
        self._check_job(self._submit())
        self.text = ask(self.url)[1]
        return True

    def replace(self, by: Signal) -> bool:
        """Replace the running version by the other one while a job trains. False when it could not go on."""
        began, before = time.monotonic(), self.version
        self.rehearsal.plan(train__base=["hang"])
        job_id = self._submit()
        trained = self.home / "jobs" / job_id / "stages/train/base/spec.json"
        if not wait_until(lambda: trained.exists() and self.rehearsal.starts()[-1:] == ["train/base"], self._left_s):
            self._find("a job reaches its training", job=job_id)
            return False
        revision, revisions = self._endpoint()
        with Chats(partial(ask, self.url)) as chats:
            if by == "SIGTERM":
                self.rehearsal.plan()
                code = self.plane.terminate()
                if code not in (0, -15):
                    self._find("a plane ends with success on SIGTERM", code=code)
                if pids := local.live_processes(self.home / "jobs" / job_id):
                    self._find("a run stops with its plane", job=job_id, pids=pids)
            else:
                self.plane.kill()
            self.plane.tree = self.old.tree if before == "new" else None
            if not self._start():
                return False
            up = self._serves()
            if by == "SIGKILL":
                self._let_train(job_id)
            self._check_job(job_id)
        done = {"from": before, "to": self.version, "by": by, "seconds": round(time.monotonic() - began, 1),
                "chats": dict(chats.seen), "schema": self._schema()}
        self.steps.append(done)
        print(f"upgrade: {done}", file=sys.stderr, flush=True)
        if not up or chats.wrong or set(chats.texts) - {self.text}:
            self._find("the endpoint answers as before, or says that it is to be repeated", **done,
                       wrong=chats.wrong[:3], texts=dict(chats.texts), wanted=self.text)
        if by == "SIGKILL" and set(chats.seen) - {"answered"}:
            self._find("the endpoint answers all the time when its plane is killed", **done)
        if self._endpoint() != (revision, revisions):
            self._find("the endpoint has the revision it had", before=[revision, revisions], after=self._endpoint())
        for ended, shown in self.ended.items():
            if (now := self._shown(ended)) != shown:
                self._find("a job that had ended is as it was", job=ended, before=shown, after=now)
        return True

    def _let_train(self, job_id: str) -> None:
        """End the training that waits since before the kill: its program dies, and is started again."""
        self.rehearsal.plan()
        for pid in local.live_processes(self.home / "jobs" / job_id):
            with contextlib.suppress(OSError):
                if b"rehearsal_stage" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    subprocess.run(["kill", "-9", str(pid)], check=False)

    @property
    def _left_s(self) -> float:
        return max(60.0, self.campaign.seconds - self.campaign.elapsed_s)

    def _find(self, rule: str, **facts: object) -> None:
        self.campaign.add_finding(rule, version=self.version, old=self.old.commit, **facts,
                                  log=self.plane.log.read_text()[-1500:])

    def _start(self) -> bool:
        code = self.plane.start()
        if code is not None:
            self._find("a version starts on the home of the other", code=code)
        return code is None

    def _serves(self) -> bool:
        def answers() -> bool:
            return (endpoint_dir(self.home, ENDPOINT) / ROUTE_FILE).exists() and ask(self.url)[0] == "answered"

        if served := wait_until(answers, self._left_s):
            return served
        self._find("the endpoint serves after the start")
        return False

    def _submit(self) -> str:
        # Each with answers of its own: a version without `reuse` cannot continue a job that takes over those of one.
        body = _BODY | {"regenerate": {"max_new_tokens": 100 + len(self.ended)}}
        answer = self.plane.http.post("/v1alpha1/jobs", json=body)
        if answer.status_code != 202:
            self._find("a job is accepted", status=answer.status_code, body=answer.text[:500])
        return str(answer.json()["id"])

    def _endpoint(self) -> tuple[object, int]:
        shown = self.plane.http.get(f"/v1alpha1/endpoints/{ENDPOINT}").json()
        return shown["active_revision"], len(shown["revisions"])

    def _shown(self, job_id: str) -> dict[str, Any]:
        status = self.plane.http.get(f"/v1alpha1/jobs/{job_id}").json()["status"]
        return {"phase": status["phase"], "finished_at": status["finished_at"],
                "stages": [(one["stage"], one["key"]) for one in status["stages"]],
                "reasons": dict(self._reasons(job_id))}

    def _events(self, job_id: str) -> list[dict[str, Any]]:
        return list(self.plane.http.get(f"/v1alpha1/jobs/{job_id}/events", params={"limit": 500},
                                        headers={"Accept": "application/json"}).json()["items"])

    def _reasons(self, job_id: str) -> Counter[str]:
        return Counter(one["reason"] for one in self._events(job_id))

    def _check_job(self, job_id: str) -> None:
        """Wait for the job's end, then look at its history."""
        def ended() -> bool:
            return self.plane.http.get(f"/v1alpha1/jobs/{job_id}").json()["status"]["finished_at"] is not None

        if not wait_until(ended, self._left_s):
            self._find("a job ends", job=job_id)
            return
        shown = self.ended[job_id] = self._shown(job_id)
        finished = Counter((one["stage"], one["key"]) for one in self._events(job_id)
                           if one["reason"] == "StageFinished")
        reasons = shown["reasons"]
        once = reasons.get("Succeeded") == 1 and reasons.get("Promoted") == 1
        if shown["phase"] != "Succeeded" or not once or any(finished[one] != 1 for one in shown["stages"]):
            self._find("a job ends as if nothing had happened", job=job_id, shown=shown, finished=str(finished),
                       warnings=[one["message"] for one in self._events(job_id) if one["type"] == "Warning"])

    def _schema(self) -> str:
        database = Database(Settings(home=self.home).resolved_database_url)
        try:
            with database.reading() as session:
                return str(session.connection().exec_driver_sql("SELECT version_num FROM alembic_version").scalar())
        finally:
            database.close()


@contextlib.contextmanager
def closing(replacement: Replacement) -> Iterator[Replacement]:
    """Stop all that is left at the end."""
    try:
        yield replacement
    finally:
        replacement.plane.close()


def main() -> int:
    """Run the campaign."""
    parser = options("upgrade", "A job and an endpoint while the version is replaced, there and back.", 240.0)
    parser.add_argument("--once", action="store_true", help="without the replacements by SIGKILL")
    wanted = parser.parse_args()
    campaign = Campaign("upgrade", wanted.seed, wanted.seconds, wanted.out)
    with scratch("upgrade") as path:
        try:
            old = check_out(path / "old", "tests/pipelines/rehearsal")
        except NoHistory as error:
            print(f"upgrade: cannot run: {error}", file=sys.stderr)
            return CANNOT_RUN
        (path / "home").mkdir()
        with rehearsed(path) as rehearsal, closing(Replacement(campaign, path / "home", old, rehearsal)) as replacement:
            signals: tuple[Signal, ...] = ("SIGTERM", "SIGTERM") if wanted.once else (
                "SIGTERM", "SIGTERM", "SIGKILL", "SIGKILL")
            if replacement.begin():
                for by in signals:
                    if not replacement.replace(by):
                        break
                    campaign.print_progress(len(replacement.steps), f"of {len(signals)} replacements")
    return campaign.finish({"old version": {"commit": old.commit, "date": old.date},
                            "newest migration": old.migration, "replacements": replacement.steps,
                            "jobs": len(replacement.ended)})


if __name__ == "__main__":
    sys.exit(main())
