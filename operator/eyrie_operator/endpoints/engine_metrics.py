"""Reads acceptance and request counters from an engine's /metrics, ours or SGLang's. Pure.

Our engine counts accepted draft tokens by position; SGLang has no such counter.

SGLang updates its counters when a request ends, and counts the first token, which no round produced: with 100 tokens
per response its tau is one hundredth too high. A round in which its adaptive mode did not draft counts like any other
(`state.ServePolicy.counts_drafted`). Without a drafter neither engine counts rounds: a window has requests alone.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ROUNDS = ("eyrie_drafted_rounds_total", "sglang:spec_verify_calls_total")
_TOKENS = ("eyrie_drafted_round_tokens_total", "sglang:generation_tokens_total")
_ACCEPTED = "eyrie_accepted_tokens_total"
_OURS, _SGLANG = "eyrie_requests_total", "sglang:http_responses_total"


@dataclass(frozen=True)
class EngineCounters:
    """Counters of one engine process since its start."""

    rounds: float = 0.0
    """Rounds that drafted, and the tokens they produced."""

    tokens: float = 0.0
    answered: float = 0.0
    """Clients' requests that succeeded, and those that failed with a server error."""

    failed: float = 0.0
    accepted: tuple[float, ...] = ()
    """Draft tokens accepted at each position, the first one first. Empty where the engine does not say."""

    @property
    def requests(self) -> float:
        """Clients' requests that have ended."""
        return self.answered + self.failed


def read_metrics(text: str) -> EngineCounters:
    """Parse Prometheus' text format; absent counters are zero."""
    rounds = tokens = answered = failed = 0.0
    accepted: dict[int, float] = {}
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        name, _, labels = head.partition("{")
        if name in _ROUNDS:
            rounds += float(value)
        elif name in _TOKENS:
            tokens += float(value)
        elif name == _ACCEPTED:
            accepted[int(dict(_LABEL.findall(labels))["position"])] = float(value)
        elif name in (_OURS, _SGLANG):
            parsed = dict(_LABEL.findall(labels))
            if name == _SGLANG and not parsed.get("endpoint", "").startswith("/v1/"):
                continue  # probes and scrapes
            if parsed.get("finish_reason") == "error" or parsed.get("status_code", "").startswith("5"):
                failed += float(value)
            else:
                answered += float(value)
    deepest = max(accepted, default=0)
    return EngineCounters(rounds, tokens, answered, failed,
                          tuple(accepted.get(position, 0.0) for position in range(1, deepest + 1)))


Counts = Mapping[str, EngineCounters]
"""By process: a restarted engine counts from zero under another key."""


def increase(counts: Counts, since: Counts) -> EngineCounters:
    """The increase since `since`. A process started meanwhile counts from zero; one that ended is left out."""
    total = EngineCounters()
    positions_known = True
    for process, now in counts.items():
        base = since.get(process, EngineCounters())
        # A version before positions were read wrote a baseline that lacks them.
        positions_known = positions_known and (bool(base.accepted) or base.tokens <= base.rounds)
        accepted = tuple(before + later - earlier for before, later, earlier
                         in zip_longest(total.accepted, now.accepted, base.accepted, fillvalue=0.0))
        total = EngineCounters(total.rounds + now.rounds - base.rounds, total.tokens + now.tokens - base.tokens,
                               total.answered + now.answered - base.answered, total.failed + now.failed - base.failed,
                               accepted)
    return total if positions_known else replace(total, accepted=())
