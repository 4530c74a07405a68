"""The engine that generates tokens: one choice of a job, which its stages and its endpoint use. How it samples, and the
shape of draft trees."""

from typing import Any, Literal

from pydantic import Field, model_validator

from eyrie_api.contract.model import Frozen, depends

SGLANG_PROGRAM = "EYRIE_SGLANG_PROGRAM"
"""Variable with the command that starts SGLang, in shell syntax; default `python -m sglang.launch_server`."""

EngineKind = Literal["embedded", "sglang"]
AttentionBackend = Literal["fa3", "flashinfer", "triton", "trtllm_mha", "aiter", "intel_amx"]
DraftBackend = Literal["fa3", "fa4", "flashinfer", "triton", "trtllm_mha"]
CHAIN_BACKENDS: tuple[DraftBackend, ...] = ("fa4", "trtllm_mha")
"""They draft chains alone."""

Verification = Literal["target", "rejection", "block"]


class SglangArguments(Frozen):
    """Further arguments of the servers, named as SGLang names them; there are no others. They change speed and memory,
    answers by rounding alone, and are equal with and without a drafter."""

    chunked_prefill_size: int | None = Field(None, ge=64, le=2**20, multiple_of=64)
    """Tokens of prompts that one step computes, at most. SGLang's default follows from the GPU's memory."""

    mem_fraction_static: float | None = Field(None, ge=0.05, le=0.98)
    """Share of a GPU's memory for weights and KV cache of all servers on it. Default: computed from its size. Lower it
    where a server runs out of memory, or other programs use the GPU."""

    disable_prefill_cuda_graph: bool = False
    """Record no CUDA graphs of prefill, which shortens each start."""

    disable_decode_cuda_graph: bool = False
    """Record no CUDA graphs of decoding, for a GPU or driver on which recording fails. Each step then waits for the
    launch of every kernel."""

    disable_overlap_schedule: bool = False
    """Schedule the next batch after the GPU has computed the one before. On a CPU it is always so."""


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

    attention_backend: AttentionBackend | None = None
    """SGLang's attention kernels. Default: chosen for the GPU, the target and all compared settings. A job whose GPU,
    target or draft trees it does not serve is refused."""

    sglang_arguments: SglangArguments = SglangArguments()
    """Further arguments of every server of the job. Only for SGLang."""

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
        if self.kind == "embedded" and (self.attention_backend or self.sglang_arguments != SglangArguments()):
            field = "attention_backend" if self.attention_backend else "sglang_arguments"
            raise ValueError(f"engine.{field} is set and engine.kind is 'embedded', which has no servers of SGLang: "
                             "remove the field, or set engine.kind to 'sglang'")
        if self.num_gpus is not None and self.num_gpus < self.tp_size:
            raise ValueError(f"engine.num_gpus is {self.num_gpus}, fewer than the engine.tp_size {self.tp_size} of one "
                             "server: raise num_gpus or lower tp_size")
        return self


class SamplingSpec(Frozen):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0.0, le=4.0)
    """0 is greedy."""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Only the most likely tokens that together reach this probability are drawn; 1 keeps all."""

    top_k: int = Field(0, ge=0, le=2**20)
    """0 keeps the whole vocabulary."""


class StepRate(Frozen):
    """How fast a server decodes batches of one size."""

    batch_tokens: int = Field(ge=1, le=2**20)
    """Verified in one step, of all requests together."""

    steps_per_s: float = Field(gt=0.0, le=1e6)
    """Such steps in a second, drafting included."""


class DraftServing(Frozen):
    """How SGLang on a GPU computes a drafter otherwise than its target. It changes speed, memory and what is accepted;
    answers are the target's."""

    attention_backend: DraftBackend | None = None
    """Attention kernels of the drafter. `fa4` and `trtllm_mha` draft chains on Blackwell. Default: the target's, of
    drafters of blocks under trtllm_mha what SGLang chooses."""

    kv_dtype: Literal["fp8_e4m3", "bfloat16"] | None = None
    """Of the drafter's keys and values: it has a slot for each token of the target's cache. Default: the target's."""

    quantization: Literal["fp8"] | None = None
    """The drafter's weights are quantised as they are loaded. Default: as they are stored."""

    step_rates: tuple[StepRate, ...] | None = None
    """Of a `dspark` drafter: verify as many tokens of each block as its confidences pay for at these rates, the fewest
    tokens first (SGLang's compact mode), with `fa3` or `trtllm_mha` for the target's attention. Tuning fills an empty
    list with what it measured. Default: whole blocks."""

    @model_validator(mode="after")
    def _ascending(self) -> "DraftServing":
        tokens = [rate.batch_tokens for rate in self.step_rates or ()]
        if tokens != sorted(set(tokens)) or len(tokens) == 1:  # which SGLang takes for no rates
            raise ValueError(f"step_rates has batch_tokens {tokens}: give at least two, each once, in ascending order")
        return self

    def label(self) -> str:
        """`/triton/kv-fp8_e4m3/fp8/by-confidence`; empty by default."""
        kv, partly = self.kv_dtype and f"kv-{self.kv_dtype}", None if self.step_rates is None else "by-confidence"
        return "".join(f"/{part}" for part in (self.attention_backend, kv, self.quantization, partly) if part)


class DraftTreeShape(Frozen):
    """The shape of the draft tree of one round, and how SGLang drafts and verifies it. top_k 1 is a chain, whose
    num_draft_tokens is num_steps + 1."""

    num_steps: int = Field(5, ge=1, le=16)
    """Drafter passes per round (depth)."""

    top_k: int = Field(1, ge=1, le=64)
    """Children kept per node."""

    num_draft_tokens: int = Field(6, ge=2, le=512)
    """Nodes sent to verification, root included."""

    static: bool = False
    """Use the same branching in every round, independent of the drafter's confidence (EAGLE-1); embedded engine
    only."""

    verification: Verification = "target"
    """How SGLang verifies drafts at temperatures above 0, without a change of the answers' distribution. `target`: the
    drafter's most probable token is accepted with the target's probability. `rejection`: the drafter's tokens are drawn
    too, and accepted with min(1, p/q) (arXiv:2211.17192). `block`: the same, decided for a whole draft
    (arXiv:2403.10444). The last two need SGLang on a GPU and a chain; of EAGLE drafters, one whose draft vocabulary is
    the target's. The embedded engine draws with noise that drafter and target share."""

    draft: DraftServing = DraftServing()
    """How SGLang computes the drafter."""

    @model_validator(mode="after")
    def _possible(self) -> "DraftTreeShape":
        if self.top_k == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} does not fit a chain of num_steps "
                             f"{self.num_steps}: with top_k 1 it must be num_steps + 1 = {self.num_steps + 1}")
        if self.verification != "target" and self.top_k > 1:
            raise ValueError(f"verification {self.verification!r} is of chains, and top_k is {self.top_k}: set top_k "
                             "to 1, or omit verification")
        most = 1 + self.top_k + (self.num_steps - 1) * self.top_k**2
        if self.num_draft_tokens > most:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} is more than a tree of num_steps "
                             f"{self.num_steps} and top_k {self.top_k} can have: at most {most}")
        if self.num_draft_tokens < self.num_steps + 1:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} cannot hold one path of num_steps "
                             f"{self.num_steps}: give at least {self.num_steps + 1} or lower num_steps")
        return self

    def label(self) -> str:
        """`num_steps/top_k/num_draft_tokens`, as usual in the literature."""
        kind = "/static" if self.static else "" if self.verification == "target" else f"/{self.verification}"
        return f"{self.num_steps}/{self.top_k}/{self.num_draft_tokens}{kind}{self.draft.label()}"
