"""Reads acceptance and request counters from an engine's /metrics, ours or SGLang's. Pure.

Our engine counts accepted draft tokens by position; SGLang has no such counter.

SGLang updates its counters when a request ends, and counts the first token, which no round produced: with 100 tokens
per response its tau is one hundredth too high. A round in which its adaptive mode did not draft counts like any other
(`plan.ServePolicy.counts_drafted`). Without a drafter neither engine counts rounds: a window has requests and tokens
alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest

from prometheus_client.parser import text_string_to_metric_families

from eyrie_api.contract.model import Frozen

_ROUNDS = ("eyrie_drafted_rounds_total", "sglang:spec_verify_calls_total")
_TOKENS = ("eyrie_drafted_round_tokens_total", "sglang:generation_tokens_total")
_GENERATED = ("eyrie_generated_tokens_total", "sglang:generation_tokens_total")
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

    generated: float = 0.0
    """All tokens, those of rounds that did not draft included."""

    @property
    def requests(self) -> float:
        """Clients' requests that have ended."""
        return self.answered + self.failed


def read_metrics(text: str) -> EngineCounters:
    """Parse Prometheus' text format; absent counters are zero. Raises ValueError."""
    rounds = tokens = generated = answered = failed = 0.0
    accepted: dict[int, float] = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        name, labels, value = sample.name, sample.labels, sample.value
        if name in _GENERATED:
            generated += value
        if name in _ROUNDS:
            rounds += value
        elif name in _TOKENS:
            tokens += value
        elif name == _ACCEPTED:
            accepted[int(labels["position"])] = value
        # SGLang's responses to probes and scrapes are not counted.
        elif name == _OURS or (name == _SGLANG and labels.get("endpoint", "").startswith("/v1/")):
            if labels.get("finish_reason") == "error" or labels.get("status_code", "").startswith("5"):
                failed += value
            else:
                answered += value
    positions = range(1, max(accepted, default=0) + 1)
    return EngineCounters(rounds, tokens, answered, failed, tuple(accepted.get(place, 0.0) for place in positions),
                          generated)


Counts = Mapping[str, EngineCounters]
"""By process: a restarted engine counts from zero under another key."""


def increase(counts: Counts, since: Counts) -> EngineCounters:
    """The increase since `since`. A process started meanwhile counts from zero; one that ended is left out."""
    total = EngineCounters()
    for process, now in counts.items():
        base = since.get(process, EngineCounters())
        accepted = tuple(before + later - earlier for before, later, earlier
                         in zip_longest(total.accepted, now.accepted, base.accepted, fillvalue=0.0))
        total = EngineCounters(total.rounds + now.rounds - base.rounds, total.tokens + now.tokens - base.tokens,
                               total.answered + now.answered - base.answered, total.failed + now.failed - base.failed,
                               accepted, total.generated + now.generated - base.generated)
    return total


class Window(Frozen):
    """The beginning of an acceptance window or of a canary's share: its time, and the engines' counters then. Stored,
    so that a restarted control plane continues the window of its predecessor."""

    since: datetime
    counts: dict[str, EngineCounters]
