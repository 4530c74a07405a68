"""The report of a finished job, from its stages' manifests."""

from eyrie_api.contract.reports import CaptureReport, LayerChoice, RegenerateReport
from eyrie_api.contract.stages import STAGES, Manifest
from eyrie_operator.jobs.report import build_report

ANSWERED = RegenerateReport(rows_read=12, rows_answered=10, rows_held_out=1, rows_quarantined=1, rows_reused=4,
                            prompt_tokens=1, answer_tokens=1, finish_reasons={}, sources={}, seconds=1.0,
                            tokens_per_s=1.0)
CAPTURED = CaptureReport(source="reference", rows=10, tokens=1, supervised_tokens=1, bytes=1000, bytes_reused=400,
                         rows_reused=4, bytes_per_token=1.0, shards=1, codec="int8", hidden_size=8,
                         layers=LayerChoice(aux_layers=(1, 2, 3), reason="default"), seconds=1.0, tokens_per_s=1.0)


def manifest(report: RegenerateReport | CaptureReport) -> Manifest:
    return Manifest(stage="regenerate" if isinstance(report, RegenerateReport) else "capture", job_id="job",
                    spec_digest=f"sha256:{0:064}", code_version="0", files=(), report=report,
                    started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:00:02+00:00")


def test_the_report_states_how_much_was_taken_over_from_earlier_jobs_and_of_how_much() -> None:
    report = build_report("job", [manifest(ANSWERED), manifest(CAPTURED)], (), 4.0, None, None, stages=STAGES)
    assert report["reused"] == {"answers": 4, "all_answers": 10, "state_bytes": 400, "all_state_bytes": 1000}


def test_the_report_of_a_job_that_ended_after_its_answers_states_those_alone() -> None:
    assert build_report("job", [manifest(ANSWERED)], (), 2.0, None, None, stages=STAGES)["reused"] == {
        "answers": 4, "all_answers": 10}
