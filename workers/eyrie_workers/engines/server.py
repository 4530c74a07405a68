"""The engine behind an endpoint: OpenAI over HTTP, one process, one target, perhaps one drafter.

`python -m eyrie_workers.engines.server --target DIR [--drafter DIR --num-steps N --top-k K --num-draft-tokens M]`

`--method ngram` drafts without a drafter directory; `--by-load 1=5/1/6,8=off` follows the load instead of one shape.

The port is taken first, so that a port in use is told in a second and not after the model is loaded; then the target
loads in the engine's thread while /health already answers 503. SIGTERM drains: no new connections, answers under way
are finished, then exit 0. A client that goes away frees its slot at the next round.

Tokenising and text assembly happen on the event loop, in one thread (the tokenizer is not for two); the arithmetic in
`worker_loop`'s. This module only joins the two: no decision about text or fields is made here.
"""

import argparse
import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from eyrie_api.artifacts import code_version, write_atomically
from eyrie_api.errors import EyrieError, InvalidInput, PortInUse
from eyrie_api.program_exit import report_error
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.tuning import Method
from eyrie_workers.engines.engine_thread import EngineCrashed, EngineThread, LoadedEngine
from eyrie_workers.engines.metrics import EngineMetrics
from eyrie_workers.engines.openai_api import (
    BodyTooLarge,
    ChatCompletionRequest,
    CompletionRequest,
    NotReady,
    Refused,
    ResponseMetadata,
    UnknownModel,
    error_body,
    parse_chat,
    parse_completion,
)
from eyrie_workers.engines.responses import GenerationRequest, ResponseBuilder, want
from eyrie_workers.speculation.engine import Engine, StepOutput

# A conversation that fills a 128k context is well under a megabyte; tools and JSON escapes included, four are ample.
MAX_BODY_BYTES = 4 * 2**20
_DRAIN_S = 30


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    target: str
    model: str
    method: str
    drafter: Path | None
    tree: DraftTreeShape | None
    by_load: dict[int, DraftTreeShape | None]
    """Rows -> shape from that many rows on; empty: `tree` at every load."""

    host: str
    port: int
    max_concurrency: int
    max_waiting: int
    max_length: int | None
    dtype: str
    threads: int | None
    ready_file: Path | None


class Service:
    """The HTTP side's hold on the engine."""

    def __init__(self, loop: EngineThread, meters: EngineMetrics, model: str) -> None:
        self.loop = loop
        self.meters = meters
        self.model = model
        self.created = int(time.time())
        self._fingerprint = f"eyrie-{code_version()}"

    def loaded(self) -> LoadedEngine:
        """What the thread loaded. Raises NotReady before that, and after its death."""
        if not self.loop.alive or self.loop.loaded is None:
            raise NotReady(f"the engine is {self.loop.state}", "try again in a moment; GET /health says when")
        return self.loop.loaded

    def open(self, body: ChatCompletionRequest | CompletionRequest) -> "Exchange":
        """Check the request against this server and send it to the engine."""
        loaded = self.loaded()
        if body.model is not None and body.model != self.model:
            raise UnknownModel(f"model {body.model!r} is not served here", f"ask for {self.model!r}", param="model",
                               code="model_not_found")
        chat = isinstance(body, ChatCompletionRequest)
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        wanted = want(body, request_id, loaded)
        head = ResponseMetadata(request_id, self.model, int(time.time()), chat, self._fingerprint)
        answer = ResponseBuilder(wanted, head, loaded.tokenizer.decode, loaded.tokenizer.parse_answer)
        return Exchange(self, wanted, answer)


class Exchange:
    """One request and its answer under way."""

    def __init__(self, service: Service, wanted: GenerationRequest, answer: ResponseBuilder) -> None:
        self.wanted = wanted
        self._service = service
        self._answer = answer
        self._inbox: asyncio.Queue[StepOutput | EyrieError] = asyncio.Queue()
        home = asyncio.get_running_loop()

        def listener(news: StepOutput | EyrieError) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone: so is the client
                home.call_soon_threadsafe(self._inbox.put_nowait, news)

        service.loop.submit(wanted.request, listener)

    async def whole(self) -> dict[str, Any]:
        """Wait for the answer. Raises what the engine raised."""
        async with self._slot():
            while self._answer.finish is None:
                self._answer.take(await self._next())
            return self._answer.whole()

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks, as it comes."""
        async with self._slot():
            opened = False
            while self._answer.finish is None:
                text = self._answer.take(await self._next())
                if not opened and self._answer.head.chat:
                    yield self._answer.opening()
                opened = True
                if text or self._answer.has_unsent:
                    yield self._answer.chunk(text)
            for chunk in self._answer.closing():
                yield chunk

    async def _next(self) -> StepOutput:
        news = await self._inbox.get()
        if isinstance(news, EyrieError):
            raise news
        return news

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Frees the engine's slot however the exchange ends: done, cut by a stop string, client gone, engine dead."""
        outcome = "cancelled"
        try:
            yield
            outcome = self._answer.finish or "error"
        except EyrieError:
            outcome = "error"
            raise
        finally:
            self._service.loop.cancel(self.wanted.request.id)
            self._service.meters.ended(outcome)


def create_app(service: Service) -> FastAPI:
    """The HTTP application around one engine."""
    app = FastAPI(title="Eyrie engine", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, parse_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, parse_completion)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != service.model:
            raise UnknownModel(f"model {model!r} is not served here", f"ask for {service.model!r}", param="model",
                               code="model_not_found")
        return _model_card(service)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": service.loop.state}, status_code=200 if service.loop.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.meters.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(EyrieError)
    async def refused(_request: Request, error: EyrieError) -> Response:
        headers = {"Retry-After": "1"} if error.http_status in (429, 503) else None
        return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)

    @app.exception_handler(HTTPException)
    async def unknown_path(request: Request, error: HTTPException) -> Response:
        said = Refused(f"{request.method} {request.url.path}: {error.detail}",
                       "POST /v1/chat/completions or /v1/completions; GET /v1/models, /health, /metrics")
        return JSONResponse(error_body(said), status_code=error.status_code)

    @app.exception_handler(Exception)
    async def broken(_request: Request, error: Exception) -> Response:
        # The traceback goes to the log (starlette raises it on); the client gets a body its library can read.
        said = EngineCrashed(f"internal error: {type(error).__name__}", "see the engine's log")
        return JSONResponse(error_body(said), status_code=500)

    return app


def _model_card(service: Service) -> dict[str, Any]:
    card: dict[str, Any] = {"id": service.model, "object": "model", "created": service.created, "owned_by": "eyrie"}
    loaded = service.loop.loaded
    if loaded is not None:
        card["max_model_len"] = loaded.engine.max_length
        card["speculation"] = loaded.engine.tree.model_dump() if loaded.engine.tree else None
    return card


async def _answer(service: Service, request: Request,
                  parse: Callable[[Mapping[str, Any]], ChatCompletionRequest | CompletionRequest]) -> Response:
    exchange = service.open(parse(await _read_json(request)))
    if exchange.wanted.stream:
        return StreamingResponse(_events(exchange), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    work = asyncio.ensure_future(exchange.whole())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return JSONResponse(work.result())
        return Response(status_code=499)  # nobody reads it; nginx's number for a client that left
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _events(exchange: Exchange) -> AsyncIterator[str]:
    try:
        async for chunk in exchange.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
    except EyrieError as error:  # the status line is out: say it in the stream
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
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}", "send one JSON object", code="invalid_json") from error
    if not isinstance(value, dict):
        raise Refused(f"the body is a JSON {type(value).__name__}", "send one JSON object", code="invalid_json")
    return value


def load(options: Options) -> LoadedEngine:
    """Load target and drafter, in the thread that will run them. Raises EyrieError."""
    import torch

    from eyrie_workers.drafters.registry import open_method
    from eyrie_workers.targets.loading import load_target, resolve
    from eyrie_workers.targets.templates import ChatTokenizer

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    directory = resolve(TargetSpec(model=options.target))
    tokenizer = ChatTokenizer(directory)
    target = load_target(directory, options.dtype)
    drafter = open_method(options.method, options.drafter, target)
    engine = Engine(target, drafter, max_concurrency=options.max_concurrency, max_length=options.max_length,
                    tree=options.tree)
    if options.by_load:
        slots = sorted(options.by_load.items())

        def choose(num_rows: int) -> DraftTreeShape | None:
            return next((shape for rows, shape in reversed(slots) if rows <= num_rows), slots[0][1])

        engine.set_tree_schedule(choose, [shape for _, shape in slots if shape is not None])
    return LoadedEngine(engine, tokenizer)


def bind(host: str, port: int) -> socket.socket:
    """Take the port. Raises PortInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {host} is in use",
                            "give another --port, or 0 for a free one, or end what listens there") from None
        raise InvalidInput(f"cannot listen on {host}:{port}: {error.strerror}",
                           "give another --host or --port") from None
    return listening


def serve(options: Options, listening: socket.socket) -> int:
    """Run until SIGTERM, or until the engine dies. Returns the exit code."""
    meters = EngineMetrics()
    loop = EngineThread(lambda: load(options), meters, max_waiting=options.max_waiting)
    app = create_app(Service(loop, meters, options.model))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False,
                                           timeout_graceful_shutdown=_DRAIN_S))
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def changed() -> None:
        if loop.state == "ready":
            print(f"ready: {options.model} at {url}/v1", flush=True)
            if options.ready_file is not None:
                ready = {"url": url, "pid": os.getpid(), "model": options.model}
                write_atomically(options.ready_file, json.dumps(ready) + "\n")
        elif loop.state == "failed":
            server.should_exit = True

    def ended(_number: int, _frame: FrameType | None) -> None:
        """uvicorn raises the signal again after it has drained; by then there is nothing left to do."""

    loop.on_change = changed
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)
    loop.start()
    server.run(sockets=[listening])
    loop.stop()
    if options.ready_file is not None:
        options.ready_file.unlink(missing_ok=True)
    if loop.failure is not None:
        raise loop.failure
    return 0


def parse_options(argv: list[str] | None = None) -> Options:
    """The command line. Raises InvalidInput for a tree that cannot be, or a method without its drafter."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.engines.server",
                                     description="OpenAI-compatible server over Eyrie's reference engine.")
    parser.add_argument("--target", required=True, help="Hugging Face directory, Hub id, or quickstart")
    parser.add_argument("--model", help="name clients ask for; default: the directory's name")
    parser.add_argument("--method", choices=get_args(Method),
                        help="who drafts; default: the drafter when one is given, else nobody")
    parser.add_argument("--drafter", type=Path, help="drafter directory")
    parser.add_argument("--num-steps", type=int, default=5, help="drafter passes per round (depth)")
    parser.add_argument("--top-k", type=int, default=1, help="children kept per node; 1 is a chain")
    parser.add_argument("--num-draft-tokens", type=int, help="nodes verified, root included; default for a chain")
    parser.add_argument("--by-load", help="shapes by running requests instead of one: 1=5/1/6,4=3/1/4,16=off")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests decoded at once")
    parser.add_argument("--max-waiting", type=int, default=256, help="requests waiting beyond those; more are refused")
    parser.add_argument("--max-length", type=int, help="prompt and answer together; default: the target's context")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--ready-file", type=Path, help="written (JSON: url, pid, model) once the engine answers")
    parsed = parser.parse_args(argv)
    for name, least in (("max_concurrency", 1), ("max_waiting", 0), ("threads", 1), ("max_length", 2), ("port", 0)):
        value = getattr(parsed, name)
        if value is not None and value < least:
            raise InvalidInput(f"--{name.replace('_', '-')} {value} is too small", f"give at least {least}")
    method = parsed.method or ("off" if parsed.drafter is None else "drafter")
    if method == "drafter" and parsed.drafter is None:
        raise InvalidInput("--method drafter has no drafter", "give --drafter DIR, or another --method")
    tree, by_load = None, {}
    if method != "off" and parsed.by_load:
        by_load = {_whole(rows, "--by-load"): None if shape == "off" else _shape(*_numbers(shape))
                   for rows, _, shape in (slot.partition("=") for slot in parsed.by_load.split(","))}
    elif method != "off":
        tree = _shape(parsed.num_steps, parsed.top_k, parsed.num_draft_tokens or parsed.num_steps + 1)
    return Options(
        target=parsed.target, model=parsed.model or Path(parsed.target).name, method=method, drafter=parsed.drafter,
        tree=tree, by_load=by_load, host=parsed.host, port=parsed.port, max_concurrency=parsed.max_concurrency,
        max_waiting=parsed.max_waiting, max_length=parsed.max_length, dtype=parsed.dtype, threads=parsed.threads,
        ready_file=parsed.ready_file)


def _shape(num_steps: int, top_k: int, num_draft_tokens: int) -> DraftTreeShape:
    try:
        return DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=num_draft_tokens)
    except ValueError as error:
        reason = str(error).splitlines()[-2].strip() if "\n" in str(error) else str(error)
        raise InvalidInput(f"no such draft tree: {reason}", "see --num-steps, --top-k, --num-draft-tokens") from None


def _numbers(shape: str) -> tuple[int, int, int]:
    """`5/1/6` as numbers."""
    steps, _, rest = shape.partition("/")
    width, _, tokens = rest.partition("/")
    return _whole(steps, "--by-load"), _whole(width, "--by-load"), _whole(tokens, "--by-load")


def _whole(text: str, flag: str) -> int:
    if not text.isdigit():
        raise InvalidInput(f"{flag}: {text!r} is not a number",
                           "write ROWS=NUM_STEPS/TOP_K/NUM_DRAFT_TOKENS or ROWS=off, by comma")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    try:
        options = parse_options(argv)
        return serve(options, bind(options.host, options.port))
    except EyrieError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
