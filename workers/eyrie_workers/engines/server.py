"""The embedded engine as a program: an OpenAI-compatible server over the reference engine.

One process serves one target with at most one drafter.

    python -m eyrie_workers.engines.server --target DIR --use '{"drafter_dir": "D", "setting": {"tree": {...}}}'

`--use` is a `DrafterUse`, as for SGLang (`sglang.serve`). With an operating map the draft tree changes with the number
of running requests, where one drafting method serves all loads (`process.batch_size_schedule`).

The port is bound first, so that a port in use is reported within a second and not after the model is loaded. Then the
target loads in the engine thread while /health already answers 503. On SIGTERM the server drains: it accepts no new
connections, finishes running responses and exits with 0. Responses that last longer than `--drain-s` end with an
OpenAI-shaped 503, streams with the same as an event. A client that disconnects frees its slot at the next round.

Tokenisation and response assembly run on the event loop, in one thread, because the tokenizer is not thread-safe; the
computation runs in the engine thread (`engine_thread`). This module connects the two: request fields are defined in
`openai_api`, response text in `responses`.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from eyrie_api import client_left
from eyrie_api.artifacts import code_version, write_atomically
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.rules import rule_of
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.errors import EyrieError, InvalidInput, report_error
from eyrie_api.processes import bind
from eyrie_api.request_origin import check_host, check_json, check_origin, is_loopback_host
from eyrie_api.web_server import TimedProtocol
from eyrie_workers.engines.engine_thread import EngineCrashed, EngineMetrics, EngineThread, LoadedEngine
from eyrie_workers.engines.openai_api import (
    BodyTooLarge,
    ChatCompletionRequest,
    CompletionRequest,
    InvalidRequest,
    NotReady,
    ResponseMetadata,
    UnknownModel,
    error_body,
    parse,
    read_object,
)
from eyrie_workers.engines.process import batch_size_schedule
from eyrie_workers.engines.responses import DecodingRequest, ResponseBuilder, build_generation_request
from eyrie_workers.speculation.engine import Engine, StepOutput

_DRAIN_S = 25.0
"""Without --drain-s: less than the 30 s after which containers are killed, since cut responses must get their error."""
_DELIVER_S = 4
"""For the errors of cut responses to reach their clients."""

# A conversation that fills a 128k context is well under a megabyte; 4 MiB leave room for tools and JSON escapes.
MAX_BODY_BYTES = 4 * 2**20


class Service:
    """The engine as the HTTP handlers use it."""

    def __init__(self, engine: EngineThread, metrics: EngineMetrics, model: str, root: str | None = None) -> None:
        """root   name of the target's directory, whatever it is served as"""
        self.engine = engine
        self.metrics = metrics
        self.model = model
        self.root = root or model
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
        response = ResponseBuilder(generation, metadata, loaded.tokenizer.decode, loaded.tokenizer.token_text)
        return ActiveRequest(self, generation, response)


class ActiveRequest:
    """A submitted request and its response while the engine generates it."""

    def __init__(self, service: Service, generation: DecodingRequest, response: ResponseBuilder) -> None:
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

    app = FastAPI(title="Eyrie engine", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False,
                  dependencies=[Depends(refuse_web_pages)])

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _respond(service, request, ChatCompletionRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _respond(service, request, CompletionRequest)

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
    card: dict[str, Any] = {"id": service.model, "object": "model", "created": service.created, "owned_by": "eyrie",
                            "root": service.root}
    loaded = service.engine.loaded
    if loaded is not None:
        card["max_model_len"] = loaded.engine.max_length
        card["dtype"] = str(loaded.engine.target.dtype).removeprefix("torch.")
        card["drafts"] = loaded.engine.drafter is not None
        card["speculation"] = loaded.engine.tree.model_dump() if loaded.engine.tree else None
    return card


async def _respond(service: Service, request: Request,
                   kind: type[ChatCompletionRequest | CompletionRequest]) -> Response:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes", "send a shorter conversation")
    active = await service.submit(parse(kind, read_object(bytes(body))))
    if active.generation.body.stream:
        return StreamingResponse(_server_sent_events(active), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    # Starlette cancels a StreamingResponse when the client disconnects, but not a handler that still computes its
    # response.
    return JSONResponse(await client_left.unless_left(request.receive, active.response()))


async def _server_sent_events(active: ActiveRequest) -> AsyncIterator[str]:
    try:
        async for chunk in active.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
    except EyrieError as error:  # the status line has been sent: report the error as an event
        yield f"data: {json.dumps(error_body(error))}\n\n"
    yield "data: [DONE]\n\n"


@dataclass(frozen=True)
class ServerOptions:
    target: str
    model: str
    use: DrafterUse
    host: str
    port: int
    max_concurrency: int
    max_waiting: int
    max_length: int | None
    dtype: str
    threads: int | None
    ready_file: Path | None
    drain_s: float


class _DrainingServer(uvicorn.Server):
    """Ends the engine when its responses last longer than `drain_s`: each handler then sends the engine's error."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread, drain_s: float) -> None:
        super().__init__(config)
        self._engine, self._drain_s = engine, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.get_running_loop().call_later(self._drain_s, self._engine.stop, 0.0)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def load(options: ServerOptions) -> LoadedEngine:
    """Load target and drafter; called in the engine thread, which then owns them. Raises EyrieError."""
    import torch

    from eyrie_workers.drafters.family import open_method
    from eyrie_workers.targets.loading import load_target, resolve
    from eyrie_workers.targets.templates import ChatTokenizer

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    directory = resolve(TargetSpec(model=options.target))
    tokenizer = ChatTokenizer(directory)
    target = load_target(directory, options.dtype)
    use = options.use
    schedule = batch_size_schedule(use.map) if use.map is not None else None
    method = use.setting.method if schedule is None else schedule[0]
    drafter_dir = Path(use.drafter_dir) if use.drafter_dir is not None and method == "drafter" else None
    engine = Engine(target, open_method(method, drafter_dir, target), max_concurrency=options.max_concurrency,
                    max_length=options.max_length, tree=use.setting.tree if schedule is None else None)
    if schedule is not None:
        slots = sorted(schedule[1].items())

        def choose(num_rows: int) -> DraftTreeShape | None:
            return next((shape for rows, shape in reversed(slots) if rows <= num_rows), slots[0][1])

        engine.set_tree_schedule(choose, [shape for _, shape in slots if shape is not None])
    return LoadedEngine(engine, tokenizer)


def serve(options: ServerOptions, listening: socket.socket) -> int:
    """Run until SIGTERM or until the engine thread fails. Returns the exit code; raises the engine thread's error."""
    metrics = EngineMetrics()
    engine = EngineThread(lambda: load(options), metrics, max_waiting=options.max_waiting)
    app = create_app(Service(engine, metrics, options.model, Path(options.target).name),
                     is_loopback=is_loopback_host(options.host))
    server = _DrainingServer(uvicorn.Config(app, log_level="warning", access_log=False, http=TimedProtocol,
                                            timeout_graceful_shutdown=math.ceil(options.drain_s) + _DELIVER_S),
                             engine, options.drain_s)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def on_state_change() -> None:
        # Runs in the engine thread. uvicorn polls `should_exit`, so setting it there is safe.
        if engine.state == "ready":
            with contextlib.suppress(OSError):  # its log may be on a full disk
                print(f"ready: {options.model} at {url}/v1", flush=True)
            if options.ready_file is not None:
                ready = {"url": url, "pid": os.getpid(), "model": options.model}
                write_atomically(options.ready_file, json.dumps(ready) + "\n")
        elif engine.state == "failed":
            server.should_exit = True

    def ignore_signal(_number: int, _frame: FrameType | None) -> None:
        """uvicorn replaces these handlers while it runs, and raises the captured signal again after it has drained.

        The default handler would then end the process before the engine thread is stopped and the ready file removed.
        """

    engine.on_state_change = on_state_change
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ignore_signal)
    engine.start()
    server.run(sockets=[listening])
    engine.stop()
    if options.ready_file is not None:
        options.ready_file.unlink(missing_ok=True)
    if engine.failure is not None:
        raise engine.failure
    return 0


def parse_options(argv: list[str] | None = None) -> ServerOptions:
    """Parse the command line. Raises InvalidInput for an impossible tree, or a setting without its drafter."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.engines.server",
                                     description="OpenAI-compatible server over Eyrie's reference engine.")
    parser.add_argument("--target", required=True, help="Hugging Face directory, Hub id, or quickstart")
    parser.add_argument("--model", help="model name in requests; default: the directory's name")
    parser.add_argument("--use", default="{}", help="a DrafterUse in JSON; default: no speculation")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 selects a free port")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests decoded at once")
    parser.add_argument("--max-waiting", type=int, default=256,
                        help="requests queued beyond those; more are rejected with 429")
    parser.add_argument("--max-length", type=int, help="prompt and answer together; default: the target's context")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--ready-file", type=Path, help="written (JSON: url, pid, model) once the engine answers")
    parser.add_argument("--drain-s", type=float, default=_DRAIN_S,
                        help="seconds that running responses get to finish after SIGTERM")
    parsed = parser.parse_args(argv)
    for name, least in (("max_concurrency", 1), ("max_waiting", 0), ("threads", 1), ("max_length", 2), ("port", 0),
                        ("drain_s", 0)):
        value = getattr(parsed, name)
        if value is not None and value < least:
            raise InvalidInput(f"--{name.replace('_', '-')} {value} is too small", f"give at least {least}")
    try:
        use = DrafterUse.model_validate_json(parsed.use)
    except ValidationError as error:
        raise InvalidInput(f"--use: {rule_of(error.errors()[0])}", "give a DrafterUse in JSON") from None
    if use.setting.method == "drafter" and use.drafter_dir is None:
        raise InvalidInput("--use has a setting with a drafter and no drafter_dir", "give one, or another method")
    return ServerOptions(**vars(parsed) | {"use": use, "model": parsed.model or Path(parsed.target).name})


def main(argv: list[str] | None = None) -> int:
    try:
        options = parse_options(argv)
        return serve(options, bind(options.host, options.port, "--port"))
    except EyrieError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
