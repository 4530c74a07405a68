"""After the pipeline: decided once, promoted once, watched until it serves. Real rows and files, no process started."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_api.artifacts import read_manifest, write_model
from eyrie_api.contract.benchmark import RivalSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.serving import EndpointServeSpec, ServeSpec
from eyrie_api.contract.stages import Manifest
from eyrie_api.contract.status import Condition, Job
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, Setting
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.results import ResultFilter, Results
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.conditions import find
from eyrie_operator.jobs.driver import Driver
from eyrie_pipelines import local
from eyrie_pipelines.local import LocalRunner
from eyrie_pipelines.processes import identify
from eyrie_workers.catalog import stage_dir
from tests.pipelines.conftest import spec_of
from tests.pipelines.finished_job import NOW, lay_out


class Harness:
    """One home; jobs in it have run their pipelines already."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home, lease_ttl_s=600.0)  # one step keeps its lease, however slow
        self.database = Database(self.settings.resolved_database_url)
        upgrade(self.database)
        self.jobs, self.endpoints = Jobs(self.database), Endpoints(self.database)

    def finished(self, spec: JobSpec, attempt: int = 1) -> str:
        """Submit a job whose run has already succeeded on disk."""
        job_id = self.jobs.submit(derive(spec)).id
        self.lay_out(job_id, spec, attempt)
        return job_id

    def lay_out(self, job_id: str, spec: JobSpec, attempt: int) -> None:
        root = self.settings.job_dir(job_id)
        lay_out(root, job_id, spec)
        process = identify(os.getpid())
        assert process is not None
        gone = process.model_copy(update={"boot": "the boot before"})  # its leader has ended long ago
        write_model(root / "run" / "run.json", local.RunHandle(run_id="r1", job_id=job_id, attempt=attempt,
                                                               process=gone, started_at=NOW))
        write_model(root / "run" / "result.json", local.RunResult(run_id="r1", state="succeeded", finished_at=NOW))

    def found(self, job_id: str, proof: ProveReport) -> None:
        """The proof of a finished job said this instead."""
        manifest = stage_dir(self.settings.job_dir(job_id), "prove") / "manifest.json"
        result = Manifest.model_validate_json(manifest.read_text())
        write_model(manifest, result.model_copy(update={"report": proof}))

    def proof(self, job_id: str) -> ProveReport:
        report = read_manifest(stage_dir(self.settings.job_dir(job_id), "prove")).report
        assert isinstance(report, ProveReport)
        return report

    def look(self, job_id: str) -> Job:
        """One look by a control plane that remembers nothing."""
        Driver(self.settings, self.database, LocalRunner(self.settings.home)).advance(job_id)
        return self.jobs.get(job_id)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "home")
    yield made
    made.database.close()


def reason_of(job: Job, kind: str) -> str | None:
    found = find(job.status.conditions, kind)
    return None if found is None else found.reason


FASTER = RivalSpec(path="org/head", name="99")


def test_a_faster_rival_refuses_promotion_when_it_is_to_be_beaten_and_is_on_the_leaderboard(harness: Harness) -> None:
    job_id = harness.finished(spec_of(rivals=(FASTER, RivalSpec(method="off")),
                                      promotion=PromotionPolicy(must_beat="rivals")))
    decision = harness.look(job_id).status.decision
    assert decision is not None
    # Tuned, the rehearsed rival is as fast in the benchmark and under load: neither reaches the margin.
    assert [check.name for check in decision.checks if not check.passed] == ["rival", "rival-loads"]
    assert any("rival-99, the best rival, both tuned" in reason for reason in decision.reasons)
    entries = Results(harness.database).leaderboard(ResultFilter(job_id=job_id, tuned=False))
    assert [(entry.checkpoint, entry.rival) for entry in entries] == [
        ("rival-99", True), ("base-step-20", False), ("base-step-10", False), ("rival-off", True)]
    tuned = Results(harness.database).leaderboard(ResultFilter(job_id=job_id, tuned=True))
    assert sorted((entry.checkpoint, entry.rival) for entry in tuned) == [("base-step-20", False), ("rival-99", True)]
    assert Results(harness.database).find(job_id).measured.report.checkpoint == "base-step-20"


def test_a_faster_rival_is_promoted_from_the_jobs_own_copy_where_the_job_allows_it(harness: Harness) -> None:
    job_id = harness.finished(spec_of(rivals=(FASTER,), promotion=PromotionPolicy(rivals="promote")))
    harness.look(job_id)
    promoted = harness.endpoints.get("default").revisions[1]
    assert promoted.checkpoint == "rival-99"
    assert promoted.drafter_dir == str(harness.settings.job_dir(job_id) / "stages/benchmark/rival-99/drafter")


def test_a_faster_drafter_becomes_the_candidate_once_and_the_job_ends_when_it_serves(harness: Harness) -> None:
    job_id = harness.finished(spec_of())
    for _ in range(3):
        job = harness.look(job_id)
        endpoint = harness.endpoints.get("default")
        assert endpoint.candidate_revision == 2
        assert [one.number for one in endpoint.revisions] == [1, 2]
        assert reason_of(job, "Serving") == "Deploying"
    promoted = endpoint.revisions[1]
    assert promoted.checkpoint == "base-step-20"
    assert promoted.drafter_dir == str(harness.settings.job_dir(job_id) / "stages/train/base/checkpoints/base-step-20")
    assert promoted.tau == 2.5
    measured = json.loads(Path(f"{promoted.drafter_dir}-results.json").read_text())
    assert measured["tuned"]["checkpoint"] == "base-step-20"
    assert measured["tuned"]["speedup"] == promoted.speedup
    assert measured["proof"]["parity"]["passed"]
    assert str(harness.settings.home) not in json.dumps(measured)
    assert not Path(str(promoted.drafter_dir)).exists()  # its directory is left as the training run made it
    harness.endpoints.activate("default", 2, "http://127.0.0.1:1/v1")
    job = harness.look(job_id)
    assert job.status.phase == "Succeeded"
    assert job.status.endpoint == "default"


def test_ngram_lookup_that_won_is_served_without_the_drafter(harness: Harness) -> None:
    job_id = harness.finished(spec_of())
    ngram = Setting(method="ngram", tree=DraftTreeShape(num_steps=3, num_draft_tokens=4))
    harness.found(job_id, harness.proof(job_id).model_copy(update={"use": DrafterUse(setting=ngram)}))
    harness.look(job_id)
    promoted = harness.endpoints.get("default").revisions[1]
    assert (promoted.use.setting, promoted.use.drafter_dir) == (ngram, None)
    assert promoted.speedup == pytest.approx(2.5)
    harness.endpoints.activate("default", 2, "http://127.0.0.1:1/v1")
    assert harness.look(job_id).status.phase == "Succeeded"


def test_where_off_is_best_nothing_is_promoted_and_the_job_succeeds(harness: Harness) -> None:
    job_id = harness.finished(spec_of())
    skipped = {"use": DrafterUse(setting=OFF), "skipped": "speculation pays at none of the declared loads",
               "load": None, "parity": None, "changed_prompt": None}
    harness.found(job_id, harness.proof(job_id).model_copy(update=skipped))
    job = harness.look(job_id)
    assert [one.number for one in harness.endpoints.get("default").revisions] == [1]
    harness.endpoints.activate("default", 1, "http://127.0.0.1:1/v1")
    job = harness.look(job_id)
    assert reason_of(job, "Promoted") == "NotFaster"
    assert job.status.phase == "Succeeded"


def test_each_result_is_of_its_own_candidates_family(harness: Harness) -> None:
    job_id = harness.finished(spec_of(drafter=DrafterSpec(family="hydra")))
    harness.look(job_id)
    entries = Results(harness.database).leaderboard()
    assert {entry.family for entry in entries} == {"hydra"}
    assert Results(harness.database).leaderboard(ResultFilter(family="eagle3")) == ()


def test_a_job_whose_engine_has_no_node_waits_in_the_words_of_its_endpoint(harness: Harness) -> None:
    job_id = harness.finished(spec_of())
    harness.look(job_id)
    waits = Condition(type="Serving", status="Unknown", reason="WaitingForNodes", last_transition_time=NOW,
                      message="revision 2 is starting: no node fits; hint: scale the pool up")
    harness.endpoints.observe("default", conditions=(waits,))
    job = harness.look(job_id)
    assert (job.status.phase, reason_of(job, "Serving")) == ("Running", "WaitingForNodes")


def test_a_rejected_revision_fails_the_job_in_its_words_and_a_retry_promotes_again(harness: Harness) -> None:
    job_id = harness.finished(spec_of())
    harness.look(job_id)
    harness.endpoints.reject("default", 2, "HealthTimeout", "not healthy after 60 s")
    # Meanwhile the endpoint has gone on to the bare target: the job's own revision was given up all the same.
    harness.endpoints.propose("default", job_id=None, checkpoint=None, tree=None, drafter_dir=None, reason="bare")
    job = harness.look(job_id)
    assert job.status.phase == "Failed"
    assert reason_of(job, "Failed") == "HealthTimeout"
    harness.jobs.retry(job_id)
    harness.lay_out(job_id, spec_of(), attempt=2)
    harness.look(job_id)
    endpoint = harness.endpoints.get("default")
    assert endpoint.candidate_revision == 4
    assert endpoint.revisions[3].checkpoint == "base-step-20"


def test_the_incumbent_is_kept_when_the_candidate_is_not_faster(harness: Harness) -> None:
    first = harness.finished(spec_of())
    harness.look(first)
    harness.endpoints.activate("default", 2, "http://127.0.0.1:1/v1")
    harness.look(first)
    second = harness.look(harness.finished(spec_of()))
    assert second.status.phase == "Succeeded"
    assert reason_of(second, "Promoted") == "IncumbentKept"
    assert second.status.decision is not None
    assert second.status.decision.incumbent_speedup == 2.5
    assert harness.endpoints.get("default").candidate_revision is None


def test_a_drafter_that_does_not_pay_leaves_the_bare_target_to_serve(harness: Harness) -> None:
    job = harness.look(harness.finished(spec_of(promotion=PromotionPolicy(min_speedup=9.0))))
    endpoint = harness.endpoints.get("default")
    assert endpoint.candidate_revision == 1
    assert endpoint.revisions[0].drafter_dir is None
    harness.endpoints.activate("default", 1, "http://127.0.0.1:1/v1")
    job = harness.look(job.id)
    assert job.status.phase == "Succeeded"
    assert reason_of(job, "Promoted") == "NotFaster"


def test_manual_promotion_waits_for_a_person_and_touches_no_endpoint(harness: Harness) -> None:
    job = harness.look(harness.finished(spec_of(promotion=PromotionPolicy(mode="manual"))))
    assert job.status.phase == "Succeeded"
    assert reason_of(job, "Promoted") == "AwaitsApproval"
    assert harness.endpoints.list().items == ()


def test_an_endpoint_of_another_target_is_not_taken_over(harness: Harness) -> None:
    harness.endpoints.create("default", TargetSpec(model="another/model"), EndpointServeSpec(), "another/model")
    job = harness.look(harness.finished(spec_of()))
    assert job.status.phase == "Failed"
    assert reason_of(job, "Failed") == "Conflict"
    failed = find(job.status.conditions, "Failed")
    assert failed is not None
    assert "another name" in failed.message
    assert harness.endpoints.get("default").revisions[-1].number == 1


def test_the_leaderboard_has_every_checkpoint_and_the_tuned_one(harness: Harness) -> None:
    from eyrie_api.database.results import Results

    job = harness.look(harness.finished(spec_of(serve=ServeSpec(enabled=False))))
    entries = [(one.checkpoint, one.tuned) for one in Results(harness.database).leaderboard()]
    assert sorted(entries) == [("base-step-10", False), ("base-step-20", False), ("base-step-20", True)]
    assert job.status.best is not None
    assert (job.status.best.checkpoint, job.status.best.tuned) == ("base-step-20", True)
