"""The endpoint that the winning drafter is promoted to."""

from pydantic import Field

from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.model import Frozen, Name, Probability
from eyrie_api.contract.placement import PlacementRequest


class ServeSpec(Frozen):
    """The endpoint the winner is promoted to."""

    enabled: bool = True
    """False: the winner is measured and kept, and nothing is served."""

    endpoint: Name = "default"
    """Name of the endpoint, created on the first promotion."""

    port: int = Field(0, ge=0, le=65535)
    """Stable port on this machine; 0 picks a free one when the endpoint is created and keeps it."""

    max_concurrency: int | None = Field(None, ge=1, le=1024)
    """Requests decoded at once; more are queued. Default: 8 in the embedded engine; in SGLang as many as its memory
    holds with 4096 tokens each, at most 256; on a cluster 48."""

    health_timeout_s: float | None = Field(None, gt=0.0, le=1e6)
    """A new engine that is not healthy within this time is rolled back. Default: 60; 600 for SGLang, which loads
    weights and captures graphs for minutes. Raise it for a target of hundreds of gigabytes."""

    drain_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """Seconds that a replaced engine on this machine has to finish its answers; it ends as soon as it has. What is not
    finished then ends with an error in OpenAI's form. On a cluster the administrator's `drain_timeout_s`."""

    min_acceptance_ratio: Probability = 0.5
    """Roll back when served acceptance length falls below this share of the proven one, three standard errors
    included."""

    record_prompts: int = Field(0, ge=0, le=1_000_000)
    """Record the messages of the latest chat requests, this many, to retrain on when traffic drifts; 0 records none.
    Privacy: the messages are written unencrypted to `traffic.jsonl` in the endpoint's directory, readable by the
    process's user only (mode 0600), never sent elsewhere, and replaced by newer ones. Inform your users."""

    record_share: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the chat requests that are recorded, drawn at random."""

    record_consented_only: bool = False
    """Record only requests with the header `Eyrie-Record: yes`."""

    record_days: float = Field(30.0, gt=0.0, le=3650.0)
    """Recorded messages are deleted after this long, copies for retraining included."""

    replicas: int | None = Field(None, ge=1, le=1000)
    """On a cluster; default: the administrator's."""

    hardware_profile: str | None = Field(None, min_length=1, max_length=64)
    """On a cluster, the accelerator that SGLang's command line is made for: `h100`, `h200`, `b200` and others, as
    `serving.hardware_profile` of the cluster profile lists them; default: the administrator's."""

    placement: PlacementRequest = PlacementRequest()
    """On a cluster, over the administrator's placement of engines."""


EMBEDDED_CONCURRENCY = 8
"""`max_concurrency` of the embedded engine where none is given."""


class EndpointServeSpec(ServeSpec):
    """How an endpoint is served: the serving section of the job that promoted last, in that job's engine."""

    engine: EngineSpec = EngineSpec()

    @property
    def healthy_within_s(self) -> float:
        """`health_timeout_s`, or its default for the engine."""
        if self.health_timeout_s is not None:
            return self.health_timeout_s
        return 600.0 if self.engine.kind == "sglang" else 60.0
