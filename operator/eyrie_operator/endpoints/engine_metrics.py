"""What an engine's /metrics say of acceptance and of answers, ours or SGLang's. Pure.

SGLang adds to its counters when a request ends, and counts the first token, which no round gave: with answers of 100
tokens its tau reads one hundredth high. A round that its adaptive form left without drafting counts like any other
(`serving.ServePolicy.counts_drafted`). Undrafted neither engine counts rounds: no window ever fills.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ROUNDS = ("eyrie_drafted_rounds_total", "sglang:spec_verify_calls_total")
_TOKENS = ("eyrie_drafted_round_tokens_total", "sglang:generation_tokens_total")
_OURS, _SGLANG = "eyrie_requests_total", "sglang:http_responses_total"


@dataclass(frozen=True)
class EngineCounters:
    """One engine process since it began."""

    rounds: float = 0.0
    """Rounds that drafted, and the tokens they gave."""

    tokens: float = 0.0
    answered: float = 0.0
    """Clients' requests that were answered, and those that failed on our side."""

    failed: float = 0.0


def read_metrics(text: str) -> EngineCounters:
    """The counters in Prometheus' text format; zero for what is not there."""
    rounds = tokens = answered = failed = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        name, _, labels = head.partition("{")
        if name in _ROUNDS:
            rounds += float(value)
        elif name in _TOKENS:
            tokens += float(value)
        elif name in (_OURS, _SGLANG):
            known = dict(_LABEL.findall(labels))
            if name == _SGLANG and not known.get("endpoint", "").startswith("/v1/"):
                continue  # probes and scrapes
            if known.get("finish_reason") == "error" or known.get("status_code", "").startswith("5"):
                failed += float(value)
            else:
                answered += float(value)
    return EngineCounters(rounds, tokens, answered, failed)


Counts = Mapping[str, EngineCounters]
"""By process: a restarted one counts from zero and is another."""


def grown(counts: Counts, since: Counts) -> EngineCounters:
    """What was counted in between. A process that began meanwhile counts from zero; of one that ended nothing is
    known."""
    total = EngineCounters()
    for process, one in counts.items():
        base = since.get(process, EngineCounters())
        total = EngineCounters(total.rounds + one.rounds - base.rounds, total.tokens + one.tokens - base.tokens,
                               total.answered + one.answered - base.answered, total.failed + one.failed - base.failed)
    return total
