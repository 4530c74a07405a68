"""Types of GPU: how fast a target computes on them, for plans, which of a job's cannot hold its target, and
for how many users those of its endpoint have memory. Pure.

**Rates** are published peaks and the share of them that is reached.

    prefill, capture    compute-bound: the share of peak bfloat16 FLOP/s times the peak
    training            the same with a share of its own
    decode              memory-bound: a step of b requests reads every weight once and yields b tokens,
                        2 b bandwidth / bytes per weight FLOP/s, until that reaches the rate of prefill

A server of `tp_size` GPUs computes and reads with all of them, less a share for each doubling, so decoding with fewer
and larger servers is faster while memory limits it: the weights are read once for all of their requests. Bytes per
weight are those that are stored, of a quantised target too; it is computed at the rate of bfloat16.

Shares are ranges, and so are the hours of a plan. Two are measured by others: SpecForge's documentation reports 27,000
captured tokens/s of an 8B target on an H200, 44 % of its peak, and 43.5 % for its trainer. A step of Eyrie's trainer
reached 40 % on an H200 and 37 % on an H100 (docs/results/gpu.md); plans expect less, since it leaves out reading,
evaluation and saving.
The others are assumptions. Reading the KV cache is not counted: long answers in large batches take
longer than this says, by up to two times.

**Memory.** The weights alone must not exceed the memory of the GPUs of one server, of SGLang the share that it is given
for weights and KV cache (`static_fraction`). What may fit is not refused: memory is at most what the label names (a GPU
of "80GB" has a little less than 80 GiB), no KV cache and no drafter is counted, and weights are what is served
(`planning.target_files.served_bytes`). GPUs and weights of an unknown size are not judged here: the stage that loads
the target reports those.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from eyrie_api.contract.placement import StageKey
from eyrie_api.contract.plan import ServingMemory
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.errors import GpuTooSmall
from eyrie_api.planning.plan_work import PlannedWork, TargetFacts
from eyrie_api.planning.training_cost import usable_bytes
from eyrie_api.planning.training_defaults import named_gb
from eyrie_api.quantities import size

Speed = Literal["low", "expected", "high"]


@dataclass(frozen=True)
class Rates:
    """Effective throughput of a machine in GFLOP/s, by kind of work."""

    prefill: float = 90.0
    decode: float = 22.0
    """Many requests in a batch."""

    single: float = 1.5
    """One request at a time: memory-bound on the weights."""

    train: float = 48.0
    """Of the training of the demo and of the published model (docs/results/plans.md), without what each step takes
    whatever its size (`plan_work.STEP_OPERATIONS`)."""

    source: str = "measured on a 2-core AVX-512 CPU; set EYRIE_*_GFLOPS for yours"
    store_bytes_per_s: float | None = None
    """To and from where hidden states are stored; None: not limiting."""


@dataclass(frozen=True)
class Gpu:
    """Published figures of one type."""

    name: str
    labels: tuple[str, ...]
    """Parts of its node label (`nvidia.com/gpu.product`), in upper case; the first type with a matching one is it."""

    tflops: float
    """Peak dense bfloat16 TFLOP/s with tensor cores."""

    gb_per_s: float
    """Memory bandwidth."""

    compute: int
    """CUDA compute capability without its dot (90: Hopper)."""

    largest_gb: int | None = None
    """Memory of the largest that is sold, of a type whose label names none. An A100 has 40 or 80 GB: not known."""


# From the data sheet of each line; where it gives figures with sparsity, half of them.
GPUS = (
    # "NVIDIA Blackwell Architecture Technical Brief", HGX B200 (those of a GB200 are higher)
    Gpu("B200", ("B200", "GB200"), 2250.0, 8000.0, 100, 192),
    # "NVIDIA H200 Tensor Core GPU", H200 SXM
    Gpu("H200", ("H200",), 989.0, 4800.0, 90),
    # "NVIDIA H100 Tensor Core GPU", H100 PCIe
    Gpu("H100 PCIe", ("H100-PCIE",), 756.0, 2000.0, 90),
    # The same, H100 SXM
    Gpu("H100", ("H100",), 989.0, 3350.0, 90),
    # "NVIDIA A100 Tensor Core GPU", A100 80GB SXM
    Gpu("A100 80 GB", ("A100-SXM4-80GB", "A100-80GB", "A100-SXM-80GB", "A100 80GB"), 312.0, 2039.0, 80),
    # The same, A100 40GB
    Gpu("A100", ("A100",), 312.0, 1555.0, 80),
    # "NVIDIA L40S"
    Gpu("L40S", ("L40S",), 362.0, 864.0, 89, 48),
    # "NVIDIA L4 Tensor Core GPU"
    Gpu("L4", ("L4",), 121.0, 300.0, 89, 24),
    # "NVIDIA A10 Tensor Core GPU"
    Gpu("A10", ("A10",), 125.0, 600.0, 86, 24),
)
ASSUMED = next(gpu for gpu in GPUS if gpu.name == "H100")
"""Where a job names no type that is known here."""

_PREFILL = {"low": 0.25, "expected": 0.40, "high": 0.50}
_TRAINING = {"low": 0.20, "expected": 0.35, "high": 0.45}
_BANDWIDTH = {"low": 0.45, "expected": 0.60, "high": 0.75}
BATCH = 64
"""Requests that the memory of a GPU holds at once, beyond what the job asks for."""

_BATCH = {"low": BATCH // 2, "expected": BATCH, "high": 2 * BATCH}

_DOUBLED = {"low": 0.8, "expected": 0.9, "high": 0.95}
"""What each doubling of a server's GPUs leaves of their rate: the all-reduces of every layer. Assumed."""

_STORE_BYTES_PER_S = {"low": 3e8, "expected": 1e9, "high": 3e9}
"""A pod's transfer to an object store or a shared file system."""

_PROGRAM_S = {"low": 40.0, "expected": 20.0, "high": 10.0}
"""Until a program computes on a GPU, without loading weights: imports, CUDA, kernels. Assumed."""

_SERVER_S = {"low": 120.0, "expected": 60.0, "high": 30.0}
"""The same of a server of SGLang, which plans its memory and records CUDA graphs. Assumed."""

_LOADED_BYTES_PER_S = {"low": 0.5e9, "expected": 2e9, "high": 5e9}
"""Weights into a GPU's memory, from a network's disk to the page cache. Assumed."""


def start_seconds(work: PlannedWork, stage: StageKey, speed: Speed) -> float:
    """Until a program of a stage, or its server of SGLang, has loaded the target and computes on a GPU."""
    is_server = work.spec.engine.kind == "sglang" and stage not in ("capture", "train")
    return (_SERVER_S if is_server else _PROGRAM_S)[speed] + work.weight_bytes / _LOADED_BYTES_PER_S[speed]


def known_gpu(label: str | None) -> Gpu | None:
    """The type that a node label names; None for none, and for one that is not listed here."""
    text = re.sub(r"[ _]", "-", (label or "").upper())
    return next((gpu for gpu in GPUS if any(re.search(rf"(^|-){re.escape(part.replace(' ', '-'))}(-|$)", text)
                                            for part in gpu.labels)), None)


def gpu_rates(gpu: Gpu, speed: Speed, *, num_gpus: int, tp_size: int, batch: int, weight_bytes: float,
              active_share: float, compute_bytes: int = 2, num_alone: int = 1) -> Rates:
    """Rates of a stage.

    num_gpus       of all its servers or processes together
    tp_size        of one server
    batch          requests at once that the job asks for, over all servers
    weight_bytes   of one weight, as it is read
    active_share   of a mixture's weights, those that compute one token; a batch reads all of them
    compute_bytes  of one value in the products
    num_alone      servers that each answer one request at a time, side by side
    """
    peak = gpu.tflops * 1e3 * 2 / compute_bytes  # float32 computes at half of bfloat16 at best
    num_servers, of_server = max(1, num_gpus // tp_size), tp_size * _DOUBLED[speed] ** math.log2(tp_size)
    prefill = peak * _PREFILL[speed] * of_server
    reads = 2 * gpu.gb_per_s * _BANDWIDTH[speed] / weight_bytes * of_server
    in_flight = min(max(1.0, batch / num_servers), _BATCH[speed] * tp_size)
    decode = min(prefill, reads * max(1.0, in_flight * active_share))
    return Rates(
        prefill=prefill * num_servers, decode=decode * num_servers, single=reads * num_alone,
        train=peak * _TRAINING[speed] * num_gpus, store_bytes_per_s=_STORE_BYTES_PER_S[speed],
        source=f"{num_gpus} x {gpu.name}: {gpu.tflops:g} TFLOP/s in bfloat16 and {gpu.gb_per_s:g} GB/s (data sheet), "
               f"of which {_PREFILL['low']:.0%}-{_PREFILL['high']:.0%}, in training {_TRAINING['low']:.0%}-"
               f"{_TRAINING['high']:.0%}, and {_BANDWIDTH['low']:.0%}-{_BANDWIDTH['high']:.0%} are reached"
               + (f"; of {tp_size} GPUs to a server, {_DOUBLED['low']:.0%}-{_DOUBLED['high']:.0%} for each doubling"
                  if tp_size > 1 else ""))


# Memory.

_GIB = 2**30
_SMALLEST_SERVER_GIB = 16
"""Of smaller GPUs SGLang's rule leaves next to nothing; all of their memory is counted, since what may fit is not
refused."""


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
    largest = named or (None if known is None else known.largest_gb)
    return None if largest is None else largest * _GIB


def static_fraction(memory_gib: float) -> float:
    """SGLang's own rule for `--mem-fraction-static`, less a margin for what speculation needs outside the KV pool.

    The rule (`memory_hook.py`): all memory but 0.5 GiB, 1.5 MiB per token of a prefill chunk, 2 MiB per captured decode
    batch size and about 0.6 GiB of prefill graphs; at least 10 GiB above 60 GiB. Drafter weights count inside the
    fraction since SGLang PR 28855. Outside of it are the drafter's graphs and the logits of verification (48 requests x
    8 draft tokens x 128k vocabulary in float32 are 0.2 GiB): 2 % covers both on the smallest GPU. The variant without
    speculation leaves them unused, so that all variants have the same fraction.
    """
    chunk, graphs = next((chunk, graphs) for below, chunk, graphs in (
        (35, 4096, 48), (60, 4096, 32), (160, 8192, 256), (math.inf, 16384, 512)) if memory_gib < below)
    reserved_mib = 512 + 1.5 * chunk + 2 * graphs + 600
    if memory_gib > 60:
        reserved_mib = max(reserved_mib, 10 * 1024)
    return math.floor(100 * (1 - reserved_mib / (1024 * memory_gib) - 0.02)) / 100


def served_memory(device: int, given: float | None = None) -> int:
    """What a server of SGLang has of a GPU for weights and KV cache; the job may give the share."""
    if given is None and device < _SMALLEST_SERVER_GIB * _GIB:
        return device
    return int(device * (given or static_fraction(device / _GIB)))


def too_small_gpus(job: ResolvedJob, facts: TargetFacts, weights: int, *, computed: int, serves: bool, node_gpus: int,
                   memory: Callable[[str | None], int | None]) -> list[GpuTooSmall]:
    """One error for each kind of GPUs that cannot hold the weights, naming the stages.

    weights   bytes of the target as it is served
    computed  the same where Eyrie or transformers compute it: more, where a quantised target is served by SGLang
    serves    whether an endpoint loads it, on the GPUs of `serve.placement`
    node_gpus GPUs of one node
    memory    bytes of a GPU by its label; a job may name none
    """
    too_small: dict[_Holder, list[str]] = {}
    given = job.spec.engine.sglang_arguments.mem_fraction_static
    for place, holder in _holders(job, serves):
        device = memory(holder.gpu_type)
        if device is not None and (weights > holder.num_gpus * served_memory(device, given) if holder.is_server
                                   else computed > holder.num_gpus * device):
            too_small.setdefault(holder, []).append(place)
    errors = []
    for holder, places in too_small.items():
        needs, device = weights if holder.is_server else computed, memory(holder.gpu_type) or 0
        gpus, has = f"{holder.num_gpus} x {holder.gpu_type or 'GPU of this machine'}", (
            "has" if holder.num_gpus == 1 else "have")
        served = served_memory(device, given)
        needed = needs / holder.num_gpus * (device / served if holder.is_server else 1)
        larger = f"name a type of GPU with more than {size(needed)}"
        enough, instead = fewest_gpus(facts, needs, device, node_gpus, given)
        gives = f", of which SGLang takes {size(holder.num_gpus * served)} for weights and KV cache"
        if enough is None:
            hint = instead if holder.is_server else f"{larger}, or a smaller or quantised target"
        elif holder.is_server:
            hint = f"set engine.tp_size to {enough} or more, with as many GPUs there, or {larger}"
        else:
            hint = f"set engine to {{kind: sglang, tp_size: {enough}}}, with as many GPUs there, or {larger}"
        errors.append(GpuTooSmall(
            f"{holder.why}: the target's weights are {size(needs)}, and {gpus} {has} {size(holder.num_gpus * device)}"
            f"{gives if holder.is_server and served < device else ''} (for {', '.join(places)})", hint))
    return errors


_CONTEXT_TOKENS = 4096
"""Of a user, at least: what SGLang's limit of requests is computed with (`serve.max_concurrency`)."""


def serving_memory(work: PlannedWork, gpu_type: str | None, num_gpus: int,
                   gpu_memory: int | None) -> ServingMemory | None:
    """Of one engine of the endpoint, and for how many users; None where the memory of its GPUs is not known.

        memory for weights and KV cache = GPUs * memory of one * the share that SGLang is given (`static_fraction`; CUDA
                                          graphs and workspace are outside of it), or `training_cost.usable_bytes`
        bytes of a user                 = tokens of the context * keys and values of target and drafter

    Keys and values are divided among a server's GPUs by heads: with fewer heads than GPUs each is repeated, and the
    vector of latent attention is on every GPU. A drafter counts as one layer of the target, like EAGLE's; of other
    families, with more layers, a user takes a little more. An engine with a new drafter is started next to the one that
    serves: with GPUs for one alone, the endpoint is away while the new one loads.

    num_gpus    of the engine together
    gpu_memory  bytes of one whose label names no size
    """
    spec, target, element = work.spec, work.target, ELEMENT_BYTES[work.job.target.dtype]
    device = memory_of(gpu_type) or gpu_memory
    if device is None:
        return None
    given = spec.engine.sglang_arguments.mem_fraction_static
    of_one = served_memory(device, given) if spec.engine.kind == "sglang" else usable_bytes(device)
    drafter = max((work.drafter(candidate).parameters for candidate in work.job.candidates), default=0) * element
    repeated = num_gpus if target.latent is not None else max(1.0, num_gpus / target.num_kv_heads)
    tokens = max(_CONTEXT_TOKENS, spec.data.max_prompt_tokens + spec.regenerate.max_new_tokens)
    user = round(tokens * target.key_values * (1 + 1 / target.num_layers) * element * repeated)
    available, users = num_gpus * of_one, max(spec.prove.concurrencies)
    fit = max(0, available - work.weight_bytes - drafter) // user
    known = known_gpu(gpu_type)
    name = known.name if known is not None else gpu_type or "GPU of this machine"
    return ServingMemory(
        num_gpus=num_gpus, gpu_type=name, available_bytes=available, weight_bytes=work.weight_bytes,
        drafter_bytes=drafter, user_bytes=user, context_tokens=tokens, users=users, users_that_fit=fit,
        update_gpus=2 * num_gpus,
        words=f"an engine on {num_gpus} x {name} has {size(available)} for weights and KV cache: "
              f"{size(work.weight_bytes)} target, {size(drafter)} drafter, {size(user)} for each user of {tokens} "
              f"tokens; {fit} users fit, {users} are declared (prove.concurrencies). A new drafter is started next to "
              f"the one that serves, on {2 * num_gpus} GPUs; with {num_gpus} the endpoint is away while it loads "
              "(on a cluster: serving.surge false)")


def undivided(facts: TargetFacts, tp_size: int) -> str | None:
    """What of a target SGLang 0.5.23 does not divide among so many GPUs; None: all of it.

    Attention heads are divided evenly; fewer key-value heads than GPUs are repeated, more are divided evenly. Of
    matrices whose scales are of blocks each GPU has whole blocks: of the experts
    (`model_runner_components.moe_ep_setup.check_quantized_moe_compatibility`, and `create_fp8_moe_weight_`), and of
    MLPs and attention (`Fp8LinearMethod.validate_block_quant_shapes` in `layers/quantization/fp8.py`), where rows are
    checked on one GPU too, since gate and up, and q, k and v, are joined. The matrices of latent attention are not
    judged: those of known targets have whole blocks wherever their heads are divided. tests/sglang asks SGLang's code.
    """
    repeated = facts.num_kv_heads < tp_size
    if facts.num_heads % tp_size:
        return f"the target's {facts.num_heads} attention heads"
    if tp_size % facts.num_kv_heads if repeated else facts.num_kv_heads % tp_size:
        return f"the target's {facts.num_kv_heads} key-value heads"
    if facts.block is None:
        return None
    experts, (rows, columns) = facts.experts, facts.block
    widths: dict[str, int] = {}
    if experts is not None:
        widths["moe_intermediate_size"] = experts.intermediate_size
    if experts is None or experts.dense_layers:
        widths["intermediate_size"] = facts.intermediate_size
    if facts.latent is None:
        widths["width of queries"] = facts.num_heads * facts.head_dim
    for name, width in widths.items():
        for unit in (rows, columns) if tp_size > 1 else (rows,):
            if width % (tp_size * unit):
                return f"the target's {name} {width} into whole blocks of {unit} (weight_block_size)"
    keys = max(1, facts.num_kv_heads // tp_size) * facts.head_dim
    if facts.latent is None and keys % rows:
        return f"the target's {facts.num_kv_heads} key-value heads into whole blocks of {rows} (weight_block_size)"
    return None


def fitting_sizes(facts: TargetFacts) -> list[int]:
    """Numbers of GPUs that divide the target."""
    return [size for size in range(1, min(facts.num_heads, 64) + 1) if undivided(facts, size) is None]


def fewest_gpus(facts: TargetFacts, weights: int, device: int, node_gpus: int,
                given: float | None = None) -> tuple[int | None, str]:
    """The fewest GPUs of one server that hold the weights. None, with what to do instead, where one node has too few: a
    server is not divided among nodes.

    device   bytes of one GPU; `given` is the share of it that the job gives its servers
    """
    sizes, served = fitting_sizes(facts), served_memory(device, given)
    enough = next((number for number in sizes if number * served >= weights), None)
    if enough is not None and enough <= node_gpus:
        return enough, ""
    here = [number for number in sizes if number <= node_gpus]
    types = sorted((memory, gpu.name) for gpu in GPUS if (memory := memory_of(gpu.labels[0])) is not None)
    larger = next((f"name a larger type of GPU, such as {number} x {name}, or " for memory, name in types
                   for number in here if number * served_memory(memory, given) >= weights), "")
    # Of 16 bits or more for each parameter, and with 8 it fits.
    halved = weights >= 2 * facts.parameters and max(here, default=0) * served >= facts.parameters
    return None, (f"it takes {enough or math.ceil(weights / served)} GPUs of this size, and one node has {node_gpus}: "
                  f"{larger}use {'an FP8 checkpoint' if halved else 'a smaller or quantised target'}")


def _holders(job: ResolvedJob, serves: bool) -> Iterator[tuple[str, _Holder]]:
    spec, engine = job.spec, job.spec.engine
    server = (engine.tp_size, f"engine.tp_size is {engine.tp_size}", True)
    alone = (1, "engine.kind is 'embedded', which computes on one device", False)
    used = server if engine.kind == "sglang" else alone
    stages: dict[StageKey, tuple[int, str, bool]] = {"benchmark": used, "tune": used, "prove": used}
    if not spec.data.answered and spec.regenerate.engine in (None, "embedded"):
        stages["regenerate"] = used if spec.regenerate.engine is None else (
            1, "regenerate.engine is 'embedded', which computes on one device", False)
    if spec.capture.mode == "stream":
        stages["train"] = (1, "capture.mode is 'stream', for which each GPU of training computes the target", False)
    elif spec.capture.source in ("reference", "transformers"):
        stages["capture"] = (
            1, f"capture.source is '{spec.capture.source}', which computes on one device", False)
    else:
        stages["capture"] = used  # a target larger than one GPU is captured by servers of SGLang
    for stage, (num_gpus, why, is_server) in stages.items():
        if stage in spec.stages and job.gpus[stage].num_gpus != 0:
            yield stage, _Holder(why, num_gpus, job.gpus[stage].gpu_type, is_server)
    placed = job.serving_gpus
    if serves and placed.num_gpus != 0 and spec.promotion.mode != "never":
        num_gpus, why, is_server = used
        if is_server and (placed.num_gpus or 0) > num_gpus:
            num_gpus, why = placed.num_gpus or 0, f"serve.placement.num_gpus is {placed.num_gpus}"
        yield "serve", _Holder(why, num_gpus, placed.gpu_type, is_server)
