"""Regeneration in SGLang without an endpoint: servers without a drafter, one per group of `engine.tp_size` GPUs.

Each request goes to the server with the fewest in flight (`dispatch`), as token ids (`Endpoint.native`). A server that
ends is reported with the last lines of its log; the stage then starts the servers again, once (`stages.regenerate`).
They are killed with the stage (`engines.parent_death_signal`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_api.v1alpha1.stages import RegenerateStage
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.engines.sglang.local_hardware import gpu_groups, visible_gpus
from eyrie_workers.engines.sglang.servers import ServerPlan, ServerPool
from eyrie_workers.stage_program import Stage

Pause = Callable[[], None]


@contextmanager
def own_servers(spec: RegenerateStage, directory: Path, stage: Stage) -> Iterator[tuple[RegenerateSpec, Pause]]:
    """Start the servers and wait until they are ready; stop them when the block is left.

    Yields the section with the servers' URLs, and a pause point that raises EngineFailed when a server has ended.
    Raises EngineFailed when a server cannot start, Transient when one is not ready in time.
    """
    groups = gpu_groups(visible_gpus(), spec.engine.tp_size, spec.engine.num_gpus)
    concurrency = -(-spec.regenerate.concurrency // len(groups))
    plan = ServerPlan("sglang", spec.target, concurrency, tp_size=spec.engine.tp_size, gpu_groups=groups)
    uses = {f"server-{number}": DrafterUse() for number in range(len(groups))}
    pool = ServerPool(plan, uses, directory, stage, capacity=len(groups), beside_reference=False)
    try:
        for error in pool.make_ready(list(uses)).values():
            raise error
        servers = [pool.server(name).server for name in uses]

        def pause() -> None:
            stage.pause_point()
            for server in servers:
                server.check()

        yield spec.regenerate.model_copy(update={
            "engine": "openai", "base_url": None, "endpoints": tuple(server.url for server in servers),
            "served_model": plan.model}), pause
    finally:
        pool.stop()
