"""The documentation: generated pages are current, examples are valid jobs, commands exist."""

import re
import shlex
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import click
import pytest
import typer
import yaml
from pydantic import BaseModel

from benchmarks import plans
from eyrie_api.contract.cluster import ClusterProfile, ModelCacheSpec, ServingSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import Placement, S3Work, VolumeWork
from eyrie_api.planning.sglang_attention import PROFILES
from eyrie_operator.command import app
from eyrie_operator.manifests.monitoring import EMBEDDED
from eyrie_operator.unscheduled import WAITS
from tests.docs.reference import REFERENCE, cli_page, cluster_page, errors_page, job_page, metrics_page, rest_page
from tests.house.sources import ROOT, modules
from tests.walkthrough.test_one_machine import plane

EXAMPLES = ROOT / "docs/examples"
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md"])


@pytest.mark.parametrize(("page", "written"), [
    ("job.md", job_page), ("cluster.md", cluster_page), ("cli.md", cli_page), ("rest.md", rest_page),
    ("metrics.md", metrics_page)])
def test_a_generated_page_is_what_the_code_says(page: str, written: object) -> None:
    assert (REFERENCE / page).read_text() == written(), "python -m tests.docs.reference"  # type: ignore[operator]


def test_the_page_of_plans_is_what_the_planner_says() -> None:
    assert plans.PAGE.read_text() == plans.page(), "python -m benchmarks.plans"


def test_the_page_of_errors_has_every_reason_and_what_to_do() -> None:
    text = (REFERENCE / "errors.md").read_text()
    assert text == errors_page(text), "python -m tests.docs.reference"
    assert [line for line in text.splitlines() if line.startswith("| `") and re.search(r"\|\s*\|$", line)] == [], \
        "write what to do into the last column"


def test_the_page_of_errors_has_every_reason_to_wait() -> None:
    text = (REFERENCE / "errors.md").read_text()
    assert [reason for reason in WAITS if f"| `{reason}` |" not in text] == []


def test_every_metric_of_the_sources_and_of_endpoints_alerts_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `(eyrie_\w+?)(?:_total)?` \|", metrics_page(), re.MULTILINE))
    made = {name for path in modules() for name in re.findall(
        r"\b(?:Counter|Gauge|Histogram|Summary|Info|Enum|\w+MetricFamily)\(\s*\"(\w+)\"", path.read_text())}
    assert made == listed
    assert {name.removesuffix("_total") for name in astuple(EMBEDDED) if name.startswith("eyrie_")} <= listed


def test_every_field_of_a_job_is_documented() -> None:
    schema = JobSpec.model_json_schema()
    models = {"": schema, **schema["$defs"]}
    assert [f"{model}.{name}" for model, one in models.items() for name, field in one.get("properties", {}).items()
            if not field.get("description") and "$ref" not in field] == []


def test_no_row_of_a_reference_page_is_without_its_meaning() -> None:
    pages = {path.name: path.read_text() for path in [*REFERENCE.glob("*.md"), ROOT / "docs/helm_values.md"]}
    assert {name: rows for name, text in pages.items()
            if (rows := [row for row in text.splitlines() if re.search(r"^\| `.*\|\s*\|$", row)])} == {}


def test_every_example_is_a_job_and_is_listed() -> None:
    listed = set(re.findall(r"\(([a-z0-9_.-]+\.(?:yaml|py))\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".py")}
    for path in EXAMPLES.glob("*.yaml"):
        document = yaml.safe_load(path.read_text())
        JobSpec.model_validate(document["spec"]["job"] if "kind" in document else document)


def test_every_alert_of_the_chart_has_what_to_do() -> None:
    rules = (ROOT / "helm/eyrie/templates/monitoring/rules.yaml").read_text()
    page = (ROOT / "docs/operations.md").read_text()
    listed = re.findall(r"^\| `(Eyrie\w+)` \|[^|]+\| [^|]+ \|$", page, re.MULTILINE)
    assert listed == re.findall(r"- alert: (\w+)", rules)


@pytest.mark.parametrize("model", [ClusterProfile, ServingSpec, ModelCacheSpec, Placement, VolumeWork, S3Work])
def test_the_fields_of_a_clusters_profile_are_listed(model: type[BaseModel]) -> None:
    page = cluster_page()
    listed = set(re.findall(r"^\| `(?:[a-z_]+\.)*([a-z_]+)` \|", page, re.MULTILINE))
    assert set(model.model_fields) <= listed


def test_the_profiles_of_hardware_are_listed() -> None:
    field = ServingSpec.model_fields["hardware_profile"]
    assert set(re.findall(r"`([a-z0-9-]+)`", field.description or "")) - {"placement"} == set(PROFILES)


def test_the_job_on_the_page_of_one_gpu_is_valid() -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/one_gpu.md").read_text(), re.DOTALL)
    assert block is not None
    JobSpec.model_validate(yaml.safe_load(block.group(1)))


def _commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks that start `eyrie`, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [part for block in blocks for line in block.replace("\\\n", " ").splitlines()
             for part in re.split(r"&&| \| ", line)]
    return [line.strip() for line in lines if line.strip().startswith("eyrie ")]


@pytest.mark.slow
@pytest.mark.timeout(2400)  # a machine that is held up is waited for
def test_the_smallest_example_is_run_to_its_decision_by_the_python_example(tmp_path: Path) -> None:
    with plane(tmp_path / "home") as (client, _):
        done = subprocess.run([sys.executable, EXAMPLES / "python_client.py", EXAMPLES / "smallest.yaml",
                               client.base_url],
                              capture_output=True, text=True, check=False, timeout=2000)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^promote|^not promoted", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("page", [path for path in PAGES if _commands(path)],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    eyrie: click.Command = typer.main.get_command(app)
    for line in _commands(page):
        words, command = shlex.split(line, comments=True)[1:], eyrie
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        assert not getattr(command, "commands", None) or not words, f"{line}: no such command"
        if command.context_settings.get("ignore_unknown_options"):
            continue
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        given = {word.split("=")[0] for word in words if word.startswith("-")}
        assert given <= known, f"{line}: {sorted(given - known)}"
