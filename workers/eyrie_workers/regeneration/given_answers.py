"""Answers that the data has already (`data.answered`), in place of generated ones.

They pass through the same selection, ledger and checks as generated answers. Their ids are the tokenizer's choice for
their text (`retokenising`); the target may have chosen others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eyrie_workers.regeneration.generation_client import (
    GeneratedAnswer,
    GenerationFailure,
    GenerationOutcome,
    GenerationRequest,
)
from eyrie_workers.regeneration.retokenising import AnswerRetokenizer


@dataclass(frozen=True)
class GivenAnswers:
    """`GenerationClient` over `GenerationRequest.given`."""

    tokenizer: AnswerRetokenizer
    max_new_tokens: int
    """Where an answer is cut, unless its request has a limit of its own."""

    context: int
    """Longest prompt and answer together, in tokens."""

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        """See `GenerationClient`."""
        for prompt in prompts:
            pause()
            yield self._answer(prompt)

    def _answer(self, prompt: GenerationRequest) -> GenerationOutcome:
        given = prompt.given
        assert given is not None, "the selection rejects rows without an answer"
        try:
            ids = self.tokenizer.answer_ids(prompt, given, ended=True)
        except ValueError as error:
            return GenerationFailure(prompt.row_id, str(error), "declined")
        limit = min(prompt.max_new_tokens or self.max_new_tokens, self.context - len(prompt.prompt_ids))
        return GeneratedAnswer(
            row_id=prompt.row_id, prompt_ids=prompt.prompt_ids, answer_ids=ids[:limit],
            finish_reason="stop" if len(ids) <= limit else "length", text=given.get("content") or "", ids_exact=False,
            reasoning=given.get("reasoning_content") or "", tool_calls=tuple(given.get("tool_calls") or ()))
