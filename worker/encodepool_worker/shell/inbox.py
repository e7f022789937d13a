"""The inbox of the owner thread: every other thread only puts events in here."""

import threading
from collections import deque

from ..core.events import Event

MAX_OUTSIDE_EVENTS = 4096
"""Events from other programs that wait at most; beyond, their threads wait, then their senders."""


class Inbox:
    """One queue in order of arrival. Outside events are bounded by making their thread wait.

    Answers never wait: each belongs to an instruction that was given, so they are as many as the
    pipeline allowed, and a flood from outside cannot hold them up.
    """

    def __init__(self, max_outside: int = MAX_OUTSIDE_EVENTS) -> None:
        self._max_outside = max_outside
        self._events: deque[tuple[Event, bool]] = deque()
        self._n_outside = 0
        self._closed = False
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)

    def put(self, event: Event) -> bool:
        """From outside. Waits while the inbox is full; False once it is closed."""
        with self._lock:
            while self._n_outside >= self._max_outside and not self._closed:
                self._room.wait()
            if self._closed:
                return False
            self._n_outside += 1
            self._append(event, True)
            return True

    def answer(self, event: Event) -> None:
        """From our own shell. Never waits."""
        with self._lock:
            self._append(event, False)

    def take(self, timeout_s: float) -> list[Event]:
        """Everything that has arrived; empty if nothing does within the time."""
        with self._lock:
            if not self._events and timeout_s > 0:
                self._arrived.wait(timeout_s)
            events = [event for event, _ in self._events]
            self._events.clear()
            if self._n_outside:
                self._n_outside = 0
                self._room.notify_all()
            return events

    def close(self) -> None:
        """Nothing is taken from outside any more, and nobody waits."""
        with self._lock:
            self._closed = True
            self._room.notify_all()

    def _append(self, event: Event, outside: bool) -> None:
        self._events.append((event, outside))
        if len(self._events) == 1:
            self._arrived.notify()
