"""`eyrie certify`: drafters that were trained elsewhere, through the real command and job; what a decision means."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eyrie_api.cli.spec import build_job, certification
from eyrie_api.cli.verbs import running_plane
from eyrie_api.contract.model import Interval
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.reports import PromotionCheck, PromotionDecision
from eyrie_api.contract.status import JobReport
from eyrie_api.contract.tuning import TuneSpec
from eyrie_api.decisions.certification import EXIT_CODES
from eyrie_api.decisions.certification import certification as certified
from eyrie_api.errors import InvalidInput
from eyrie_operator.cli.certify import judge, words
from tests.api.samples import benchmark_report
from tests.operator.conftest import Eyrie
from tests.tiny import tiny_target
from tests.workers.drafters import published_forms

SMALL = ("benchmark.max_new_tokens=8", "benchmark.warmup_prompts=0", "benchmark.temperatures=[0.0]",
         "benchmark.tree={num_steps: 2, top_k: 1, num_draft_tokens: 3}", "tune.num_steps=[2]", "tune.top_k=[1]",
         "tune.num_draft_tokens=[3]", "tune.concurrencies=[1]", "tune.max_prompts=2", "tune.budget_s=2",
         "prove.concurrencies=[1]", "prove.requests=4", "prove.most_pairs=3",
         "prove.max_new_tokens=8", "prove.parity_prompts=2")
LIMIT_S = 1500.0


def check(name: str, *, passed: bool = False, figure: float | None = None, bound: float | None = None,
          low: float | None = None, undecided: bool = False) -> PromotionCheck:
    return PromotionCheck(name=name, passed=passed, figure=figure, bound=bound, undecided=undecided,
                          words=f"{name} says so",
                          interval=None if low is None else Interval(low=low, high=9.0))


def decision(*checks: PromotionCheck, verdict: str = "no-drafter") -> PromotionDecision:
    return PromotionDecision.model_validate({
        "promote": False, "verdict": verdict, "reasons": [each.words for each in checks], "checks": checks})


PASSED = check("identical", passed=True)


@pytest.mark.parametrize(("checks", "verdict"), [
    ((PASSED,), "faster"),
    ((PASSED, check("suite:chat", figure=0.9, bound=1.05)), "not-faster"),
    ((PASSED, check("speculation-pays")), "not-faster"),
    ((PASSED, check("ttft:4", figure=2.0, bound=1.5)), "not-faster"),
    ((PASSED, check("load:1", figure=1.2, bound=1.05, low=0.8, undecided=True)), "undecided"),
    ((PASSED, check("load:1", figure=1.2, bound=1.05, low=0.8), check("load:4", figure=1.0, bound=1.05, low=0.9)),
     "not-faster"),
    ((PASSED, check("proof")), "undecided"),
    ((), "undecided"),
    ((check("identical", figure=3, bound=4), check("suite:chat", figure=0.9, bound=1.05)), "not-lossless"),
    ((PASSED, check("parity", figure=4, bound=4, low=0.0)), "not-lossless"),
    ((PASSED, check("changed-prompt", figure=1.2, bound=1.0, low=1.1)), "not-lossless"),
    ((PASSED, check("changed-prompt", figure=0.9, bound=1.0, low=0.8)), "not-faster"),
])
def test_the_exit_code_follows_from_the_kind_of_the_checks_that_failed(checks: tuple[PromotionCheck, ...],
                                                                        verdict: Any) -> None:
    assert certified(decision(*checks)) == verdict
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert [kind for kind, code in EXIT_CODES.items() if code == 0] == ["faster"]


def test_a_drafter_that_may_not_be_promoted_by_the_policy_is_certified_all_the_same() -> None:
    for verdict in ("promote", "awaits-approval", "keep-incumbent", "no-drafter"):
        assert certified(decision(PASSED, verdict=verdict)) == "faster"


def test_the_certificate_names_what_was_measured_and_what_was_refused() -> None:
    measured = benchmark_report("mine", {"chat": (2.0,)})
    refused = measured.model_copy(update={"checkpoint": "theirs", "cells": (), "dropped": "it reads states of 48"})
    report = JobReport(job_id="job-1", name=None, target="t", phase="Succeeded", seconds={},
                       benchmark=(measured, refused), decision=decision(check("identical", figure=3, bound=4)))
    certificate = judge(report)
    assert (certificate.verdict, certificate.exit_code) == ("not-lossless", 4)
    assert [(drafter.name, drafter.reason) for drafter in certificate.refused] == [("theirs", "it reads states of 48")]
    stream = io.StringIO()
    Console(file=stream, width=160).print(words(certificate))
    assert "Not lossless" in stream.getvalue()
    assert "identical says so" in stream.getvalue()
    assert "refused: theirs: it reads states of 48" in stream.getvalue()


def test_its_job_serves_nothing_unless_it_promotes_and_keeps_what_the_command_sets() -> None:
    job = build_job(target="org/model", drafters=["org/head"], prompts=["a/My Chats.jsonl", "org/other"],
                    settings=["tune.budget_s=7"])
    never, promoted = certification(job, promote=False), certification(job, promote=True)
    assert (never.promotion.mode, never.serve.enabled, never.tune.ngram) == ("never", False, False)
    assert (promoted.promotion.mode, promoted.serve.enabled) == ("auto", True)
    assert [suite.name for suite in never.benchmark.suites] == ["my-chats", "other"]
    assert never.tune.budget_s == 7
    shipped = certification(build_job(target="quickstart", drafters=["org/head"]), promote=False)
    assert [suite.path for suite in shipped.benchmark.suites] == [
        f"quickstart:{name}" for name in ("chat", "math", "code", "tools")]
    assert shipped.tune.budget_s < TuneSpec().budget_s
    assert shipped.prove.requests < ProveSpec().requests
    large = build_job(target="quickstart", drafters=["org/head"], settings=["prove.requests=99"])
    assert certification(large, promote=False).prove.requests == 99
    with pytest.raises(InvalidInput, match="no conversations were given, and no drafters"):
        build_job(target="quickstart")
    with pytest.raises(InvalidInput, match="no drafter was given, and eyrie certify trains none"):
        certification(build_job(target="quickstart", data=["quickstart"]), promote=False)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "target", **published_forms.TARGET)


def run_process(where: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "EYRIE_SERVER"}
    return subprocess.run([sys.executable, "-m", "eyrie_operator.command", *map(str, arguments)], cwd=where, text=True,
                          capture_output=True, check=False, timeout=LIMIT_S,
                          env=variables | {"EYRIE_HOME": str(where / "home"), "TMPDIR": str(where)})


def certify(where: Path, target: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """With prompts of a few rows, unless the arguments name others, and the smallest sizes."""
    prompts = where / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Name {number} towns."}) + "\n" for number in range(2, 6)))
    settings = [part for setting in SMALL for part in ("--set", setting)]
    given = () if "--prompts" in arguments else ("--prompts", prompts)
    return run_process(where, "certify", *arguments, "--target", target, *given, *settings, "--json")


def test_a_drafter_of_another_target_and_a_damaged_one_are_refused_with_the_reason(tmp_path: Path,
                                                                                   target: Path) -> None:
    wide = tiny_target(tmp_path / "wide", **published_forms.TARGET | {"hidden_size": 48})
    good = published_forms.specforge().write(tmp_path / "good")
    damaged = published_forms.specforge().write(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for refused_target, drafter, says in ((wide, good, "reads states of 32, the target's are 48"),
                                          (target, damaged, "model.safetensors"),
                                          (target, tmp_path / "nowhere", "no such file or directory")):
        done = certify(tmp_path, refused_target, drafter)
        error = json.loads(done.stderr.splitlines()[-1])["error"]
        assert done.returncode == 65, done.stderr
        assert says in error["message"]
        assert str(drafter) in error["message"]
        assert error["hint"]
        assert done.stdout == ""
    assert running_plane(tmp_path / "home") is None, "the control plane that it started is stopped"


@pytest.mark.parametrize(("arguments", "says"), [
    ((), "no conversations were given, and no drafters"),
    (("--check-only",), "no drafter was given"),
    (("head", "--fast"), "--fast is given without --check-only"),
    (("head", "--context", "9"), "--context is given without --check-only"),
    (("--off", "http://one"), "one of --off and --drafted is missing"),
    (("--off", "http://one", "--drafted", "http://two", "--prompts", "p.jsonl"), "--target does not belong to --off")])
def test_arguments_that_do_not_belong_together_are_refused(arguments: tuple[str, ...], says: str,
                                                           tmp_path: Path, eyrie: Eyrie) -> None:
    done = eyrie("certify", *arguments, "--target", "quickstart", cwd=tmp_path)
    assert done.returncode == 65
    assert says in done.stderr


@pytest.mark.parametrize(("arguments", "says"), [
    ((), "no prompts were given"),
    (("--prompts", "p.jsonl", "--set", "tune.budget_s=2"), "only fields of prove and promotion apply"),
    (("--prompts", "p.jsonl", "--set", "prove.requests=1"), "prove.requests"),
    (("--prompts", "quickstart:chat", "--model", "m"), "are one server"),
    (("head", "--prompts", "p.jsonl", "--promote"), "DRAFTER, --promote does not belong to --off")])
def test_two_running_servers_take_prompts_and_fields_of_the_proof(arguments: tuple[str, ...], says: str,
                                                                   tmp_path: Path, eyrie: Eyrie) -> None:
    done = eyrie("certify", "--off", "http://127.0.0.1:1", "--drafted", "http://localhost:1/v1", *arguments,
                 cwd=tmp_path, env={"EYRIE_HOME": str(tmp_path / "home")})
    assert done.returncode == 65
    assert says in done.stderr
    assert not (tmp_path / "home").exists(), "no control plane takes part"


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_published_drafters_are_measured_tuned_proven_and_judged_without_data_and_training(tmp_path: Path,
                                                                                            target: Path) -> None:
    theirs = published_forms.eagle_3().write(tmp_path / "authors")
    other = published_forms.speculators_eagle_1().write(tmp_path / "converted")
    plain = published_forms.specforge()
    third = plain.write(tmp_path / "specforge")
    lost = published_forms.Published(plain.config, plain.tensors | {
        "fc.weight": torch.full_like(plain.tensors["fc.weight"], float("nan"))}).write(tmp_path / "lost")
    done = certify(tmp_path, target, theirs, third, other, lost)
    certificate = json.loads(done.stdout)
    assert done.returncode == certificate["exit_code"] == EXIT_CODES[certificate["verdict"]], done.stderr
    # They are random, so nothing of theirs is accepted, and the output is the target's.
    assert certificate["verdict"] in ("not-faster", "undecided"), certificate
    assert {entry["checkpoint"]: entry["lossless"] for entry in certificate["leaderboard"]} == {
        "authors": True, "specforge": True, "converted": True}
    assert certificate["best"]["tuned"]
    assert [drafter["name"] for drafter in certificate["refused"]] == ["lost"]
    assert "fc.weight" in certificate["refused"][0]["reason"]
    assert running_plane(tmp_path / "home") is None
    stages = tmp_path / "home" / "jobs" / certificate["job"] / "stages"
    assert sorted(path.name for path in stages.iterdir()) == ["benchmark", "prove", "tune"]

    up = json.loads(run_process(tmp_path, "up", "--detach", "--port", "0", "--json").stdout)
    try:
        exported = run_process(tmp_path, "export", certificate["job"], "--server", up["url"], "--to",
                               tmp_path / "out", "--json")
    finally:
        run_process(tmp_path, "down")
    assert exported.returncode == 0, exported.stderr
    document = json.loads(exported.stdout)
    assert (document["drafted"], document["reason"]) == (False, certificate["summary"])
    assert (tmp_path / "out" / "sglang.sh").read_text().startswith("SGLANG_USE_CPU_ENGINE=1 python3 -m sglang.launch")
    assert "speculative" not in (tmp_path / "out" / "vllm.sh").read_text()

    alone = certify(tmp_path, target, lost)
    assert alone.returncode == 65, alone.stderr
    assert "fc.weight" in json.loads(alone.stderr.splitlines()[-1])["error"]["message"]

    (tmp_path / "rows.jsonl").write_text('{"text": "no prompt"}\n')
    unread = certify(tmp_path, target, theirs, "--prompts", tmp_path / "rows.jsonl")
    assert unread.returncode == 65, unread.stderr
    assert "rename the column that holds the prompt" in json.loads(unread.stderr.splitlines()[-1])["error"]["hint"]
