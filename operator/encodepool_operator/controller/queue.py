"""Which pools to look at next: each at most once in the queue, however often it was named.

A key that is being worked on is not handed out a second time; named meanwhile, it comes back when it
is done. Times come from ``clock`` (monotonic seconds).
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(slots=True)
class _Waiting:
    """``due_s`` is when the key may be handed out, ``since_s`` when it was first wanted."""

    due_s: float
    since_s: float
    entry: int


class KeyQueue(Generic[Key]):
    """Bounded by the number of keys."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[Key, _Waiting] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._working: dict[Key, float] = {}
        self._entries = 0
        self._news = asyncio.Event()

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Want ``key`` in ``after_s`` seconds; an earlier time wins over a later one."""
        now_s = self._clock()
        due_s = now_s + after_s
        known = self._waiting.get(key)
        if known is not None and known.due_s <= due_s:
            return
        self._entries += 1
        since_s = due_s if known is None else min(known.since_s, due_s)
        self._waiting[key] = _Waiting(due_s, since_s, self._entries)
        heapq.heappush(self._heap, (due_s, self._entries, key))
        self._news.set()

    def forget(self, key: Key) -> None:
        self._waiting.pop(key, None)

    async def take(self) -> Key:
        """The next key that is due and not being worked on; ``done`` must follow."""
        while True:
            self._news.clear()
            key, wait_s = self.take_due()
            if key is not None:
                return key
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                pass

    def done(self, key: Key) -> None:
        self._working.pop(key, None)
        known = self._waiting.get(key)
        if known is not None:  # its place in the heap may have been passed over
            heapq.heappush(self._heap, (known.due_s, known.entry, key))
            self._news.set()

    @property
    def depth(self) -> int:
        """Keys that are due."""
        now_s = self._clock()
        return sum(waiting.due_s <= now_s for waiting in self._waiting.values())

    @property
    def age_s(self) -> float:
        """How long the oldest due key has waited, or the longest work has taken."""
        now_s = self._clock()
        waiting = (now_s - w.since_s for key, w in self._waiting.items() if key not in self._working)
        working = (now_s - began_s for began_s in self._working.values())
        return max([0.0, *waiting, *working])

    def take_due(self) -> tuple[Key | None, float | None]:
        """The next key if one is due, else in how many seconds one may be (None: when added)."""
        now_s = self._clock()
        while self._heap:
            due_s, entry, key = self._heap[0]
            known = self._waiting.get(key)
            if known is None or known.entry != entry or key in self._working:
                heapq.heappop(self._heap)  # outdated, or pushed again by ``done``
                continue
            if due_s > now_s:
                return None, due_s - now_s
            heapq.heappop(self._heap)
            del self._waiting[key]
            self._working[key] = now_s
            return key, 0.0
        return None, None
