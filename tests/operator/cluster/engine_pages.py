"""The /metrics page of an engine, with the figures a test wants."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class EnginePages:
    """One engine process that has counted so much."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {"rounds": 0, "tokens": 0, "generated": 0, "answered": 0, "failed": 0}
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = pages.text().encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_line: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def count(self, **more: float) -> None:
        for name, amount in more.items():
            self.counts[name] += amount

    def text(self) -> str:
        known = self.counts
        return (f"eyrie_drafted_rounds_total {known['rounds']}\neyrie_drafted_round_tokens_total {known['tokens']}\n"
                f"eyrie_generated_tokens_total {known['generated']}\n"
                f'eyrie_requests_total{{finish_reason="stop"}} {known["answered"]}\n'
                f'eyrie_requests_total{{finish_reason="error"}} {known["failed"]}\n')

    def __enter__(self) -> "EnginePages":
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
