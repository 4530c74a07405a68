"""Generation through an OpenAI-compatible Batch API: a file of requests, a file of answers, within 24 hours.

One batch at a time:

    upload requests -> save the file id -> create the batch -> save its id -> poll -> download -> answers

The state is saved in `batch.json`, so that a program killed while the batch runs resumes it instead of paying twice; a
program killed between creating the batch and saving its id finds it in the endpoint's list by the id of its input file.
`batch.json` is deleted when the last answer of the batch has been consumed. Requests that expired, or that failed with
a retryable status, are sent in the next batch.

The Batch API returns no token ids: answers are tokenized again, and `ids_exact` of the rows is false.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from eyrie_api.artifacts import write_model
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.errors import Permanent, Transient
from eyrie_api.ssrf_safe_http import addresses_for_job, check_known_address, environment_proxy
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    GenerationFailure,
    GenerationOutcome,
    GenerationRequest,
    WaitingRequests,
    sleep_in_slices,
)
from eyrie_workers.regeneration.endpoint import (
    GenerationEndpoint,
    declined,
    fatal,
    is_retryable,
    parse_completion,
    request_body,
    retry_delay_s,
)

MAX_REQUESTS = 50_000  # OpenAI's limit of requests in one batch
MAX_FILE_BYTES = 190 * 2**20  # below OpenAI's 200 MB for the input file
_CHAT_PATH = "/v1/chat/completions"
_PARTIAL_STATUSES = ("expired", "cancelled")


class PinnedTransport(httpx.HTTPTransport):
    """Connects to the address that was checked, under the host name of the URL."""

    def __init__(self, rules: ReadRules | None) -> None:
        super().__init__()
        self._rules = rules

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises AddressRefused for an address that the job may not connect to, and as httpx."""
        host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
        try:
            *others, last = addresses_for_job(host, port, self._rules)
        except (OSError, ValueError) as error:
            raise httpx.ConnectError(str(error), request=request) from error
        for address in others:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return self._sent_to(address, request)
        return self._sent_to(last, request)

    def _sent_to(self, address: str, request: httpx.Request) -> httpx.Response:
        return super().handle_request(httpx.Request(
            request.method, request.url.copy_with(host=address), headers=request.headers, stream=request.stream,
            extensions={**request.extensions, "sni_hostname": request.url.host}))


def _client(endpoint: GenerationEndpoint) -> httpx.Client:
    """Without redirects, which httpx does not follow. Raises AddressRefused as far as the address is known."""
    url = httpx.URL(endpoint.base_url)
    check_known_address(url.host, url.port or 0, endpoint.reads)
    proxied = environment_proxy(url.scheme, url.host, url.netloc.decode()) is not None
    return httpx.Client(headers=endpoint.headers, timeout=endpoint.spec.timeout_s,
                        transport=None if proxied else PinnedTransport(endpoint.reads))


class PendingBatch(Frozen):
    """`batch.json`: the batch in progress."""

    row_ids: tuple[str, ...]
    input_file_id: str
    batch_id: str | None = None


@dataclass
class BatchClient:
    endpoint: GenerationEndpoint
    tokenizer: AnswerRetokenizer
    state_file: Path  # `batch.json`
    warn: Callable[[str, str], None]
    first_delay_s: float = 0.5
    poll_s: float = 10.0
    max_requests: int = MAX_REQUESTS
    _failures: Counter[str] = field(default_factory=Counter)

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        """See `GenerationClient`. Raises Transient or Permanent as `online` does."""
        self.warn("TokenIdsNotReturned", "the Batch API returns no token ids: answers are tokenized again from their "
                  "text, which may differ from the ids the target produced (rows say ids_exact: false)")
        with _client(self.endpoint) as client:
            waiting = WaitingRequests(prompts)
            empty_batches = 0
            while chunk := self._chunk(waiting):
                pending = self._pending() or self._upload(client, chunk, pause)
                if pending.batch_id is None:
                    pending = self._create(client, pending, pause)
                assert pending.batch_id is not None
                batch = self._await(client, pending.batch_id, pause)
                outcomes = self._collect(client, batch, {prompt.row_id: prompt for prompt in chunk}, pause)
                yield from outcomes.values()
                self.state_file.unlink(missing_ok=True)
                waiting.front.extendleft(
                    prompt for prompt in reversed(chunk) if prompt.row_id not in outcomes)
                empty_batches = 0 if outcomes else empty_batches + 1
                if empty_batches > self.endpoint.spec.max_retries:
                    raise Transient(f"{self.endpoint.base_url}: {empty_batches} batches in a row returned no answer",
                                    "retry later; answered rows are kept", 3600.0)

    def _chunk(self, waiting: WaitingRequests) -> list[GenerationRequest]:
        """The prompts of the next batch: the unanswered ones of the batch in progress, if there is one."""
        if (pending := self._pending()) is not None:
            known = set(pending.row_ids)
            # Answered rows are not requested again and the order is deterministic: the batch's unanswered prompts are
            # first.
            if chunk := waiting.take_while(lambda prompt: prompt.row_id in known):
                return chunk
            self.state_file.unlink()
        left = [self.max_requests, MAX_FILE_BYTES]

        def fits(prompt: GenerationRequest) -> bool:
            left[0] -= 1
            left[1] -= len(self._line(prompt))
            return min(left) >= 0

        return waiting.take_while(fits)

    def _pending(self) -> PendingBatch | None:
        try:
            return PendingBatch.model_validate_json(self.state_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def _line(self, prompt: GenerationRequest) -> bytes:
        body = request_body(self.endpoint, prompt, ids_field=None)
        return json.dumps({"custom_id": prompt.row_id, "method": "POST", "url": _CHAT_PATH, "body": body}).encode() \
            + b"\n"

    def _upload(self, client: httpx.Client, chunk: Sequence[GenerationRequest],
                pause: Callable[[], None]) -> PendingBatch:
        lines = b"".join(self._line(prompt) for prompt in chunk)
        file = self._call(client, "POST", "/files", pause, data={"purpose": "batch"},
                          files={"file": ("requests.jsonl", lines, "application/jsonl")}).json()
        pending = PendingBatch(row_ids=tuple(prompt.row_id for prompt in chunk), input_file_id=file["id"])
        write_model(self.state_file, pending)
        return pending

    def _create(self, client: httpx.Client, pending: PendingBatch,
                pause: Callable[[], None]) -> PendingBatch:
        # A kill between POST /batches and saving its id leaves a batch that only the endpoint's list knows.
        listed = self._call(client, "GET", "/batches?limit=100", pause).json().get("data", [])
        batch = next((b for b in listed if b.get("input_file_id") == pending.input_file_id), None)
        if batch is None:
            body = {"input_file_id": pending.input_file_id, "endpoint": _CHAT_PATH, "completion_window": "24h"}
            batch = self._call(client, "POST", "/batches", pause, json=body).json()
        pending = pending.model_copy(update={"batch_id": batch["id"]})
        write_model(self.state_file, pending)
        return pending

    def _await(self, client: httpx.Client, batch_id: str, pause: Callable[[], None]) -> dict[str, Any]:
        while True:
            batch: dict[str, Any] = self._call(client, "GET", f"/batches/{batch_id}", pause).json()
            if batch["status"] == "completed" or batch["status"] in _PARTIAL_STATUSES:
                return batch
            if batch["status"] == "failed":
                self.state_file.unlink(missing_ok=True)
                reasons = [e.get("message", "") for e in (batch.get("errors") or {}).get("data", [])]
                raise Permanent(f"batch {batch_id} failed: {'; '.join(reasons) or 'no reason given'}",
                                "fix what the endpoint reports, then retry; answered rows are kept")
            sleep_in_slices(self.poll_s, pause)

    def _collect(self, client: httpx.Client, batch: dict[str, Any], prompts: dict[str, GenerationRequest],
                 pause: Callable[[], None]) -> dict[str, GenerationOutcome]:
        outcomes: dict[str, GenerationOutcome] = {}
        for key in ("output_file_id", "error_file_id"):
            if not batch.get(key):
                continue
            content = self._call(client, "GET", f"/files/{batch[key]}/content", pause).content
            for line in content.splitlines():
                row = json.loads(line)
                prompt = prompts.get(row.get("custom_id"))
                if prompt is not None and (outcome := self._outcome(prompt, row)) is not None:
                    outcomes[prompt.row_id] = outcome
        return outcomes

    def _outcome(self, prompt: GenerationRequest, row: dict[str, Any]) -> GenerationOutcome | None:
        """None for a request that expired, or that may succeed in another batch."""
        response, error = row.get("response") or {}, row.get("error") or {}
        status = response.get("status_code")
        if status == 200:
            return parse_completion(prompt, response.get("body"), self.tokenizer)
        if status is None:
            return None if "expired" in str(error.get("code")) else GenerationFailure(
                prompt.row_id, f"the Batch API answered: {error.get('message') or error.get('code')}")
        if is_retryable(status):
            self._failures[prompt.row_id] += 1
            return None if self._failures[prompt.row_id] <= self.endpoint.spec.max_retries else GenerationFailure(
                prompt.row_id, f"the endpoint answered {status} in {self._failures[prompt.row_id]} batches")
        return declined(prompt, status, f"{self.endpoint.base_url}{_CHAT_PATH}")

    def _call(self, client: httpx.Client, method: str, path: str, pause: Callable[[], None],
              **arguments: Any) -> httpx.Response:
        url = self.endpoint.base_url + path
        attempt = 0
        while True:
            try:
                response = client.request(method, url, **arguments)
            except httpx.TransportError as error:
                error_text, retry_after = f"{type(error).__name__} {error}".strip(), None
            else:
                if response.is_success:
                    return response
                if not is_retryable(response.status_code):
                    raise fatal(response.status_code, url)
                error_text, retry_after = f"status {response.status_code}", response.headers.get("Retry-After")
            if attempt >= self.endpoint.spec.max_retries:
                raise Transient(f"{url} failed {attempt + 1} times: {error_text}",
                                "check that the endpoint is up, then retry: the batch is saved", 60.0)
            sleep_in_slices(retry_delay_s(attempt, retry_after, self.first_delay_s, random.random()), pause)
            attempt += 1
