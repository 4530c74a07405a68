"""Hidden states captured through SGLang's servers: the states, what survives a kill, and nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.stages import CaptureStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.sglang.capture_states import SglangStates
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan
from eyrie_workers.stage_program import Stage, run_program
from eyrie_workers.stages.capture import capture, is_whole
from eyrie_workers.targets.loading import load_target, resolve
from tests.sglang.servers import descendants, let_stages_start_it
from tests.waiting import wait_for
from tests.workers.stages.test_capture import artifact, wait_for_shards, write_rows

TARGET = TargetSpec(model="quickstart", dtype="float32")
IN_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    let_stages_start_it(monkeypatch)
    before = set(IN_MEMORY.glob("eyrie-states-*"))  # of captures that were killed and never run again
    yield
    assert set(IN_MEMORY.glob("eyrie-states-*")) <= before


def test_states_of_every_layer_are_those_of_the_reference_and_a_killed_server_is_replaced(tmp_path: Path) -> None:
    reference = load_target(resolve(TARGET), "float32")
    layers = tuple(range(1, reference.config.num_layers + 1))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, reference.config.vocab_size, (length,), generator=generator)
             for length in (1, 7, 300, 42)]
    wanted = reference.packed_states(texts, layers)
    before = descendants(os.getpid())  # the servers that other tests of this run share
    stage, history = Stage(tmp_path, quiet=True), ServerHistory(tmp_path, "d")
    with SglangStates(ServerPlan("sglang", TARGET, 4), layers, 300, tmp_path, stage, history) as source:
        found = source.packed_states(texts, layers)
        for child in descendants(os.getpid()) - before:
            with suppress(ProcessLookupError):  # it ended with one killed before it
                os.kill(child, signal.SIGKILL)
        again = source.packed_states(texts, layers)
        assert history.restarts == 1
        logits = source.output_head.logits(found[1])
        torch.testing.assert_close(logits, reference.logits(wanted[1]), atol=2e-3, rtol=1e-3)
    for mine, theirs, repeated in zip(found, wanted, again, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(repeated, mine, atol=0.0, rtol=0.0)
    with pytest.raises(InvalidInput, match="layer 0"):
        SglangStates(ServerPlan("sglang", TARGET, 4), (0, 2), 300, tmp_path, stage)


@pytest.mark.slow
def test_a_capture_killed_with_its_server_running_resumes_with_the_same_bytes(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", resolve(TARGET), 160, longest=120)
    spec = CaptureStage(
        job_id="job", target=TARGET, rows_dir=str(tmp_path / "rows"), engine=EngineSpec(kind="sglang"),
        capture=CaptureSpec(source="sglang", codec="float32", check_rows=1, shard_size_bytes=2**18, batch_tokens=256))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for out in (whole, killed):
        out.mkdir()
        (out / "spec.json").write_text(spec.model_dump_json())
    arguments = ["--spec", str(whole / "spec.json"), "--out", str(whole / "manifest.json")]
    assert run_program(CaptureStage, capture, arguments, is_whole) == 0

    command = [sys.executable, "-m", "eyrie_workers.stages.capture", "--spec", str(killed / "spec.json"), "--out",
               str(killed / "manifest.json")]
    first = subprocess.Popen(command)
    wait_for_shards(first, killed, 2)
    servers = descendants(first.pid)
    first.kill()
    first.wait()
    wait_for(lambda: not [pid for pid in servers if Path(f"/proc/{pid}").exists()], "no server outlives its stage")
    assert subprocess.run(command, check=False).returncode == 0
    assert artifact(killed) == artifact(whole)
