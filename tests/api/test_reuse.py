"""Which earlier jobs a job may take answers from, from their documents alone."""

from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.reports import CaptureReport, LayerChoice, RegenerateReport
from eyrie_api.contract.status import Condition, Job, JobStatus
from eyrie_api.planning.preflight import plan
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.reuse import MAX_JOBS, jobs_with_answers
from eyrie_api.quantities import size
from eyrie_api.settings import Settings
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
    shared = plan(job_spec(**spec(400)), settings, [(earlier, derive(earlier.spec))])
    assert not any("answers are present" in note for note in alone.notes)
    assert shared.notes[0].startswith("180 of 400 answers are present, in job job-a")
    assert shared.stages[0].hours == pytest.approx(alone.stages[0].hours * 220 / 400)
    assert shared.stages[0].tokens == alone.stages[0].tokens
    assert shared.stages[1:] == alone.stages[1:]  # no states are present
    assert shared.present is not None
    assert (shared.present.state_bytes, shared.present.states_in) == (0, "")
    for other in (spec(199), spec(400, reuse="never"), spec(400, regenerate={"seed": 2}),
                  spec(400, benchmark={"suites": [{"name": "math", "path": "quickstart:math"}]})):
        notes = plan(job_spec(**other), settings, [(earlier, derive(earlier.spec))]).notes
        assert not any("answers are present" in note for note in notes)
    gone = job("gone", **spec(200))
    assert plan(job_spec(**spec(400)), settings, [(gone, derive(gone.spec))]) == alone


def test_a_plan_says_what_share_of_the_states_is_present_in_the_format_that_the_job_stores(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    target = {"target": {"model": str(target_directory(tmp_path / "target")), "dtype": "float32"}}

    def spec(rows: int, **changes: Any) -> dict[str, Any]:
        data = {"sources": [{"path": "quickstart"}], "max_conversations": rows, "held_out_fraction": 0.0}
        return target | {"data": data, "benchmark": {"suites": [{"name": "chat", "path": "quickstart:chat"}]}} | changes

    answers = RegenerateReport(rows_read=200, rows_answered=200, rows_held_out=0, rows_quarantined=0, prompt_tokens=1,
                               answer_tokens=1, finish_reasons={}, sources={}, seconds=1.0, tokens_per_s=1.0)
    states = CaptureReport(source="reference", rows=200, tokens=1, supervised_tokens=1, bytes=1, bytes_per_token=1.0,
                           shards=1, layers=LayerChoice(aux_layers=(1,), reason="r"), hidden_size=1, codec="int8",
                           seconds=1.0, tokens_per_s=1.0)
    finish_stage(settings.job_dir("job-a") / "stages/regenerate", "regenerate", answers, {}, "job-a")
    finish_stage(settings.job_dir("job-a") / "stages/capture", "capture", states, {}, "job-a")
    earlier = job("job-a", **spec(200))

    alone = plan(job_spec(**spec(400)), settings)
    shared = plan(job_spec(**spec(400)), settings, [(earlier, derive(earlier.spec))])
    assert alone.present is None
    assert shared.present is not None
    whole = alone.stages[1].bytes_on_disk
    assert (shared.present.answers, shared.present.all_answers) == (200, 400)
    assert (shared.present.state_bytes, shared.present.all_state_bytes) == (whole // 2, whole)
    assert f"{size(whole // 2)} of {size(whole)} of their hidden states" in shared.present.words
    assert shared.stages[1].hours == pytest.approx(alone.stages[1].hours / 2)
    for other in ({"capture": {"codec": "bfloat16"}}, {"capture": {"aux_layers": [1, 2]}},
                  {"capture": {"max_length": 64}}, {"capture": {"mode": "stream"}}, {"drafter": {"family": "medusa"}}):
        present = plan(job_spec(**spec(400, **other)), settings, [(earlier, derive(earlier.spec))]).present
        assert present is not None
        assert (present.answers, present.state_bytes) == (200, 0), other
