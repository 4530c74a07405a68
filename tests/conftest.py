"""Shared test configuration: one thread per process, so that parallel workers do not compete for cores; real servers.

Property tests use the same examples every time and have no deadline; `HYPOTHESIS_PROFILE=explore` draws new examples.
"""

import functools
import gc
import inspect
import os
import ssl
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.servers.fixtures import mlflow_address, moto_s3, postgres_server, rclone_s3, redis
from tests.servers.processes import SESSION, Session

__all__ = ["mlflow_address", "moto_s3", "postgres_server", "rclone_s3", "redis"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Requests without a timeout of their own get httpx's default of five seconds, which a crowded machine exceeds.
for _phase in ("connect", "read", "write", "pool"):
    setattr(inspect.signature(httpx.get).parameters["timeout"].default, _phase, 60.0)


@functools.cache
def _authorities(trust_env: bool, *_variables: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=trust_env)


def _ssl_context(verify: ssl.SSLContext | str | bool, cert: Any, trust_env: bool) -> ssl.SSLContext:
    if verify is not True or cert is not None:
        return httpx.create_ssl_context(verify, cert, trust_env)
    return _authorities(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


# Every client of httpx reads the certificate authorities, 18 ms of processor time each, also for an http:// address: a
# third of the time of the API's tests. Here they are read once per process and value of the variables that name them.
httpx._transports.default.create_ssl_context = _ssl_context

_session: list[Session] = []


def pytest_configure(config: pytest.Config) -> None:
    """Create the servers' directory in the process that was started; xdist's workers inherit it.

    While tests are collected nothing is garbage, and full collections took a fifth of the time.
    """
    gc.disable()
    if SESSION not in os.environ and not hasattr(config, "workerinput"):
        _session.append(Session())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest test first, jobs of all examples (a third of the slow tier's time): begun late, it runs while the
    other processes idle."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/docs/test_examples_run.py"))


def pytest_collection_finish() -> None:
    """Exclude imported modules from every later garbage collection: each full one took 0.7 s."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Stop the servers that the tests started."""
    while _session:
        _session.pop().end()
