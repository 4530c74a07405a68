"""The operator's metrics, with the names that the alerts use."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Telemetry:
    """Metrics of one operator in their own registry."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.reconciled = Counter("eyrie_operator_reconcile", "Reconciliations.", ("kind",), registry=registry)
        self.errors = Counter("eyrie_operator_reconcile_errors", "Reconciliations that failed and are retried.",
                              ("kind", "reason"), registry=registry)
        self.seconds = Histogram("eyrie_operator_reconcile_seconds", "Duration of a reconciliation with its writes.",
                                 ("kind",), registry=registry)
        self.writes = Counter("eyrie_operator_writes", "Write requests to the cluster.",
                              ("verb", "kind"), registry=registry)
        self.waiting = Gauge("eyrie_operator_queue_length", "Objects waiting for reconciliation.", registry=registry)
        self.leads = Gauge("eyrie_operator_leader", "1 while this operator holds the lease.", registry=registry)

    def count_write(self, verb: str, kind: str) -> None:
        """For `apply.Cluster`."""
        self.writes.labels(verb, kind).inc()

    def num_writes(self) -> float:
        """Total number of writes."""
        return sum(sample.value for family in self.writes.collect() for sample in family.samples
                   if sample.name.endswith("_total"))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
