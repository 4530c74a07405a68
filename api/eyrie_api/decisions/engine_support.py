"""What a job's engine cannot do, refused before the job is accepted. Pure.

SGLang refuses some of this itself, after it has loaded the weights; other combinations it serves differently with only
a warning in its log. Limits of single launch lines, which depend on the GPU's generation, are in
`eyrie_workers.engines.sglang.launch`.

On a CPU, SGLang 0.5.23 verifies drafts greedily whatever the temperature (`_verify_uses_greedy` in its source): output
at a temperature above 0 would not be the target's. Sampled generation without a drafter is not affected, so
regeneration may sample there.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from eyrie_api.decisions.capture_support import require_block_capture, require_capture
from eyrie_api.decisions.plan_facts import TargetFacts
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.engine import DraftTreeShape, EngineSpec
from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.targets import QUICKSTART, TRAINED_HERE

BLOCKS = "dflash"
"""The family whose drafters have blocks of a length of their own."""

Device = Literal["cpu", "gpu"]
"""What SGLang's servers compute on."""


GPU_CONVERSATIONS = 20_000
"""Where a job for a target of one's own computes on GPUs and names no number: an evening for 8 billion parameters on
one H100 (docs/results/plans.md)."""


def with_gpu_defaults(spec: JobSpec, *, has_sglang: bool) -> JobSpec:
    """The job with what it omits and what a target of one's own needs on GPUs: SGLang, where there is one (it computes
    no float32 there), and more conversations than are right for the shipped targets."""
    if spec.target.model in (QUICKSTART, *TRAINED_HERE):
        return spec
    if has_sglang and "kind" not in spec.engine.model_fields_set and spec.target.dtype != "float32":
        spec = spec.model_copy(update={"engine": EngineSpec.model_validate({**dict(spec.engine), "kind": "sglang"})})
    if "max_conversations" not in spec.data.model_fields_set:
        spec = spec.model_copy(update={
            "data": spec.data.model_copy(update={"max_conversations": GPU_CONVERSATIONS})})
    return spec


def with_engine_defaults(spec: JobSpec, device: Device | None) -> JobSpec:
    """The job with defaults that its engine on this device can follow: temperature 0 alone for SGLang on a CPU, where
    the job does not name temperatures itself; and for drafters of blocks, on GPUs, the chain of one block."""
    if spec.engine.kind != "sglang":
        return spec
    if device != "cpu":
        if BLOCKS not in (spec.sweep.families or (spec.drafter.family,)) or "tree" in spec.benchmark.model_fields_set:
            return spec
        return spec.model_copy(update={"benchmark": spec.benchmark.model_copy(update={"tree": block_chain(spec)})})
    return spec.model_copy(update={
        name: section.model_copy(update={"temperatures": (0.0,)})
        for name, section in (("benchmark", spec.benchmark), ("tune", spec.tune))
        if "temperatures" not in section.model_fields_set})


def block_chain(spec: JobSpec) -> DraftTreeShape:
    """The only draft of SGLang with a drafter of blocks that is trained by this document: its whole block."""
    num_steps = spec.drafter.max_draft_tokens or spec.train.ttt_length
    return DraftTreeShape(num_steps=num_steps, top_k=1, num_draft_tokens=num_steps + 1)


def check_blocks(spec: JobSpec, candidates: Iterable[JobSpec]) -> None:
    """Raises InvalidInput where a drafter of blocks would be ranked by a draft that SGLang refuses: it would be trained
    first. A continued drafter has the block that it was trained with, which is not known here."""
    if spec.engine.kind != "sglang":
        return
    for candidate in candidates:
        if candidate.drafter.family != BLOCKS or candidate.drafter.init_from is not None:
            continue
        tree, chain = spec.benchmark.tree, block_chain(candidate)
        if tree != chain:
            raise InvalidInput(
                f"benchmark.tree is {tree.label()} and a drafter of family {BLOCKS!r} has blocks of "
                f"{chain.num_draft_tokens} tokens (drafter.max_draft_tokens, by default train.ttt_length, and one "
                "more), which SGLang drafts as a whole",
                f"set benchmark.tree to num_steps {chain.num_steps}, top_k 1 and num_draft_tokens "
                f"{chain.num_draft_tokens}; in a sweep, drafter.max_draft_tokens is the same for all of them")


def check_engine(spec: JobSpec, families: Iterable[str], architectures: Sequence[str], device: Device | None) -> None:
    """Check target and settings against the job's engine.

    families        of the drafters that the job trains
    architectures   of the target's config.json; empty where it cannot be read here
    device          None where it is not known

    Raises InvalidInput or UnsupportedTarget.
    """
    if spec.engine.kind != "sglang":
        return
    _check_dtype(spec, device)
    _check_temperatures(spec, device)
    for family in families:
        _check_family(family, architectures, device)


def check_heads(tp_size: int, facts: TargetFacts, field: str = "engine.tp_size") -> None:
    """Raises InvalidInput when the GPUs of one server cannot divide the target's attention heads.

    field   what gives their number
    """
    # Fewer key-value heads than GPUs are repeated; more must divide evenly, as attention heads must.
    repeated = facts.num_kv_heads < tp_size
    left = tp_size % facts.num_kv_heads if repeated else facts.num_kv_heads % tp_size
    for name, number, rest in (("attention", facts.num_heads, facts.num_heads % tp_size),
                               ("key-value", facts.num_kv_heads, left)):
        if rest:
            raise InvalidInput(f"{field} {tp_size} does not divide the target's {number} {name} heads",
                               f"use a number that does: {', '.join(map(str, fitting_sizes(facts)))}")


def _check_dtype(spec: JobSpec, device: Device | None) -> None:
    dtype = spec.target.dtype
    if device == "gpu" and dtype == "float32":
        raise InvalidInput("target.dtype is 'float32' and engine is 'sglang', whose attention kernels on GPUs have no "
                           "float32", "set target.dtype to 'bfloat16', or engine to 'embedded'")
    if device == "cpu" and dtype == "float16":
        raise InvalidInput("target.dtype is 'float16' and engine is 'sglang', whose CPU kernels compute in bfloat16",
                           "set target.dtype to 'bfloat16', or engine to 'embedded'")


def _check_temperatures(spec: JobSpec, device: Device | None) -> None:
    if device != "cpu":
        return
    for name, section in (("benchmark", spec.benchmark), ("tune", spec.tune)):
        above = [value for value in section.temperatures if value > 0.0]
        if above:
            raise InvalidInput(
                f"{name}.temperatures has {above[0]:g} and engine is 'sglang' on a CPU, which verifies drafts greedily "
                "only: drafted output at a temperature above 0 would not be the target's",
                f"set {name}.temperatures to [0], or engine to 'embedded'")


def _check_family(family: str, architectures: Sequence[str], device: Device | None) -> None:
    algorithm = FAMILIES[family].sglang_algorithm
    if algorithm == "DFLASH" and device == "cpu":
        raise InvalidInput(f"drafters of family {family!r} and engine 'sglang' on a CPU: SGLang runs them on GPUs only",
                           "train another family, or set engine to 'embedded'")
    if not architectures:
        return
    if algorithm == "EAGLE3":
        require_capture(architectures[0])
    elif algorithm == "DFLASH":
        require_block_capture(architectures[0])


def fitting_sizes(facts: TargetFacts) -> list[int]:
    """Numbers of GPUs that divide the target's heads."""
    return [size for size in range(1, min(facts.num_heads, 64) + 1)
            if facts.num_heads % size == 0 and (facts.num_kv_heads % size == 0 or size % facts.num_kv_heads == 0)]
