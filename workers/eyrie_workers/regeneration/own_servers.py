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
from eyrie_workers.engines.managed_servers import ManagedServer, ServerPlan, managed_servers
from eyrie_workers.engines.sglang.gpu_groups import gpu_groups, visible_gpus

Pause = Callable[[], None]


@contextmanager
def own_servers(spec: RegenerateStage, directory: Path, pause: Pause) -> Iterator[tuple[RegenerateSpec, Pause]]:
    """Start the servers and wait until they are ready; stop them when the block is left.

    Yields the section with the servers' URLs, and a `pause` that raises EngineFailed when a server has ended. Raises as
    `managed_servers`.
    """
    groups = gpu_groups(visible_gpus(), spec.engine.tp_size, spec.engine.num_gpus)
    concurrency = -(-spec.regenerate.concurrency // len(groups))
    plan = ServerPlan("sglang", spec.target, concurrency, tp_size=spec.engine.tp_size, gpu_groups=groups)
    uses = {f"server-{number}": DrafterUse() for number in range(len(groups))}
    with managed_servers(plan, uses, directory, pause) as servers:
        urls = tuple(server.server.url for server in servers.values())
        section = spec.regenerate.model_copy(update={
            "engine": "openai", "base_url": None, "endpoints": urls, "served_model": plan.model})
        yield section, _watching(tuple(servers.values()), pause)


def _watching(servers: tuple[ManagedServer, ...], pause: Pause) -> Pause:
    def checked() -> None:
        pause()
        for server in servers:
            server.server.check()

    return checked
