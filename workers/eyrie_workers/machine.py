"""The machine that computes: its description and versions in reports, and the lock that keeps measurements apart.

Figures compare within one environment only (hardware, threads, versions, date). An image for GPUs has the torch, Triton
and CUDA of its maker: versions outside the installed package's own requirements are reported and not refused.

Concurrent benchmarks disturb each other. A lock on one file in the system's temporary directory serialises all
measuring processes of the machine, whatever job, directory or user they belong to; the kernel releases it when its
holder exits. Measurements that were given different GPUs run at the same time: they share that lock, and hold one of
each GPU. Other work cannot be locked out, so its share of the processors is computed from /proc/stat before and
after, and reported when it is too large. So are, of GPUs, the time for which they were slowed down, and processes that
are not ours (`nvidia-smi`; a driver without counters of the former says nothing about them).

Torch is imported by `environment` alone: the load generator's processes do not load it.
"""

import fcntl
import importlib.metadata
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import Requirement

from eyrie_api.artifacts import code_version
from eyrie_api.contract.reports import Environment

LOCK_NAME = "eyrie-measuring.lock"
_GPU_LOCK_NAME = "eyrie-measuring-gpu-{}.lock"
_POLL_S = 0.2
# A tenth of the machine used by others changes throughput by about as much as the differences to be measured.
_TOLERATED_SHARE = 0.1

# Counters of nvidia-smi, in microseconds, and the causes that they count.
_SLOWDOWNS = {"sw_power_cap": "its power limit", "sw_thermal_slowdown": "heat", "hw_thermal_slowdown": "heat",
              "hw_power_brake_slowdown": "the power supply"}
_NVIDIA_SMI_TIMEOUT_S = 10.0

# Vector extensions that determine the speed of small matrix products on a CPU, as /proc/cpuinfo spells them.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def cpu_count() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(dtype: str) -> Environment:
    """The current environment, with torch's current thread count."""
    import torch

    return client_environment().model_copy(update={
        "threads": torch.get_num_threads(), "torch": str(torch.__version__), "dtype": dtype})


def client_environment() -> Environment:
    """The environment of a process that only sends requests: one thread, no torch, no dtype."""
    try:
        hardware = describe_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        hardware = platform.processor() or platform.machine()
    return Environment(
        hardware=hardware, cpu_count=cpu_count(), threads=1, torch="not loaded",
        python=platform.python_version(), dtype="not known to the client", code_version=code_version(),
        date=datetime.now(UTC).isoformat(timespec="seconds"))


def describe_cpuinfo(text: str) -> str:
    """Processor name and relevant vector extensions, from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    processor = fields.get("model name") or platform.machine()
    telling = " ".join(flag for flag in _TELLING_FLAGS if flag in flags)
    return f"{processor} ({telling})" if telling else processor


def other_versions(requirements: Iterable[str], installed: Mapping[str, str]) -> list[str]:
    """One line for each installed library that is outside its required range. Pure."""
    lines = []
    for wanted in map(Requirement, requirements):
        version = installed.get(wanted.name)
        if version is not None and not wanted.specifier.contains(version, prereleases=True):
            lines.append(f"{wanted.name} {version} is installed, and Eyrie is tested with "
                         f"{wanted.name}{wanted.specifier}: if results differ, install a version of that range")
    return list(dict.fromkeys(lines))


def version_notes() -> list[str]:
    """`other_versions` of this Python."""
    installed = {}
    for name in ("torch", "triton", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    try:
        return other_versions(importlib.metadata.requires("eyrie") or (), installed)
    except importlib.metadata.PackageNotFoundError:
        return []


@contextmanager
def machine_lock(while_waiting: Callable[[], None], directory: Path | None = None,
                 gpus: Sequence[str] = (), held: Sequence[int] = ()) -> Iterator[list[int]]:
    """Hold the machine's measuring lock; yields its descriptors.

    gpus   ids of the GPUs that this measurement was given: others may be measured meanwhile; empty: the whole machine
    held   the descriptors of the lock, passed on by the process that acquired it for these GPUs: it is not waited for

    `while_waiting` is called several times a second until the lock is acquired; it may raise to give up.
    """
    parent = directory or Path(tempfile.gettempdir())
    wanted = [(LOCK_NAME, fcntl.LOCK_SH if gpus else fcntl.LOCK_EX),
              *((_GPU_LOCK_NAME.format(gpu), fcntl.LOCK_EX) for gpu in sorted(gpus))]
    descriptors = list(held)
    try:
        for name, kind in wanted if not held else ():
            # Opened read-only, created only when missing: other users lock the same file, and Linux refuses O_CREAT on
            # another user's file in a sticky directory (fs.protected_regular). Two processes may both find it missing;
            # without O_EXCL the second O_CREAT opens the file of the first.
            try:
                descriptor = os.open(parent / name, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                descriptor = os.open(parent / name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            descriptors.append(descriptor)
            while True:
                try:
                    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    while_waiting()
                    time.sleep(_POLL_S)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class ProcessorTime:
    """Processor seconds since boot: of the machine, and of this process."""

    wall_s: float
    busy_s: float
    own_s: float
    """Waited-for children included: an engine started for a measurement is not other work."""

    stolen_s: float = 0.0
    """Of `busy_s`, what the host of a virtual machine gave to others: no process of this machine shows it."""

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat"), servers_s: float = 0.0) -> "ProcessorTime | None":
        """The current reading, with the seconds of processes that work for this one and are not its children; None
        where the kernel has no /proc/stat (not Linux)."""
        try:
            fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        idle = fields[3] + fields[4]
        spent = os.times()
        own_s = time.process_time() + spent.children_user + spent.children_system + servers_s
        hz = os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), (sum(fields) - idle) / hz, own_s, fields[7] / hz)


def share_of_other_processes(before: ProcessorTime, after: ProcessorTime, cpu_count: int) -> float:
    """Share of the machine's processors that other processes used between two readings, 0 to 1."""
    capacity = (after.wall_s - before.wall_s) * cpu_count
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others / capacity)) if capacity > 0 else 0.0


def interference(before: ProcessorTime | None, after: ProcessorTime | None, cpu_count: int,
                load_average: float) -> str | None:
    """A warning about other work between two readings; None when it was within the tolerated share."""
    if before is None or after is None:
        if load_average <= cpu_count:
            return None
        return f"the load average was {load_average:.1f} on {cpu_count} processors while measuring"
    share = share_of_other_processes(before, after, cpu_count)
    if share <= _TOLERATED_SHARE:
        return None
    stolen = (after.stolen_s - before.stolen_s) / (after.wall_s - before.wall_s) / cpu_count
    host = f", {stolen:.0%} its host for other machines" if stolen > _TOLERATED_SHARE else ""
    return (f"other work used {share:.0%} of this machine's {cpu_count} processors while measuring{host} (load average "
            f"{load_average:.1f}): tokens per second are too low, ratios are noisier than their intervals say")


@dataclass(frozen=True)
class GpuReading:
    """What slowed GPUs down so far, and which other processes compute on them."""

    at_s: float
    slowed_s: Mapping[tuple[str, str], float]
    """By index of the GPU and cause."""

    others: frozenset[str]
    """`<program> (pid <number>)`."""

    @classmethod
    def now(cls, gpus: Sequence[str], keeper: int = 0) -> "GpuReading | None":
        """The current reading; None without a GPU.

        gpus     ids, as in CUDA_VISIBLE_DEVICES
        keeper   id of a process whose children work for this one
        """
        if not gpus:
            return None
        counters = ",".join(f"clocks_event_reasons_counters.{name}" for name in _SLOWDOWNS)
        rows = [row.split(",", 1) for row in _nvidia_smi(gpus, "--query-compute-apps=pid,process_name")]
        ours = (os.getpid(), keeper)
        return cls(time.monotonic(), read_slowdowns(_nvidia_smi(gpus, f"--query-gpu=index,{counters}")), frozenset(
            f"{name.strip()} (pid {pid})" for pid, name in rows if pid.isdigit() and _is_other(int(pid), ours)))


def _nvidia_smi(gpus: Sequence[str], query: str) -> list[str]:
    """Rows of its answer; none where it is missing, or does not know what is asked."""
    command = ["nvidia-smi", f"--id={','.join(gpus)}", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S,
                              check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _is_other(pid: int, ours: Sequence[int]) -> bool:
    """Whether a process is not one of ours or below them. One that is not seen here has ended, or is of a container
    with ids of its own."""
    try:
        while pid > 1 and pid not in ours:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return False
    return pid not in ours


def read_slowdowns(rows: Iterable[str]) -> dict[tuple[str, str], float]:
    """Seconds by GPU and cause, from rows of an index and the counters in `_SLOWDOWNS`. Pure."""
    slowed: dict[tuple[str, str], float] = {}
    for index, *counters in (row.replace(" ", "").split(",") for row in rows):
        for cause, counter in zip(_SLOWDOWNS.values(), counters, strict=False):
            if counter.isdigit():  # a GPU that does not count it says [N/A]
                slowed[index, cause] = slowed.get((index, cause), 0.0) + int(counter) / 1e6
    return slowed


def gpu_interference(before: GpuReading | None, after: GpuReading | None) -> str | None:
    """A warning about GPUs that were slowed down, and other processes on them, between two readings; None without.
    Pure."""
    if before is None or after is None:
        return None
    wall_s = max(after.at_s - before.at_s, 1e-9)
    shares = {key: (seconds - before.slowed_s[key]) / wall_s for key, seconds in after.slowed_s.items()
              if key in before.slowed_s}
    words = [f"GPU {index} was slowed down by {cause} for {share:.0%} of the time"
             for (index, cause), share in shares.items() if share > _TOLERATED_SHARE]
    if others := sorted(before.others | after.others):
        words.append(f"other processes computed on its GPUs: {', '.join(others)}")
    return "; ".join(words) or None
