"""`EndpointDeployment`: the configuration of an endpoint on a cluster, as one frozen value; its objects' names. Pure.

An `Endpoint` lists the revisions, and which of them serves or is the candidate. `EndpointDeployment` adds the
administrator's settings (`ServingSpec`), placement, replicas, drafters, and the APIs of the server. Facts about models
(context length, attention, a drafter's window) are passed in as the workers' values (`TargetCheckpoint`,
`DrafterCheckpoint`), because reading a config.json is I/O.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyrie_api.contract.cluster import ModelCacheSpec, ServingSpec
from eyrie_api.contract.model import API_VERSION
from eyrie_api.contract.placement import Placement, S3Work
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.status import Endpoint
from eyrie_api.contract.targets import JobTarget
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.errors import InvalidInput
from eyrie_workers.sglang.checkpoints import DrafterCheckpoint
from eyrie_workers.sglang.launch import LaunchPlan

GROUP = "eyrie.dev"
ENDPOINT_LABEL = f"{GROUP}/endpoint"
REVISION_LABEL = f"{GROUP}/revision"
ROLE_LABEL = f"{GROUP}/role"
MANAGER = "eyrie-operator"
"""Field manager of server-side apply, and value of app.kubernetes.io/managed-by."""

SERVER, ENTRY = "server", "entry"
"""Roles: a pod that serves requests; the stable Service."""

OWNER_KIND = "DraftEndpoint"
"""Kind of the objects' owner."""

_LONGEST = 52

Manifest = dict[str, Any]


class Undeployable(InvalidInput):
    """The endpoint cannot be deployed on this cluster as configured."""


EmbeddedLine = Callable[[DrafterUse, int], Sequence[str]]
"""The reference engine's command line for a use and a port; it listens on 0.0.0.0. A function because the module that
renders it (`EngineCommand` of `eyrie_workers.engines.process`) also starts processes."""


@dataclass(frozen=True)
class StoredDrafter:
    prefix: str
    """Key prefix of the stage directory that contains it."""

    part: str
    """The drafter's directory below the prefix, for example `checkpoints/c3`."""


@dataclass(frozen=True)
class DrafterFiles:
    facts: DrafterCheckpoint
    """`directory` is a path on the work volume, unless the drafter is downloaded from `stored`."""

    stored: StoredDrafter | None = None
    digest: str | None = None
    """Digest of its files. The pods are replaced when it changes."""


@dataclass(frozen=True)
class CachedTarget:
    """A target of the Hub in the cluster's model cache. An init container fills the cache where it lacks the target;
    the engine reads it, read-only and without the Hub."""

    volume: ModelCacheSpec
    target: JobTarget


@dataclass(frozen=True)
class Owner:
    """The owner reference of all rendered objects: the garbage collector deletes them with the owner."""

    uid: str
    name: str


@dataclass(frozen=True)
class EndpointDeployment:
    """The configuration of an endpoint on a cluster. Raises Undeployable when it is inconsistent."""

    cluster: ServingSpec
    """The administrator's settings. Its `placement` and `replicas` are not read: the fields below apply."""

    placement: Placement
    engine: LaunchPlan | EmbeddedLine
    """SGLang's plan, common to all revisions: drafter, setting, paths, host and port are set for each. Or the reference
    engine, for the quickstart model, tests, and machines without SGLang; it supports no API key."""

    fetch_image: str
    """Image that contains Eyrie, for init containers: they download drafters from an artifact store, judge files, and
    bring SGLang the package it imports."""

    fetch_python: tuple[str, ...]
    """Command that starts Python in `fetch_image`."""

    drafters: Mapping[int, DrafterFiles] = field(default_factory=dict)
    """By revision number; absent for revisions without a drafter."""

    served: frozenset[str] = frozenset()
    """`group/version` of the APIs that the server offers, as `kubectl api-versions` lists them."""

    replicas: int = 1
    """Replicas of the serving revision; the minimum when scaled. A candidate has as many, because it gets all requests
    as soon as its canary has passed."""

    min_acceptance_ratio: float = 0.5
    """Alert when windowed tau is below this fraction of the proven tau (`serve.min_acceptance_ratio`)."""

    cached_target: CachedTarget | None = None
    """None: the engine itself downloads a target of the Hub into its pod."""

    target_path: str | None = None
    """Directory of the target in the pods; None: of the Hub, or the shipped one."""

    reads: ReadRules | None = None
    """Rules for the files that engines open, without the job of a revision's drafter; None: any."""

    owner: Owner | None = None

    def __post_init__(self) -> None:
        given, scale = self.cluster, self.cluster.autoscale
        if given.drain_timeout_s <= given.leave_delay_s:
            raise Undeployable(f"drain_timeout_s {given.drain_timeout_s:g} leaves nothing after leave_delay_s "
                               f"{given.leave_delay_s:g}", "give more")
        if scale is not None and scale.max_replicas < self.replicas:
            raise Undeployable(f"autoscale.max_replicas {scale.max_replicas} is below replicas {self.replicas}",
                               "raise it")
        num_gpus = self.placement.num_gpus
        if not isinstance(self.engine, LaunchPlan):
            if given.key_secret is not None:
                raise Undeployable("key_secret is given and the embedded engine supports no keys: any client in the "
                                   "cluster could send it requests", "serve with engine sglang, or leave key_secret "
                                   "out and restrict by NetworkPolicy")
        elif self.engine.machine.platform == "cpu":
            if num_gpus:
                raise Undeployable(f"placement.num_gpus {num_gpus} with hardware profile "
                                   f"{self.engine.machine.name!r}", "give the GPU's profile, or num_gpus 0")
        elif self.engine.engine.tp_size != num_gpus:
            raise Undeployable(f"tp_size {self.engine.engine.tp_size} needs as many GPUs, and the pod has "
                               f"placement.num_gpus {num_gpus}", "make them equal")

    def has(self, *apis: str) -> str | None:
        """The first of these `group/version` that the server offers; None when it offers none."""
        return next((api for api in apis if api in self.served), None)

    def left_out(self) -> tuple[str, ...]:
        """Configured features that this cluster lacks, as text for users; none of them prevents serving."""
        missing = []
        if self.cluster.gateway is not None and self.route_api is None:
            missing.append("no gateway.networking.k8s.io here: traffic moves to a new revision at once, by Service")
        if self.cluster.autoscale is not None and not self.scaled:
            missing.append(f"no keda.sh/v1alpha1 here: replicas stay at {self.replicas}")
        if self.cluster.monitoring and self.has("monitoring.coreos.com/v1") is None:
            missing.append("no monitoring.coreos.com/v1 here: neither PodMonitor nor PrometheusRule")
        if self.has("policy/v1", "policy/v1beta1") is None:
            missing.append("no policy/v1 here: no PodDisruptionBudget")
        return tuple(missing)

    @property
    def counts_drafted(self) -> bool:
        """Whether the engine counts drafted rounds separately (`endpoints.plan.proven_tau`). SGLang does not."""
        return not isinstance(self.engine, LaunchPlan)

    @property
    def route_api(self) -> str | None:
        """API version of the HTTPRoute; None where traffic is switched by Service."""
        if self.cluster.gateway is None:
            return None
        return self.has("gateway.networking.k8s.io/v1", "gateway.networking.k8s.io/v1beta1")

    @property
    def scaled(self) -> bool:
        """Whether KEDA sets the number of replicas."""
        return self.cluster.autoscale is not None and self.has("keda.sh/v1alpha1") is not None


def fetched(files: DrafterFiles, placement: Placement) -> StoredDrafter | None:
    """The location an init container downloads the drafter from; None when the work area is no artifact store. Raises
    Undeployable."""
    if not isinstance(placement.work, S3Work):
        return None
    if files.stored is None:
        raise Undeployable(f"drafter {files.facts.directory!r} has no place in the artifact store "
                           f"{placement.work.url}", "say where it is stored, or serve from a work volume")
    if re.search(r"(^|/)\.\.(/|$)", f"{files.stored.prefix}/{files.stored.part}"):
        raise Undeployable(f"stored drafter {files.stored.prefix}/{files.stored.part} climbs out of its prefix",
                           "give plain keys")
    return files.stored


def object_name(endpoint: str, revision: int | None = None, part: str = "") -> str:
    """`eyrie-<endpoint>[-r<revision>][-<part>]`, shortened to a DNS label of at most 52 characters.

    A Service's name must begin with a letter, and an endpoint's may begin with a digit. The controller of Deployments
    appends a suffix, and the result has to fit into a label of 63. A longer name is truncated and gets 8 hexadecimal
    digits of the SHA-256 of the endpoint's name, so that two long endpoint names do not collide.
    """
    tail = (f"-r{revision}" if revision is not None else "") + (f"-{part}" if part else "")
    head = f"eyrie-{endpoint}"
    if len(head) + len(tail) > _LONGEST:
        mark = hashlib.sha256(endpoint.encode()).hexdigest()[:8]
        head = f"{head[:_LONGEST - len(tail) - len(mark) - 1].rstrip('-')}-{mark}"
    return head + tail


def service_name(endpoint: str, revision: int) -> str:
    return object_name(endpoint, revision, "http")


def selector(endpoint: str, revision: int | None = None, role: str | None = SERVER) -> dict[str, str]:
    """Labels of selectors. They never change during the life of an object, because selectors are immutable."""
    labels = {"app.kubernetes.io/name": "eyrie-engine", ENDPOINT_LABEL: endpoint}
    if revision is not None:
        labels[REVISION_LABEL] = str(revision)
    if role is not None:
        labels[ROLE_LABEL] = role
    return labels


def labels(endpoint: str, revision: int | None = None, role: str | None = None) -> dict[str, str]:
    return selector(endpoint, revision, role) | {
        "app.kubernetes.io/instance": endpoint, "app.kubernetes.io/component": "endpoint",
        "app.kubernetes.io/part-of": "eyrie", "app.kubernetes.io/managed-by": MANAGER}


def digest(value: str | Mapping[str, Any]) -> str:
    """`sha256:<hex>` of a text or a JSON value."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def described(api_version: str, kind: str, name: str, endpoint: Endpoint, deployment: EndpointDeployment,
              revision: int | None = None, role: str | None = None) -> Manifest:
    """A manifest with apiVersion, kind and metadata (name, labels, owner), without a spec."""
    metadata: Manifest = {"name": name, "namespace": deployment.cluster.namespace,
                          "labels": labels(endpoint.name, revision, role)}
    owner = deployment.owner
    if owner is not None:
        metadata["ownerReferences"] = [{"apiVersion": API_VERSION, "kind": OWNER_KIND, "name": owner.name,
                                        "uid": owner.uid, "controller": True, "blockOwnerDeletion": True}]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
