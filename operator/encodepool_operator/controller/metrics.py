"""The operator's metrics, all in one registry of their own."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "encodepool_operator"
SHORT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
LONG_S = (10, 30, 60, 120, 300, 600, 1800, 3600, 7200)


class Metrics:
    """``ports_*`` count blocks of ports."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(name, doc, labels, namespace=PREFIX, registry=self.registry)

        def gauge(name: str, doc: str, *labels: str) -> Gauge:
            return Gauge(name, doc, labels, namespace=PREFIX, registry=self.registry)

        def histogram(name: str, doc: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, doc, labels, namespace=PREFIX, registry=self.registry, buckets=buckets)

        self.reconcile_seconds = histogram("reconcile_seconds", "Time of one look at a pool.", SHORT_S)
        self.reconcile_failures = counter(
            "reconcile_failures", "Looks at a pool in which something was not done.", "why"
        )
        self.queue_depth = gauge("queue_depth", "Pools that wait to be looked at.")
        self.queue_age_seconds = gauge("queue_age_seconds", "Wait of the pool that waits longest.")
        self.api_calls = counter("api_calls", "Requests to the API server.", "verb", "code")
        self.api_seconds = histogram("api_seconds", "Time of requests to the API server.", SHORT_S, "verb")
        self.watch_age_seconds = gauge("watch_age_seconds", "Time since the last event of a watch.", "kind")
        self.resync_age_seconds = gauge("resync_age_seconds", "Time since the last complete LIST.")
        self.resync_differences = counter(
            "resync_differences", "Objects that a LIST knew better than the watch.", "kind"
        )
        self.stalled_watches = counter("stalled_watches", "Watches found to tell nothing.", "kind")
        self.actions = counter("actions", "Actions carried out.", "action")
        self.groups = gauge("groups", "Groups by phase.", "namespace", "pool", "phase")
        self.restarts = counter("group_restarts", "Groups stopped because they failed.", "reason")
        self.rollout_seconds = histogram(
            "rollout_seconds", "Time from a new revision to the last group on it.", LONG_S
        )
        self.ports_used = gauge("ports_used", "Port blocks in use.", "namespace", "pool")
        self.ports_free = gauge("ports_free", "Port blocks that are free.", "namespace", "pool")
        self.leading = gauge("leading", "1 while this replica holds the Lease.")
        self.events_dropped = counter("events_dropped", "Events that were not posted.")

    def observe_call(self, verb: str, code: str, taken_s: float) -> None:
        self.api_calls.labels(verb, code).inc()
        self.api_seconds.labels(verb).observe(taken_s)
