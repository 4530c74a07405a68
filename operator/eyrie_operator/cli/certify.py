"""`eyrie certify`: drafters that were trained elsewhere, measured for a target and judged, with an exit code for CI.

It submits a job with `drafters`, which regenerates, captures and trains nothing, to the control plane of this machine,
follows it and says what its decision means (`eyrie_api.decisions.certification`). Where no control plane runs it starts
one and stops it afterwards, unless what was promoted serves. The job has no special treatment: it stays in the home,
and `eyrie up` shows it.

The static checks come first: the submission refuses a drafter by its config.json and the headers of its weights, and
the benchmark stage by everything else, with the reason, before any engine loads it.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from eyrie_api.cli import watch
from eyrie_api.cli.tables import entry_line, leaderboard_table
from eyrie_api.cli.verbs import Screen, connect, running_plane
from eyrie_api.client import Client
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import LeaderboardEntry
from eyrie_api.contract.status import Endpoint, JobReport
from eyrie_api.decisions.certification import EXIT_CODES, WORDS, Verdict, certification
from eyrie_api.decisions.promotion import summarize_decision
from eyrie_api.errors import InvalidInput, NoChatTemplate, NoUsableData, TargetNotFound, UnsupportedTarget
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from eyrie_operator.cli import demo
from eyrie_operator.cli.detached import start_detached, stop_plane
from eyrie_operator.conditions import find

_REFUSALS = {error.reason for error in (InvalidInput, TargetNotFound, UnsupportedTarget, NoChatTemplate, NoUsableData)}
"""Reasons of a failed job that are of what was given."""


class DraftersRefused(InvalidInput):
    """No drafter could be measured, or the prompts could not be read."""


class RefusedDrafter(Frozen):
    """A drafter that was not measured."""

    name: str
    reason: str


class Certificate(Frozen):
    """The result of `eyrie certify`."""

    verdict: Verdict
    exit_code: int
    job: str
    best: LeaderboardEntry | None = None
    """The best drafter, tuned."""

    summary: str
    """The checks that failed, or the speed-ups at the declared loads."""

    refused: tuple[RefusedDrafter, ...] = ()
    leaderboard: tuple[LeaderboardEntry, ...] = ()
    endpoint: str | None = None
    """Address of the endpoint that serves it, if it was promoted."""


def judge(report: JobReport, endpoint: Endpoint | None = None) -> Certificate:
    """What the report of a job with a decision says. Pure."""
    assert report.decision is not None
    verdict = certification(report.decision)
    # A rival that was tuned too, to be beaten, is not what was certified.
    tuned = sorted((entry for entry in report.leaderboard if entry.tuned), key=lambda entry: entry.rival)
    return Certificate(
        verdict=verdict, exit_code=EXIT_CODES[verdict], job=report.job_id, best=tuned[0] if tuned else None,
        summary=summarize_decision(report.decision), leaderboard=report.leaderboard,
        refused=tuple(RefusedDrafter(name=measured.checkpoint, reason=measured.dropped)
                      for measured in report.benchmark if measured.dropped is not None),
        endpoint=None if endpoint is None else endpoint.url)


def words(certificate: Certificate) -> RenderableType:
    """For a terminal. Pure."""
    style = {"faster": "bold green", "not-faster": "bold yellow", "undecided": "bold yellow"}
    best = "" if certificate.best is None else f": {entry_line(certificate.best)}"
    parts: list[RenderableType] = [
        Text(), leaderboard_table(certificate.leaderboard), Text(),
        Text.assemble((WORDS[certificate.verdict], style.get(certificate.verdict, "bold red")), best),
        Text(certificate.summary),
        *(Text.assemble(("refused: ", "bold red"), f"{drafter.name}: {drafter.reason}")
          for drafter in certificate.refused)]
    if certificate.endpoint is not None:
        parts.append(Text(f"It serves at {certificate.endpoint}; eyrie down stops it."))
    return Group(*parts)


@contextmanager
def control_plane(server: str | None, home: Path, screen: Screen) -> Iterator[tuple[Client, list[Endpoint]]]:
    """A client of the named server, of the control plane of a home, or of one that is started for the time of the
    context; that one keeps running where the list has got an endpoint."""
    plane, served = running_plane(home) if server is None else None, list[Endpoint]()
    started = None
    # The default action would end this process without stopping what it started.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    if server is None and plane is None:
        plane = started = start_detached(Settings.from_env().model_copy(update={"home": home, "port": free_port()}))
        screen.note(f"started a control plane for this run: {plane.url}")
    try:
        with connect(server or (plane.url if plane is not None else "")) as client:
            yield client, served
    finally:
        if started is not None and not served:
            stop_plane(started)


def certify(spec: JobSpec, server: str | None, home: Path, screen: Screen) -> Certificate:
    """Run the job and judge it. Raises DraftersRefused where nothing could be measured, JobFailed and JobCancelled."""
    with control_plane(server, home, screen) as (client, served):
        created = client.create_job(spec)
        screen.note(f"job {created.id} accepted")
        job = watch.watch(client, created.id, screen.for_progress())
        failed = find(job.status.conditions, "Failed")
        if failed is not None and failed.status == "True" and failed.reason in _REFUSALS:
            message, _, hint = failed.message.partition("; hint: ")
            raise DraftersRefused(message, hint)
        watch.verdict(job)
        endpoint = None
        if job.status.decision is not None and job.status.decision.promote:
            endpoint = demo.wait_serving(client, job)
        if endpoint is not None:
            served.append(endpoint)
        return judge(client.report(job.id), endpoint)
