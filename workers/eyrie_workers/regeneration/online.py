"""Generation through OpenAI-compatible endpoints: one request per row, many in flight, balanced over the endpoints.

An event loop runs inside the generator: up to `concurrency` requests are in flight, each finished one is replaced by
the next, and the consumer of the answers sets the pace. Closing the generator, or a stop request, cancels the requests
in flight; those rows are requested again by the next run, with the same seed.

A request goes to the endpoint with the fewest requests in flight (`RequestRoutes`). An endpoint that fails is
unavailable for a backoff that doubles with each consecutive failure, as long as another one is available; after the
backoff one request probes it, and the first answer makes it available again. When all are unavailable, the one whose
backoff ends first is used: the retries of a request then set the pace, as with a single endpoint.

Requests are sent with `measure.load.http_client`: when a server that batches finishes many answers at once, the
processor time of a general HTTP library delayed the next requests (workers/README.md). A proxy from the environment is
used (`measure.load.http_client`).
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from eyrie_api.errors import Transient
from eyrie_workers.measure.load.http_client import ConnectionPool, RequestFailed, pool_of_job
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    GeneratedAnswer,
    GenerationFailure,
    GenerationOutcome,
    GenerationRequest,
)
from eyrie_workers.regeneration.endpoint import (
    GenerationEndpoint,
    declined,
    is_retryable,
    parse_completion,
    parse_generated,
    request_body,
    retry_delay_s,
)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


@dataclass
class RequestRoute:
    url: str
    in_flight: int = 0
    answered: int = 0
    failures: int = 0  # consecutive failures
    unavailable_until: float = 0.0
    ids_fields: tuple[str | None, ...] = ("return_token_ids", "return_output_ids_in_sglext", None)
    """Request fields that ask for token ids, of which the first is sent: vLLM and Eyrie; SGLang; None where a server
    has no such field."""

    def reject_ids_field(self, ids_field: str | None) -> None:
        """Use the next field from now on; concurrent requests may report the same field."""
        if ids_field is not None and ids_field == self.ids_fields[0]:
            self.ids_fields = self.ids_fields[1:]


class RequestRoutes:
    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [RequestRoute(url) for url in urls]

    def take(self, now: float) -> RequestRoute:
        """The endpoint for the next request, which counts as in flight until `answered` or `failed`, or its caller
        is cancelled."""
        available = [route for route in self.all if self._is_available(route, now)]
        if available:
            route = min(available, key=lambda route: (route.in_flight, route.answered))
        else:
            route = min(self.all, key=lambda route: (route.unavailable_until, route.in_flight))
        route.in_flight += 1
        return route

    def answered(self, route: RequestRoute) -> None:
        """The endpoint answered; an error about one prompt counts as an answer."""
        route.in_flight -= 1
        route.answered += 1
        route.failures, route.unavailable_until = 0, 0.0

    def failed(self, route: RequestRoute, now: float, retry_after_s: float = 0.0) -> None:
        """The endpoint failed and becomes unavailable; requests that failed during one backoff count once.

        retry_after_s   the pause that the endpoint asked for
        """
        route.in_flight -= 1
        if now >= route.unavailable_until:
            backoff_s = min(FIRST_BACKOFF_S * 2.0**min(route.failures, 30), MAX_BACKOFF_S)
            route.unavailable_until = now + max(retry_after_s, backoff_s)
            route.failures += 1

    def has_available(self, now: float) -> bool:
        """Whether a failed request can be retried at once on another endpoint."""
        return any(self._is_available(route, now) for route in self.all)

    @staticmethod
    def _is_available(route: RequestRoute, now: float) -> bool:
        # After a backoff a single request probes the endpoint: none may be in flight.
        return route.failures == 0 or (now >= route.unavailable_until and route.in_flight == 0)


_TOO_MANY = "status 429"
_POLL_S = 0.2  # longest time until a stop request takes effect


@dataclass
class OnlineClient:
    """`GenerationClient` over chat completion requests."""

    endpoint: GenerationEndpoint
    tokenizer: AnswerRetokenizer
    warn: Callable[[str, str], None]  # called with a reason and a sentence
    first_delay_s: float = 0.5
    _routes: RequestRoutes = field(init=False)
    _pools: dict[str, ConnectionPool] = field(default_factory=dict)
    """Connections to every endpoint, kept alive between requests."""

    _warned: bool = False
    _answered: int = 0

    def __post_init__(self) -> None:
        self._routes = RequestRoutes(self.endpoint.spec.base_urls)

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        """See `GenerationClient`. Raises Transient after the last retry, Permanent when every request would fail."""
        with asyncio.Runner() as runner:
            spec, headers = self.endpoint.spec, {"Accept": "application/json", **self.endpoint.headers}
            for url in spec.base_urls:
                self._pools[url] = pool_of_job(url, headers, self.endpoint.reads)
            in_flight: set[asyncio.Task[GenerationOutcome]] = set()
            try:
                while True:
                    while len(in_flight) < spec.concurrency and (prompt := next(prompts, None)) is not None:
                        in_flight.add(runner.get_loop().create_task(self._ask(prompt)))
                    if not in_flight:
                        return
                    pause()
                    done, in_flight = runner.run(asyncio.wait(in_flight, timeout=_POLL_S,
                                                              return_when=asyncio.FIRST_COMPLETED))
                    failures = [error for task in done if (error := task.exception()) is not None]
                    # Yield answers before raising: answers that arrived are kept even when another request ends the
                    # stage.
                    for task in done:
                        if task.exception() is not None:
                            continue
                        outcome = task.result()
                        if isinstance(outcome, GeneratedAnswer) and not outcome.ids_exact and not self._warned:
                            self._warned = True
                            self.warn("TokenIdsNotReturned", "the endpoint returns no token ids: answers are tokenized "
                                      "again from their text, which may differ from the ids the target produced (rows "
                                      "say ids_exact: false)")
                        yield outcome
                    if failures:
                        raise failures[0]
            finally:
                runner.run(self._cancel_all(in_flight))

    async def _cancel_all(self, tasks: set[asyncio.Task[GenerationOutcome]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in self._pools.values():
            await pool.close()

    async def _ask(self, prompt: GenerationRequest) -> GenerationOutcome:
        answered_before = self._answered
        try:
            async with asyncio.timeout(self.endpoint.spec.deadline_s):
                return await self._ask_until_answered(prompt, answered_before)
        except TimeoutError:
            error_text = f"no answer within regenerate.deadline_s = {self.endpoint.spec.deadline_s:g}"
            # Other prompts were answered meanwhile: the endpoint works, so only this prompt fails.
            if self._answered > answered_before:
                return GenerationFailure(prompt.row_id, f"{error_text}, while others were answered")
            raise Transient(f"{', '.join(self.endpoint.spec.base_urls)}: {error_text}",
                            "check that the endpoint is up, then retry: answered rows are kept", 60.0) from None

    async def _ask_until_answered(self, prompt: GenerationRequest, answered_before: int) -> GenerationOutcome:
        routes, attempt = self._routes, 0
        while True:
            route = routes.take(time.monotonic())
            url, ids_field = f"{route.url}{self.endpoint.path}", route.ids_fields[0]
            retry_after: str | None = None
            try:
                body = request_body(self.endpoint, prompt, ids_field=ids_field)
                sent = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
                reply = await self._pools[route.url].send("POST", self.endpoint.path, sent,
                                                          timeout_s=self.endpoint.spec.timeout_s)
            except RequestFailed as error:
                error_text = f"{error.reason}: {error}"
            except BaseException:  # cancelled by a stop or by the deadline: says nothing about the endpoint
                route.in_flight -= 1
                raise
            else:
                if not is_retryable(reply.status):
                    routes.answered(route)
                    if reply.status == 200:
                        return self._read(route, ids_field, prompt, reply.body)
                    text = reply.body.decode(errors="replace")
                    if ids_field is not None and reply.status in (400, 422) and ids_field in text:
                        # The error is about the field, not about the prompt: applies to every later request.
                        route.reject_ids_field(ids_field)
                        continue
                    return declined(prompt, reply.status, url)
                error_text, retry_after = f"status {reply.status}", reply.headers.get("retry-after")
            # Jitter against retries in step; need not be reproducible, so the global generator is used.
            delay_s = retry_delay_s(attempt, retry_after, self.first_delay_s, random.random())
            routes.failed(route, time.monotonic(), delay_s if retry_after else 0.0)
            if attempt >= self.endpoint.spec.max_retries:
                if self._answered > answered_before and error_text != _TOO_MANY:
                    # Other prompts were answered meanwhile, so the fault is this prompt's: it must not end the stage.
                    reason = f"failed {attempt + 1} times while others were answered: {error_text}"
                    return GenerationFailure(prompt.row_id, reason)
                raise Transient(f"{url} failed {attempt + 1} times for one request: {error_text}",
                                "check that the endpoint is up, then retry: answered rows are kept", 60.0)
            if not routes.has_available(time.monotonic()):
                await asyncio.sleep(delay_s)
            attempt += 1

    def _read(self, route: RequestRoute, ids_field: str | None, prompt: GenerationRequest,
              body: bytes) -> GenerationOutcome:
        self._answered += 1
        try:
            payload = json.loads(body)
        except ValueError:
            payload = None
        if self.endpoint.native:
            return parse_generated(prompt, payload, self.tokenizer)
        outcome = parse_completion(prompt, payload, self.tokenizer)
        if isinstance(outcome, GeneratedAnswer) and not outcome.ids_exact:
            route.reject_ids_field(ids_field)  # the server accepted the field and returned no ids
        return outcome
