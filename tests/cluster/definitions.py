"""Our resources' definitions, made on a cluster of the tests', and namespaces that are deleted whatever holds them."""

from pathlib import Path
from typing import Any

import yaml

from eyrie_api.errors import NotFound
from eyrie_operator.cluster.client import Cluster, ClusterConflict, path_of
from tests.cluster.patience import eventually

CRDS = Path(__file__).parents[2] / "helm" / "eyrie" / "files" / "crds"


def define_ours(admin: Cluster) -> None:
    """Define DrafterJob and DraftEndpoint."""
    for path in sorted(CRDS.glob("*.yaml")):
        define(admin, yaml.safe_load(path.read_text(encoding="utf-8")))


def define(admin: Cluster, definition: dict[str, Any]) -> None:
    """Make or replace a definition, and wait until the server serves it. Not by server-side apply: a server from before
    CEL rules drops them silently when posted, and refuses them when applied."""
    kind, api_version, name = definition["kind"], definition["apiVersion"], definition["metadata"]["name"]

    def read() -> dict[str, Any]:
        return admin.get(api_version, kind, "", name)

    try:
        admin.create(definition)
    except ClusterConflict:
        definition["metadata"]["resourceVersion"] = read()["metadata"]["resourceVersion"]
        admin._request("PUT", kind, path_of(api_version, kind, None, name), definition, "application/json")

    def established() -> bool:
        conditions = read().get("status", {}).get("conditions") or []  # null where it has just been made
        return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

    eventually(established, f"{name} is served")


def delete_namespace(cluster: Cluster, name: str) -> None:
    """Delete a namespace. What holds its objects may be gone with an operator: their finalizers are removed."""
    for kind in ("DrafterJob", "DraftEndpoint"):
        for one in cluster.list_all("eyrie.dev/v1alpha1", kind, name):
            if one["metadata"].get("finalizers"):
                try:
                    cluster.merge("eyrie.dev/v1alpha1", kind, name, one["metadata"]["name"],
                                  {"metadata": {"finalizers": []}})
                except NotFound:
                    continue
    cluster.delete("v1", "Namespace", "", name)
