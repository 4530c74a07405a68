"""Callers of an endpoint while its processes are killed: what they may see and what not.

An answer is right, or it is one that a client can send again: 502 or 503 with Retry-After and an error in OpenAI's
form, an error event in a stream, or a connection that was refused or cut. Anything else is a finding: another status,
another text than before, a stream that ends as if it were whole.
"""

import json
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.campaigns.report import Campaign
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_pipelines.run_records import read_record

_PAUSE_S = 0.3
_TOKENS = 12


class Callers:
    """Threads that ask the endpoint in `directory` again and again, greedily, streamed and not."""

    def __init__(self, campaign: Campaign, directory: Path, model: str, num: int = 2) -> None:
        self.campaign, self.directory, self.model = campaign, directory, model
        self.seen: Counter[str] = Counter()
        self.longest_outage_s = 0.0
        self._answered_at = time.monotonic()
        self._expected: dict[str, str] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(num)]

    def start(self) -> None:
        """Begin; the endpoint serves."""
        self._answered_at = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, and wait for the last answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(300)

    def _call(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            turn += 1
            prompt = f"Question {turn % 5}"
            try:
                self._note(prompt, self._ask(prompt, streamed=turn % 2 == 0))
            except httpx.HTTPError as error:  # refused or cut: a client sends it again
                self._note_failure(type(error).__name__)
            self._stop.wait(_PAUSE_S)

    def _note(self, prompt: str, text: str | None) -> None:
        if text is None:
            self._note_failure("retryable")
            return
        with self._lock:
            self.seen["answered"] += 1
            self._answered_at = time.monotonic()
            expected = self._expected.setdefault(prompt, text)
        if text != expected:
            self.campaign.add_finding("an answer is the same before and after a kill", prompt=prompt, text=text,
                                      expected=expected)

    def _note_failure(self, kind: str) -> None:
        with self._lock:
            self.seen[kind] += 1
            self.longest_outage_s = max(self.longest_outage_s, time.monotonic() - self._answered_at)

    def _ask(self, prompt: str, *, streamed: bool) -> str | None:
        """The answer; None where the request may be sent again. Raises httpx.HTTPError."""
        gateway = read_record(self.directory / GATEWAY_FILE, GatewayRecord)
        if gateway is None:
            return None
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": _TOKENS,
                "temperature": 0, "stream": streamed}
        answer = httpx.post(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json=body, trust_env=False,
                            timeout=300.0)
        if answer.status_code in (502, 503) and "retry-after" in answer.headers and "error" in answer.json():
            return None
        if answer.status_code != 200:
            self.campaign.add_finding("a caller sees answers and errors to try again alone", status=answer.status_code,
                                      body=answer.text[:500])
            return None
        return self._joined(answer.text) if streamed else str(answer.json()["choices"][0]["message"]["content"])

    def _joined(self, stream: str) -> str | None:
        events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
        parsed = [json.loads(event) for event in events if event != "[DONE]"]
        if any("error" in event for event in parsed):
            return None
        choices = [choice for event in parsed for choice in event.get("choices", ())]
        if events[-1:] != ["[DONE]"] or not any(choice.get("finish_reason") for choice in choices):
            self.campaign.add_finding("a cut stream says so", stream=stream[-500:])
            return None
        return "".join(choice["delta"].get("content") or "" for choice in choices)
