"""What people read: durations, sizes, tables that survive narrow terminals, and no colour in a pipe."""

import json
import re
import shlex
import socket
import threading
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from eyrie_api import quantities
from eyrie_api.cli import tables
from eyrie_api.cli.watch import JobCancelled, JobFailed, _EventReader, closing_words, verdict, watch_view
from eyrie_api.client import Client
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Interval
from eyrie_api.contract.plan import PlannedAndActual, PlannedStages, StageComparison, StagePlan
from eyrie_api.contract.reports import LeaderboardEntry, PromotionDecision
from eyrie_api.contract.status import Endpoint, Event, Job, JobStatus, Phase, Progress, Revision, StageStatus

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
SPEC = JobSpec.model_validate({"name": "mine", "target": {"model": "org/model"},
                               "data": {"sources": [{"path": "chats.jsonl"}]}})
ENTRY = LeaderboardEntry(
    job_id="j-1", checkpoint="c0-step-90", candidate="c0", family="eagle3", target="org/model",
    tree=DraftTreeShape(num_steps=7, top_k=1, num_draft_tokens=8), tau=4.321, tokens_per_s=99.4, speedup=2.5,
    speedup_greedy=2.75, speedup_sampled=None, lossless=True, tuned=True, suites={"chat": 2.5}, rank=1)


def job(phase: Phase = "Running", *stages: StageStatus, **status: object) -> Job:
    return Job(id="j-1", created_at=NOW - timedelta(seconds=125), updated_at=NOW, spec=SPEC,
               status=JobStatus(phase=phase, stages=stages, **status))  # type: ignore[arg-type]


def rendered(words: RenderableType, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(words)
    return out.getvalue()


TRAINING = StageStatus(stage="train", key="c0", state="Running", started_at=NOW - timedelta(seconds=61),
                       progress=Progress(done=30, total=120, unit="steps", rate=2.5, eta_s=36, message="loss 1.2"))
FAILED = StageStatus(stage="capture", state="Failed", reason="DiskTooSmall", message="no room", hint="make room")


def test_a_plan_against_what_happened_has_a_row_for_each_stage_and_the_settings_to_start_with() -> None:
    stage = StagePlan(stage="capture", tokens=1, bytes_on_disk=1, hours=1.0)
    row = StageComparison(stage="capture", planned=stage, seconds=1800.0, is_running=False, size_bytes=1)
    extra = row.model_copy(update={"stage": "train", "planned": None, "is_running": True})
    words = rendered(tables.calibration_view(PlannedAndActual(
        stages=(row, extra), time_left=None, rates={"EYRIE_PREFILL_GFLOPS": 180.0})))
    assert re.search(r"capture +1h00m +30m00s +0\.50x", words)
    assert re.search(r"train +- +30m00s so far +-", words)
    assert "EYRIE_PREFILL_GFLOPS=180" in words
    assert "published ones" in rendered(tables.calibration_view(PlannedAndActual(stages=(row,), time_left=None)))


@pytest.mark.parametrize(("seconds", "words"), [
    (0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599, "59m59s"), (7800, "2h10m"), (90_000, "1d1h"), (None, "-"),
    (-3, "0s"),
])
def test_durations_read_as_people_say_them(seconds: float | None, words: str) -> None:
    assert quantities.duration(seconds) == words


@pytest.mark.parametrize(("value", "words"), [
    (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB"), (2**62, "4096.0 PiB")])
def test_sizes_are_binary(value: int, words: str) -> None:
    assert quantities.size(value) == words


def test_a_running_stage_shows_done_total_rate_and_time_left() -> None:
    seen = rendered(watch_view(job("Running", TRAINING), [], NOW))
    for part in ("train c0", "30/120 steps", "2.5/s", "36s left", "loss 1.2", "1m01s", "Running"):
        assert part in seen


def test_the_watch_keeps_one_line_per_stage_on_any_width() -> None:
    event = Event(id=1, job_id="j-1", time=NOW, reason="Regenerated", message="words " * 40)
    for width in (30, 50, 80, 200):
        lines = rendered(watch_view(job("Running", TRAINING, FAILED), [event], NOW), width).splitlines()
        assert len(lines) == 4
        assert all(len(line) <= width for line in lines)


def test_an_absent_server_is_shown_while_watching() -> None:
    assert "is unavailable" in rendered(watch_view(job("Running", TRAINING), [], NOW, away="connection refused"))


def test_a_failed_stage_shows_reason_and_hint() -> None:
    seen = rendered(tables.job_view(job("Failed", FAILED), NOW))
    assert "DiskTooSmall: no room" in seen
    assert "make room" in seen


def test_a_failed_job_raises_its_stage_s_hint_and_a_cancelled_one_its_own_exit_code() -> None:
    with pytest.raises(JobFailed, match="DiskTooSmall") as failed:
        verdict(job("Failed", FAILED))
    assert failed.value.hint == ("make room; if the job need not change, then eyrie retry j-1, "
                                 "which continues after the finished stages")
    with pytest.raises(JobCancelled) as cancelled:
        verdict(job("Cancelled"))
    assert cancelled.value.exit_code != failed.value.exit_code != 0
    verdict(job("Succeeded"))


def test_tau_never_stands_without_its_draft_tree() -> None:
    assert "tau 4.32 at depth 7, top-k 1, 8 draft tokens" in tables.entry_line(ENTRY)
    board = rendered(tables.leaderboard_table([ENTRY]), 160)
    assert "4.32" in board
    assert "7/1/8" in board


def test_the_leaderboard_has_a_column_for_the_values_of_a_sweep_where_there_is_one() -> None:
    swept = ENTRY.model_copy(update={"axes": {"drafter.intermediate_size": 704, "train.learning_rate": 1e-4}})
    assert "intermediate_size 704; learning_rate 0.0001" in rendered(tables.leaderboard_table([swept, ENTRY]), 250)
    assert "SWEEP" not in rendered(tables.leaderboard_table([ENTRY]), 250)


def test_closing_words_tell_the_decision_with_its_reasons() -> None:
    decision = PromotionDecision(promote=False, verdict="no-drafter", reasons=("slower in tools: 0.97x",))
    assert "slower in tools: 0.97x" in closing_words(job("Succeeded", best=ENTRY, decision=decision))


def endpoint(**changes: object) -> Endpoint:
    """One that serves a drafter."""
    drafted = Revision(number=2, job_id="j-1", checkpoint="c0-step-90", tree=ENTRY.tree, drafter_dir="/d",
                       created_at=NOW, reason="faster", state="active")
    return Endpoint(name="assistant", target="/models/my-model", url="http://127.0.0.1:5/v1", model="my-model",
                    active_revision=2, revisions=(drafted,), updated_at=NOW).model_copy(update=changes)


def test_closing_words_end_with_a_request_to_the_endpoint_by_the_name_of_its_model() -> None:
    words = closing_words(job("Succeeded", endpoint="assistant"), endpoint()).splitlines()
    assert words[-2] == "It serves model my-model with the drafter c0-step-90 at http://127.0.0.1:5/v1"
    command = shlex.split(words[-1])
    assert command[:2] == ["curl", "http://127.0.0.1:5/v1/chat/completions"]
    body = json.loads(command[command.index("-d") + 1])
    assert (body["model"], body["messages"][0]["role"]) == ("my-model", "user")


def test_closing_words_say_that_an_endpoint_serves_without_a_drafter_or_does_not_serve() -> None:
    alone = endpoint().revisions[0].model_copy(update={"checkpoint": None, "tree": None, "drafter_dir": None})
    ended = job("Succeeded", endpoint="assistant")
    assert "It serves model my-model without a drafter at http" in closing_words(ended, endpoint(revisions=(alone,)))
    for silent in (endpoint(url=None), endpoint(active_revision=None), endpoint(desired="off")):
        words = closing_words(ended, silent)
        assert words.endswith("eyrie endpoints show assistant")
        assert "curl" not in words
    assert "curl" not in closing_words(ended)


def test_empty_lists_say_what_to_do() -> None:
    assert "eyrie train" in rendered(tables.jobs_table([], NOW))
    for words in (tables.leaderboard_table([]), tables.endpoints_table([]), tables.series_table([])):
        assert rendered(words).strip()


def test_a_sparkline_is_lowest_at_the_lowest_and_no_wider_than_its_points() -> None:
    assert tables.sparkline([]) == ""
    assert tables.sparkline([1.0, 1.0]) == "__"
    assert tables.sparkline([0.0, 5.0, 10.0])[0::2] == "_#"
    assert len(tables.sparkline([float(i) for i in range(1000)], width=24)) == 24


def test_an_accepted_job_says_in_a_line_what_it_will_take() -> None:
    on_gpus = PlannedStages(stages=(
        StagePlan(stage="capture", tokens=1, bytes_on_disk=3 * 2**30, hours=0.5, num_gpus=1,
                  hours_range=Interval(low=0.25, high=1.0)),
        StagePlan(stage="train", tokens=1, bytes_on_disk=2**30, hours=1.5, num_gpus=2,
                  hours_range=Interval(low=1.0, high=3.0))))
    assert tables.planned_words(on_gpus) == ("planned: 2h00m (1h15m to 4h00m), 4.0 GiB on disk, 3.5 GPU hours; "
                                             "train takes 75%; eyrie plan has the rest")
    here = PlannedStages(stages=(StagePlan(stage="train", tokens=1, bytes_on_disk=2**20, hours=0.1),))
    assert tables.planned_words(here) == "planned: 6m00s, 1.0 MiB on disk; train takes 100%; eyrie plan has the rest"


def test_a_watch_that_ends_while_its_stream_is_opened_again_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    unhandled: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}")
        reader = _EventReader(client, "j-1")
        reader.start()
        listening.accept()[0].close()  # the reader has asked, and asks again
        reader.closed.set()
        client.close()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "events"]
        thread.join(60)
    assert not thread.is_alive()
    assert unhandled == []
