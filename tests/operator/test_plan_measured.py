"""`eyrie plan --measure`: rounds timed in the engine before anything is trained, by the real command and job."""

import json
from pathlib import Path

import pytest

from eyrie_api.processes import free_port
from tests.operator.test_certify import LIMIT_S, SMALL, run_process
from tests.tiny import tiny_target


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_needed_tau_is_timed_by_a_job_that_serves_nothing(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Name {number} towns."}) + "\n" for number in range(40)))
    server = f"http://127.0.0.1:{(port := free_port())}"
    settings = [part for setting in (*SMALL, "data.max_conversations=24", "tune.num_steps=[1, 2]")
                for part in ("--set", setting)]
    up = run_process(tmp_path, "up", "--detach", "--port", str(port))
    assert up.returncode == 0, up.stderr
    try:
        done = run_process(tmp_path, "plan", "--target", tiny_target(tmp_path / "target"), "--data", data, *settings,
                     "--measure", "--server", server, "--json")
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert {(row["users"], row["num_steps"]) for row in plan["needed_tau"]} == {(1, 1), (1, 2)}
        listed = json.loads(run_process(tmp_path, "jobs", "--server", server, "--json").stdout)
        (job,) = listed["items"]
        assert (plan["timed_by"], job["status"]["phase"]) == (job["id"], "Succeeded")
        assert job["status"]["decision"]["verdict"] == "no-drafter"
        assert json.loads(run_process(tmp_path, "endpoints", "--server", server, "--json").stdout)["items"] == []
    finally:
        run_process(tmp_path, "down")
