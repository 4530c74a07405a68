"""Every line of the documentation's shell blocks is run, in order, or is listed here with what runs it instead; so is
every Python program. Commands are in fenced blocks, never in indented ones.

Commands and control plane are the real ones; the stages of jobs are rehearsed (tests.pipelines.rehearsal), because what
they compute is tested elsewhere. A page's placeholders are replaced by what a reader would put there (`_STAND_FOR`).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.campaigns.chaos import rehearsed
from benchmarks.campaigns.live_servers import Plane
from eyrie_api.processes import free_port
from tests.house.sources import ROOT

PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("[a-z]*/README.md"), *ROOT.glob("*.md")])

NOT_RUN = {
    r"make demo-published\b": "minutes, and needs PyPI: tests/published has its parts",
    r"make (demo|test)\b": "CI runs them: .ci/wheel and .ci/run",
    r"make (setup|lint)\b": "CI runs them: .ci/run",
    r"\.ci/run\b": "is what CI runs",
    r"make compare\b": "minutes: tests/api/test_cli.py submits its job",
    r"make (bench-(scratch|drift)|rehearse-seed)\b": "minutes, or a cluster: docs/results has what was found",
    r"make test-(images|cluster)\b": "needs a container engine, or a cluster",
    r"make sbom\b": "CI runs it: .ci/run",
    r"pytest ": "make test and make test-slow run them",
    r"python -m benchmarks\.plans\b": "needs a checkout: test_documentation.py compares the page",
    r"eyrie data push ": "needs an S3 server: tests/operator/test_data_push.py",
    r"make image-": "needs a container engine: make test-images",
    r"for part in .* docker push": "needs a registry",
    r"git clone ": "CI begins with it",
    r"source \.venv/": "the test's PATH begins with the environment",
    r"(helm|kubectl) ": "needs a cluster: make test-helm and make test-cluster",
    r"eyrie (chat|endpoints)\b": "need an endpoint that serves: tests/walkthrough and the demo",
    r"eyrie compare ": "trains for minutes: tests/api/test_cli.py",
    r"eyrie (cancel|retry|rollback) ": "need a job that runs, or an endpoint: tests/api/test_cli.py",
    r"eyrie keys rotate ": "needs the id of a key: tests/api/access/test_verbs.py",
    r"eyrie certify ": "needs drafters: tests/operator/test_certify.py",
    r"eyrie export ": "needs a job that was measured: tests/operator/test_certify.py",
    r"curl .*published-eagle3-head": "needs a drafter: tests/docs/test_examples.py plans the document",
    r"eyrie webhooks create ": "resolves the receiver's host: tests/api/access/test_webhooks.py",
    r"eyrie worker ": "needs Redis: tests/api/test_prefork.py",
    r"python -m eyrie_workers\.targets\.prefetch ": "reads the Hub: tests/workers/targets/test_prefetch.py",
    r"python -m eyrie_workers\.shards": "needs Redis and an S3 server: tests/workers/regeneration",
    r"eyrie (plan|train) --file docs/examples/one_gpu\.yaml": "reads the Hub; tests/docs validates the file",
    r"hf download ": "reads the Hub",
    r"(\S+ )?eyrie (up .*--port 8700|(plan|train|watch|job|metrics) .*my-32b)": "needs a cluster and a 32B target: "
    "tests/docs/test_large_job.py plans it",
    r"eyrie train --file docs/examples/first_on_a_cluster\.yaml": "needs a cluster: test_examples.py accepts it",
    r"curl .*chat/completions": "needs an endpoint that serves: the demo sends it",
    r"curl .*num_steps": "needs an endpoint that serves: tests/operator/test_embedded_endpoints.py",
}
"""Patterns of lines, and what runs them or why nothing does."""

_STAND_FOR = (("/backup/", "backup/"), ("PORT", "{port}"), ("JOB", "demo"), ("localhost:8642", "127.0.0.1:{port}"),
              ("EYRIE_TOKEN=...", "EYRIE_TOKEN=secret-of-the-test"))


def lines_of(page: Path) -> Iterator[str]:
    """The lines of a page's shell blocks, continued lines joined, comments removed."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if text := re.sub(r"\s+#.*", "", line).strip():
                yield text


def programs_of(page: Path) -> list[str]:
    """The page's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def reason_of(line: str) -> str | None:
    """Why a line is not run here; None when it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, line)), None)


_PROGRAM = re.compile(r"(\$ )?(\w+=\S* )*(\.ci/\w+|bash|cat|cd|cp|curl|docker|export|eyrie|git|helm|kubectl|make|mkdir|"
                      r"openssl|pg_dump|pip|podman|pytest|python3?|source|sudo)( |$)")
"""The beginning of a line that is a command."""


def indented_commands(text: str) -> list[str]:
    """The commands of a page in blocks that are indented instead of fenced: nothing runs those."""
    outside = re.sub(r"^ *```.*?^ *``` *$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:\A|\n)[ \t]*\n((?:(?: {4}|\t).*\n)+)", outside)
    return [line.strip() for block in blocks for line in block.splitlines() if _PROGRAM.match(line.strip())]


def test_commands_are_in_fenced_blocks() -> None:
    found = {str(page.relative_to(ROOT)): indented_commands(page.read_text()) for page in PAGES}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_an_indented_command_is_found_and_indented_text_is_not() -> None:
    text = "Text\n\n    make x\n    $ A=1 kubectl get\n    makes it\n\n```sh\n\n    make y\n```\n- item\n    eyrie is\n"
    assert indented_commands(text) == ["make x", "$ A=1 kubectl get"]


def test_every_reason_not_to_run_a_line_is_still_needed() -> None:
    lines = [line for page in PAGES for line in lines_of(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in lines)] == []


def test_the_make_targets_and_test_files_of_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for line in (line for page in PAGES for line in lines_of(page)):
        program, *words = shlex.split(line)
        if program == "make":
            missing += [line for word in words if "=" not in word and "$" not in word and word not in targets]
        if program == "pytest":
            missing += [line for word in words if "/" in word and not (ROOT / word.partition("::")[0]).exists()]
    assert missing == []


def _without_server(line: str) -> bool:
    """Whether a line works, or means to work, while no control plane runs."""
    return line.startswith(("eyrie up", "eyrie down", "eyrie doctor", "cp ", "export "))


@pytest.mark.slow
@pytest.mark.timeout(2400)  # forty starts of Python
@pytest.mark.parametrize("pages", [[page for page in PAGES if "EYRIE_TOKEN=" not in page.read_text()],
                                   [page for page in PAGES if "EYRIE_TOKEN=" in page.read_text()]],
                         ids=["without a token", "with one"])
def test_the_commands_of_the_pages_do_what_they_say(pages: list[Path], tmp_path: Path) -> None:
    port = free_port()
    shutil.copytree(ROOT / "workers/eyrie_workers/quickstart/target", tmp_path / "my-model")
    (tmp_path / "chats.jsonl").write_text("".join(
        json.dumps({"messages": [{"role": "user", "content": f"Name {num} towns."}]}) + "\n" for num in range(99)))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "backup").mkdir()
    up, train = "eyrie up --detach", "eyrie train --target ./my-model --data chats.jsonl --name demo"

    with rehearsed(tmp_path):
        variables = {**os.environ, "EYRIE_PORT": str(port), "EYRIE_SERVER": f"http://127.0.0.1:{port}",
                     "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        if any("EYRIE_TOKEN=" in page.read_text() for page in pages):
            variables |= {"EYRIE_TOKEN": "secret-of-the-test", "EYRIE_OIDC_ISSUER": "https://issuer.example.com",
                          "EYRIE_OIDC_AUDIENCE": "eyrie"}

        def run(line: str) -> None:
            if line.startswith("eyrie train "):
                line += " --set serve.enabled=false"  # a rehearsed drafter cannot be served
            script = "\n".join((*exported, line))
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True,
                                  text=True, check=False, timeout=600, env=variables)
            assert done.returncode == 0, f"{page}: {script}\n{done.stdout}\n{done.stderr}"

        page, exported, runs = ROOT, list[str](), False
        try:
            for line in (up, train):  # what readers have by then: a plane that runs, and a job that has ended
                run(line)
            runs = True
            for page in pages:
                exported.clear()
                for line in lines_of(page):
                    if reason_of(line) is not None:
                        continue
                    for word, meaning in _STAND_FOR:
                        line = line.replace(word, meaning.format(port=port))
                    if not runs and not _without_server(line):
                        run(up)
                        runs = True
                    if line.startswith("export "):
                        exported.append(line)
                        continue
                    run(line)
                    runs = (runs and line != "eyrie down") or line.startswith("eyrie up")
        finally:
            subprocess.run(["eyrie", "down"], cwd=tmp_path, env=variables, capture_output=True, check=False,
                           timeout=120)


@pytest.mark.slow
def test_the_python_programs_of_the_pages_do_what_they_say(tmp_path: Path) -> None:
    programs = [one for page in PAGES for one in programs_of(page)]
    assert programs
    with rehearsed(tmp_path):
        (tmp_path / "home").mkdir()
        plane = Plane(tmp_path / "home")
        assert plane.start() is None, plane.log.read_text()[-2000:]
        try:
            for program in programs:
                text = program.replace("127.0.0.1:8642", f"127.0.0.1:{plane.port}")
                # A rehearsed drafter cannot be served.
                text = text.replace("JobSpec(target=", 'JobSpec(serve={"enabled": False}, target=')
                done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False,
                                      timeout=250)
                assert done.returncode == 0, done.stderr
                assert "promote=" in done.stdout
        finally:
            plane.close()
