"""Servers that pass from one stage of a run to the next, and that nothing else outlives."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_pipelines.local import _server_keeper
from eyrie_pipelines.processes import identify
from eyrie_workers.engines.process import group_ticks
from eyrie_workers.engines.server_keeper import Keeper, keeper
from eyrie_workers.machine import ProcessorTime, machine_lock
from eyrie_workers.measure.benchmark.session import measuring
from eyrie_workers.sglang.servers import DrafterUses, ServerHistory, ServerPlan, ServerPool
from eyrie_workers.stage_program import Interrupted, Stage
from tests.waiting import wait_for

CHAIN, DEEP = (Setting(tree=DraftTreeShape(num_steps=depth, top_k=1, num_draft_tokens=depth + 1)) for depth in (2, 4))
SERVER = (sys.executable, "-c", "import time; time.sleep(600)")
STAGE = """
    import sys, time
    from pathlib import Path
    from eyrie_workers.engines.server_keeper import keeper
    assert keeper().take() == []
    server = keeper().start("key", sys.argv[2:], Path(sys.argv[1]))
    print(server.pid, flush=True)
    time.sleep(600)
"""
RUNNER = """
    import sys, time
    from pathlib import Path
    from eyrie_pipelines.local import _server_keeper
    from eyrie_workers.engines.server_keeper import keeper
    with _server_keeper():
        keeper().take()
        server = keeper().start("key", sys.argv[2:], Path(sys.argv[1]))
        keeper().keep([])
        print(server.pid, flush=True)
        time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def run() -> Iterator[None]:
    """A run whose stages this process is, one after the other (`next_stage`)."""
    with _server_keeper():
        keeper.cache_clear()
        yield
    keeper.cache_clear()


def next_stage() -> Keeper:
    """The connection of this process as another one, while the one before has ended."""
    keeper.cache_clear()
    return keeper()


def ended(pid: int) -> bool:
    return identify(pid) is None


def another_may_measure(directory: Path) -> bool:
    class Stop(BaseException):
        pass

    def give_up() -> None:
        raise Stop

    try:
        with machine_lock(give_up, directory):
            return True
    except Stop:
        return False


def pool_of(directory: Path, target: Path, uses: DrafterUses) -> ServerPool:
    directory.mkdir(exist_ok=True)
    plan = ServerPlan("embedded", TargetSpec(model=str(target), dtype="float32"), 2, 1)
    return ServerPool(plan, uses, directory / "servers", Stage(directory, quiet=True), ServerHistory(directory, "d"))


def pid_of(pool: ServerPool, name: str) -> int:
    return pool.server(name).process.pid


def starts(pool: ServerPool) -> int:
    assert pool.history is not None
    return pool.history.starts


@pytest.mark.usefixtures("run")
def test_the_next_stage_continues_with_equal_servers_and_stops_the_others_and_one_that_is_stopped_leaves_none(
        target: Path, drafter: Path, tmp_path: Path) -> None:
    chain, deep = (DrafterUse(drafter_dir=str(drafter), setting=setting) for setting in (CHAIN, DEEP))
    with measuring(Stage(tmp_path, quiet=True)):
        first = pool_of(tmp_path / "first", target, {"off": DrafterUse(), "chain": chain})
        assert first.make_ready(["off", "chain"]) == {}
        plain, drafted, url = pid_of(first, "off"), pid_of(first, "chain"), first.server("off").url
    assert starts(first) == 2
    assert not another_may_measure(tmp_path)  # it would find the memory taken
    next_stage()
    with contextlib.suppress(Interrupted), measuring(stopped := Stage(tmp_path, quiet=True)):
        second = pool_of(tmp_path / "second", target, {"baseline": DrafterUse(), "deep": deep})
        assert second.resident == ("baseline",)
        assert second.server("baseline").url == url
        assert (pid_of(second, "baseline"), starts(second)) == (plain, 0)
        assert ended(drafted)
        assert second.make_ready(["baseline", "deep"]) == {}
        assert starts(second) == 1
        deeper = pid_of(second, "deep")
        stopped.stop_requested = True
        stopped.pause_point()
    assert next_stage().take() == []
    assert ended(plain)
    assert ended(deeper)
    assert another_may_measure(tmp_path)


@pytest.mark.usefixtures("run")
def test_a_server_of_a_setting_that_was_changed_stops_and_the_others_stay(target: Path, drafter: Path,
                                                                          tmp_path: Path) -> None:
    chain, deep = (DrafterUse(drafter_dir=str(drafter), setting=setting) for setting in (CHAIN, DEEP))
    with measuring(Stage(tmp_path, quiet=True)):
        pool = pool_of(tmp_path / "pool", target, {"off": DrafterUse(), "chain": chain})
        assert pool.make_ready(["off", "chain"]) == {}
        before = pid_of(pool, "chain")
        pool.amend({"off": DrafterUse(), "chain": deep})
        assert pool.resident == ("off",)
        assert ended(before)
        pool.stop()


@pytest.mark.usefixtures("run")
def test_a_stage_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    stage = subprocess.Popen([sys.executable, "-c", textwrap.dedent(STAGE), str(tmp_path / "log"), *SERVER],
                             stdout=subprocess.PIPE)
    assert stage.stdout is not None
    server = int(stage.stdout.readline())
    assert not ended(server)
    stage.kill()
    stage.wait()
    stage.stdout.close()
    wait_for(lambda: ended(server), "the server of a killed stage has ended")
    assert next_stage().take() == []
    assert keeper().taken == []


def test_no_kept_server_outlives_the_run_that_ends_or_is_killed(tmp_path: Path) -> None:
    with _server_keeper():
        next_stage().take()
        kept = keeper().start("key", SERVER, tmp_path / "log").pid
        keeper().keep([])
        next_stage().take()
        assert [server.pid for server in keeper().taken] == [kept]
        keeper().keep([])
        assert not ended(kept)
    assert ended(kept)
    keeper.cache_clear()
    assert keeper().take() == []
    assert keeper().connection is None
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(RUNNER), str(tmp_path / "log"), *SERVER],
                              stdout=subprocess.PIPE)
    assert runner.stdout is not None
    server = int(runner.stdout.readline())
    assert not ended(server)
    runner.kill()
    runner.wait()
    runner.stdout.close()
    wait_for(lambda: ended(server), "the server of a killed run has ended")


@pytest.mark.usefixtures("run")
def test_without_its_keeper_a_stage_goes_on_with_servers_of_its_own(tmp_path: Path) -> None:
    next_stage().take()
    lost = keeper().start("key", SERVER, tmp_path / "log")
    assert lost.poll() is None
    os.kill(keeper().pid, signal.SIGKILL)
    wait_for(lambda: ended(lost.pid), "servers end with the keeper")
    assert lost.poll() == -signal.SIGKILL
    own = keeper().start("key", SERVER, tmp_path / "log")
    assert os.getpid() == int(Path(f"/proc/{own.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    own.kill()
    own.wait()


@pytest.mark.usefixtures("run")
def test_the_lock_of_the_machine_and_of_a_gpu_passes_on_with_servers_and_is_released_without(tmp_path: Path) -> None:
    with machine_lock(lambda: None, gpus=["0"], held=next_stage().take()) as lock:
        kept = keeper().start("key", SERVER, tmp_path / "log")
        keeper().keep(lock)
    assert not another_may_measure(tmp_path)
    with machine_lock(lambda: None, gpus=["0"], held=next_stage().take()) as lock:
        [server] = keeper().taken
        assert (server.pid, len(lock)) == (kept.pid, 2)
        assert not another_may_measure(tmp_path)
        server.kill()
        assert server.wait() == -signal.SIGKILL
        keeper().keep(lock)
    assert another_may_measure(tmp_path)


@pytest.mark.usefixtures("run")
def test_what_servers_of_the_keeper_compute_counts_as_the_stages_own_and_not_as_other_work(tmp_path: Path) -> None:
    computing = "import time\nwhile time.process_time() < 0.5: pass\nprint('computed', flush=True)\ntime.sleep(600)"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {computing!r}]).wait()"
    log = tmp_path / "log"

    def own_s() -> float:
        now = ProcessorTime.now(servers_s=keeper().cpu_seconds())
        assert now is not None
        return now.own_s

    next_stage().take()
    before = own_s()
    server = keeper().start("key", (sys.executable, "-c", child), log)
    wait_for(lambda: "computed" in log.read_text(), "the server's child has computed")
    assert own_s() - before >= 0.5
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    assert group_ticks(server.pid) == {}
    assert own_s() - before >= 0.5
