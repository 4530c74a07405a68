"""`eyrie certify --off URL --drafted URL` on two servers of vLLM's CPU build."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.contract.prove import ProveSpec
from eyrie_api.processes import free_port
from eyrie_workers.measure.running_servers import main
from tests.sglang.trained_drafter import ROOT, trained_drafter
from tests.vllm.test_vllm import LIMIT_S, TARGET, drafting
from tests.waiting import wait_for

FLAGS = ("--served-model-name", "quickstart", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
         "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 28), "--no-enable-prefix-caching", "--host",
         "127.0.0.1")
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
             "OMP_NUM_THREADS": "1"}


@contextmanager
def serving(log: Path, speculative_config: dict[str, Any] | None = None) -> Iterator[str]:
    """The URL of a server that is ready; it and its engine's process have ended afterwards."""
    python = Path(os.environ.get("EYRIE_VLLM_VENV", str(ROOT / ".eyrie" / "vllm-venv"))) / "bin" / "python"
    port = free_port()
    drafts = () if speculative_config is None else ("--speculative-config", json.dumps(speculative_config))
    with log.open("wb") as output, subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", "--model", TARGET, "--port", str(port), *FLAGS,
             *drafts], stdout=output, stderr=subprocess.STDOUT, cwd=log.parent,
            env=os.environ | VARIABLES, start_new_session=True) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: _is_ready(url), "vLLM answers", LIMIT_S, every_s=1.0, process=server,
                     state=lambda: log.read_text(errors="replace")[-3000:])
            yield url
        finally:
            os.killpg(server.pid, 9)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def test_two_running_servers_are_compared_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = os.environ.get("EYRIE_VLLM_DRAFTER")
    drafter = Path(given) if given else trained_drafter()
    proof = ProveSpec(concurrencies=(1, 4), requests=8, most_pairs=6, max_new_tokens=24, parity_prompts=4)
    with serving(tmp_path / "off.log") as off, serving(tmp_path / "drafted.log", drafting(drafter)) as drafted:
        code = main(["--off", off, "--drafted", drafted, "--prompts", "quickstart:chat", "--prompts",
                     "quickstart:math", "--prove", proof.model_dump_json(), "--json"])
        certificate = json.loads(capsys.readouterr().out)
        assert main(["--off", drafted, "--drafted", off, "--prompts", "quickstart:chat", "--json"]) == 65
    assert "--off" in capsys.readouterr().err
    assert code == certificate["exit_code"]
    # How fast two servers are next to other work is not what this test decides.
    assert certificate["verdict"] in ("faster", "not-faster", "undecided"), certificate["summary"]
    assert [(part["users"], part["compared"], part["by"]) for part in certificate["answers"]] == [
        (1, 4, "token ids"), (4, 4, "token ids")]
    assert all(part["identical"] + part["near_ties"] + part["as_undrafted"] == 4 for part in certificate["answers"])
    assert (certificate["off"]["engine"], certificate["off"]["drafts"], certificate["drafted"]["drafts"]) == (
        "vllm", "", "drafts")
    print(f"{certificate['verdict']}: {certificate['summary']}; {certificate['answers']}")
