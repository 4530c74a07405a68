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
from eyrie_workers.engines.process import Process
from eyrie_workers.engines.server_keeper import Keeper, connect
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
    from eyrie_workers.engines.server_keeper import connect
    keeper = connect()
    assert keeper.take([]) == []
    server = keeper.start("key", sys.argv[2:], Path(sys.argv[1]))
    print(server.pid, flush=True)
    time.sleep(600)
"""
RUNNER = """
    import sys, time
    from pathlib import Path
    from eyrie_pipelines.local import _server_keeper
    from eyrie_workers.engines.server_keeper import connect
    with _server_keeper():
        keeper = connect()
        server = keeper.start("key", sys.argv[2:], Path(sys.argv[1]))
        keeper.keep([], [])
        keeper.close()
        print(server.pid, flush=True)
        time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def run() -> Iterator[None]:
    with _server_keeper():
        yield


def connected() -> Keeper:
    keeper = connect()
    assert keeper is not None
    return keeper


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


def pool_of(directory: Path, target: Path, uses: DrafterUses, keeper: Keeper | None) -> ServerPool:
    directory.mkdir(exist_ok=True)
    plan = ServerPlan("embedded", TargetSpec(model=str(target), dtype="float32"), 2, 1)
    return ServerPool(plan, uses, directory / "servers", Stage(directory, quiet=True), ServerHistory(directory, "d"),
                      keeper=keeper)


def process_of(pool: ServerPool, name: str) -> Process:
    return pool.server(name).server.process


def starts(pool: ServerPool) -> int:
    assert pool.history is not None
    return pool.history.starts


@pytest.mark.usefixtures("run")
def test_the_next_stage_continues_with_equal_servers_and_stops_the_others_and_a_stage_that_is_stopped_leaves_none(
        target: Path, drafter: Path, tmp_path: Path) -> None:
    chain, deep = (DrafterUse(drafter_dir=str(drafter), setting=setting) for setting in (CHAIN, DEEP))
    with measuring(Stage(tmp_path, quiet=True)) as measurement:
        first = pool_of(tmp_path / "first", target, {"off": DrafterUse(), "chain": chain}, measurement.keeper)
        assert first.make_ready(["off", "chain"]) == {}
        plain, drafted = process_of(first, "off").pid, process_of(first, "chain").pid
        url = first.server("off").url
    assert starts(first) == 2
    assert not another_may_measure(tmp_path)  # it would find the memory taken
    with contextlib.suppress(Interrupted), measuring(stopped := Stage(tmp_path, quiet=True)) as measurement:
        second = pool_of(tmp_path / "second", target, {"baseline": DrafterUse(), "deep": deep}, measurement.keeper)
        assert second.resident == ("baseline",)
        assert second.server("baseline").url == url
        assert (process_of(second, "baseline").pid, starts(second)) == (plain, 0)
        wait_for(lambda: ended(drafted), "a server that this stage does not need has ended")
        assert second.make_ready(["baseline", "deep"]) == {}
        assert starts(second) == 1
        deeper = process_of(second, "deep").pid
        stopped.stop_requested = True
        stopped.pause_point()
    wait_for(lambda: ended(plain) and ended(deeper), "the servers of a stage that was stopped have ended")
    assert another_may_measure(tmp_path)
    assert connected().take([]) == []


@pytest.mark.usefixtures("run")
def test_a_stage_that_is_killed_leaves_no_server_and_what_the_stage_before_kept_ends_with_it(tmp_path: Path) -> None:
    stage = subprocess.Popen([sys.executable, "-c", textwrap.dedent(STAGE), str(tmp_path / "log"), *SERVER],
                             stdout=subprocess.PIPE)
    assert stage.stdout is not None
    server = int(stage.stdout.readline())
    assert not ended(server)
    stage.kill()
    stage.wait()
    stage.stdout.close()
    wait_for(lambda: ended(server), "the server of a killed stage has ended")
    keeper = connected()
    assert keeper.take([]) == []
    assert keeper.taken == []


def test_no_kept_server_outlives_the_run_that_ends_or_is_killed(tmp_path: Path) -> None:
    with _server_keeper():
        keeper = connected()
        kept = keeper.start("key", SERVER, tmp_path / "log").pid
        keeper.keep([], [])
        keeper.close()
        again = connected()
        again.take([])
        assert [server.pid for server in again.taken] == [kept]
        again.keep([], [])
        again.close()
        assert not ended(kept)
    assert ended(kept)
    assert connect() is None
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
    keeper = connected()
    lost = keeper.start("key", SERVER, tmp_path / "log")
    assert lost.poll() is None
    os.kill(keeper.pid, signal.SIGKILL)
    wait_for(lambda: ended(lost.pid), "servers end with the keeper")
    assert lost.poll() == -signal.SIGKILL
    own = keeper.start("key", SERVER, tmp_path / "log")
    assert isinstance(own, subprocess.Popen)
    own.kill()
    own.wait()


@pytest.mark.usefixtures("run")
def test_measurements_on_shares_of_the_gpus_keep_servers_of_their_own_until_one_of_the_whole_machine(
        tmp_path: Path) -> None:
    kept = {}
    for gpus in (["0"], ["1"]):
        keeper = connected()
        with machine_lock(lambda: None, gpus=gpus, held=keeper.take(gpus)) as lock:
            assert keeper.taken == []
            kept[gpus[0]] = keeper.start("key", SERVER, tmp_path / gpus[0]).pid
            keeper.keep(gpus, lock)
            keeper.close()
    keeper = connected()
    with machine_lock(lambda: None, gpus=["1"], held=keeper.take(["1"])) as lock:
        assert [server.pid for server in keeper.taken] == [kept["1"]]
        assert not ended(kept["0"])
        keeper.keep(["1"], lock)
        keeper.close()
    assert not another_may_measure(tmp_path)
    assert connected().take([]) == []
    assert all(map(ended, kept.values()))
    assert another_may_measure(tmp_path)


@pytest.mark.usefixtures("run")
def test_what_servers_of_the_keeper_compute_counts_as_the_stages_own_and_not_as_other_work(tmp_path: Path) -> None:
    computing = "import time\nwhile time.process_time() < 0.5: pass\nprint('computed', flush=True)\ntime.sleep(600)"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {computing!r}]).wait()"
    keeper, log = connected(), tmp_path / "log"
    before = ProcessorTime.now(servers_s=keeper.cpu_seconds())
    server = keeper.start("key", (sys.executable, "-c", child), log)
    wait_for(lambda: "computed" in log.read_text(), "the server's child has computed")
    during = ProcessorTime.now(servers_s=keeper.cpu_seconds())
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    after = ProcessorTime.now(servers_s=keeper.cpu_seconds())
    assert before is not None
    assert during is not None
    assert after is not None
    assert during.own_s - before.own_s >= 0.5
    assert after.own_s - before.own_s >= 0.5  # of processes that have ended too
