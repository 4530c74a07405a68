"""How the target rewrites the assistant turns of the conversations."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.model import Frozen, depends


class RegenerateSpec(Frozen):
    """How the target rewrites the answers."""

    engine: Literal["embedded", "openai", "openai-batch"] | None = None
    """Default: the job's engine. `embedded`: the reference engine whatever the job's is. `openai`: any
    OpenAI-compatible endpoint. `openai-batch`: its Batch API."""

    base_url: str | None = Field(None, pattern=r"^https?://")
    """Endpoint for the openai engines, up to and including `/v1`."""

    endpoints: tuple[Annotated[str, Field(pattern=r"^https?://", max_length=4096)], ...] = Field((), max_length=1024)
    """More endpoints of the same model, in addition to `base_url`: each request goes to the one with the fewest in
    flight. Only for engine `openai`."""

    served_model: str | None = None
    """Model name to send to the endpoint; default: the target's name."""

    api_key_env: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """Environment variable that holds the key. The key itself never enters a spec."""

    sampling: SamplingSpec = SamplingSpec(temperature=0.7)
    """How answers are sampled; as the endpoint will be used."""

    max_new_tokens: int = Field(256, ge=1, le=131_072)
    """Longest answer, in tokens; a source may set its own."""

    concurrency: int = depends(24, ge=1, le=4096)
    """Conversations in flight, over all servers. Omitted, with SGLang on GPUs, 64 for each GPU that the job or a
    cluster's profile names, and 64 where neither names a number."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Row i is sampled with a seed derived from this and the row id, so a restart repeats the same answer."""

    turns: Literal["last", "all"] = "last"
    """`all`: every assistant turn is regenerated, in the context of the regenerated turns before it, as a row of its
    own."""

    truncated: Literal["train", "quarantine"] = "train"
    """Answers cut at `max_new_tokens` do not end with an end-of-turn token; `quarantine` excludes them from
    training."""

    timeout_s: float = Field(600.0, gt=0.0, le=1e6)
    """Timeout of one request."""

    max_retries: int = Field(5, ge=0, le=100)
    """Attempts after a request that failed, before the row is given up."""

    deadline_s: float = Field(3600.0, gt=0.0, le=1e8)
    """Time limit of one row, including its retries."""

    @model_validator(mode="after")
    def _endpoint_named(self) -> "RegenerateSpec":
        if self.engine in ("openai", "openai-batch") and self.base_url is None and not self.endpoints:
            raise ValueError(f"regenerate.base_url is required when regenerate.engine is {self.engine!r}: "
                             "give the endpoint's URL including /v1, or omit regenerate.engine to use the job's engine")
        if self.endpoints and self.engine != "openai":
            raise ValueError(f"regenerate.endpoints is for regenerate.engine 'openai', and it is {self.engine!r}: "
                             "remove the field or change the engine")
        return self

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Every endpoint once, `base_url` first."""
        urls = (self.base_url, *self.endpoints) if self.base_url is not None else self.endpoints
        return tuple(dict.fromkeys(url.rstrip("/") for url in urls))
