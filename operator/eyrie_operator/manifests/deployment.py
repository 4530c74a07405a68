"""What is decided about an endpoint on a cluster, beyond what the endpoint itself says: one frozen value. Pure.

An `Endpoint` says which revisions there are and which of them serves or is on trial. Where they run, how many, with
which image, behind which gateway, and what the API server knows, is here. Facts of models (contexts, attention, a
drafter's window) come in as the workers' own values: reading a config.json is I/O, and happens before.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.model import Name
from eyrie_api.v1alpha1.placement import ObjectName, Placement, S3Work
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.engines.sglang.checkpoints import DrafterCheckpoint
from eyrie_workers.engines.sglang.launch_plan import LaunchPlan

LWS_API = "leaderworkerset.x-k8s.io/v1"


class Undeployable(InvalidInput):
    """An endpoint that cannot stand on this cluster as asked."""

    reason = "Undeployable"


@dataclass(frozen=True)
class SglangEngine:
    """SGLang. `plan` is what its revisions share; drafter, setting, paths, host and port are filled in for each."""

    plan: LaunchPlan


@dataclass(frozen=True)
class EmbeddedEngine:
    """The reference engine: for the quickstart model, tests, and machines without SGLang. It knows no API key."""

    target: str
    argv: Callable[[DrafterUse, int], Sequence[str]]
    """Its command line by use and port, to listen on 0.0.0.0 (`engines.process.EngineCommand` renders it; that module
    also starts processes, so it stays outside)."""


@dataclass(frozen=True)
class StoredDrafter:
    """Where a drafter lies in an artifact store."""

    prefix: str
    """Of the stage directory that holds it."""

    part: str
    """The drafter's directory inside, for example `checkpoints/c3`."""


@dataclass(frozen=True)
class DrafterFiles:
    """One revision's drafter."""

    facts: DrafterCheckpoint
    """`directory` is a path on the work volume, unless `stored` says where it is fetched from."""

    stored: StoredDrafter | None = None
    digest: str | None = None
    """Of its files. When it changes the pods are replaced."""


@dataclass(frozen=True)
class KeySecret:
    """A Secret whose `key` holds a YAML file for SGLang's --config, with the one line `api-key: ...`."""

    secret: ObjectName
    key: str = "engine.yaml"
    version: str = ""
    """Its resourceVersion, if rotating it should replace the pods: SGLang reads it once."""


@dataclass(frozen=True)
class ModelCache:
    """Where Hub downloads are kept: a claim that survives pods, or else an emptyDir and a download per pod."""

    claim: ObjectName | None = None
    size: str | None = None
    """Bound of the emptyDir."""


@dataclass(frozen=True)
class GatewayRef:
    """The Gateway whose listener leads to the endpoint."""

    name: ObjectName
    namespace: Name | None = None
    section: str | None = None
    hostnames: tuple[str, ...] = ()
    request_timeout_s: float | None = None
    """Some gateways cut a request off after 15 s, which a long answer exceeds. 0 switches the limit off."""


@dataclass(frozen=True)
class Autoscale:
    """KEDA keeps requests per replica near `target_requests`, running and waiting together."""

    prometheus_url: str
    max_replicas: int
    target_requests: float
    cooldown_s: int = 300


@dataclass(frozen=True)
class Owner:
    """The resource that owns all this: when it is deleted, the garbage collector deletes the rest."""

    uid: str
    name: str
    kind: str = "DraftEndpoint"
    api_version: str = "eyrie.dev/v1alpha1"


@dataclass(frozen=True)
class Monitoring:
    """What is scraped, alerted and drawn, where the Prometheus operator is installed."""

    interval_s: int = 15
    labels: Mapping[str, str] = field(default_factory=dict)
    """Extra labels of PodMonitor and PrometheusRule: many Prometheus installations select by one."""

    min_acceptance_ratio: float = 0.5
    """Alert when windowed tau is below this share of the proven one (`serve.min_acceptance_ratio`)."""

    max_queued: float = 32.0
    """Alert when a replica keeps more requests waiting than this."""

    max_error_ratio: float = 0.05
    dashboard: bool = True


@dataclass(frozen=True)
class EndpointDeployment:
    """How an endpoint stands on a cluster."""

    namespace: Name
    placement: Placement
    engine: SglangEngine | EmbeddedEngine
    drafters: Mapping[int, DrafterFiles] = field(default_factory=dict)
    """By revision number; revisions without a drafter have none."""

    served: frozenset[str] = frozenset()
    """`group/version` of the APIs the server has, as `kubectl api-versions` lists them."""

    replicas: int = 1
    """Of the serving revision, and at least so many when scaled. A revision on trial has as many: it may be given all
    requests the moment it has proved itself."""

    num_nodes: int = 1
    """Nodes one engine spans, by LeaderWorkerSet; tp_size x pp_size is then num_nodes x placement.num_gpus."""

    port: int = 30000
    startup_timeout_s: float = 1800.0
    """Loading weights and capturing graphs takes 10 to 30 minutes for a large target."""

    drain_timeout_s: float = 600.0
    """An engine asked to go answers what it has begun; SGLang has no deadline of its own. Then it is killed."""

    leave_delay_s: float = 10.0
    """From being taken out of the Service until SIGTERM: proxies learn of it meanwhile. Part of `drain_timeout_s`."""

    surge: bool = True
    """A changed revision first starts a further pod. False needs no spare GPU, and serves with one replica less."""

    run_as: int = 65532
    """User and group of the pods; a work volume must be readable to it. 0 is refused by PodSecurity `restricted`."""

    python: tuple[str, ...] = ("python3",)
    """How the images start Python."""

    api_key: KeySecret | None = None
    model_cache: ModelCache = ModelCache()
    fetch_image: str | None = None
    """Image with Eyrie in it, that fetches drafters from an artifact store; default: the placement's. SGLang's own has
    none."""

    fetch_python: tuple[str, ...] | None = None
    """How it starts Python; default: `python`."""

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
        """The first of these `group/version` the server has."""
        return next((api for api in apis if api in self.served), None)

    def left_out(self) -> tuple[str, ...]:
        """What was asked for and this cluster cannot have, in words for an Event; nothing of it stops serving."""
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
        """The engine counts rounds that drafted apart (`serving.proven_tau`). SGLang does not."""
        return isinstance(self.engine, EmbeddedEngine)

    @property
    def route_api(self) -> str | None:
        """API version of the HTTPRoute; None where traffic is switched by Service."""
        if self.gateway is None:
            return None
        return self.has("gateway.networking.k8s.io/v1", "gateway.networking.k8s.io/v1beta1")

    @property
    def scaled(self) -> bool:
        """KEDA owns the number of replicas."""
        return self.autoscale is not None and self.has("keda.sh/v1alpha1") is not None

    def _check_embedded(self) -> None:
        if self.api_key is not None:
            raise Undeployable("api_key is given and the embedded engine knows none: anybody in the cluster could ask "
                               "it", "serve with engine sglang, or leave api_key out and restrict by NetworkPolicy")
        if self.num_nodes > 1:
            raise Undeployable(f"num_nodes {self.num_nodes}: the embedded engine runs on one", "use engine sglang")

    def _check_gpus(self, plan: LaunchPlan) -> None:
        wanted, given = plan.tp_size * plan.pp_size, self.num_nodes * self.placement.num_gpus
        if plan.machine.platform == "cpu":
            if given:
                raise Undeployable(f"placement.num_gpus {self.placement.num_gpus} with hardware profile "
                                   f"{plan.machine.name!r}", "give the GPU's profile, or num_gpus 0")
        elif wanted != given:
            raise Undeployable(
                f"tp_size {plan.tp_size} x pp_size {plan.pp_size} = {wanted} GPUs, and {self.num_nodes} node(s) with "
                f"placement.num_gpus {self.placement.num_gpus} have {given}", "make them equal")


def fetched(files: DrafterFiles, placement: Placement) -> StoredDrafter | None:
    """Where an init container gets the drafter from; None when it lies on the work volume. Raises Undeployable."""
    if not isinstance(placement.work, S3Work):
        return None
    if files.stored is None:
        raise Undeployable(f"drafter {files.facts.directory!r} has no place in the artifact store "
                           f"{placement.work.url}", "say where it is stored, or serve from a work volume")
    if re.search(r"(^|/)\.\.(/|$)", f"{files.stored.prefix}/{files.stored.part}"):
        raise Undeployable(f"stored drafter {files.stored.prefix}/{files.stored.part} climbs out of its prefix",
                           "give plain keys")
    return files.stored
