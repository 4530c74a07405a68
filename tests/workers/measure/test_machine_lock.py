"""One process of a machine measures at a time, and other work on it is named."""

import dataclasses
import multiprocessing
import os
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from eyrie_workers.machine import (
    GpuReading,
    ProcessorTime,
    cpu_count,
    describe_cpuinfo,
    environment,
    gpu_interference,
    interference,
    machine_lock,
    read_slowdowns,
    share_of_other_processes,
)


def _hold(directory: Path, pipe: Connection) -> None:
    with machine_lock(lambda: None, directory):
        pipe.send("held")
        pipe.recv()


def test_a_second_measurement_waits_until_the_holder_of_the_lock_exits(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path, theirs))
    holder.start()
    assert ours.recv() == "held"
    polls = 0

    def while_waiting() -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            holder.kill()
            holder.join()

    with machine_lock(while_waiting, tmp_path):
        assert polls >= 2


def test_a_waiting_measurement_can_be_interrupted(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def give_up() -> None:
        raise Stop

    with machine_lock(give_up, tmp_path), pytest.raises(Stop), machine_lock(give_up, tmp_path):
        pytest.fail("two held the lock")


def test_measurements_on_different_gpus_run_at_once_and_exclude_one_of_the_whole_machine(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def give_up() -> None:
        raise Stop

    with machine_lock(give_up, tmp_path, ["0", "1"]):
        with machine_lock(give_up, tmp_path, ["2"]):
            pass
        for gpus in (["1", "2"], []):
            with pytest.raises(Stop), machine_lock(give_up, tmp_path, gpus):
                pytest.fail(f"two held the lock of {gpus or 'the machine'}")
    with machine_lock(give_up, tmp_path), pytest.raises(Stop), machine_lock(give_up, tmp_path, ["2"]):
        pytest.fail("a GPU was measured next to the whole machine")


def test_other_work_is_the_machines_work_without_our_own() -> None:
    before, after = ProcessorTime(0.0, 100.0, 1.0), ProcessorTime(10.0, 116.0, 7.0)
    assert share_of_other_processes(before, after, cpu_count=2) == pytest.approx(0.5)


def test_a_busy_machine_gives_a_warning_with_its_load() -> None:
    start = ProcessorTime(0.0, 0.0, 0.0)
    assert interference(start, ProcessorTime(10.0, 9.5, 9.4), 2, 1.0) is None
    said = interference(start, ProcessorTime(10.0, 19.0, 9.0), 2, 3.5)
    assert said is not None
    assert "50%" in said
    assert "3.5" in said
    assert "host" not in said
    assert "25% its host" in (interference(start, ProcessorTime(10.0, 19.0, 9.0, stolen_s=5.0), 2, 3.5) or "")


def test_without_processor_accounting_the_load_average_decides() -> None:
    assert interference(None, None, 2, 1.9) is None
    assert "4.0" in (interference(None, None, 2, 4.0) or "")
    assert ProcessorTime.now(Path("/nowhere/stat")) is None


def test_gpus_that_were_slowed_down_and_other_processes_on_them_are_named() -> None:
    quiet = GpuReading(0.0, {("0", "heat"): 3.0, ("0", "its power limit"): 90.0}, frozenset())
    hot = GpuReading(100.0, {("0", "heat"): 28.0, ("0", "its power limit"): 95.0}, frozenset({"python (pid 7)"}))
    assert gpu_interference(quiet, hot) == ("GPU 0 was slowed down by heat for 25% of the time; "
                                            "other processes computed on its GPUs: python (pid 7)")
    assert gpu_interference(quiet, dataclasses.replace(quiet, at_s=100.0)) is None
    assert gpu_interference(dataclasses.replace(quiet, slowed_s={}), hot) == (
        "other processes computed on its GPUs: python (pid 7)")
    assert gpu_interference(None, None) is None


def test_counters_of_slow_downs_are_read_by_gpu_and_cause() -> None:
    rows = ["0, 5000000, 1000000, 500000, 0", "1, [N/A], [N/A], [N/A], [N/A]"]
    assert read_slowdowns(rows) == {("0", "its power limit"): 5.0, ("0", "heat"): 1.5, ("0", "the power supply"): 0.0}


def test_a_gpu_is_read_by_nvidia_smi_and_without_one_nothing_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, child = tmp_path / "nvidia-smi", subprocess.Popen(["sleep", "60"])
    program.write_text(f"""#!/bin/sh
test "$1" = --id=0,1 || exit 1
case "$2" in
  --query-gpu=index,clocks_event_reasons_counters.sw_power_cap,*) echo "0, 2000000, 0, 0, 0" ;;
  --query-compute-apps=*)
    printf '%s, %s\\n' {os.getppid()} /usr/bin/other {os.getpid()} us {child.pid} ours 99999999 gone ;;
esac
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    try:
        found = GpuReading.now(["0", "1"])
        assert found is not None
        assert found.slowed_s[("0", "its power limit")] == 2.0
        assert found.others == {f"/usr/bin/other (pid {os.getppid()})"}
    finally:
        child.kill()
        child.wait()
    unknown = GpuReading.now(["9"])  # it refuses
    assert unknown is not None
    assert (unknown.slowed_s, unknown.others) == ({}, frozenset())
    assert GpuReading.now([]) is None


def test_our_own_work_is_not_counted_as_other_work() -> None:
    before = ProcessorTime.now()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    after = ProcessorTime.now()
    if before is None or after is None:
        pytest.skip("this system has no /proc/stat")
    assert after.own_s - before.own_s >= 0.2
    assert after.busy_s >= before.busy_s


def test_the_environment_names_processor_threads_and_code() -> None:
    found = environment("float32")
    assert found.cpu_count == cpu_count() <= (os.cpu_count() or 1)
    assert found.dtype == "float32"
    assert found.hardware
    assert "+" in found.code_version


def test_the_processor_is_described_by_name_and_vector_extensions() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f amx_bf16 sse\n"
    assert describe_cpuinfo(text) == "Some CPU (avx2 avx512f amx_bf16)"
