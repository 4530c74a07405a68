"""`EndpointDeployment`: the configuration of an endpoint on a cluster, as one frozen value. Pure.

An `Endpoint` lists the revisions, and which of them serves or is the candidate. `EndpointDeployment` adds placement,
replicas, image, gateway, and the APIs of the server. Facts about models (context length, attention, a drafter's window)
are passed in as the workers' values (`TargetCheckpoint`, `DrafterCheckpoint`), because reading a config.json is I/O.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.cluster import ModelCacheSpec
from eyrie_api.v1alpha1.model import Name
from eyrie_api.v1alpha1.placement import ObjectName, Placement, S3Work
from eyrie_api.v1alpha1.targets import JobTarget
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.engines.sglang.checkpoints import DrafterCheckpoint
from eyrie_workers.engines.sglang.launch import LaunchPlan

LWS_API = "leaderworkerset.x-k8s.io/v1"


class Undeployable(InvalidInput):
    """The endpoint cannot be deployed on this cluster as configured."""

    reason = "Undeployable"


@dataclass(frozen=True)
class SglangEngine:
    """SGLang. `plan` is common to all revisions; drafter, setting, paths, host and port are set for each."""

    plan: LaunchPlan


@dataclass(frozen=True)
class EmbeddedEngine:
    """The reference engine: for the quickstart model, tests, and machines without SGLang. It supports no API key."""

    target: str
    argv: Callable[[DrafterUse, int], Sequence[str]]
    """The command line for a use and a port; it listens on 0.0.0.0. Passed in as a function because the module that
    renders it (`EngineCommand` of `eyrie_workers.engines.process`) also starts processes."""


@dataclass(frozen=True)
class StoredDrafter:
    """Location of a drafter in an artifact store."""

    prefix: str
    """Key prefix of the stage directory that contains it."""

    part: str
    """The drafter's directory below the prefix, for example `checkpoints/c3`."""


@dataclass(frozen=True)
class DrafterFiles:
    """The drafter of one revision."""

    facts: DrafterCheckpoint
    """`directory` is a path on the work volume, unless the drafter is downloaded from `stored`."""

    stored: StoredDrafter | None = None
    digest: str | None = None
    """Digest of its files. The pods are replaced when it changes."""


@dataclass(frozen=True)
class KeySecret:
    """A Secret whose `key` contains a YAML file for SGLang's --config with the single line `api-key: ...`."""

    secret: ObjectName
    key: str = "engine.yaml"
    version: str = ""
    """The Secret's resourceVersion, if the pods are to be replaced when it is rotated: SGLang reads the file once."""


@dataclass(frozen=True)
class CachedTarget:
    """A target of the Hub in the cluster's model cache. An init container fills the cache where it lacks the target;
    the engine reads it, read-only and without the Hub."""

    volume: ModelCacheSpec
    target: JobTarget


@dataclass(frozen=True)
class GatewayRef:
    """The parent Gateway of the endpoint's HTTPRoute."""

    name: ObjectName
    namespace: Name | None = None
    section: str | None = None
    hostnames: tuple[str, ...] = ()
    request_timeout_s: float | None = None
    """Some gateways end a request after 15 s, which a long generation exceeds. 0 disables the limit."""


@dataclass(frozen=True)
class Autoscale:
    """KEDA scales replicas so that each has about `target_requests` requests, running and queued together."""

    prometheus_url: str
    max_replicas: int
    target_requests: float
    cooldown_s: int = 300


@dataclass(frozen=True)
class Owner:
    """The owner reference of all rendered objects: the garbage collector deletes them with the owner."""

    uid: str
    name: str
    kind: str = "DraftEndpoint"
    api_version: str = "eyrie.dev/v1alpha1"


@dataclass(frozen=True)
class Monitoring:
    """Scraping, alerts (both need the Prometheus operator) and dashboard."""

    interval_s: int = 15
    labels: Mapping[str, str] = field(default_factory=dict)
    """Additional labels of PodMonitor and PrometheusRule: many Prometheus installations select by a label."""

    min_acceptance_ratio: float = 0.5
    """Alert when windowed tau is below this fraction of the proven tau (`serve.min_acceptance_ratio`)."""

    max_queued: float = 32.0
    """Alert when a replica has more queued requests than this."""

    max_error_ratio: float = 0.05
    dashboard: bool = True


@dataclass(frozen=True)
class EndpointDeployment:
    """The configuration of an endpoint on a cluster. Raises Undeployable when it is inconsistent."""

    namespace: Name
    placement: Placement
    engine: SglangEngine | EmbeddedEngine
    drafters: Mapping[int, DrafterFiles] = field(default_factory=dict)
    """By revision number; absent for revisions without a drafter."""

    served: frozenset[str] = frozenset()
    """`group/version` of the APIs that the server offers, as `kubectl api-versions` lists them."""

    replicas: int = 1
    """Replicas of the serving revision; the minimum when scaled. A candidate has as many, because it gets all requests
    as soon as its canary has passed."""

    num_nodes: int = 1
    """Nodes of one engine; above 1 by LeaderWorkerSet. tp_size must equal num_nodes x placement.num_gpus."""

    port: int = 30000
    startup_timeout_s: float = 1800.0
    """Time limit for loading weights and capturing graphs, which take 10 to 30 minutes for a large target."""

    drain_timeout_s: float = 600.0
    """Time a terminating engine has to finish its requests before it is killed; SGLang itself has no deadline."""

    leave_delay_s: float = 10.0
    """Pause between removal from the Service and SIGTERM, for proxies to update. Part of `drain_timeout_s`."""

    surge: bool = True
    """A rollout starts a new pod before it stops an old one. False needs no spare GPU; one replica is then missing."""

    run_as: int = 65532
    """User and group of the pods, which must be able to read a work volume. PodSecurity `restricted` rejects 0."""

    python: tuple[str, ...] = ("python3",)
    """Command that starts Python in the images."""

    api_key: KeySecret | None = None
    cached_target: CachedTarget | None = None
    """None: the engine itself downloads a target of the Hub into its pod."""

    fetch_image: str | None = None
    """Image that contains Eyrie, for init containers that download drafters from an artifact store and bring SGLang the
    package it imports; default: the placement's image, which then contains Eyrie. SGLang's own does not."""

    fetch_python: tuple[str, ...] | None = None
    """Command that starts Python in `fetch_image`; default: the field `python`."""

    gateway: GatewayRef | None = None
    autoscale: Autoscale | None = None
    monitoring: Monitoring | None = None
    owner: Owner | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.num_nodes < 1:
            raise Undeployable(f"replicas {self.replicas}, num_nodes {self.num_nodes}: both must be at least 1",
                               "switch the endpoint off instead of giving it no replicas")
        if self.drain_timeout_s <= self.leave_delay_s:
            raise Undeployable(f"drain_timeout_s {self.drain_timeout_s:g} leaves nothing after leave_delay_s "
                               f"{self.leave_delay_s:g}", "give more")
        if self.autoscale is not None and self.autoscale.max_replicas < self.replicas:
            raise Undeployable(f"autoscale.max_replicas {self.autoscale.max_replicas} is below replicas "
                               f"{self.replicas}", "raise it")
        if isinstance(self.engine, EmbeddedEngine):
            self._check_embedded()
        else:
            self._check_gpus(self.engine.plan)
        if self.num_nodes > 1 and LWS_API not in self.served:
            raise Undeployable(f"num_nodes {self.num_nodes} needs {LWS_API}, which this cluster has not",
                               "install LeaderWorkerSet, or serve on one node")

    def has(self, *apis: str) -> str | None:
        """The first of these `group/version` that the server offers; None when it offers none."""
        return next((api for api in apis if api in self.served), None)

    def left_out(self) -> tuple[str, ...]:
        """Configured features that this cluster lacks, as text for users; none of them prevents serving."""
        missing = []
        if self.gateway is not None and self.route_api is None:
            missing.append("no gateway.networking.k8s.io here: traffic moves to a new revision at once, by Service")
        if self.autoscale is not None and not self.scaled:
            missing.append(f"no keda.sh/v1alpha1 here: replicas stay at {self.replicas}")
        if self.monitoring is not None and self.has("monitoring.coreos.com/v1") is None:
            missing.append("no monitoring.coreos.com/v1 here: neither PodMonitor nor PrometheusRule")
        if self.has("policy/v1", "policy/v1beta1") is None:
            missing.append("no policy/v1 here: no PodDisruptionBudget")
        return tuple(missing)

    @property
    def counts_drafted(self) -> bool:
        """Whether the engine counts drafted rounds separately (`endpoints.plan.proven_tau`). SGLang does not."""
        return isinstance(self.engine, EmbeddedEngine)

    @property
    def route_api(self) -> str | None:
        """API version of the HTTPRoute; None where traffic is switched by Service."""
        if self.gateway is None:
            return None
        return self.has("gateway.networking.k8s.io/v1", "gateway.networking.k8s.io/v1beta1")

    @property
    def scaled(self) -> bool:
        """Whether KEDA sets the number of replicas."""
        return self.autoscale is not None and self.has("keda.sh/v1alpha1") is not None

    def _check_embedded(self) -> None:
        if self.api_key is not None:
            raise Undeployable("api_key is given and the embedded engine knows none: anybody in the cluster could ask "
                               "it", "serve with engine sglang, or leave api_key out and restrict by NetworkPolicy")
        if self.num_nodes > 1:
            raise Undeployable(f"num_nodes {self.num_nodes}: the embedded engine runs on one", "use engine sglang")

    def _check_gpus(self, plan: LaunchPlan) -> None:
        given = self.num_nodes * self.placement.num_gpus
        if plan.machine.platform == "cpu":
            if given:
                raise Undeployable(f"placement.num_gpus {self.placement.num_gpus} with hardware profile "
                                   f"{plan.machine.name!r}", "give the GPU's profile, or num_gpus 0")
        elif plan.tp_size != given:
            raise Undeployable(
                f"tp_size {plan.tp_size}, and {self.num_nodes} node(s) with placement.num_gpus "
                f"{self.placement.num_gpus} have {given} GPUs", "make them equal")


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
