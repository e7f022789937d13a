"""Rank 0's part of the metrics: counters any thread adds to, and readings of one moment.

They travel to the frontend in the State message, by the names of the table in
``encodepool_worker.metrics``; the frontend exposes them.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from ..core.limits import PipelineSnapshot
from ..metrics import sample_name
from ..transport.sender_types import SenderSnapshot

COUNTED_BY_THE_PIPELINE = {
    "encodepool_tower_failures_total": "items_failed",
    "encodepool_expired_total": "expired_before_encode",
    "encodepool_deduplicated_total": "joined",
    "encodepool_quarantines_total": "writes_late",
}


class Metrics:
    """Counters of the table by name and labels. Raises KeyError or ValueError for any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        sample = _sample(name, tuple(labels.items()))
        with self._lock:
            self._values[sample] += value

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)


@lru_cache(maxsize=1024)
def _sample(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    return sample_name(name, **dict(labels))


DEMOTIONS = {"moved": "demotions", "kept": "demotions_in_vain", "failed": "demotions_failed"}


def pipeline_samples(snapshot: PipelineSnapshot, now_s: float, tiers: Sequence[str]) -> dict[str, float]:
    """The pipeline's numbers under their names for outside; ``tiers`` are the names of its tiers."""
    store, counters = snapshot.store, snapshot.counters
    queued_s = 0.0 if snapshot.queue_since_s is None else now_s - snapshot.queue_since_s
    samples = {
        sample_name("encodepool_queue_age_seconds"): queued_s,
        sample_name("encodepool_store_pinned_bytes"): float(store.pinned_bytes),
    }
    for name, counter in COUNTED_BY_THE_PIPELINE.items():
        samples[sample_name(name)] = float(counters.get(counter, 0))
    in_second = counters.get("hits_second_tier", 0)
    hits = (counters.get("hits", 0) - in_second, in_second)
    for tier, books, n_hits in zip(tiers, store.tiers, hits, strict=False):
        samples[sample_name("encodepool_hits_total", tier=tier)] = float(n_hits)
        samples[sample_name("encodepool_evictions_total", tier=tier)] = float(books.evictions)
        for state, nbytes in [*books.bytes_by_state.items(), ("free", books.free_bytes)]:
            samples[sample_name("encodepool_store_bytes", state=state, tier=tier)] = float(nbytes)
    if len(store.tiers) > 1:
        for outcome, counter in DEMOTIONS.items():
            samples[sample_name("encodepool_demotions_total", outcome=outcome)] = float(
                counters.get(counter, 0)
            )
    return samples


def sender_samples(snapshot: SenderSnapshot) -> dict[str, float]:
    """The sender's numbers under their names for outside."""
    samples = {
        sample_name("encodepool_transfer_bytes_total"): float(snapshot.written_bytes),
        sample_name("encodepool_transfer_seconds_total"): snapshot.write_seconds,
        sample_name("encodepool_breakers_open"): float(snapshot.peers.get("broken", 0)),
    }
    for outcome, n_writes in snapshot.outcomes.items():
        if outcome != "done":
            samples[sample_name("encodepool_transfer_failures_total", reason=outcome)] = float(n_writes)
    return samples
