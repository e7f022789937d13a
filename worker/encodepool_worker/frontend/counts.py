"""Counters of this process, and the text of /metrics: ours, the budget's and the loop's."""

import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from ..metrics import BY_NAME, COUNTER, TABLE, parse_sample

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

MAX_REFUSED_FIELDS = 100
"""Field names come from requests (tensors have names), so their number is bounded here."""

Samples = Mapping[str, Mapping[tuple[str, ...], float]]
"""Values by metric name, then by the values of its labels."""


class Counts:
    """Counters by name and labels; for one thread."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """``name`` must be a counter of the table, with exactly its labels."""
        metric = BY_NAME[name]
        if metric.kind != COUNTER or tuple(labels) != metric.labels:
            raise ValueError(f"{name} is a {metric.kind} with labels {metric.labels}, not {tuple(labels)}")
        values = self._values.setdefault(name, {})
        key = tuple(labels.values())
        values[key] = values.get(key, 0) + amount

    def add_refused(self, field: str) -> None:
        """Counts a refusal by its field; what stands in brackets is the request's, not ours."""
        plain = re.sub(r"\[[^\]]*\]?", "[]", field)[:100]
        name = "encodepool_requests_refused_total"
        known = self._values.get(name, {})
        if (plain,) not in known and len(known) >= MAX_REFUSED_FIELDS:
            plain = "other"
        self.add(name, field=plain)

    def get(self, name: str, **labels: str) -> float:
        return self._values.get(name, {}).get(tuple(labels.values()), 0)

    @property
    def samples(self) -> Samples:
        return self._values


def exposition(*sources: Samples) -> bytes:
    """The text format, in the order of the table. Metrics without a value are left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(sources))
    return generate_latest(registry)


def from_loop(counters: Mapping[str, float]) -> Samples:
    """The loop's counters as samples; what is not in the table is left out."""
    out: dict[str, dict[tuple[str, ...], float]] = {}
    for sample, value in counters.items():
        parsed = parse_sample(sample)
        if parsed is not None:
            out.setdefault(parsed[0], {})[parsed[1]] = value
    return out


class _Collected:
    def __init__(self, sources: Iterable[Samples]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterator[Metric]:
        for row in TABLE:
            values = {
                key: value for source in self._sources for key, value in source.get(row.name, {}).items()
            }
            if not values:
                continue
            make = CounterMetricFamily if row.kind == COUNTER else GaugeMetricFamily
            family = make(row.name, row.help, labels=row.labels)
            for key, value in values.items():
                family.add_metric(list(key), value)
            yield family
