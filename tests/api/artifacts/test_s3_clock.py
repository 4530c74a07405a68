"""A clock that is off: requests are refused by the store until it is set, which is no refusal of the credentials."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.campaigns.deployments import Clock, build_clock_library
from tests.servers.s3 import S3Server

ASK = """
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.errors import EyrieError
try:
    print("found", open_store().stat("jobs/none"))
except EyrieError as error:
    print(error.reason, error.message)
"""


@pytest.mark.parametrize(("seconds", "expected"), [
    (-86_400, "StoreUnavailable"), (86_400, "StoreUnavailable"), (0, "StoreAccessDenied")])
def test_a_signature_of_another_time_is_retried_and_one_of_another_secret_is_not(
        tmp_path: Path, rclone_s3: S3Server, seconds: int, expected: str) -> None:
    library = build_clock_library(tmp_path)
    if library is None:
        pytest.skip("no C compiler on this machine: apt-get install gcc")
    clock = Clock(library, tmp_path / "clock")
    clock.shift(seconds)
    secret = rclone_s3.secret_key if seconds else "another-secret-of-the-tests"
    asked = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=200,
        env={**os.environ, **clock.environment, "EYRIE_ARTIFACTS_URL": "s3://drafters/eyrie",
             "AWS_SECRET_ACCESS_KEY": secret, "AWS_ACCESS_KEY_ID": rclone_s3.access_key,
             "EYRIE_ARTIFACTS_ENDPOINT_URL": rclone_s3.endpoint_url})
    assert asked.stdout.split()[0] == expected, asked.stdout
    assert ("clock is" in asked.stdout) is bool(seconds)
