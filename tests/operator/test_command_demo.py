"""The demo's pure parts: its job, and the words it closes with."""

from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from eyrie_api.cli.chat import Reply
from eyrie_api.cli.verbs import Screen
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Interval
from eyrie_api.contract.prove import ParityReport, ProveReport, SampledParityReport
from eyrie_api.contract.reports import BenchmarkReport, CellReport, PromotionDecision, TuneReport
from eyrie_api.contract.status import Endpoint, Job, JobReport, JobStatus
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint, rank
from eyrie_operator.cli import demo
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT, load_report

CHAIN = DraftTreeShape(num_steps=7, top_k=1, num_draft_tokens=8)


def cell(suite: str, temperature: float, identical: int = 6) -> CellReport:
    return CellReport(
        suite=suite, temperature=temperature, tree=CHAIN, prompts=6, tokens=500, tau=5.5, acceptance=(0.9,),
        accepted_histogram=(1, 9), tokens_per_s=140.0, baseline_tokens_per_s=50.0, speedup=2.1 if temperature else 2.8,
        speedup_interval=Interval(low=2.5, high=3.1), ttft_s=0.1, baseline_ttft_s=0.1, identical=identical)


FINAL = BenchmarkReport(
    checkpoint="base-step-90", candidate="base", path="checkpoints/base-step-90",
    cells=(cell("chat", 0.0), cell("chat", 1.0), cell("math", 0.0), cell("math", 1.0)), lossless=True, speedup=2.8,
    baseline_tokens_per_s=50.0, seconds=30.0, environment=ENVIRONMENT)

TUNED = TuneReport(checkpoint="base-step-90", path="checkpoints/base-step-90", cells=(), winner=CHAIN, finding="chain",
                   final=FINAL, environment=ENVIRONMENT, seconds=10.0)


PARITY = ParityReport(engine="embedded", prompts=8, identical=8, tree=CHAIN, histogram=(1, 9), tau=5.41,
                      tau_interval=Interval(low=5.0, high=5.8), reference_tau=5.41, passed=True, reasons=("identical",))
PROOF = ProveReport(
    checkpoint="base-step-90", path="checkpoints/base-step-90", engine="embedded",
    use=DrafterUse(setting=Setting(tree=CHAIN)), parity=PARITY,
    loaded_parity=PARITY.model_copy(update={"reasons": ("16 of 16 answers are identical",)}),
    sampled_parity=SampledParityReport(engine="embedded", prompts=8, answers=8, passed=None,
                                       reasons=("sampled answers were not compared",)),
    load=load_report((1, 4), ("off", "candidate"), 2.41), changed_prompt=load_report((1,), ("off", "candidate"), 1.95),
    environment=ENVIRONMENT, seconds=20.0)


def report(*, promoted: bool, **changed: Any) -> JobReport:
    compared = FINAL.model_copy(update={"transformers_generate_tokens_per_s": 44.0,
                                        "transformers_baseline_tokens_per_s": 61.0, "transformers_prompts": 4})
    made = JobReport(
        job_id="job-1", name="demo", target="quickstart", phase="Succeeded", endpoint="default",
        seconds={"regenerate": 60.0, "capture": 20.0, "total": 80.0}, benchmark=(compared,), tune=TUNED, prove=PROOF,
        leaderboard=rank([MeasuredCheckpoint("job-1", "eagle3", "quickstart", True, FINAL)]),
        decision=PromotionDecision(promote=promoted, verdict="promote" if promoted else "no-drafter",
                                   reasons=("tools: 0.97x is below 1.05x",)))
    return made.model_copy(update=changed)


def rendered(words: RenderableType, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False, markup=False).print(words)
    return out.getvalue()


def test_the_short_job_keeps_every_stage_and_shrinks_what_takes_time() -> None:
    whole, short = demo.demo_job(short=False), demo.demo_job(short=True)
    assert short.data.max_conversations < whole.data.max_conversations
    assert short.train.epochs * short.data.max_conversations < whole.train.epochs * whole.data.max_conversations
    assert len(short.tune.num_steps) * len(short.tune.top_k) < len(whole.tune.num_steps) * len(whole.tune.top_k)
    for job in (whole, short):
        assert {suite.name for suite in job.benchmark.suites} == {"chat", "math", "code", "tools"}
        assert set(job.benchmark.temperatures) == {0.0, 1.0}
        assert job.promotion.mode == "auto"
        assert job.promotion.require_identical
        assert job.serve.enabled
        assert job.prove.concurrencies == (1, 4)
    assert short.prove.requests * short.prove.max_new_tokens < whole.prove.requests * whole.prove.max_new_tokens


def test_closing_words_name_every_setting_a_tau_depends_on() -> None:
    seen = " ".join(rendered(demo.closing(report(promoted=True), None)).split())
    for part in ("2.80x greedy, 2.10x sampled, against", "12 of 12 greedy and 12 of 12 sampled", "depth 7, top-k 1",
                 "8 draft tokens", "same output", "without a drafter (50 tok/s on the same prompts)",
                 "61 tok/s without a drafter, 44 tok/s by transformers generate: the same 4 prompts, greedy, in turn"):
        assert part in seen, part


def test_a_baseline_that_was_not_compared_with_transformers_is_not_printed_next_to_it() -> None:
    assert demo.baseline_words([FINAL]) == "transformers generate was not measured"


def test_closing_words_tell_the_proof_in_the_serving_engine() -> None:
    seen = " ".join(rendered(demo.closing(report(promoted=True), None)).split())
    for part in ("serves what was trained: 8 of 8", "tau is 5.41 there", "16 of 16 answers are identical",
                 "sampled answers were not compared", "at 7/1/8", "1 2.41x (2.41-2.41) 64 (64) 100 ms (100 ms)",
                 "4 at once 2.41x (2.41-2.41)", "1, another system prompt 1.95x"):
        assert part in seen, part
    failed = PROOF.model_copy(update={"parity": PARITY.model_copy(update={"passed": False})})
    seen = rendered(demo.closing(report(promoted=False, prove=failed), None))
    assert "does NOT serve what was trained" in " ".join(seen.split())
    skipped = PROOF.model_copy(update={"parity": None, "skipped": "speculation pays at none of the declared loads"})
    seen = rendered(demo.closing(report(promoted=False, prove=skipped), None), 200)
    assert "Not measured in the serving engine: speculation pays at none" in seen


def test_an_answer_of_the_endpoint_is_shown_with_its_speed() -> None:
    reply = Reply(content="12 + 30\n= 42", completion_tokens=8, total_s=0.1, acceptance_length=4.0, verify_rounds=2)
    seen = rendered(demo.closing(report(promoted=True), reply))
    assert "12 + 30 = 42" in seen
    assert "acceptance length 4.00" in seen


def test_a_drafter_that_does_not_pay_is_not_praised() -> None:
    seen = rendered(demo.closing(report(promoted=False), None))
    assert "No drafter was promoted: tools: 0.97x is below 1.05x" in seen
    assert "Faster" not in seen


def test_closing_words_fit_narrow_terminals() -> None:
    for width in (60, 80, 200):
        words = demo.closing(report(promoted=True), None)
        assert all(len(line) <= width for line in rendered(words, width).splitlines())
        assert "math" in rendered(words, width)


def test_where_lists_time_by_stage_and_the_files(tmp_path: Path) -> None:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    job = Job(id="job-1", spec=demo.demo_job(short=True), created_at=created, updated_at=created,
              status=JobStatus(phase="Succeeded", finished_at=created + timedelta(minutes=4)))
    endpoint = Endpoint(name="default", target="quickstart", url="http://127.0.0.1:5/v1", model="quickstart",
                        active_revision=2, updated_at=created)
    seen = rendered(demo.where(job, report(promoted=True), endpoint, [tmp_path / "a.png", tmp_path / "b.png"],
                               tmp_path), 300)
    for part in ("4m00s (regenerate 1m00s, capture 20s)", "report.json", "(2)", "http://127.0.0.1:5/v1"):
        assert part in seen


def test_stopping_when_nothing_runs_is_fine(tmp_path: Path) -> None:
    demo.stop(tmp_path / "nowhere", Screen(as_json=True), quietly=True)
    assert not (tmp_path / "nowhere").exists()
