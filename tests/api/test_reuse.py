"""Which earlier jobs a job may take answers from, from their documents alone."""

from pathlib import Path
from typing import Any

import pytest

from eyrie_api.decisions.reuse import MAX_JOBS, jobs_with_answers
from eyrie_api.settings import Settings
from eyrie_api.submission.preflight import plan
from eyrie_api.v1alpha1.reports import RegenerateReport
from eyrie_api.v1alpha1.status import Condition, Job, JobStatus
from tests.api.samples import NOW, finish_stage, job_spec, target_directory


def chosen(job: Job, others: list[Job]) -> tuple[str, ...]:
    return tuple(one.id for one in jobs_with_answers(job.spec, others))


def job(job_id: str, regenerated: bool = True, **changes: Any) -> Job:
    done = Condition(type="Regenerated", status="True" if regenerated else "False", reason="Test",
                     last_transition_time=NOW)
    return Job(id=job_id, generation=1, created_at=NOW, updated_at=NOW, spec=job_spec(**changes),
               status=JobStatus(conditions=(done,)))


MINE = job("mine", regenerated=False)


def test_jobs_that_have_regenerated_are_taken_in_their_order_and_no_more_than_the_stage_may_read() -> None:
    others = [job("running", regenerated=False), *(job(f"done-{number}") for number in range(MAX_JOBS + 2))]
    assert chosen(MINE, others) == tuple(f"done-{number}" for number in range(MAX_JOBS))
    assert chosen(MINE, []) == ()


@pytest.mark.parametrize("changes", [
    {"target": {"model": "other"}}, {"target": {"model": "quickstart", "dtype": "bfloat16"}},
    {"data": {"sources": [{"path": "other.jsonl"}]}}, {"data": {"sources": [{"path": "quickstart"}], "answered": True}},
    {"engine": {"kind": "sglang"}}, {"regenerate": {"sampling": {"temperature": 0.9}}},
    {"regenerate": {"max_new_tokens": 8}}, {"regenerate": {"seed": 3}}, {"regenerate": {"turns": "all"}},
    {"regenerate": {"engine": "openai", "base_url": "http://target/v1"}}])
def test_jobs_whose_answers_would_be_others_are_not_read(changes: dict[str, Any]) -> None:
    assert chosen(MINE, [job("other", **changes)]) == ()
    assert chosen(job("mine", **changes), [job("other")]) == ()


def test_what_does_not_act_on_an_answer_may_differ() -> None:
    more = {"data": {"sources": [{"path": "quickstart"}, {"path": "more.jsonl"}], "max_conversations": 7, "seed": 4},
            "regenerate": {"concurrency": 3}, "train": {"epochs": 2.0}}
    assert chosen(MINE, [job("other", **more)]) == ("other",)
    greedy = {"sampling": {"temperature": 0.0}}
    assert chosen(job("mine", regenerate=greedy),
                             [job("other", regenerate=greedy | {"seed": 3, "turns": "all"})]) == ("other",)
    endpoint = {"engine": "openai", "base_url": "http://one/v1"}
    assert chosen(job("mine", regenerate=endpoint),
                             [job("other", regenerate=endpoint | {"base_url": "http://two/v1"})]) == ("other",)


def test_a_job_that_wants_new_answers_or_has_given_ones_takes_over_none() -> None:
    assert chosen(job("mine", reuse="never"), [job("other")]) == ()
    answered = {"sources": [{"path": "quickstart"}], "answered": True}
    assert chosen(job("mine", data=answered), [job("other", data=answered)]) == ()


def test_a_plan_says_how_many_answers_are_present_and_counts_no_time_for_them(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    target = {"target": {"model": str(target_directory(tmp_path / "target")), "dtype": "float32"}}

    def spec(rows: int, **changes: Any) -> dict[str, Any]:
        data = {"sources": [{"path": "quickstart"}], "max_conversations": rows, "held_out_fraction": 0.0}
        return target | {"data": data, "benchmark": {"suites": [{"name": "chat", "path": "quickstart:chat"}]}} | changes

    earlier = job("job-a", **spec(200))
    report = RegenerateReport(rows_read=200, rows_answered=180, rows_held_out=0, rows_quarantined=20, prompt_tokens=1,
                              answer_tokens=1, finish_reasons={}, sources={}, seconds=1.0, tokens_per_s=1.0)
    finish_stage(settings.job_dir("job-a") / "stages/regenerate", "regenerate", report, {}, "job-a")

    alone = plan(job_spec(**spec(400)), settings)
    shared = plan(job_spec(**spec(400)), settings, [earlier])
    assert not any("answers are present" in note for note in alone.notes)
    assert shared.notes[0].startswith("180 of 400 answers are present, in job job-a")
    assert shared.stages[0].hours == pytest.approx(alone.stages[0].hours * 220 / 400)
    assert shared.stages[0].tokens == alone.stages[0].tokens
    assert shared.stages[1:] == alone.stages[1:]
    for other in (spec(199), spec(400, reuse="never"), spec(400, regenerate={"seed": 2}),
                  spec(400, benchmark={"suites": [{"name": "math", "path": "quickstart:math"}]})):
        assert not any("answers are present" in note for note in plan(job_spec(**other), settings, [earlier]).notes)
    assert plan(job_spec(**spec(400)), settings, [job("gone", **spec(200))]) == alone
