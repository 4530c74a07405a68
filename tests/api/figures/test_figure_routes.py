"""Figures by REST: the same as of the report, and a hint where there is none."""

import httpx
from starlette.testclient import TestClient

from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.results import Results
from eyrie_api.decisions.leaderboard import Measured
from eyrie_api.figures.job_figures import figures_of
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from eyrie_api.v1alpha1.status import JobReport
from tests.api.figures.job_values import NAMES, finish_job, job_report
from tests.api.samples import job_spec


def test_figures_are_listed_and_read_as_the_report_defines_them(settings: Settings, database: Database) -> None:
    client: httpx.Client = TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")
    job = Jobs(database).submit(job_spec())
    path = f"/v1alpha1/jobs/{job.id}"
    assert client.get(f"{path}/figures").json()["items"] == []
    refused = client.get(f"{path}/figures/tuning")
    assert refused.status_code == 404
    assert "when the benchmark, tune and prove stages finish" in refused.json()["hint"]

    finish_job(settings.home / "jobs" / job.id, job.id)
    for one in job_report().benchmark:
        Results(database).record(Measured(job.id, "eagle3", "quickstart", False, one), "/d")
    report = JobReport.model_validate(client.get(f"{path}/report").json())
    listed = client.get(f"{path}/figures").json()["items"]
    assert [one["name"] for one in listed] == list(NAMES)
    assert all("spec" not in one for one in listed)
    for figure in figures_of(report):
        assert client.get(f"{path}/figures/{figure.name}").json() == figure.model_dump(mode="json")
