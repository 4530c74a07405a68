"""Generation with the reference engine in this process, many prompts at once.

Decoding a small batch costs little more than decoding one token: the weights are read once for all rows. The client
keeps the engine full: a finished answer frees its slot for the next prompt, so short answers do not wait for long ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from eyrie_workers.regeneration.generation_client import (
    GeneratedAnswer,
    GenerationOutcome,
    GenerationParams,
    GenerationRequest,
)
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.requests import Generation, Request
from eyrie_workers.targets.templates import ChatTokenizer


@dataclass
class EmbeddedClient:
    """`GenerationClient` over `speculation.engine.Engine`, without a drafter."""

    engine: Engine
    tokenizer: ChatTokenizer
    params: GenerationParams
    context: int
    """Longest prompt and answer together, in tokens."""

    concurrency: int
    _in_flight: dict[str, GenerationRequest] = field(default_factory=dict)

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        """See `GenerationClient`."""
        try:
            while True:
                while len(self._in_flight) < self.concurrency and (prompt := next(prompts, None)) is not None:
                    self._submit(prompt)
                if not self._in_flight:
                    return
                pause()
                for progress in self.engine.step():
                    if progress.generation is not None:
                        yield self._finished(progress.generation)
        finally:
            for row_id in self._in_flight:
                self.engine.cancel(row_id)
            self._in_flight.clear()

    def _submit(self, prompt: GenerationRequest) -> None:
        max_tokens = min(prompt.max_new_tokens or self.params.max_new_tokens, self.context - len(prompt.prompt_ids))
        self.engine.submit(Request(
            id=prompt.row_id, prompt_ids=tuple(prompt.prompt_ids),
            max_new_tokens=max_tokens, sampling=self.params.sampling, seed=prompt.seed,
            stop_ids=tuple(self.tokenizer.eos_ids)))
        self._in_flight[prompt.row_id] = prompt

    def _finished(self, done: Generation) -> GeneratedAnswer:
        ended = done.finish_reason == "stop"
        prompt_ids = self._in_flight.pop(done.id).prompt_ids
        return GeneratedAnswer(row_id=done.id, prompt_ids=prompt_ids, answer_ids=done.token_ids,
                      finish_reason=done.finish_reason, ids_exact=True,
                      text=self.tokenizer.decode(done.token_ids[:-1] if ended else done.token_ids))
