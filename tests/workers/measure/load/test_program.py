"""`python -m eyrie_workers.measure.load` and `eyrie load-test`: options in, report, tables and figures out."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_api.contract.load import LoadReport
from eyrie_api.errors import InvalidInput
from eyrie_workers.measure.load.__main__ import build_parser, main, read_prompts, read_spec, read_variants
from eyrie_workers.measure.load.client import EndpointUnusable
from tests.servers.stub_openai_server import Timing
from tests.workers.measure.load.servers import responding

QUICK = ["--concurrency", "1,2", "--requests", "8", "--max-new-tokens", "8", "--prompts", "quickstart:chat",
         "--prompts", "quickstart:math"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with responding(tmp_path_factory.mktemp("responder"), Timing(bundle=2)) as address:
        yield address


def test_a_comparison_prints_tables_and_writes_report_and_figures(
        url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        [
            "--variant",
            f"off={url}",
            "--variant",
            f"candidate={url}",
            *QUICK,
            "--rate",
            "100",
            "--slo",
            "ttft=30,e2e=60",
            "--what",
            "candidate=chain 1/1/2",
            "--out",
            str(tmp_path / "r.json"),
            "--plots",
            str(tmp_path / "p"),
        ]
    )
    output = capsys.readouterr()
    assert code == 0
    report = LoadReport.model_validate_json((tmp_path / "r.json").read_text())
    assert {level.variant for level in report.levels} == {"off", "candidate"}
    assert list(report.levels[0].by_category) == ["chat", "math"]
    for words in ("Closed loop", "Open loop", "SAME ANSWERS", "All greedy answers were the same in every variant.",
                  "candidate: chain 1/1/2", "GOOD"):
        assert words in output.out
    assert "requests" in output.err
    drawn = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"load-throughput.png", "load-latency.png", "load-latency-by-rate.png", "load-categories.svg",
            "load-acceptance.svg"} <= drawn


def test_json_is_the_report_and_nothing_else(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--variant", f"one={url}", *QUICK, "--json"]) == 0
    output = capsys.readouterr()
    assert LoadReport.model_validate_json(output.out).model == "responder"
    assert output.err == ""


def test_an_unreachable_server_sets_the_exit_code_and_prints_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--variant", "one=http://127.0.0.1:1/v1"]) == EndpointUnusable.exit_code
    assert "start the server" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "words"), [
    (["--concurrency", "many"], "is not numbers"),
    (["--concurrency", "1.5"], "whole numbers"),
    (["--concurrency", "0"], "concurrencies"),
    (["--rate", "-1"], "rates_per_s"),
    (["--slo", "speed=1"], "not a service level"),
    (["--slo", "ttft"], "<name>=<value>"),
    (["--temperature", "9"], "temperature"),
])
def test_invalid_options_are_rejected_by_name(options: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_spec(build_parser().parse_args(["--variant", "a=http://h/v1", *options]))


def test_concurrencies_have_a_default_unless_a_rate_is_given() -> None:
    parse = build_parser().parse_args
    assert read_spec(parse(["--variant", "a=http://h/v1"])).concurrencies == (1, 4, 16)
    assert read_spec(parse(["--variant", "a=http://h/v1", "--rate", "2"])).concurrencies == ()


def test_models_and_keys_are_given_to_all_variants_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "sk-hidden")
    variants = read_variants(build_parser().parse_args([
        "--variant", "off=http://h:1/v1", "--variant", "on=http://h:2/v1", "--model", "big", "--model", "on=small",
        "--api-key-env", "on=THEIR_KEY"]))
    assert [(variant.name, variant.model, variant.api_key) for variant in variants] == [
        ("off", "big", None), ("on", "small", "sk-hidden")]


@pytest.mark.parametrize("options", [["--model", "on=x"], ["--api-key-env", "NOT_SET_HERE"], ["--what", "on=x"],
                                     ["--variant", "off=http://h/v1"], ["--variant", "http://me:hidden@h/v1"]])
def test_options_of_unknown_variants_are_rejected(options: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_variants(build_parser().parse_args(["--variant", "off=http://h/v1", "--model", "off=m", *options]))
    assert "hidden" not in str(caught.value)


def test_prompts_are_read_from_suites_and_files_with_their_category(tmp_path: Path) -> None:
    file = tmp_path / "My Traffic.jsonl"
    file.write_text(json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"question": "why?"}) + "\n")
    assert {prompt.suite for prompt in read_prompts([], 0)} == {"chat", "math", "code", "tools"}
    assert {prompt.suite for prompt in read_prompts([str(file)], 0)} == {"my-traffic"}
    assert len(read_prompts([f"mine={file}"], 0)) == 2
    with pytest.raises(InvalidInput, match="no valid category name"):
        read_prompts([f"={file}"], 0)


def test_eyrie_load_runs_the_program_with_its_options_and_exit_code() -> None:
    done = subprocess.run([sys.executable, "-m", "eyrie_operator.command", "load-test", "--variant", "one=http://127.0.0.1:1/v1",
                           "--json"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == EndpointUnusable.exit_code
    assert json.loads(done.stderr)["error"]["reason"] == "EndpointUnusable"


def test_the_program_does_not_load_torch() -> None:
    code = ("import sys, eyrie_workers.measure.load.__main__\n"
            "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
