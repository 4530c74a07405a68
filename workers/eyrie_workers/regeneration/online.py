"""Asks OpenAI-compatible endpoints, one request per row, many at once, each where the least are in flight.

An event loop lives inside the generator: as many requests as `concurrency` are in flight, a finished one makes room
for the next, and whoever consumes the answers decides the pace. Closing the generator, or a request to stop, cancels
what is in flight; those rows are asked again next time, with the same seed.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

from eyrie_api.errors import Transient
from eyrie_workers.regeneration.asking import Answer, Prompt, Refusal
from eyrie_workers.regeneration.dispatch import Route, Routes
from eyrie_workers.regeneration.endpoint import (
    AnswerTokenizer,
    Endpoint,
    declined,
    may_pass,
    read_answer,
    refuses_ids_field,
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
    _routes: Routes = field(init=False)
    _warned: bool = False
    _answered: int = 0

    def __post_init__(self) -> None:
        self._routes = Routes(self.endpoint.base_urls)

    def answers(self, prompts: Iterator[Prompt], pause: Callable[[], None]) -> Iterator[Answer | Refusal]:
        """See `AnswerEngine`. Raises Transient when retries are used up, Permanent when every request would fail."""
        with asyncio.Runner() as runner:
            clients = _Clients(self.endpoint)
            in_flight: set[asyncio.Task[Answer | Refusal]] = set()
            try:
                while True:
                    while len(in_flight) < self.endpoint.concurrency and (prompt := next(prompts, None)) is not None:
                        in_flight.add(runner.get_loop().create_task(self._ask(clients, prompt)))
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
                runner.run(_abandon(in_flight, clients))

    async def _ask(self, clients: "_Clients", prompt: Prompt) -> Answer | Refusal:
        answered_before = self._answered
        client = clients.take()
        try:
            async with asyncio.timeout(self.endpoint.deadline_s):
                return await self._ask_until_answered(client, prompt, answered_before)
        except TimeoutError:
            trouble = f"no answer within regenerate.deadline_s = {self.endpoint.deadline_s:g}"
            if self._answered > answered_before:
                return Refusal(prompt.row_id, f"{trouble}, while others were answered")
            raise Transient(f"{', '.join(self.endpoint.base_urls)}: {trouble}",
                            "see that the endpoint is up, then retry: answered rows are kept", 60.0) from None
        finally:
            clients.give_back(client)

    async def _ask_until_answered(self, client: httpx.AsyncClient, prompt: Prompt,
                                  answered_before: int) -> Answer | Refusal:
        routes, attempt = self._routes, 0
        while True:
            route = routes.take(time.monotonic())
            url, ids_field = f"{route.url}/chat/completions", route.ids_field
            retry_after: str | None = None
            try:
                response = await client.post(url, json=request_body(self.endpoint, prompt, ids_field=ids_field))
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__} {error}".strip()
            except BaseException:
                routes.dropped(route)
                raise
            else:
                if not may_pass(response.status_code):
                    routes.answered(route)
                    if response.status_code == 200:
                        return self._read(route, ids_field, prompt, _json(response))
                    if refuses_ids_field(response.status_code, response.text, ids_field):
                        route.does_not_know(ids_field)  # for every request from now on
                        continue
                    return declined(prompt, response.status_code, response.text, url)
                trouble, retry_after = f"status {response.status_code}", response.headers.get("Retry-After")
            # A jitter, not a secret.
            delay_s = retry_delay_s(attempt, retry_after, self.first_delay_s, random.random())
            routes.failed(route, time.monotonic(), delay_s if retry_after else 0.0)
            if attempt >= self.endpoint.max_retries:
                if self._answered > answered_before and trouble != _TOO_MANY:
                    # Others were answered meanwhile: it is this prompt, and it must not stop the job for ever.
                    return Refusal(prompt.row_id, f"failed {attempt + 1} times while others were answered: {trouble}")
                raise Transient(f"{url} failed {attempt + 1} times for one request: {trouble}",
                                "see that the endpoint is up, then retry: answered rows are kept", 60.0)
            if not routes.another_is_well(time.monotonic()):
                await asyncio.sleep(delay_s)
            attempt += 1

    def _read(self, route: Route, ids_field: str | None, prompt: Prompt, payload: object) -> Answer | Refusal:
        self._answered += 1
        outcome = read_answer(prompt, payload, self.tokenizer)
        if isinstance(outcome, Answer) and not outcome.ids_exact:
            route.does_not_know(ids_field)  # it took the field and said nothing
        return outcome

    def _told(self, outcome: Answer | Refusal) -> Answer | Refusal:
        if isinstance(outcome, Answer) and not outcome.ids_exact and not self._warned:
            self._warned = True
            self.warn("TokenIdsNotReturned", "the endpoint returns no token ids: answers are tokenised again from "
                      "their text, which may differ from the ids the target produced (rows say ids_exact: false)")
        return outcome


class _Clients:
    """A client for each request in flight, the last used first.

    Not one for all: httpcore's pool looks at every connection for every connection at each request, which at 64 in
    flight was most of the processor time a row cost.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._certificates = httpx.create_ssl_context()  # 20 ms to read, so once
        self._all: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    def take(self) -> httpx.AsyncClient:
        """One that nobody uses."""
        if not self._free:
            self._free.append(httpx.AsyncClient(headers=self._endpoint.headers, timeout=self._endpoint.timeout_s,
                                                verify=self._certificates))
            self._all += self._free
        return self._free.pop()

    def give_back(self, client: httpx.AsyncClient) -> None:
        """It may be taken again, with the connections it has open."""
        self._free.append(client)

    async def aclose(self) -> None:
        """Close every connection."""
        for client in self._all:
            await client.aclose()


async def _first_done(tasks: set[asyncio.Task[Answer | Refusal]]) -> tuple[
        set[asyncio.Task[Answer | Refusal]], set[asyncio.Task[Answer | Refusal]]]:
    return await asyncio.wait(tasks, timeout=_LISTEN_S, return_when=asyncio.FIRST_COMPLETED)


async def _abandon(tasks: set[asyncio.Task[Answer | Refusal]], clients: _Clients) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await clients.aclose()


def _json(response: httpx.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return None
