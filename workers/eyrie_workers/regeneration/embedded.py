"""Answers with our own engine in this process, many prompts at once.

Decoding a small batch costs little more than decoding one token: the weights are read once for all. So the engine is
kept full: a finished answer makes room for the next prompt, and short answers never wait for long ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from eyrie_workers.regeneration.generation_client import Answer, Asking, Prompt, Refusal
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.requests import Generation, Request
from eyrie_workers.targets.templates import ChatTokenizer


@dataclass
class EmbeddedEngine:
    """`AnswerEngine` over `speculation.engine.Engine`, without a drafter."""

    engine: Engine
    tokenizer: ChatTokenizer
    asking: Asking
    context: int
    """Longest prompt and answer together, in tokens."""

    concurrency: int
    _asked: dict[str, Prompt] = field(default_factory=dict)

    def answers(self, prompts: Iterator[Prompt], pause: Callable[[], None]) -> Iterator[Answer | Refusal]:
        """See `AnswerEngine`."""
        try:
            while True:
                while len(self._asked) < self.concurrency and (prompt := next(prompts, None)) is not None:
                    self._submit(prompt)
                if not self._asked:
                    return
                pause()
                for progress in self.engine.step():
                    if progress.generation is not None:
                        yield self._finished(progress.generation)
        finally:
            for row_id in self._asked:
                self.engine.cancel(row_id)
            self._asked.clear()

    def _submit(self, prompt: Prompt) -> None:
        room = self.context - len(prompt.prompt_ids)
        self.engine.submit(Request(
            id=prompt.row_id, prompt_ids=tuple(prompt.prompt_ids),
            max_new_tokens=min(self.asking.max_new_tokens, room), sampling=self.asking.sampling, seed=prompt.seed,
            stop_ids=tuple(self.tokenizer.eos_ids)))
        self._asked[prompt.row_id] = prompt

    def _finished(self, done: Generation) -> Answer:
        ended = done.finish_reason == "stop"
        return Answer(row_id=done.id, prompt_ids=self._asked.pop(done.id).prompt_ids, answer_ids=done.token_ids,
                      finish_reason=done.finish_reason, ids_exact=True,
                      text=self.tokenizer.decode(done.token_ids[:-1] if ended else done.token_ids))
