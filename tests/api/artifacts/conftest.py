"""Stores of each kind, empty: a directory, rclone (verifies signatures), moto (honours conditions)."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import MIN_PART_BYTES, ArtifactStore, StoreOptions
from tests.servers.s3 import S3Server


@dataclass(frozen=True)
class Bucket:
    """An empty bucket of a running server, and how its owner sees it."""

    server: S3Server
    name: str
    secret: Path
    client: Any

    def options(self, **changes: Any) -> StoreOptions:
        """Options that reach it."""
        return StoreOptions(**{"endpoint_url": self.server.endpoint_url, "credentials_dir": self.secret,
                               "part_size_bytes": MIN_PART_BYTES} | changes)

    def store(self, prefix: str = "eyrie/tests", **changes: Any) -> ArtifactStore:
        """A store in it."""
        return open_store(f"s3://{self.name}/{prefix}", self.options(**changes))


@cache
def owner(server: S3Server) -> Any:
    """boto3's client, without anything of ours between."""
    return boto3.session.Session().client(
        "s3", endpoint_url=server.endpoint_url, region_name="us-east-1", aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required",
                      response_checksum_validation="when_required"))


def make_bucket(server: S3Server, directory: Path) -> Bucket:
    """A bucket of the test's own, and a secret as Kubernetes would mount it."""
    secret = directory / "secret"
    secret.mkdir()
    (secret / "access_key").write_text(server.access_key + "\n")
    (secret / "secret_key").write_text(server.secret_key + "\n")
    client = owner(server)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return Bucket(server, name, secret, client)


@pytest.fixture(params=["rclone", "moto"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return make_bucket(request.getfixturevalue(f"{request.param}_s3"), tmp_path)


@pytest.fixture(params=["local", "rclone", "moto"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "local":
        return open_store(str(tmp_path / "store"), StoreOptions())
    return make_bucket(request.getfixturevalue(f"{request.param}_s3"), tmp_path).store()


@pytest.fixture
def a_file(tmp_path: Path) -> Callable[..., Path]:
    """Makes files whose bytes are all different."""

    def make(size: int, name: str = "a.bin") -> Path:
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        block = b"".join(number.to_bytes(4, "big") for number in range(1 << 16))
        path.write_bytes((block * (size // len(block) + 1))[:size])
        return path

    return make
