"""The demo's pure parts: its job, and the words it closes with."""

import json
import shlex
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from eyrie_api.terminal.chat import Reply
from eyrie_api.terminal.screen import Screen
from eyrie_api.v1alpha1.job import DraftTreeShape
from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.reports import BenchmarkReport, CellReport, Environment
from eyrie_operator import demo

CHAIN = DraftTreeShape(num_steps=7, top_k=1, num_draft_tokens=8)


def cell(suite: str, temperature: float, identical: int = 6) -> CellReport:
    return CellReport(
        suite=suite, temperature=temperature, tree=CHAIN, prompts=6, tokens=500, tau=5.5, acceptance=(0.9,),
        accepted_histogram=(1, 9), tokens_per_s=140.0, baseline_tokens_per_s=50.0, speedup=2.8,
        speedup_interval=Interval(low=2.5, high=3.1), ttft_s=0.1, baseline_ttft_s=0.1, identical=identical)


FINAL = BenchmarkReport(
    checkpoint="base-step-90", candidate="base", path="checkpoints/base-step-90",
    cells=(cell("chat", 0.0), cell("chat", 1.0), cell("math", 0.0), cell("math", 1.0)), lossless=True, speedup=2.8,
    baseline_tokens_per_s=50.0, seconds=30.0, environment=Environment(
        hardware="cpu", cpu_count=2, threads=2, torch="2", python="3", dtype="float32", code_version="x", date="now"))


def report(*, promoted: bool) -> dict[str, Any]:
    return {
        "promoted": {"checkpoint": "base-step-90", **CHAIN.model_dump(), "tau": 5.5, "reasons": ["faster"],
                     "speedup": {"greedy": 3.01, "sampled": 2.02},
                     "identical": {"greedy": True, "sampled": True}} if promoted else None,
        "decision": {"promote": promoted, "reasons": ["tools: 0.97x is below 1.05x"]},
        "outcome": {"succeeded": True, "reason": "Completed", "message": ""},
        "baseline": {"tokens_per_s": 50.0, "transformers_generate_tokens_per_s": None},
        "seconds": {"setup": 100.0, "regenerate": 60.0, "capture": 20.0, "total": 240.0},
        "endpoint": {"name": "default", "url": "http://127.0.0.1:5/v1", "model": "quickstart"},
    }


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


def test_closing_words_name_every_setting_a_tau_depends_on() -> None:
    seen = " ".join(rendered(demo.closing(report(promoted=True), FINAL, None)).split())
    for part in ("3.01x greedy", "2.02x sampled", "12 of 12 greedy and 12 of 12 sampled", "depth 7, top-k 1",
                 "8 draft tokens", "same output", "50 tok/s", "not measured"):
        assert part in seen, part


def test_an_answer_of_the_endpoint_is_shown_with_its_speed() -> None:
    reply = Reply(content="12 + 30\n= 42", completion_tokens=8, total_s=0.1, acceptance_length=4.0, verify_rounds=2)
    seen = rendered(demo.closing(report(promoted=True), FINAL, reply))
    assert "12 + 30 = 42" in seen
    assert "acceptance length 4.00" in seen


def test_a_drafter_that_does_not_pay_is_not_praised() -> None:
    seen = rendered(demo.closing(report(promoted=False), FINAL, None))
    assert "No drafter was promoted: tools: 0.97x is below 1.05x" in seen
    assert "Faster" not in seen
    assert "Faster" not in rendered(demo.closing(report(promoted=False), None, None))


def test_closing_words_fit_narrow_terminals() -> None:
    for width in (60, 80, 200):
        words = demo.closing(report(promoted=True), FINAL, None)
        assert all(len(line) <= width for line in rendered(words, width).splitlines())
        assert "math" in rendered(words, width)


def test_the_curl_line_is_one_shell_command_with_a_valid_body() -> None:
    command = shlex.split(demo.curl_line("http://127.0.0.1:5/v1", "quickstart"))
    assert command[:2] == ["curl", "http://127.0.0.1:5/v1/chat/completions"]
    body = json.loads(command[command.index("-d") + 1])
    assert body["model"] == "quickstart"
    assert body["messages"][0]["role"] == "user"


def test_where_lists_time_by_stage_and_the_files(tmp_path: Path) -> None:
    seen = rendered(demo.where(report(promoted=True), [tmp_path / "a.png", tmp_path / "b.png"], tmp_path), 300)
    for part in ("4m00s (regenerate 1m00s, capture 20s)", "report.json", "(2)", "http://127.0.0.1:5/v1"):
        assert part in seen


def test_stopping_when_nothing_runs_is_fine(tmp_path: Path) -> None:
    demo.stop(tmp_path / "nowhere", Screen(as_json=True), quietly=True)
    assert not (tmp_path / "nowhere").exists()
