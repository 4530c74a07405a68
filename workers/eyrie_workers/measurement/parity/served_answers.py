"""Greedy answers of a serving engine as token ids, with the histogram of accepted lengths of each.

Does not import torch. Two APIs: SGLang's `/generate`, which takes and returns token ids and whose `meta_info` holds the
histogram; and the OpenAI completions of our engine with its two extensions (`engines.openai_api`). Both report the
rounds of one request. SGLang counts all accepted tokens of the last round, our engine those within the answer.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from eyrie_api.v1alpha1.engine import EngineKind
from eyrie_api.v1alpha1.model import Frozen
from eyrie_workers.engines.process import EngineFailed

_TIMEOUT_S = 600.0
WHOLE_LAST_ROUND: dict[EngineKind, bool] = {"sglang": True, "embedded": False}
"""Whether an engine counts all tokens accepted in the round that ends a request."""


class Served(Frozen):
    """One answer."""

    token_ids: tuple[int, ...]
    histogram: tuple[int, ...]
    """[k]: rounds in which k draft tokens were accepted; empty without a drafter."""


def request_answer(kind: EngineKind, url: str, model: str, prompt_ids: Sequence[int], max_new_tokens: int) -> Served:
    """The engine's greedy answer. Raises EngineFailed for an error status, a dropped or a refused connection."""
    if kind == "sglang":
        answer = _post(f"{url}/generate", {
            "input_ids": list(prompt_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens}})
        return Served(token_ids=answer["output_ids"],
                      histogram=answer["meta_info"].get("spec_correct_drafts_histogram") or ())
    answer = _post(f"{url}/v1/completions", {
        "model": model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens, "temperature": 0.0,
        "return_token_ids": True, "return_spec_tokens_details": True})
    details = (answer.get("sglext") or {}).get("spec_tokens_details") or {}
    return Served(token_ids=answer["choices"][0]["token_ids"],
                  histogram=details.get("spec_correct_drafts_histogram") or ())


def request_answers(kind: EngineKind, url: str, model: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, *,
                    in_flight: int = 1, pause: Callable[[], None] = lambda: None) -> list[Served]:
    """`request_answer` for every prompt, `in_flight` at a time; `pause` is called after each answer and may raise."""
    with ThreadPoolExecutor(in_flight) as pool:
        futures = [pool.submit(request_answer, kind, url, model, prompt, max_new_tokens) for prompt in prompts]
        answers = []
        try:
            for future in futures:
                answers.append(future.result())
                pause()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return answers


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            document = json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read(500).decode(errors="replace")
        raise EngineFailed(f"{url} answered {error.code}: {text}", "read the engine's log") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        raise EngineFailed(f"{url} did not complete the request: {error}", "read the engine's log") from error
    if not isinstance(document, dict):
        raise EngineFailed(f"{url} did not answer with a JSON object", "check that the URL is an engine's")
    return document
