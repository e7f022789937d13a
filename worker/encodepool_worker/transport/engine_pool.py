"""Several engines over the same memory, so that one frozen peer cannot hold up the others.

Mooncake opens a peer's session inside the first write to it, under a lock that every other write
of that engine takes as well; a peer that is frozen at that moment keeps the lock for 61 s. So at
most one call of an engine may be an opening one, no other call starts meanwhile, and if it takes
longer than ``open_timeout_s`` the engine's other peers move to another engine. The stuck engine is
used again once its call has returned.

Mooncake also never asks twice where a session's data port is. A peer that restarted under its old
session is refused for ever by an engine that knew it before, so after such a refusal, or when it registers
anew, it moves to an engine that does not.

Destroying a Mooncake engine stops every Python thread of the process for a second. So engines are
destroyed one at a time, and after each everybody else has at least as long as it took.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import TransportError, WriteRefused, WriteTorn
from .base import MAX_SLICES_PER_BATCH, Engine, RawSlice
from .regions import Region

# A call takes Mooncake's lock as it begins and holds it for microseconds. An opening call lets none
# begin and waits until every other one is this old, so none can still be in front of the lock.
_PAST_THE_LOCK_S = 0.05

_RENEW_PAUSE_S = 60.0
"""With as many engines as there may be, one is given up for a restarted peer at most so often."""

_MAKE_AGAIN_S = 60.0
"""After an engine that could not be made; those there are do the work meanwhile."""

_MAX_KNOWN = 16_384
"""Sessions remembered of each engine. One forgotten is taken for a stranger to the engine, which knows it."""

_LOOK_AGAIN_S = 1.0
"""When to see whether a retired engine has become idle."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One engine and what is going on in it.

    ``known`` are the sessions it has tried to write to, the longest unused first, and whether the
    last write succeeded.
    """

    number: int
    engine: Engine
    known: dict[str, bool] = field(default_factory=dict)
    calls: dict[int, float] = field(default_factory=dict)  # call -> when it began
    opening: str | None = None
    opening_since_s: float = 0.0
    probes: int = 0
    retired: bool = False

    @property
    def is_idle(self) -> bool:
        """Retired, and nothing is going on in it."""
        return self.retired and not self.calls and not self.probes

    def remember(self, session: str, opened: bool) -> None:
        self.known.pop(session, None)
        self.known[session] = opened
        _drop_oldest(self.known)


class EnginePool:
    """``engines`` are used side by side, up to ``max_engines`` while some are stuck. Thread-safe."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        regions: Sequence[Region],
        *,
        engines: int,
        max_engines: int,
        open_timeout_s: float,
        wait_s: float,
    ) -> None:
        """Makes the first engine. Raises TransportError."""
        self._make_engine = make_engine
        self._regions = regions
        self._engines = engines
        self._max_engines = max(engines, max_engines)
        self._open_timeout_s = open_timeout_s
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._calls = itertools.count()
        self._pins: dict[str, _Slot] = {}
        self._wrote: dict[str, int] = {}  # session -> number of the engine of its last write
        # Sessions whose peer may have restarted -> whether an engine that had written to it was refused.
        self._restarted: dict[str, bool] = {}
        self._renewed_s = -math.inf
        self._close_again_s = -math.inf
        self._make_again_s = -math.inf
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
            opened, refused = False, False
            try:
                slot.engine.write(session, slices[first : first + MAX_SLICES_PER_BATCH])
                opened = True
            except (WriteRefused, WriteTorn):
                refused = True
                raise
            finally:
                self._leave(slot, call, session, opened, refused)

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
            return slot is None or not slot.known.get(session)

    def engine_of(self, session: str) -> int | None:
        """Number of the engine that carried the session's last write; it may be pinned elsewhere by now."""
        with self._changed:
            return self._wrote.get(session)

    def renew(self, session: str) -> None:
        """The peer may have restarted: its next write goes to an engine that does not know it."""
        with self._changed:
            if any(session in slot.known for slot in self._slots):
                self._suspect(session, refused=False)

    def forget(self, session: str) -> None:
        with self._changed:
            self._restarted.pop(session, None)
            self._wrote.pop(session, None)
            slot = self._pins.pop(session, None)
            if slot is not None and session in slot.known:
                slot.known[session] = False

    def retire(self, number: int) -> None:
        """Start nothing on this engine any more, so that ``close_retired`` can close it."""
        with self._changed:
            for slot in self._slots:
                if slot.number == number:
                    slot.retired = True
            self._changed.notify_all()

    def close_retired(self) -> int | None:
        """Close one retired engine that nothing uses, if it is time for one; its number."""
        with self._changed:
            idle = [slot for slot in self._slots if slot.is_idle]
            if not idle or time.monotonic() < self._close_again_s:
                return None
            slot = idle[0]
            self._slots.remove(slot)
        took_s = _close(slot.engine)
        with self._changed:
            self._close_again_s = time.monotonic() + took_s
            self._changed.notify_all()
        return slot.number

    def close_due_s(self) -> float | None:
        """When to call ``close_retired`` again (monotonic); None while no engine is retired."""
        with self._changed:
            retired = [slot for slot in self._slots if slot.retired]
            if not retired:
                return None
            if any(slot.is_idle for slot in retired):
                return self._close_again_s
            return time.monotonic() + _LOOK_AGAIN_S

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
            took_s = _close(slot.engine)
            if slot is not slots[-1]:
                time.sleep(took_s)  # the others' turn: a heartbeat is due every second

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

    def _usable(self) -> list[_Slot]:
        return [slot for slot in self._slots if not slot.retired and not self._stuck(slot)]

    def _may_make_one(self) -> bool:
        n_engines = len(self._slots) + self._creating
        return n_engines < self._max_engines and time.monotonic() >= self._make_again_s

    def _usable_pin(self, session: str) -> _Slot | None:
        slot = self._pins.get(session)
        return None if slot is None or slot.retired or self._stuck(slot) else slot

    def _place(self, session: str) -> _Slot | None:
        """Pin the session to an engine that can take it; None if one has to be made or awaited."""
        slot = self._usable_pin(session)
        if slot is not None:
            return slot
        usable = self._usable()
        room = self._may_make_one()
        if not usable or (room and len(usable) + self._creating < self._engines):
            return None
        if session in self._restarted:
            strangers = [slot for slot in usable if session not in slot.known]
            if not strangers and room:
                return None
            if not strangers:
                if self._restarted[session]:
                    self._renew(usable)
                return usable[0]  # not pinned: the next write looks again
            usable = strangers
        load = {slot.number: 0 for slot in usable}
        for pinned in self._pins.values():
            if pinned.number in load:
                load[pinned.number] += 1
        slot = min(usable, key=lambda one: (load[one.number], one.number))
        self._pins[session] = slot
        return slot

    def _renew(self, usable: list[_Slot]) -> None:
        """Every engine knows a peer that restarted: give one up, so that its next write has another.

        The interpreter stands still for that, and a peer can bring it about: hence the pause.
        """
        now_s = time.monotonic()
        if len(usable) > 1 and now_s >= self._renewed_s + _RENEW_PAUSE_S:
            self._renewed_s = now_s
            oldest = min(usable, key=lambda slot: slot.number)
            oldest.retired = True
            usable.remove(oldest)

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
                if not slot.known.get(session):
                    slot.opening, slot.opening_since_s = session, now_s
                    self._wait_for_running_calls(slot)
                    if self._closed or slot.retired:
                        slot.opening = None
                        self._changed.notify_all()
                        continue
                    slot.opening_since_s = time.monotonic()
                    slot.remember(session, opened=False)
                call = next(self._calls)
                slot.calls[call] = time.monotonic()
                self._wrote[session] = slot.number
                return slot, call

    def _wait_for_running_calls(self, slot: _Slot) -> None:
        """Until none can be in front of the engine's lock; none begins meanwhile, as ``opening`` is set."""
        while slot.calls and (left_s := max(slot.calls.values()) + _PAST_THE_LOCK_S - time.monotonic()) > 0:
            self._changed.wait(left_s)

    def _make_room_for_one(self) -> bool:
        """Make another engine if there may be one. Leaves the lock while it works.

        Raises TransportError where that fails and no other can be used.
        """
        if not self._may_make_one():
            return False
        self._creating += 1
        self._changed.release()
        slot, problem = None, None
        try:
            slot = self._create()
        except TransportError as exc:
            problem = exc
        finally:
            self._changed.acquire()
            self._creating -= 1
            if slot is not None and not self._closed:
                self._slots.append(slot)
                slot = None
            self._changed.notify_all()
        if problem is not None:
            self._make_again_s = time.monotonic() + _MAKE_AGAIN_S
            if not self._usable():
                raise TransportError(f"no further engine could be made: {problem}") from problem
        if slot is not None:
            slot.engine.close()
        return True

    def _leave(self, slot: _Slot, call: int, session: str, opened: bool, refused: bool) -> None:
        with self._changed:
            del slot.calls[call]
            was_opening = slot.opening == session
            if was_opening:
                slot.opening = None
            # After a failure the engine may have dropped the session: the next write opens it.
            slot.remember(session, opened)
            if opened:
                self._restarted.pop(session, None)
            # Refused at first contact is refused for good; a peer that took writes before may have
            # restarted since.
            if refused and not was_opening:
                self._suspect(session, refused=True)
            self._changed.notify_all()

    def _suspect(self, session: str, *, refused: bool) -> None:
        if self._max_engines > 1:
            self._restarted[session] = refused or self._restarted.get(session, False)
            _drop_oldest(self._restarted)
            self._pins.pop(session, None)

    # --- no lock held

    def _create(self) -> _Slot:
        engine = self._make_engine()
        try:
            for region in self._regions:
                engine.register(region.ptr, region.nbytes, receives=False)
        except TransportError:
            engine.close()
            raise
        number = next(self._numbers)
        if number == 0:
            self._session = engine.session
        return _Slot(number, engine)


def _drop_oldest(sessions: dict[str, bool]) -> None:
    if len(sessions) > _MAX_KNOWN:
        del sessions[next(iter(sessions))]


def _close(engine: Engine) -> float:
    """The seconds it took."""
    started_s = time.monotonic()
    engine.close()
    return time.monotonic() - started_s
