"""Figures by REST: the same as of the report, and a hint where there is none."""

import httpx
from starlette.testclient import TestClient

from eyrie_api.contract.status import JobReport
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.results import Results
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from eyrie_api.figures.job_figures import figures_of
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.figures.job_values import NAMES, finish_job, job_report
from tests.api.samples import benchmark_report, job_spec

DATABASES = ("sqlite",)  # figures have no SQL of their own: what they read is tested on both elsewhere


def test_figures_are_listed_and_read_as_the_report_defines_them(settings: Settings, database: Database) -> None:
    client: httpx.Client = TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")
    job = Jobs(database).submit(derive(job_spec()))
    path = f"/v1alpha1/jobs/{job.id}"
    assert client.get(f"{path}/figures").json()["items"] == []
    refused = client.get(f"{path}/figures/tuning")
    assert refused.status_code == 404
    assert "when the benchmark, tune and prove stages finish" in refused.json()["hint"]

    finish_job(settings.home / "jobs" / job.id, job.id)
    for one in job_report().benchmark:
        Results(database).record(MeasuredCheckpoint(job.id, "eagle3", "quickstart", False, one), "/d")
    report = JobReport.model_validate(client.get(f"{path}/report").json())
    listed = client.get(f"{path}/figures").json()["items"]
    assert [one["name"] for one in listed] == list(NAMES)
    assert all("spec" not in one for one in listed)
    for figure in figures_of(report):
        assert client.get(f"{path}/figures/{figure.name}").json() == figure.model_dump(mode="json")


def test_the_figure_of_the_leaderboard_is_of_the_selection_and_the_others_of_everything(
        settings: Settings, database: Database) -> None:
    client: httpx.Client = TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")
    job = Jobs(database).submit(derive(job_spec()))
    for checkpoint, family, speedups in (("a-step-1", "eagle3", {"chat": (2.0, 1.8), "math": (2.2, 2.0)}),
                                         ("b-step-1", "dflash", {"chat": (1.2, 1.1), "math": (3.4, 1.9)})):
        report = benchmark_report(checkpoint, speedups)
        Results(database).record(MeasuredCheckpoint(job.id, family, "t", False, report), "/d")
    path = f"/v1alpha1/jobs/{job.id}/figures"

    def read(**selected: str) -> tuple[str, list[float], str]:
        figure = client.get(f"{path}/leaderboard", params=selected).json()
        [listed] = client.get(path, params=selected).json()["items"]
        assert (listed["title"], listed["caption"]) == (figure["title"], figure["caption"])
        values = [row["speedup"] for row in figure["spec"]["data"]["values"]]
        return figure["title"].partition(" ")[0], values, figure["caption"].partition(",")[0]

    assert read() == ("a-step-1", [2.0, 1.9], "Mean speed-up over all suites and temperatures")
    assert read(family="", suite="", temperature="", engine="") == read(), "as a form without a choice sends it"
    assert read(suite="math")[:2] == ("b-step-1", [2.65, 2.1])
    assert "of the selection (suite math, temperature 1), one" in client.get(
        f"{path}/leaderboard", params={"suite": "math", "temperature": "1"}).json()["caption"]
    assert read(family="dflash", temperature="0")[:2] == ("b-step-1", [2.3])
    assert client.get(path, params={"suite": "none"}).json()["items"] == [], "nothing was measured with it"
    assert client.get(f"{path}/leaderboard", params={"suite": "none"}).status_code == 404
    for wrong in ({"engine": "vllm"}, {"temperature": "nan"}, {"temperature": "-1"}):
        assert client.get(path, params=wrong).status_code == 422, wrong
