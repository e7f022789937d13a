"""Where the owner thread waits: for its own threads' answers, and at the sockets to the outside."""

import math
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..core.events import Event
from ..logs import get_logger
from .threads import Crash

ENOUGH = 256
"""Events from outside in a turn; the source that brings the last of them may bring as many more."""


class Source(Protocol):
    """A socket of the owner thread."""

    def fileno(self) -> int:
        """Readable when there may be something to read."""
        ...

    def due_s(self) -> float:
        """Monotonic time at which it is to be read even if it is not readable; infinite mostly."""
        ...

    def read(self) -> Sequence[Event]:
        """What has come, but no more than a turn has time for. Never waits."""
        ...


class Inbox:
    """Answers of any thread in their order, and then what the sources have, in turn.

    Answers wait for nothing but the turn under way: each belongs to an instruction that was given, so
    they are as many as the pipeline allowed. Events from outside wait in their sockets, and then at their
    senders: of a flood each turn takes a few. A source that cannot be read is given up, and ends the
    process (``crash``): the owner thread itself goes on, to tell the receivers.
    """

    def __init__(self, crash: Crash) -> None:
        self._crash = crash
        self._answers: deque[Event] = deque()
        self._sources: deque[tuple[int, Source]] = deque()  # with their descriptors, in the order of turns
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def listen(self, source: Source) -> None:
        """By the owner thread, or before it runs."""
        fd = source.fileno()
        self._sources.append((fd, source))
        self._epoll.register(fd, select.EPOLLIN)

    def answer(self, event: Event) -> None:
        """From any thread. Never waits."""
        self._answers.append(event)
        # ``take`` says that it sleeps before it looks for answers, so that none can slip between.
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def take(self, timeout_s: float) -> list[Event]:
        """What has arrived; empty if nothing does within the time, or what did was no event."""
        due_s = min((source.due_s() for _, source in self._sources), default=math.inf)
        wait_s = max(0.0, min(timeout_s, due_s - time.monotonic()))
        self._asleep = True
        ready = {fd for fd, _ in self._epoll.poll(0 if self._answers else wait_s)}
        self._asleep = False
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        events: list[Event] = []
        while self._answers:
            events.append(self._answers.popleft())
        n_answers = len(events)
        now_s = time.monotonic()
        for fd, source in tuple(self._sources):
            if fd in ready or source.due_s() <= now_s:
                if len(events) - n_answers >= ENOUGH:
                    break  # the others come first in the next turn
                events.extend(self._read(fd, source))
            self._sources.rotate(-1)
        return events

    def close(self) -> None:
        """Once nothing is taken any more, and nobody answers."""
        self._epoll.close()
        os.close(self._wake_fd)

    def _read(self, fd: int, source: Source) -> Sequence[Event]:
        try:
            return source.read()
        except Exception as error:  # noqa: BLE001 (handed on)
            name = type(source).__name__
            get_logger().exception("a socket cannot be read", socket=name)
            self._epoll.unregister(fd)
            self._sources.remove((fd, source))
            self._crash(f"{name} cannot be read: {error!r}")
            return ()
