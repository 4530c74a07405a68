"""Which GPUs of a job cannot hold its target: the weights alone exceed all memory of the GPUs of one server. Pure.

What may fit is not refused. Memory is at most what the label names (a GPU of "80GB" has a little less than 80 GiB), no
KV cache and no workspace is counted, and weights are what is served (`submission.target_files.served_bytes`). GPUs and
weights of an unknown size are not judged here: the stage that loads the target reports those.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from eyrie_api.decisions.hardware import known_gpu
from eyrie_api.decisions.plan_work import TargetFacts
from eyrie_api.decisions.training_defaults import named_gb
from eyrie_api.errors import GpuTooSmall
from eyrie_api.quantities import size
from eyrie_api.v1alpha1.requests import StageKey
from eyrie_api.v1alpha1.resolved import ResolvedJob

_GIB = 2**30
_LARGEST_GB = {"B200": 192, "L40S": 48, "L4": 24, "A10": 24}
"""Of types whose labels name no size, the largest that is sold. An A100 has 40 or 80 GB: not known."""

_ENGINES: tuple[StageKey, ...] = ("benchmark", "tune", "prove")


class _Holder(NamedTuple):
    """What loads the target onto GPUs."""

    why: str
    """The field with its value that decides on the number of GPUs, and in words what that means."""

    num_gpus: int
    """Of one server, or process."""

    gpu_type: str | None
    is_server: bool
    """Whether more GPUs could share the weights by `engine.tp_size`."""


def memory_of(gpu_type: str | None) -> int | None:
    """The most memory that a GPU of this label has, in bytes; None where that is not known."""
    named, known = named_gb(gpu_type), known_gpu(gpu_type)
    largest = named or (None if known is None else _LARGEST_GB.get(known.name))
    return None if largest is None else largest * _GIB


def too_small_gpus(job: ResolvedJob, facts: TargetFacts, weights: int, *, serves: bool,
                   memory: Callable[[str | None], int | None] = memory_of) -> list[GpuTooSmall]:
    """One error for each kind of GPUs that cannot hold the weights, naming the stages.

    weights   bytes of the target as it is served
    serves    whether an endpoint loads it, on the GPUs of `serve.placement`
    memory    bytes of a GPU by its label; a job may name none
    """
    found: dict[_Holder, list[str]] = {}
    for place, holder in _holders(job, serves):
        device = memory(holder.gpu_type)
        if device is not None and weights > holder.num_gpus * device:
            found.setdefault(holder, []).append(place)
    return [_error(holder, places, facts, weights, memory(holder.gpu_type) or 0) for holder, places in found.items()]


def fitting_sizes(facts: TargetFacts) -> list[int]:
    """Numbers of GPUs that divide the target's heads."""
    return [size for size in range(1, min(facts.num_heads, 64) + 1)
            if facts.num_heads % size == 0 and (facts.num_kv_heads % size == 0 or size % facts.num_kv_heads == 0)]


def _error(holder: _Holder, places: list[str], facts: TargetFacts, weights: int, device: int) -> GpuTooSmall:
    gpus = f"{holder.num_gpus} x {holder.gpu_type or 'GPU of this machine'}"
    has = "has" if holder.num_gpus == 1 else "have"
    larger = f"name a type of GPU with more than {size(weights / holder.num_gpus)}"
    enough = next((number for number in fitting_sizes(facts) if number * device >= weights), None)
    if enough is None:
        hint = f"{larger}, or a smaller or quantised target"
    elif holder.is_server:
        hint = f"set engine.tp_size to {enough} or more, with as many GPUs there, or {larger}"
    else:
        hint = f"set engine to {{kind: sglang, tp_size: {enough}}}, with as many GPUs there, or {larger}"
    return GpuTooSmall(f"{holder.why}: the target's weights are {size(weights)}, and {gpus} {has} "
                       f"{size(holder.num_gpus * device)} (for {', '.join(places)})", hint)


def _holders(job: ResolvedJob, serves: bool) -> Iterator[tuple[str, _Holder]]:
    spec, engine = job.spec, job.spec.engine
    server = (engine.tp_size, f"engine.tp_size is {engine.tp_size}", True)
    alone = (1, "engine.kind is 'embedded', which computes on one device", False)
    used = server if engine.kind == "sglang" else alone
    stages = dict.fromkeys(_ENGINES, used)
    if not spec.data.answered and spec.regenerate.engine in (None, "embedded"):
        stages["regenerate"] = used if spec.regenerate.engine is None else (
            1, "regenerate.engine is 'embedded', which computes on one device", False)
    if spec.capture.feed == "stream":
        stages["train"] = (1, "capture.feed is 'stream', for which each GPU of training computes the target", False)
    elif spec.capture.source in ("reference", "transformers"):
        stages["capture"] = (
            1, f"capture.source is '{spec.capture.source}', which computes on one device", False)
    else:
        stages["capture"] = used  # a target larger than one GPU is captured by servers of SGLang
    for stage, (num_gpus, why, is_server) in stages.items():
        if job.gpus[stage].num_gpus != 0:
            yield stage, _Holder(why, num_gpus, job.gpus[stage].gpu_type, is_server)
    placed = job.serving_gpus
    if serves and placed.num_gpus != 0 and spec.promotion.mode != "never":
        num_gpus, why, is_server = used
        if is_server and (placed.num_gpus or 0) > num_gpus:
            num_gpus, why = placed.num_gpus or 0, f"serve.placement.num_gpus is {placed.num_gpus}"
        yield "serve", _Holder(why, num_gpus, placed.gpu_type, is_server)
