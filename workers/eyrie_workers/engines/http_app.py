"""The HTTP application of the embedded engine: OpenAI endpoints over one engine thread.

Tokenisation and response assembly run on the event loop, in one thread, because the tokenizer is not thread-safe; the
computation runs in the engine thread (`engine_thread`). This module connects the two: request fields are defined in
`openai_api`, response text in `responses`.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from eyrie_api.artifacts import code_version
from eyrie_api.errors import EyrieError
from eyrie_api.request_origin import check_host, check_json, check_origin
from eyrie_workers.engines.engine_thread import EngineCrashed, EngineThread, LoadedEngine
from eyrie_workers.engines.metrics import EngineMetrics
from eyrie_workers.engines.openai_api import (
    BodyTooLarge,
    ChatCompletionRequest,
    CompletionRequest,
    InvalidRequest,
    NotReady,
    ResponseMetadata,
    UnknownModel,
    error_body,
    parse_chat,
    parse_completion,
    read_object,
)
from eyrie_workers.engines.responses import GenerationRequest, ResponseBuilder, build_generation_request
from eyrie_workers.speculation.engine import StepOutput

# A conversation that fills a 128k context is well under a megabyte; 4 MiB leave room for tools and JSON escapes.
MAX_BODY_BYTES = 4 * 2**20


class Service:
    """The engine as the HTTP handlers use it."""

    def __init__(self, engine: EngineThread, metrics: EngineMetrics, model: str) -> None:
        self.engine = engine
        self.metrics = metrics
        self.model = model
        self.created = int(time.time())
        self._fingerprint = f"eyrie-{code_version()}"

    def loaded(self) -> LoadedEngine:
        """The loaded engine. Raises NotReady before loading has finished and after the engine thread has ended."""
        if not self.engine.alive or self.engine.loaded is None:
            raise NotReady(f"the engine is {self.engine.state}", "try again in a moment; GET /health reports the state")
        return self.engine.loaded

    def check_model(self, model: str) -> None:
        """Raises UnknownModel for any model but the one served."""
        if model != self.model:
            raise UnknownModel(f"model {model!r} is not served here", f"ask for {self.model!r}", param="model",
                               code="model_not_found")

    async def submit(self, body: ChatCompletionRequest | CompletionRequest) -> "ActiveRequest":
        """Check a request against this server and submit it to the engine. Other requests go on while its prompt is
        encoded, which takes seconds for megabytes of text."""
        loaded = self.loaded()
        if body.model is not None:
            self.check_model(body.model)
        chat = isinstance(body, ChatCompletionRequest)
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        generation = await asyncio.to_thread(build_generation_request, body, request_id, loaded)
        metadata = ResponseMetadata(request_id, self.model, int(time.time()), chat, self._fingerprint)
        response = ResponseBuilder(generation, metadata, loaded.tokenizer.decode, loaded.tokenizer.parse_answer,
                                   loaded.tokenizer.token_text)
        return ActiveRequest(self, generation, response)


class ActiveRequest:
    """A submitted request and its response while the engine generates it."""

    def __init__(self, service: Service, generation: GenerationRequest, response: ResponseBuilder) -> None:
        self.generation = generation
        self._service = service
        self._response = response
        self._updates: asyncio.Queue[StepOutput | EyrieError] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def listener(update: StepOutput | EyrieError) -> None:
            # Runs in the engine thread. asyncio.Queue is not thread-safe, so the update is put on the event loop. A
            # RuntimeError means that the loop was closed in the meantime: the client's connection is gone too.
            with contextlib.suppress(RuntimeError):
                event_loop.call_soon_threadsafe(self._updates.put_nowait, update)

        service.engine.submit(generation.engine_request, listener)

    async def response(self) -> dict[str, Any]:
        """The complete response object. Raises what the engine raised."""
        async with self._engine_slot():
            while self._response.finish is None:
                self._response.append(await self._next())
            return self._response.response()

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The response as chunks, while it is generated."""
        async with self._engine_slot():
            started = False
            while self._response.finish is None:
                text = self._response.append(await self._next())
                if not started and self._response.metadata.chat:
                    yield self._response.first_chunk()
                started = True
                if text or self._response.has_unsent:
                    yield self._response.chunk(text)
            for chunk in self._response.last_chunks():
                yield chunk

    async def _next(self) -> StepOutput:
        update = await self._updates.get()
        if isinstance(update, EyrieError):
            raise update
        return update

    @contextlib.asynccontextmanager
    async def _engine_slot(self) -> AsyncIterator[None]:
        """Frees the engine's slot however the request ends: finished, stop string, client disconnected, engine failed.

        A stop string is found here, not in the engine, which may have generated further tokens by then; cancelling a
        request that has already ended is a no-op, so no case needs a check.
        """
        outcome = "cancelled"
        try:
            yield
            outcome = self._response.finish or "error"
        except EyrieError:
            outcome = "error"
            raise
        finally:
            self._service.engine.cancel(self.generation.engine_request.id)
            self._service.metrics.ended(outcome)


def create_app(service: Service, *, is_loopback: bool = False) -> FastAPI:
    """The HTTP application around one engine. `is_loopback`: it listens on loopback only, so that Host must name this
    machine."""

    async def refuse_web_pages(request: Request) -> None:
        if is_loopback:
            check_host(request.headers)
        check_origin(request.method, request.headers)
        check_json(request.method, request.headers)

    app = FastAPI(title="Eyrie engine", docs_url=None, redoc_url=None, openapi_url=None,
                  redirect_slashes=False,
                  dependencies=[Depends(refuse_web_pages)])

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _respond(service, request, parse_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _respond(service, request, parse_completion)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return _model_card(service)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": service.engine.state}, status_code=200 if service.engine.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(EyrieError)
    async def eyrie_error(_request: Request, error: EyrieError) -> Response:
        headers = {"Retry-After": "1"} if error.http_status in (429, 503) else None
        return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        body = error_body(InvalidRequest(f"{request.method} {request.url.path}: {error.detail}",
                                         "POST /v1/chat/completions or /v1/completions; "
                                         "GET /v1/models, /health, /metrics"))
        return JSONResponse(body, status_code=error.status_code)

    @app.exception_handler(Exception)
    async def internal_error(_request: Request, error: Exception) -> Response:
        # Starlette re-raises the exception, so the traceback reaches the log; the client gets a body it can parse.
        body = error_body(EngineCrashed(f"internal error: {type(error).__name__}", "see the engine's log"))
        return JSONResponse(body, status_code=500)

    return app


def _model_card(service: Service) -> dict[str, Any]:
    card: dict[str, Any] = {"id": service.model, "object": "model", "created": service.created, "owned_by": "eyrie"}
    loaded = service.engine.loaded
    if loaded is not None:
        card["max_model_len"] = loaded.engine.max_length
        card["speculation"] = loaded.engine.tree.model_dump() if loaded.engine.tree else None
    return card


async def _respond(service: Service, request: Request,
                   parse: Callable[[Mapping[str, Any]], ChatCompletionRequest | CompletionRequest]) -> Response:
    active = await service.submit(parse(await _read_json(request)))
    if active.generation.stream:
        return StreamingResponse(_server_sent_events(active), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    # Starlette cancels a StreamingResponse when the client disconnects, but not a handler that still computes its
    # response. So the two are raced, and the generation is cancelled when the disconnect comes first.
    generation = asyncio.ensure_future(active.response())
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({generation, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if generation.done():
            return JSONResponse(generation.result())
        return Response(status_code=499)  # not delivered; nginx's status for a client that closed the connection
    finally:
        for task in (generation, disconnect):
            task.cancel()
        await asyncio.gather(generation, disconnect, return_exceptions=True)


async def _server_sent_events(active: ActiveRequest) -> AsyncIterator[str]:
    try:
        async for chunk in active.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
    except EyrieError as error:  # the status line has been sent: report the error as an event
        yield f"data: {json.dumps(error_body(error))}\n\n"
    yield "data: [DONE]\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_json(request: Request) -> Mapping[str, Any]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes", "send a shorter conversation")
    return read_object(bytes(body))
