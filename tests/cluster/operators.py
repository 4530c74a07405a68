"""`eyrie operator` as processes, over a database of the test's own."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from eyrie_api.processes import free_port
from tests.cluster.patience import eventually

LEASE_S = 6.0
"""How long a silent leader is waited for. Renewals get two thirds of it: enough on a crowded machine."""


@dataclass
class OperatorProcess:
    """One operator."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of one of its pages; (0, "") while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def figure(self, name: str) -> float:
        """A metric, summed over its labels."""
        status, text = self.page("/metrics")
        if status != 200:
            return 0.0
        return sum(sample.value for family in text_string_to_metric_families(text) for sample in family.samples
                   if sample.name == name)

    @property
    def leads(self) -> bool:
        return self.figure("eyrie_operator_leader") == 1.0

    def kill(self) -> None:
        """As the kernel does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> int:
        """As the kubelet does; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def start_operator(home: Path, namespace: str, *options: str) -> OperatorProcess:
    """Start an operator that watches one namespace and has its lease there."""
    port = free_port()
    log = home / f"operator-{port}.log"
    argv = [sys.executable, "-m", "eyrie_operator.command", "operator", "--namespace", namespace, "--host", "127.0.0.1",
            "--port", str(port), "--lease", f"{namespace}/eyrie-operator", "--lease-seconds", str(LEASE_S), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, "EYRIE_HOME": str(home)})
    return OperatorProcess(process, port, log)


@contextmanager
def operating(home: Path, namespace: str, *options: str, lead: bool = True) -> Iterator[OperatorProcess]:
    """`start_operator`, killed at the end."""
    one = start_operator(home, namespace, *options)
    try:
        if lead:
            eventually(lambda: alive(one) and one.leads, "the operator leads")
        yield one
    finally:
        if one.process.poll() is None:
            one.kill()


def alive(one: OperatorProcess) -> bool:
    assert one.process.poll() is None, one.log.read_text()
    return True
