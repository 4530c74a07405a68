"""Generation in the job's own engine: the reference engine in this process, or SGLang servers started for the stage.

Decoding a small batch costs little more than decoding one token: the weights are read once for all rows.
`EmbeddedClient` keeps the reference engine full: a finished answer frees its slot for the next prompt, so short answers
do not wait for long ones. Attention reads as many keys of every row as the longest one has; prompts are therefore sent
in an order by length, a window of them at a time.

`sglang_servers` starts servers without a drafter, one per group of `engine.tp_size` GPUs. Each request goes to the
server with the fewest in flight (`regeneration.online`), as token ids (`Endpoint.native`). A server that ends is
reported with the last lines of its log; the stage then starts the servers again, once (`stages.regenerate`). They are
killed with the stage (`engines.parent_death_signal`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.contract.tuning import DrafterUse
from eyrie_workers.regeneration.answers import GeneratedAnswer, GenerationOutcome, GenerationRequest
from eyrie_workers.sglang.local_hardware import gpu_groups, visible_gpus
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan, ServerPool
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.templates import ChatTokenizer

_WINDOW = 16
"""Prompts that are put in order together, as a multiple of those in flight."""


@dataclass
class EmbeddedClient:
    """`GenerationClient` over `speculation.engine.Engine`, without a drafter."""

    engine: Engine
    tokenizer: ChatTokenizer
    spec: RegenerateSpec
    context: int  # longest prompt and answer together, in tokens

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        in_flight: dict[str, GenerationRequest] = {}
        waiting: list[GenerationRequest] = []
        shortest_first = False  # in turn, so that the windows' ends have similar lengths
        try:
            while True:
                while len(in_flight) < self.spec.concurrency:
                    if not waiting:
                        waiting = sorted(islice(prompts, _WINDOW * self.spec.concurrency),
                                         key=lambda prompt: len(prompt.prompt_ids), reverse=shortest_first)
                        shortest_first = not shortest_first
                    if not waiting:
                        break
                    prompt = waiting.pop()
                    max_tokens = min(prompt.max_new_tokens or self.spec.max_new_tokens,
                                     self.context - len(prompt.prompt_ids))
                    self.engine.submit(Request(
                        id=prompt.row_id, prompt_ids=tuple(prompt.prompt_ids), max_new_tokens=max_tokens,
                        sampling=self.spec.sampling, seed=prompt.seed, stop_ids=tuple(self.tokenizer.eos_ids)))
                    in_flight[prompt.row_id] = prompt
                if not in_flight:
                    return
                pause()
                for done in (progress.generation for progress in self.engine.step()):
                    if done is not None:
                        text_ids = done.token_ids[:-1] if done.finish_reason == "stop" else done.token_ids
                        yield GeneratedAnswer(
                            row_id=done.id, prompt_ids=in_flight.pop(done.id).prompt_ids, answer_ids=done.token_ids,
                            finish_reason=done.finish_reason, ids_exact=True, text=self.tokenizer.decode(text_ids))
        finally:
            for row_id in in_flight:
                self.engine.cancel(row_id)


Pause = Callable[[], None]


@contextmanager
def sglang_servers(spec: RegenerateStage, directory: Path, stage: Stage,
                   history: ServerHistory) -> Iterator[tuple[RegenerateSpec, Pause]]:
    """Start the servers and wait until they are ready; stop them when the block is left.

    Yields the section with the servers' URLs, and a pause point that raises EngineFailed when a server has ended.
    Raises EngineFailed when a server cannot start, Transient when one is not ready in time.
    """
    groups = gpu_groups(visible_gpus(), spec.engine.tp_size, spec.engine.num_gpus)
    concurrency = -(-spec.regenerate.concurrency // len(groups))
    plan = ServerPlan("sglang", spec.target, concurrency, engine=spec.engine, gpu_groups=groups)
    uses = {f"server-{number}": DrafterUse() for number in range(len(groups))}
    pool = ServerPool(plan, uses, directory, stage, history, capacity=len(groups), beside_reference=False)
    try:
        for error in pool.make_ready(list(uses)).values():
            raise error
        servers = [pool.server(name) for name in uses]

        def pause() -> None:
            stage.pause_point()
            for server in servers:
                server.check()

        yield spec.regenerate.model_copy(update={
            "engine": "openai", "base_url": None, "endpoints": tuple(server.url for server in servers),
            "served_model": plan.model}), pause
    finally:
        pool.stop()
