"""The embedded engine as a program: an OpenAI-compatible server over the reference engine.

One process serves one target with at most one drafter.

    python -m eyrie_workers.engines.server --target DIR [--drafter DIR --num-steps N --top-k K --num-draft-tokens M]

`--method ngram` drafts without a drafter directory; `--trees-by-batch-size 1=5/1/6,8=off` changes the draft tree with
the number of running requests instead of using one tree.

The port is bound first, so that a port in use is reported within a second and not after the model is loaded. Then the
target loads in the engine thread while /health already answers 503. On SIGTERM the server drains: it accepts no new
connections, finishes running responses and exits with 0. Responses that last longer than `--drain-s` end with an
OpenAI-shaped 503, streams with the same as an event. A client that disconnects frees its slot at the next round.
"""

import argparse
import asyncio
import contextlib
import errno
import json
import math
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import get_args

import uvicorn

from eyrie_api.artifacts import write_atomically
from eyrie_api.errors import EyrieError, InvalidInput, PortInUse, report_error
from eyrie_api.request_origin import is_loopback_host
from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.tuning import Method
from eyrie_api.web_server import TimedProtocol
from eyrie_workers.engines.engine_thread import EngineThread, LoadedEngine
from eyrie_workers.engines.http_app import Service, create_app
from eyrie_workers.engines.metrics import EngineMetrics
from eyrie_workers.speculation.engine import Engine

_DRAIN_S = 25.0
"""Without --drain-s: less than the 30 s after which containers are killed, since cut responses must get their error."""
_DELIVER_S = 4
"""For the errors of cut responses to reach their clients."""


@dataclass(frozen=True)
class ServerOptions:
    """The parsed command line."""

    target: str
    model: str
    method: str
    drafter: Path | None
    tree: DraftTreeShape | None
    trees_by_batch_size: dict[int, DraftTreeShape | None]
    """Number of running requests -> the tree from that number on, None for no drafting; empty: `tree` always."""

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
    if options.trees_by_batch_size:
        slots = sorted(options.trees_by_batch_size.items())

        def choose(num_rows: int) -> DraftTreeShape | None:
            return next((shape for rows, shape in reversed(slots) if rows <= num_rows), slots[0][1])

        engine.set_tree_schedule(choose, [shape for _, shape in slots if shape is not None])
    return LoadedEngine(engine, tokenizer)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`. Raises PortInUse, or InvalidInput for another host's address."""
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


def serve(options: ServerOptions, listening: socket.socket) -> int:
    """Run until SIGTERM or until the engine thread fails. Returns the exit code; raises the engine thread's error."""
    metrics = EngineMetrics()
    engine = EngineThread(lambda: load(options), metrics, max_waiting=options.max_waiting)
    app = create_app(Service(engine, metrics, options.model), is_loopback=is_loopback_host(options.host))
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
    """Parse the command line. Raises InvalidInput for an impossible tree, or a method without its drafter."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.engines.server",
                                     description="OpenAI-compatible server over Eyrie's reference engine.")
    parser.add_argument("--target", required=True, help="Hugging Face directory, Hub id, or quickstart")
    parser.add_argument("--model", help="model name in requests; default: the directory's name")
    parser.add_argument("--method", choices=get_args(Method),
                        help="drafting method; default: drafter when --drafter is given, else off")
    parser.add_argument("--drafter", type=Path, help="drafter directory")
    parser.add_argument("--num-steps", type=int, default=5, help="drafter passes per round (depth)")
    parser.add_argument("--top-k", type=int, default=1, help="children kept per node; 1 is a chain")
    parser.add_argument("--num-draft-tokens", type=int, help="nodes verified, root included; default for a chain")
    parser.add_argument("--trees-by-batch-size",
                        help="trees by number of running requests instead of one tree: 1=5/1/6,4=3/1/4,16=off")
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
    method = parsed.method or ("off" if parsed.drafter is None else "drafter")
    if method == "drafter" and parsed.drafter is None:
        raise InvalidInput("--method drafter has no drafter", "give --drafter DIR, or another --method")
    tree, trees_by_batch_size = None, {}
    if method != "off" and parsed.trees_by_batch_size:
        trees_by_batch_size = _parse_trees_by_batch_size(parsed.trees_by_batch_size)
    elif method != "off":
        tree = _tree_shape(parsed.num_steps, parsed.top_k, parsed.num_draft_tokens or parsed.num_steps + 1)
    return ServerOptions(
        target=parsed.target, model=parsed.model or Path(parsed.target).name, method=method, drafter=parsed.drafter,
        tree=tree, trees_by_batch_size=trees_by_batch_size, host=parsed.host, port=parsed.port,
        max_concurrency=parsed.max_concurrency, max_waiting=parsed.max_waiting, max_length=parsed.max_length,
        dtype=parsed.dtype, threads=parsed.threads, ready_file=parsed.ready_file, drain_s=parsed.drain_s)


def _parse_trees_by_batch_size(text: str) -> dict[int, DraftTreeShape | None]:
    """`1=5/1/6,8=off` as a mapping."""
    trees: dict[int, DraftTreeShape | None] = {}
    for slot in text.split(","):
        batch_size, _, tree = slot.partition("=")
        numbers = tree.split("/")
        if not batch_size.isdigit() or (tree != "off" and (len(numbers) != 3 or not all(n.isdigit() for n in numbers))):
            raise InvalidInput(f"--trees-by-batch-size: {slot!r} is not a slot",
                               "write BATCH_SIZE=NUM_STEPS/TOP_K/NUM_DRAFT_TOKENS or BATCH_SIZE=off, comma-separated")
        trees[int(batch_size)] = None if tree == "off" else _tree_shape(*map(int, numbers))
    return trees


def _tree_shape(num_steps: int, top_k: int, num_draft_tokens: int) -> DraftTreeShape:
    try:
        return DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=num_draft_tokens)
    except ValueError as error:
        reason = str(error).splitlines()[-2].strip() if "\n" in str(error) else str(error)
        raise InvalidInput(f"invalid draft tree: {reason}", "see --num-steps, --top-k, --num-draft-tokens") from None


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    try:
        options = parse_options(argv)
        return serve(options, bind(options.host, options.port))
    except EyrieError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
