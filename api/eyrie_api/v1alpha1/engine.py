"""The engine that generates tokens: one choice of a job, which its stages and its endpoint use."""

from typing import Any, Literal

from pydantic import Field, model_validator

from eyrie_api.v1alpha1.model import Frozen, depends

SGLANG_PROGRAM = "EYRIE_SGLANG_PROGRAM"
"""Variable with the command that starts SGLang, in shell syntax; default `python -m sglang.launch_server`."""

EngineKind = Literal["embedded", "sglang"]


class EngineSpec(Frozen):
    """The engine in which a job regenerates, benchmarks, tunes, proves and serves.

    Outside Kubernetes objects the kind alone may be written: `engine: sglang` is `engine: {kind: sglang}`.
    """

    kind: EngineKind = depends("embedded")
    """`embedded`: Eyrie's reference engine. `sglang`: SGLang servers, which stages start and stop themselves. In a
    job that omits it, `sglang` for a target of your own on GPUs: on a cluster, and on a machine that has SGLang."""

    tp_size: int = Field(1, ge=1, le=64)
    """GPUs that compute one server together (tensor parallelism). Only for SGLang."""

    num_gpus: int | None = Field(None, ge=1, le=64)
    """GPUs of all servers of a stage together, `num_gpus // tp_size` servers at a time; default: those that the stage
    sees. Only for SGLang."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _gpus_of_servers(self) -> "EngineSpec":
        if self.kind == "embedded" and (self.tp_size > 1 or self.num_gpus is not None):
            field, value = ("num_gpus", self.num_gpus) if self.tp_size == 1 else ("tp_size", self.tp_size)
            raise ValueError(f"engine.{field} is {value} and engine.kind is 'embedded', which computes on one device: "
                             "remove the field, or set engine.kind to 'sglang'")
        if self.num_gpus is not None and self.num_gpus < self.tp_size:
            raise ValueError(f"engine.num_gpus is {self.num_gpus}, fewer than the engine.tp_size {self.tp_size} of one "
                             "server: raise num_gpus or lower tp_size")
        return self
