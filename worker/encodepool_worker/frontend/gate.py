"""The queue in front of the budget: calls wait here unread until there is a place to read them.

A call that is let in and then sends nothing keeps a place that the longest message would fit in.
gRPC shows no part of a message before all of it is there, so who is silent shows only with time.
Therefore connections are told apart by what they have done so far:

known   has delivered a request of ours. Known connections read in turn, each in at most half of
        the places.
new     has delivered nothing yet, or its last message did not arrive in time. All of these
        together have one place, which only they use, the newest first: those that went silent
        before it do not stand in front of one that means it.

Each side always finds a place, even while the queue for the tower is full (``Limits``); and a
reader for whose place others wait is hurried.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from .admission import Account, NoCredit

MAX_WAITING = 4096
"""Calls that may wait unread: 16 connections of 256 streams."""

MAX_KNOWN = 4096
"""Connections remembered; the one that has been quiet the longest is forgotten first."""

HURRIED_S = 5.0
"""For a message that others wait for: 256 MiB at 430 Mbit/s."""

Line = OrderedDict[str, deque["asyncio.Future[int]"]]
"""Waiting calls by connection."""


@dataclass(slots=True)
class _Reader:
    """A call that holds a place for the longest message. ``limit`` ends its read."""

    peer: str
    known: bool
    since_s: float
    limit: asyncio.Timeout | None = None
    hurried: bool = False


class Gate:
    """Hands out the readers' holds of one account. For one event loop."""

    def __init__(self, account: Account, hurried_s: float = HURRIED_S) -> None:
        self.account = account
        self.hurried_s = hurried_s
        self._loop = asyncio.get_running_loop()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._known_line: Line = OrderedDict()
        self._new_line: Line = OrderedDict()
        self._waiting = 0
        self._readers: dict[int, _Reader] = {}
        self._reading: Counter[str] = Counter()
        self._new_reading = 0
        limits = account.limits
        self._most_of_one = max(1, limits.pixel_bytes // limits.message_bytes // 2)

    @property
    def waiting(self) -> int:
        return self._waiting

    async def enter(self, peer: str) -> int:
        """A hold for one longest message. Raises NoCredit when too many wait already."""
        if self._waiting >= MAX_WAITING and not self._turn_away_one():
            raise NoCredit(f"{MAX_WAITING} calls are waiting to be read")
        future: asyncio.Future[int] = self._loop.create_future()
        line = self._known_line if peer in self._known else self._new_line
        line.setdefault(peer, deque()).append(future)
        self._waiting += 1
        self.refresh()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._leave(peer, future)
                self.refresh()
            elif future.exception() is None:  # it was let in and cancelled in one turn
                self.drop(future.result())
            raise

    def limit(self, hold: int, limit: asyncio.Timeout) -> None:
        """What ends the read of ``hold``; brought forward when others wait for its place."""
        self._readers[hold].limit = limit
        self._hurry()

    def arrived(self, hold: int) -> None:
        """The message of ``hold`` is here: its read has ended, and is hurried no more."""
        self._readers[hold].limit = None

    def measured(self, hold: int, nbytes: int) -> None:
        """The message of ``hold`` is a request and holds ``nbytes``: its connection is known now."""
        self.account.measured(hold, nbytes)
        reader = self._stop_reading(hold)
        if reader is not None:
            self._trust(reader.peer)
        self.refresh()

    def late(self, hold: int) -> bool:
        """The message of ``hold`` did not arrive in time. True: it was hurried."""
        reader = self._readers[hold]
        self._distrust(reader.peer)
        self.drop(hold)
        return reader.hurried

    def drop(self, hold: int) -> None:
        """The request of ``hold`` goes no further."""
        self.account.drop(hold)
        self._stop_reading(hold)
        self.refresh()

    def refresh(self) -> None:
        """To be called after anything was given back: lets in whoever now fits."""
        while self._let_in_known() or self._let_in_new():
            pass
        self._hurry()

    def _let_in_known(self) -> bool:
        # The place of the new connections is left alone.
        if not self.account.may_read(1 if self._new_reading else 2):
            return False
        for peer, calls in self._known_line.items():
            if self._reading[peer] < self._most_of_one:
                self._let_in(self._known_line, peer, calls.popleft(), known=True)
                if peer in self._known_line:
                    self._known_line.move_to_end(peer)
                return True
        return False

    def _let_in_new(self) -> bool:
        others_read = len(self._readers) > self._new_reading
        if self._new_reading or not self._new_line or not self.account.may_read(1 if others_read else 2):
            return False
        peer = next(reversed(self._new_line))
        self._let_in(self._new_line, peer, self._new_line[peer].popleft(), known=False)
        return True

    def _let_in(self, line: Line, peer: str, future: "asyncio.Future[int]", *, known: bool) -> None:
        if not line[peer]:
            del line[peer]
        self._waiting -= 1
        if future.done():
            return
        hold = self.account.start_reading()
        self._readers[hold] = _Reader(peer, known, self._loop.time())
        self._reading[peer] += 1
        self._new_reading += not known
        future.set_result(hold)

    def _stop_reading(self, hold: int) -> _Reader | None:
        reader = self._readers.pop(hold, None)
        if reader is not None:
            self._new_reading -= not reader.known
            self._reading[reader.peer] -= 1
            if not self._reading[reader.peer]:
                del self._reading[reader.peer]
        return reader

    def _hurry(self) -> None:
        """Readers for whose place others wait have less time, counted from when they were let in."""
        for reader in self._readers.values():
            if reader.hurried or not (self._known_line if reader.known else self._new_line):
                continue
            limit = reader.limit
            when_s = limit.when() if limit is not None and not limit.expired() else None
            hurried_s = reader.since_s + self.hurried_s
            if limit is not None and when_s is not None and hurried_s < when_s:
                reader.hurried = True
                limit.reschedule(hurried_s)

    def _trust(self, peer: str) -> None:
        self._known[peer] = None
        self._known.move_to_end(peer)
        _move(self._new_line, self._known_line, peer)
        if len(self._known) > MAX_KNOWN:
            self._distrust(next(iter(self._known)))

    def _distrust(self, peer: str) -> None:
        self._known.pop(peer, None)
        _move(self._known_line, self._new_line, peer)
        if peer in self._new_line:
            self._new_line.move_to_end(peer, last=False)

    def _turn_away_one(self) -> bool:
        """The new connection that has waited the longest makes room for another call."""
        if not self._new_line:
            return False
        peer = next(iter(self._new_line))
        future = self._new_line[peer].popleft()
        if not self._new_line[peer]:
            del self._new_line[peer]
        self._waiting -= 1
        if not future.done():
            future.set_exception(NoCredit(f"{MAX_WAITING} calls are waiting to be read"))
        return True

    def _leave(self, peer: str, future: "asyncio.Future[int]") -> None:
        for line in (self._known_line, self._new_line):
            if future in line.get(peer, ()):
                line[peer].remove(future)
                self._waiting -= 1
                if not line[peer]:
                    del line[peer]


def _move(source: Line, target: Line, peer: str) -> None:
    if peer in source:
        target.setdefault(peer, deque()).extend(source.pop(peer))
