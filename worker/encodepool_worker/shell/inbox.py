"""Where the owner thread waits: for its own threads' answers, and at the sockets to the outside."""

import math
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..core.events import Event


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
    """Answers of any thread in their order, and then what each source has.

    Answers are never kept waiting: each belongs to an instruction that was given, so they are as many
    as the pipeline allowed. Events from outside wait in their sockets, and then at their senders: of a
    flood each turn takes a few.
    """

    def __init__(self) -> None:
        self._answers: deque[Event] = deque()
        self._sources: dict[int, Source] = {}
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def listen(self, source: Source) -> None:
        """By the owner thread, or before it runs."""
        self._sources[source.fileno()] = source
        self._epoll.register(source.fileno(), select.EPOLLIN)

    def answer(self, event: Event) -> None:
        """From any thread. Never waits."""
        self._answers.append(event)
        # ``take`` says that it sleeps before it looks for answers, so that none can slip between.
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def take(self, timeout_s: float) -> list[Event]:
        """Everything that has arrived; empty if nothing does within the time. The owner thread's."""
        due_s = min((source.due_s() for source in self._sources.values()), default=math.inf)
        wait_s = min(timeout_s, due_s - time.monotonic())
        self._asleep = True
        ready = {fd for fd, _ in self._epoll.poll(0 if self._answers else max(0.0, wait_s))}
        self._asleep = False
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        events: list[Event] = []
        while self._answers:
            events.append(self._answers.popleft())
        for fd, source in self._sources.items():
            if fd in ready or (due_s < math.inf and source.due_s() <= time.monotonic()):
                events.extend(source.read())
        return events

    def close(self) -> None:
        """Once nothing is taken any more, and nobody answers."""
        self._epoll.close()
        os.close(self._wake_fd)
