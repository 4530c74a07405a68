"""The `eyrie` and `curl` lines of the console's pages are run as they are shown, against a real server."""

import argparse
import re
import shlex
from html import unescape

import httpx
import pytest
from typer.testing import CliRunner

from eyrie_api.cli.commands import app
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.results import Results
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from tests.api.conftest import Running
from tests.api.samples import benchmark_report, ended, job_spec

DATABASES = ("sqlite",)  # what the routes do is tested on both elsewhere


@pytest.fixture(params=["eyrie", "curl"])
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run_line(server: Running, path: str, what: str, program: str) -> None:
    """Run the page's line that does this, in this program."""
    page = httpx.get(server.url + path, headers={"accept": "text/html"}).raise_for_status().text
    (entry,) = re.findall(rf"<dt>{re.escape(what)}</dt>(.*?)</dd>", page, re.DOTALL)
    (line,) = [shlex.split(unescape(one)) for one in re.findall(r"<code>(.*?)</code>", entry, re.DOTALL)
               if one.startswith(f"{program} ")]
    if program == "eyrie":
        done = CliRunner().invoke(app, line[1:], env={"EYRIE_SERVER": server.url})
        assert done.exit_code == 0, done.output
    else:
        curl(line[1:])


def curl(arguments: list[str]) -> None:
    """Send the request of a line with these options of curl, and no others."""
    options = argparse.ArgumentParser(exit_on_error=False)
    options.add_argument("-X", dest="method", default=None)
    options.add_argument("-H", dest="headers", action="append", default=[])
    options.add_argument("-d", dest="body", default=None)
    options.add_argument("url")
    given = options.parse_args(arguments)
    answer = httpx.request(given.method or ("POST" if given.body else "GET"), given.url, content=given.body,
                           headers=dict(one.split(": ", 1) for one in given.headers))
    assert answer.is_success, answer.text


def test_a_failed_job_is_retried_by_the_line_of_its_page(server: Running, program: str) -> None:
    job = server.client.create_job(job_spec()).id
    server.control.jobs.save_status(job, ended("Failed"))
    run_line(server, f"/console/jobs/{job}", "Retry it after the last finished stage", program)
    status = server.client.job(job).status
    assert (status.phase, status.attempt) == ("Pending", 2)


def test_a_drafter_is_promoted_by_the_line_of_its_job(server: Running, program: str) -> None:
    job = server.client.create_job(job_spec(serve={"endpoint": "assistant"})).id
    Results(server.control.database).record(MeasuredCheckpoint(
        job_id=job, target="quickstart", family="eagle3", tuned=False,
        report=benchmark_report("base-step-7", {"chat": (1.5, 1.4)})), "/d")
    run_line(server, f"/console/jobs/{job}", "Promote its best checkpoint by hand", program)
    revision = server.client.endpoint("assistant").revisions[-1]
    assert (revision.job_id, revision.checkpoint, revision.state) == (job, "base-step-7", "proposed")


def test_an_endpoint_is_switched_off_and_on_by_the_lines_of_its_page(server: Running, program: str) -> None:
    endpoints = Endpoints(server.control.database)
    endpoints.create("assistant", TargetSpec(model="quickstart"), EndpointServeSpec(), "tiny")
    endpoints.activate("assistant", 1, "http://127.0.0.1:9/v1")
    for what, desired in (("Switch it off; name, URL and history stay", "off"), ("Switch it on", "on")):
        run_line(server, "/console/endpoints/assistant", what, program)
        assert server.client.endpoint("assistant").desired == desired
