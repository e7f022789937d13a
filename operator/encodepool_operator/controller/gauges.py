"""What the metrics say about pools; worked out when they are asked for, not when a pool changes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from encodepool_operator.api import labels
from encodepool_operator.core.addresses import free_blocks
from encodepool_operator.core.group import GroupRules, Phase
from encodepool_operator.core.memo import Memo
from encodepool_operator.core.snapshot import Snapshot

from .metrics import Metrics
from .pools import PoolKey


@dataclass(slots=True)
class _Seen:
    """The last snapshot of a pool; ``rollout_s`` is when its rollout was first seen, None without one."""

    snapshot: Snapshot
    memo: Memo
    rollout_s: float | None = None


class PoolGauges:
    def __init__(self, metrics: Metrics, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._pools: dict[PoolKey, _Seen] = {}

    def note(self, key: PoolKey, snapshot: Snapshot, memo: Memo) -> None:
        seen = self._pools.get(key)
        if seen is None:
            seen = self._pools[key] = _Seen(snapshot, memo)
        seen.snapshot, seen.memo = snapshot, memo
        status = snapshot.status or {}
        rolling = status.get("currentRevision") != status.get("updateRevision")
        if rolling and seen.rollout_s is None:
            seen.rollout_s = self._clock()
        elif not rolling and seen.rollout_s is not None:
            self._metrics.rollout_seconds.observe(self._clock() - seen.rollout_s)
            seen.rollout_s = None

    def forget(self, key: PoolKey) -> None:
        if self._pools.pop(key, None) is not None:
            for phase in Phase:
                self._metrics.groups.remove_by_labels(_labels(key) | {"phase": phase.value})
            self._metrics.ports_used.remove_by_labels(_labels(key))
            self._metrics.ports_free.remove_by_labels(_labels(key))

    def show(self) -> None:
        for key, seen in self._pools.items():
            pool = seen.snapshot.pool
            resume = pool.metadata.annotations.get(labels.RESUME, "")
            rules = GroupRules(pool.spec.restart, pool.metadata.uid, resume)
            phases = Counter(
                seen.memo.view(group, rules, self._now()).phase for group in seen.snapshot.groups
            )
            for phase in Phase:
                self._metrics.groups.labels(*key, phase.value).set(phases[phase])
            used = sum(group.object is not None for group in seen.snapshot.groups)
            self._metrics.ports_used.labels(*key).set(used)
            self._metrics.ports_free.labels(*key).set(free_blocks(seen.snapshot, pool.spec.network))


def _labels(key: PoolKey) -> dict[str, str]:
    return {"namespace": key[0], "pool": key[1]}
