"""Shared test set-up: one thread per process, so that parallel workers do not fight for the cores; real servers.

Property tests draw the same examples every time, and a slow machine is no failure; `HYPOTHESIS_PROFILE=explore` draws
new ones.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.servers.fixtures import moto_s3, postgres_server, rclone_s3, redis
from tests.servers.processes import SESSION, Session

__all__ = ["moto_s3", "postgres_server", "rclone_s3", "redis"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_session: list[Session] = []


def pytest_configure(config: pytest.Config) -> None:
    """The servers' directory belongs to the process the developer started; xdist's workers inherit it."""
    if SESSION not in os.environ and not hasattr(config, "workerinput"):
        _session.append(Session())


def pytest_unconfigure() -> None:
    """Whatever was started ends."""
    while _session:
        _session.pop().end()
