"""GPU memory of an engine that serves a job's target: what it holds, and for how many users. Pure.

    memory for weights and KV cache = GPUs * memory of one * the share that SGLang is given (`hardware.static_fraction`;
                                      CUDA graphs and workspace are outside of it), or `training_cost.usable_bytes`
    bytes of a user                 = tokens of the context * keys and values of target and drafter

Keys and values are divided among a server's GPUs by heads: with fewer heads than GPUs each is repeated, and the vector
of latent attention is on every GPU. A drafter counts as one layer of the target, like EAGLE's; of other families, with
more layers, a user takes a little more. An engine with a new drafter is started next to the one that serves: with GPUs
for one alone, the endpoint is away while the new one loads.
"""

from eyrie_api.contract.plan import ServingMemory
from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.planning.hardware import known_gpu, memory_of, served_memory
from eyrie_api.planning.plan_work import PlannedWork
from eyrie_api.planning.training_cost import usable_bytes
from eyrie_api.quantities import size

_CONTEXT_TOKENS = 4096
"""Of a user, at least: what SGLang's limit of requests is computed with (`serve.max_concurrency`)."""


def serving_memory(work: PlannedWork, gpu_type: str | None, num_gpus: int,
                   gpu_memory: int | None) -> ServingMemory | None:
    """Of one engine; None where the memory of its GPUs is not known.

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
