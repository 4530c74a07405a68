"""What the engine server counts, in Prometheus words.

Tokens and verify rounds are counted as they happen, in the thread that steps the engine, so that a scrape in the middle
of a long answer is true. Acceptance length is a gauge over the last rounds rather than over the process's life. Any
other window is the quotient of two counters' `rate()`: `eyrie_generated_tokens_total` by `eyrie_verify_rounds_total`
over all rounds, `eyrie_drafted_round_tokens_total` by `eyrie_drafted_rounds_total` over those that drafted. The latter
is what a controller watches to notice that the traffic has left the drafter's world: an engine that switches drafting
off under load has not, though all its rounds then give one token.
"""

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Rounds in the gauge's window. At a few tens of rounds a second and request: tens of seconds of traffic.
WINDOW_ROUNDS = 512
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class EngineMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._window: deque[int] = deque(maxlen=WINDOW_ROUNDS)
        self._tokens = Counter("eyrie_generated_tokens", "Tokens generated, prompt not included.",
                               registry=self._registry)
        self._prompt_tokens = Counter("eyrie_prompt_tokens", "Prompt tokens of accepted requests.",
                                      registry=self._registry)
        self._rounds = Counter("eyrie_verify_rounds", "Target passes over a draft tree; plain decode steps count too.",
                               registry=self._registry)
        self._drafted = Counter("eyrie_drafted_rounds", "Target passes for which the drafter was asked.",
                                registry=self._registry)
        self._drafted_tokens = Counter("eyrie_drafted_round_tokens", "Tokens those passes gave, bonus token included.",
                                       registry=self._registry)
        self._accepted = Counter("eyrie_accepted_tokens", "Draft tokens accepted, by their position in the draft.",
                                 ["position"], registry=self._registry)
        self._acceptance = Gauge("eyrie_acceptance_length",
                                 f"Mean tokens per target pass over the last {WINDOW_ROUNDS} rounds, bonus token "
                                 "included; NaN before the first round.", registry=self._registry)
        self._acceptance.set(float("nan"))
        self._requests = Counter("eyrie_requests", "Requests ended, by finish reason.", ["finish_reason"],
                                 registry=self._registry)
        self._first = Histogram("eyrie_time_to_first_token_seconds", "From acceptance of a request to its first token.",
                                buckets=_TTFT_BUCKETS, registry=self._registry)
        self._between = Histogram("eyrie_inter_token_latency_seconds",
                                  "Time between tokens; a round's time is shared evenly by the tokens it yields.",
                                  buckets=_ITL_BUCKETS, registry=self._registry)
        self._running = Gauge("eyrie_running_requests", "Requests being decoded.", registry=self._registry)
        self._queued = Gauge("eyrie_queued_requests", "Requests waiting for a slot.", registry=self._registry)

    def accepted_request(self, num_prompt_tokens: int) -> None:
        """A request was let in."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, count: int, since_s: float, *, first: bool) -> None:
        """`count` tokens arrived `since_s` after the request was accepted (first) or after its last tokens."""
        self._tokens.inc(count)
        if first:
            self._first.observe(since_s)
            return
        for _ in range(count):
            self._between.observe(since_s / count)

    def rounds(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Verify rounds happened, with so many draft tokens accepted, and asked for, in each."""
        if not accepted:
            return
        self._rounds.inc(len(accepted))
        tried = [count for count, asked in zip(accepted, drafted, strict=True) if asked]
        self._drafted.inc(len(tried))
        self._drafted_tokens.inc(sum(tried) + len(tried))
        for count in accepted:
            for position in range(1, count + 1):
                self._accepted.labels(str(position)).inc()
        self._window.extend(accepted)
        self._acceptance.set(1.0 + sum(self._window) / len(self._window))

    def ended(self, finish_reason: str) -> None:
        """A request ended: stop, length, tool_calls, cancelled or error."""
        self._requests.labels(finish_reason).inc()

    def load(self, running: int, queued: int) -> None:
        """How busy the engine is now."""
        self._running.set(running)
        self._queued.set(queued)

    def render(self) -> bytes:
        """The text a scraper reads."""
        return generate_latest(self._registry)
