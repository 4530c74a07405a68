"""The operator's metrics, under the names its alerts use."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Telemetry:
    """One operator's figures, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.reconciled = Counter("eyrie_operator_reconcile", "Objects looked at.", ("kind",), registry=registry)
        self.errors = Counter("eyrie_operator_reconcile_errors", "Looks that failed and are repeated.",
                              ("kind", "reason"), registry=registry)
        self.seconds = Histogram("eyrie_operator_reconcile_seconds", "How long a look took, with what it did.",
                                 ("kind",), registry=registry)
        self.writes = Counter("eyrie_operator_writes", "Requests that change something in the cluster.",
                              ("verb", "kind"), registry=registry)
        self.waiting = Gauge("eyrie_operator_queue_length", "Objects waiting to be looked at.", registry=registry)
        self.leads = Gauge("eyrie_operator_leader", "1 while this operator holds the lease.", registry=registry)

    def count_write(self, verb: str, kind: str) -> None:
        """For `apply.Cluster`."""
        self.writes.labels(verb, kind).inc()

    def num_writes(self) -> float:
        """All of them."""
        return sum(one.value for family in self.writes.collect() for one in family.samples
                   if one.name.endswith("_total"))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
