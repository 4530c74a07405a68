"""Prometheus metrics of the engine server.

Tokens and verify rounds are counted when they happen, in the engine thread, so that a scrape during a long response is
correct. Acceptance length is a gauge over the last rounds instead of over the life of the process. For any other window
divide the `rate()` of two counters: `eyrie_generated_tokens_total` by `eyrie_verify_rounds_total` for all rounds,
`eyrie_drafted_round_tokens_total` by `eyrie_drafted_rounds_total` for the rounds that drafted. A controller watches the
latter to detect that the traffic has moved away from the drafter's training data. The former also falls when an engine
disables drafting under load, where every round yields one token.
"""

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Rounds in the gauge's window: at a few tens of rounds per second and request, tens of seconds of traffic.
WINDOW_ROUNDS = 512
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class EngineMetrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._window: deque[int] = deque(maxlen=WINDOW_ROUNDS)
        self._tokens = Counter("eyrie_generated_tokens", "Tokens generated, prompt not included.",
                               registry=self._registry)
        self._prompt_tokens = Counter("eyrie_prompt_tokens", "Prompt tokens of accepted requests.",
                                      registry=self._registry)
        self._rounds = Counter("eyrie_verify_rounds", "Target passes over a draft tree; plain decode steps count too.",
                               registry=self._registry)
        self._drafted = Counter("eyrie_drafted_rounds", "Target passes with draft tokens.",
                                registry=self._registry)
        self._drafted_tokens = Counter("eyrie_drafted_round_tokens", "Tokens of those passes, bonus token included.",
                                       registry=self._registry)
        self._accepted = Counter("eyrie_accepted_tokens", "Draft tokens accepted, by their position in the draft.",
                                 ["position"], registry=self._registry)
        self._acceptance = Gauge("eyrie_acceptance_length",
                                 f"Mean tokens per target pass over the last {WINDOW_ROUNDS} rounds, bonus token "
                                 "included; NaN before the first round.", registry=self._registry)
        self._acceptance.set(float("nan"))
        self._requests = Counter("eyrie_requests", "Finished requests, by finish reason.", ["finish_reason"],
                                 registry=self._registry)
        self._first = Histogram("eyrie_time_to_first_token_seconds", "From acceptance of a request to its first token.",
                                buckets=_TTFT_BUCKETS, registry=self._registry)
        self._between = Histogram("eyrie_inter_token_latency_seconds",
                                  "Time between tokens; a round's time is shared evenly by the tokens it yields.",
                                  buckets=_ITL_BUCKETS, registry=self._registry)
        self._running = Gauge("eyrie_running_requests", "Requests being decoded.", registry=self._registry)
        self._queued = Gauge("eyrie_queued_requests", "Requests waiting for a slot.", registry=self._registry)

    def accepted_request(self, num_prompt_tokens: int) -> None:
        """Count an accepted request."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, count: int, since_s: float, *, first: bool) -> None:
        """Count tokens that arrived `since_s` after the request was accepted (first) or after its previous tokens."""
        self._tokens.inc(count)
        if first:
            self._first.observe(since_s)
            return
        for _ in range(count):
            self._between.observe(since_s / count)

    def rounds(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Count verify rounds, given the draft tokens accepted and proposed in each."""
        if not accepted:
            return
        self._rounds.inc(len(accepted))
        of_drafted = [count for count, proposed in zip(accepted, drafted, strict=True) if proposed]
        self._drafted.inc(len(of_drafted))
        self._drafted_tokens.inc(sum(of_drafted) + len(of_drafted))
        for count in accepted:
            for position in range(1, count + 1):
                self._accepted.labels(str(position)).inc()
        self._window.extend(accepted)
        self._acceptance.set(1.0 + sum(self._window) / len(self._window))

    def ended(self, finish_reason: str) -> None:
        """Count a finished request by its reason: stop, length, tool_calls, cancelled or error."""
        self._requests.labels(finish_reason).inc()

    def load(self, running: int, queued: int) -> None:
        """Set the number of running and of queued requests."""
        self._running.set(running)
        self._queued.set(queued)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
