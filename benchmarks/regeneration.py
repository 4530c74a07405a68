"""Share of the servers' capacity that online regeneration reaches. `python -m benchmarks.regeneration`

Stub servers of known timing (`tests.servers.stub_openai_server`): each answer takes a set time, however many are in
flight. With C requests in flight and T seconds per answer they can serve C / T answers per second, and R rounds of C
rows take R * T seconds at best. Printed:

- what was reached of that;
- how full the servers were kept: the time that answers spent in them, by their own clock, over C times the whole time.
  On a busy machine the servers are late too, which the first figure charges to regeneration and this one does not;
- the processor time a row cost here, which says where this process itself would be the limit.

Everything between the selection and the ledger is in it: dispatch, requests, reading token ids, appending rows.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.load_generator import stub_server
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.data.rows import AnsweredRow, RowLedger, RowSampling
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    GeneratedAnswer,
    GenerationRequest,
    row_seed,
)
from eyrie_workers.regeneration.endpoint import GenerationEndpoint
from eyrie_workers.regeneration.online import OnlineClient
from eyrie_workers.targets.loading import resolve
from eyrie_workers.targets.templates import ChatTokenizer


def prompts(tokenizer: ChatTokenizer, num: int) -> Iterator[GenerationRequest]:
    """Short questions, all different."""
    for number in range(num):
        messages = [{"role": "user", "content": f"What is question {number} about?"}]
        row_id = f"{number:032x}"
        yield GenerationRequest(row_id, messages, [], tokenizer.render(messages), row_seed(0, row_id), number)


def ask(endpoint: GenerationEndpoint, tokenizer: ChatTokenizer, num_rows: int, path: Path) -> tuple[float, float]:
    """GeneratedAnswer so many rows into a ledger; seconds and processor seconds."""
    ledger = RowLedger(path)
    engine = OnlineClient(endpoint, AnswerRetokenizer(tokenizer), lambda reason, text: print(f"{reason}: {text}"))
    asked = list(prompts(tokenizer, num_rows))  # the selection has rendered them
    sampling = RowSampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=endpoint.spec.max_new_tokens)
    started, cpu = time.perf_counter(), time.process_time()
    for outcome in engine.answers(iter(asked), lambda: None):
        if not isinstance(outcome, GeneratedAnswer):
            raise RuntimeError(f"the responder answered with {outcome.reason}")
        ledger.append(AnsweredRow(
            id=outcome.row_id, source="bench", line=1, category="", prompt_ids=tuple(outcome.prompt_ids),
            answer_ids=tuple(outcome.answer_ids), finish_reason=outcome.finish_reason, text=outcome.text,
            sampling=sampling, seed=0, ids_exact=outcome.ids_exact))
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    if len(ledger) != num_rows:
        raise RuntimeError(f"{len(ledger)} rows in the ledger instead of {num_rows}")
    return seconds, cpu_s


def main(argv: list[str] | None = None) -> int:
    """Print figures as a JSON object."""
    parser = argparse.ArgumentParser(description="Share of the capacity of paced servers that regeneration reaches.")
    parser.add_argument("--endpoints", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6, help="rows per request in flight")
    parser.add_argument("--tokens", type=int, default=200, help="per answer")
    parser.add_argument("--token", type=float, default=0.02, help="seconds per token")
    parser.add_argument("--dialect", default="sglang", choices=("sglang", "vllm", "openai"))
    given = parser.parse_args(argv)
    answer_s = (given.tokens - 1) * given.token
    tokenizer = ChatTokenizer(resolve(TargetSpec(model="quickstart")))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory, urls = Path(name), []
        for number in range(given.endpoints):
            (directory / str(number)).mkdir()
            urls.append(stack.enter_context(stub_server(directory / str(number), "--token", str(given.token),
                                                      "--tokens", str(given.tokens), "--dialect", given.dialect,
                                                      "--log", str(directory / f"{number}.jsonl"))))
        endpoint = GenerationEndpoint(RegenerateSpec(
            engine="openai", endpoints=tuple(urls), concurrency=given.concurrency, sampling=SamplingSpec(),
            max_new_tokens=given.tokens), "responder")
        num_rows, logs = given.concurrency * given.rounds, [directory / f"{n}.jsonl" for n in range(given.endpoints)]
        seconds, cpu_s = ask(endpoint, tokenizer, num_rows, directory / "rows.jsonl")
        stack.close()  # the logs are whole when the servers have ended
        served_s = sum(line["sent_at"][0] - line["received_at"] for log in logs
                       for line in map(json.loads, log.read_text().splitlines()))
    possible = given.concurrency / answer_s
    print(json.dumps({
        "rows": num_rows, "endpoints": given.endpoints, "concurrency": given.concurrency,
        "answer_s": round(answer_s, 3), "possible_rows_per_s": round(possible, 1),
        "reached_rows_per_s": round(num_rows / seconds, 1), "reached_share": round(num_rows / seconds / possible, 4),
        "servers_kept_full_share": round(served_s / (given.concurrency * seconds), 4),
        "cpu_ms_per_row": round(1000 * cpu_s / num_rows, 2)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
