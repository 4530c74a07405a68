"""Asks an OpenAI-compatible endpoint, one request per row, many at once.

An event loop lives inside the generator: as many requests as `concurrency` are in flight, a finished one makes room
for the next, and whoever consumes the answers decides the pace. Closing the generator, or a request to stop, cancels
what is in flight; those rows are asked again next time, with the same seed.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from eyrie_api.errors import Transient
from eyrie_workers.regeneration.asking import Answer, Prompt, Refusal
from eyrie_workers.regeneration.endpoint import (
    AnswerTokenizer,
    Endpoint,
    declined,
    may_pass,
    read_answer,
    refuses_token_ids,
    request_body,
    retry_delay_s,
)

_TOO_MANY = "status 429"
_LISTEN_S = 0.2
"""How long a request to stop may go unheard."""


@dataclass
class OnlineEngine:
    """`AnswerEngine` over chat completion requests."""

    endpoint: Endpoint
    tokenizer: AnswerTokenizer
    warn: Callable[[str, str], None]
    """Called with a reason and a sentence."""

    first_delay_s: float = 0.5
    _want_ids: bool = True
    _warned: bool = False
    _answered: int = 0

    def answers(self, prompts: Iterator[Prompt], pause: Callable[[], None]) -> Iterator[Answer | Refusal]:
        """See `AnswerEngine`. Raises Transient when retries are used up, Permanent when every request would fail."""
        with asyncio.Runner() as runner:
            client = httpx.AsyncClient(headers=self.endpoint.headers, timeout=self.endpoint.timeout_s,
                                       limits=httpx.Limits(max_connections=self.endpoint.concurrency))
            in_flight: set[asyncio.Task[Answer | Refusal]] = set()
            try:
                while True:
                    while len(in_flight) < self.endpoint.concurrency and (prompt := next(prompts, None)) is not None:
                        in_flight.add(runner.get_loop().create_task(self._ask(client, prompt)))
                    if not in_flight:
                        return
                    pause()
                    done, in_flight = runner.run(_first_done(in_flight))
                    failures = [error for task in done if (error := task.exception()) is not None]
                    # Answers first: what has arrived is kept even when another request ends the stage.
                    for task in done:
                        if task.exception() is None:
                            yield self._told(task.result())
                    if failures:
                        raise failures[0]
            finally:
                runner.run(_abandon(in_flight, client))

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt) -> Answer | Refusal:
        url = f"{self.endpoint.base_url}/chat/completions"
        answered_before, attempt = self._answered, 0
        while True:
            asked_ids = self._want_ids
            try:
                response = await client.post(url, json=request_body(self.endpoint, prompt, want_ids=asked_ids))
            except httpx.TransportError as error:
                trouble, retry_after = f"{type(error).__name__} {error}".strip(), None
            else:
                if response.status_code == 200:
                    self._answered += 1
                    return read_answer(prompt, _json(response), self.tokenizer)
                if asked_ids and refuses_token_ids(response.status_code, response.text):
                    self._want_ids = False  # for every request from now on
                    continue
                if not may_pass(response.status_code):
                    return declined(prompt, response.status_code, response.text, url)
                trouble, retry_after = f"status {response.status_code}", response.headers.get("Retry-After")
            if attempt >= self.endpoint.max_retries:
                if self._answered > answered_before and trouble != _TOO_MANY:
                    # Others were answered meanwhile: it is this prompt, and it must not stop the job for ever.
                    return Refusal(prompt.row_id, f"failed {attempt + 1} times while others were answered: {trouble}")
                raise Transient(f"{url} failed {attempt + 1} times for one request: {trouble}",
                                "see that the endpoint is up, then retry: answered rows are kept", 60.0)
            # A jitter, not a secret.
            await asyncio.sleep(retry_delay_s(attempt, retry_after, self.first_delay_s, random.random()))
            attempt += 1

    def _told(self, outcome: Answer | Refusal) -> Answer | Refusal:
        if isinstance(outcome, Answer) and not outcome.ids_exact and not self._warned:
            self._warned = True
            self.warn("TokenIdsNotReturned", "the endpoint returns no token ids: answers are tokenised again from "
                      "their text, which may differ from the ids the target produced (rows say ids_exact: false)")
        return outcome


async def _first_done(tasks: set[asyncio.Task[Answer | Refusal]]) -> tuple[
        set[asyncio.Task[Answer | Refusal]], set[asyncio.Task[Answer | Refusal]]]:
    return await asyncio.wait(tasks, timeout=_LISTEN_S, return_when=asyncio.FIRST_COMPLETED)


async def _abandon(tasks: set[asyncio.Task[Answer | Refusal]], client: httpx.AsyncClient) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


def _json(response: httpx.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return None
