"""Several engines over one region, so that one frozen peer cannot hold up the others.

Mooncake opens a peer's session inside the first write to it, under a lock that every other write
of that engine takes as well; a peer that is frozen at that moment keeps the lock for 61 s. So at
most one call of an engine may be an opening one, no other call starts meanwhile, and if it takes
longer than ``open_timeout_s`` the engine's other peers move to another engine. The stuck engine is
used again once its call has returned.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import TransportError
from .base import MAX_SLICES_PER_BATCH, Engine, RawSlice

# A call takes Mooncake's lock as it begins and holds it for microseconds. An opening call waits
# until every other call is this old, so none can still be in front of the lock.
_PAST_THE_LOCK_S = 0.05


@dataclass(slots=True, eq=False)
class _Slot:
    """One engine and what is going on in it."""

    number: int
    engine: Engine
    opened: set[str] = field(default_factory=set)
    calls: dict[int, float] = field(default_factory=dict)  # call -> when it began
    opening: str | None = None
    opening_since_s: float = 0.0
    probes: int = 0
    retired: bool = False


class EnginePool:
    """``engines`` are used side by side, up to ``max_engines`` while some are stuck. Thread-safe."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        region_ptr: int,
        region_nbytes: int,
        *,
        engines: int,
        max_engines: int,
        open_timeout_s: float,
        wait_s: float,
    ) -> None:
        """Makes the first engine. Raises TransportError."""
        self._make_engine = make_engine
        self._region = (region_ptr, region_nbytes)
        self._engines = engines
        self._max_engines = max(engines, max_engines)
        self._open_timeout_s = open_timeout_s
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._calls = itertools.count()
        self._pins: dict[str, _Slot] = {}
        self._creating = 0
        self._closed = False
        self._slots = [self._create()]

    @property
    def session(self) -> str:
        """The session of the first engine: what this process is called in its peers' logs."""
        return self._session

    def write(self, session: str, slices: Sequence[RawSlice]) -> None:
        """As Engine.write, on the engine the session is pinned to."""
        for first in range(0, len(slices), MAX_SLICES_PER_BATCH):
            slot, call = self._enter(session)
            opened = False
            try:
                slot.engine.write(session, slices[first : first + MAX_SLICES_PER_BATCH])
                opened = True
            finally:
                self._leave(slot, call, session, opened)

    def probe(self, session: str) -> bool:
        """As Engine.probe; on Mooncake it needs no lock, so also a stuck engine will do."""
        with self._changed:
            slot = self._any_slot(session)
            slot.probes += 1
        try:
            return slot.engine.probe(session)
        finally:
            with self._changed:
                slot.probes -= 1
                self._changed.notify_all()

    def needs_open(self, session: str) -> bool:
        """Whether the next write to this peer would be its first on the engine it will use."""
        with self._changed:
            slot = self._usable_pin(session)
            return slot is None or session not in slot.opened

    def engine_of(self, session: str) -> int | None:
        """Number of the engine the session is pinned to."""
        with self._changed:
            slot = self._pins.get(session)
            return None if slot is None else slot.number

    def forget(self, session: str) -> None:
        with self._changed:
            slot = self._pins.pop(session, None)
            if slot is not None:
                slot.opened.discard(session)

    def retire(self, number: int) -> None:
        """Start nothing on this engine any more, so that ``close_retired`` can close it."""
        with self._changed:
            for slot in self._slots:
                if slot.number == number:
                    slot.retired = True
            self._changed.notify_all()

    def close_retired(self) -> list[int]:
        """Close retired engines that nothing uses; their numbers. Mooncake takes a second each."""
        with self._changed:
            idle = [slot for slot in self._slots if slot.retired and not slot.calls and not slot.probes]
            self._slots = [slot for slot in self._slots if slot not in idle]
        for slot in idle:
            slot.engine.close()
        return [slot.number for slot in idle]

    def counts(self) -> tuple[int, int]:
        """(engines there are, engines stuck in an opening call)."""
        with self._changed:
            return len(self._slots), sum(self._stuck(slot) for slot in self._slots)

    def close(self) -> None:
        """Close every engine, whatever still runs in it. Idempotent."""
        with self._changed:
            self._closed = True
            slots, self._slots = self._slots, []
            self._changed.notify_all()
        for slot in slots:
            slot.engine.close()

    # --- called with the lock held

    def _any_slot(self, session: str) -> _Slot:
        """An engine to probe with: the peer's own unless it is to be closed."""
        slot = self._pins.get(session)
        if slot is not None and not slot.retired:
            return slot
        while not self._closed:
            for slot in self._slots:
                if not slot.retired:
                    return slot
            if not self._make_room_for_one():
                self._changed.wait(self._wait_s)
        raise TransportError("the engines are closed")

    def _stuck(self, slot: _Slot) -> bool:
        return slot.opening is not None and time.monotonic() - slot.opening_since_s >= self._open_timeout_s

    def _usable_pin(self, session: str) -> _Slot | None:
        slot = self._pins.get(session)
        return None if slot is None or slot.retired or self._stuck(slot) else slot

    def _place(self, session: str) -> _Slot | None:
        """Pin the session to an engine that can take it; None if one has to be made or awaited."""
        slot = self._usable_pin(session)
        if slot is not None:
            return slot
        usable = [slot for slot in self._slots if not slot.retired and not self._stuck(slot)]
        room = len(self._slots) + self._creating < self._max_engines
        if not usable or (room and len(usable) + self._creating < self._engines):
            return None
        load = {slot.number: 0 for slot in usable}
        for pinned in self._pins.values():
            if pinned.number in load:
                load[pinned.number] += 1
        slot = min(usable, key=lambda one: (load[one.number], one.number))
        self._pins[session] = slot
        return slot

    def _enter(self, session: str) -> tuple[_Slot, int]:
        """Wait until a call for this session may begin, and count it. Raises TransportError."""
        deadline_s = time.monotonic() + self._wait_s
        with self._changed:
            while True:
                if self._closed:
                    raise TransportError("the engines are closed")
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    raise TransportError(f"no engine became free within {self._wait_s} s")
                slot = self._place(session)
                if slot is None:
                    if not self._make_room_for_one():
                        self._changed.wait(deadline_s - now_s)
                    continue
                if slot.opening is not None:
                    self._changed.wait(
                        max(0.0, min(slot.opening_since_s + self._open_timeout_s, deadline_s) - now_s)
                    )
                    continue
                if session not in slot.opened:
                    young_s = max(slot.calls.values(), default=0.0) + _PAST_THE_LOCK_S - now_s
                    if young_s > 0:
                        self._changed.wait(young_s)
                        continue
                    slot.opening, slot.opening_since_s = session, now_s
                call = next(self._calls)
                slot.calls[call] = now_s
                return slot, call

    def _make_room_for_one(self) -> bool:
        """Make another engine if there may be one. Leaves the lock while it works."""
        if len(self._slots) + self._creating >= self._max_engines:
            return False
        self._creating += 1
        self._changed.release()
        slot = None
        try:
            slot = self._create()
        except TransportError as exc:
            raise TransportError(f"no further engine could be made: {exc}") from exc
        finally:
            self._changed.acquire()
            self._creating -= 1
            if slot is not None and not self._closed:
                self._slots.append(slot)
                slot = None
            self._changed.notify_all()
        if slot is not None:
            slot.engine.close()
        return True

    def _leave(self, slot: _Slot, call: int, session: str, opened: bool) -> None:
        with self._changed:
            del slot.calls[call]
            if slot.opening == session:
                slot.opening = None
            # After a failure the engine may have dropped the session: the next write opens it.
            if opened:
                slot.opened.add(session)
            else:
                slot.opened.discard(session)
            self._changed.notify_all()

    # --- no lock held

    def _create(self) -> _Slot:
        engine = self._make_engine()
        try:
            engine.register(*self._region)
        except TransportError:
            engine.close()
            raise
        number = next(self._numbers)
        if number == 0:
            self._session = engine.session
        return _Slot(number, engine)
