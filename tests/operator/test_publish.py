"""`eyrie publish`: a job's drafter with its card and results, in a directory and in a repository of a Hub's double."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from eyrie_api.artifacts import digest_file, digest_model, write_model
from eyrie_api.client import Client
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.reports import TrainReport, TuneReport, VocabularyReport
from eyrie_api.contract.stages import FileEntry, Manifest, StageReport
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import Conflict, NotFound
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.processes import bind
from eyrie_api.settings import Settings
from eyrie_operator.cli.files import publish
from eyrie_workers.drafters.card import Card, identify, write_card
from eyrie_workers.drafters.check import check_directory
from tests.operator.conftest import Eyrie
from tests.operator.hub_double import TOKEN, Hub, hub_double
from tests.pipelines.conftest import spec_of
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT, benchmark_report
from tests.tiny import tiny_target
from tests.waiting import wait_for
from tests.workers.measure.tiny_bench import random_drafter

NAME = "base-step-7"


def finish(home: Path, job_id: str, stage: str, key: str, report: StageReport) -> None:
    directory = home / "jobs" / job_id / "stages" / stage / key
    directory.mkdir(parents=True, exist_ok=True)
    files = tuple(FileEntry(path=file.relative_to(directory).as_posix(), size_bytes=file.stat().st_size,
                            sha256=digest_file(file)) for file in sorted(directory.rglob("*")) if file.is_file())
    write_model(directory / "manifest.json", Manifest(
        stage=stage, job_id=job_id, spec_digest=digest_model(spec_of()), code_version="0", report=report,  # type: ignore[arg-type]
        files=files, started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:00:00+00:00"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """The URL of an API, the id of a job in it that is trained, measured and tuned, and its target."""
    home = tmp_path_factory.mktemp("home")
    listening = bind("127.0.0.1", 0)
    settings = Settings(home=home, port=listening.getsockname()[1])
    database = Database(settings.resolved_database_url)
    upgrade(database)
    job = Jobs(database).submit(derive(spec_of().model_copy(update={"name": "nightly"})))
    target = tiny_target(tmp_path_factory.mktemp("target") / "tiny", num_layers=8)
    directory = random_drafter(home / "jobs" / job.id / "stages/train/base/checkpoints" / NAME, target,
                               layers=(1, 2, 4))
    write_card(directory, Card(target=identify(target), drafter=DrafterSpec(), aux_layers=(1, 2, 4), code_version="0"))
    measured = benchmark_report(NAME, 1.9)
    finish(home, job.id, "train", "base", TrainReport(
        candidate="base", steps=7, tokens=1, supervised_tokens=1, seconds=1.0, tokens_per_s=1.0, padding_share=0.0,
        data_wait_share=0.0, checkpoints=(), vocabulary=VocabularyReport(
            draft_vocab_size=4, vocab_size=8, coverage=0.9, coverage_curve={4: 0.9})))
    finish(home, job.id, "benchmark", NAME, measured)
    finish(home, job.id, "benchmark", "rival-x", benchmark_report("rival-x", 2.5).model_copy(update={"rival": True}))
    tree = measured.cells[0].tree
    assert tree is not None
    finish(home, job.id, "tune", "", TuneReport(checkpoint=NAME, path="/srv/secret/path", cells=(), winner=tree,
                                                finding="-", final=benchmark_report(NAME, 2.0),
                                                environment=ENVIRONMENT, seconds=1.0))
    brought = Jobs(database).submit(derive(JobSpec.model_validate({
        "name": "brought", "target": {"model": "quickstart"}, "drafters": ["org/head"]})))
    finish(home, brought.id, "benchmark", "head", benchmark_report("head", 1.9))
    server = uvicorn.Server(uvicorn.Config(create_app(settings, database=database), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    wait_for(lambda: server.started, "the server answers")
    yield f"http://127.0.0.1:{settings.port}", job.id, target
    server.should_exit = True
    thread.join(60)


def test_a_published_directory_is_a_sound_drafter_whose_card_has_the_results(
        served: tuple[str, str, Path], tmp_path: Path) -> None:
    url, job_id, target = served
    with Client(url) as client:
        assert publish(client, job_id, None, tmp_path / "out") == NAME
        assert [one for one in check_directory(tmp_path / "out", target_dir=target) if one.severity == "error"] == []
        card = json.loads((tmp_path / "out" / "eyrie-card.json").read_text())
        assert set(card["results"]) == {"benchmark", "tuned"}
        assert card["results"]["tuned"]["speedup"] == 2.0
        readme = (tmp_path / "out" / "README.md").read_text()
        assert "speedup 2" in readme
        assert "/srv/secret" not in json.dumps(card)
        assert sorted(tmp_path.iterdir()) == [tmp_path / "out"], "no scratch is left"
        with pytest.raises(Conflict, match="exists"):
            publish(client, job_id, None, tmp_path / "out")
        with pytest.raises(NotFound, match="its checkpoints are base-step-7"):
            publish(client, job_id, "rival-x", tmp_path / "other")


def test_a_drafter_that_was_trained_elsewhere_is_not_published_from_here(served: tuple[str, str, Path],
                                                                         tmp_path: Path) -> None:
    with Client(served[0]) as client:
        (brought,) = client.jobs(name="brought").items
        with pytest.raises(NotFound, match=f"head was not trained by job {brought.id}"):
            publish(client, brought.id, "head", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run_process(url: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "eyrie_operator.command", "publish", *arguments, "--server", url],
                          capture_output=True, text=True, timeout=120, check=False,
                          env=os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DOWNLOAD_TIMEOUT": "60",
                                            "HF_HUB_ETAG_TIMEOUT": "60"} | environment)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_double() as found:
        yield found


def test_a_repository_of_the_hub_gets_the_same_files_in_one_commit(served: tuple[str, str, Path], hub: Hub) -> None:
    url, _, _ = served
    done = run_process(url, "nightly", "--to", "org/drafter", "--json", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["published"] == f"{hub.url}/org/drafter"
    assert hub.repositories == {"org/drafter": True}
    assert hub.commits == [f"{NAME} of job nightly, with its results"]
    assert {"README.md", "config.json", "eyrie-card.json", "model.safetensors"} <= hub.files.keys()
    assert json.loads(hub.files["eyrie-card.json"])["results"]["tuned"]["speedup"] == 2.0


def test_a_refused_upload_says_what_to_set_and_shows_no_token(
        served: tuple[str, str, Path], hub: Hub, eyrie: Eyrie) -> None:
    done = run_process(served[0], "nightly", "--to", "org/drafter", HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
    assert done.returncode != 0
    assert "NotPublished" in done.stderr
    assert "HF_TOKEN" in done.stderr
    assert "hf_wrong" not in done.stderr
    both = eyrie("publish", "nightly", "--server", served[0])
    assert "give one of --to and --out" in both.stderr


