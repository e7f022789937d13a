"""Threads that cannot die unseen, and a loop around a ZMQ socket that can be ended from outside."""

import os
import threading
from collections.abc import Callable
from typing import Any

import zmq

from ..logs import get_logger

Crash = Callable[[str], None]
"""Called with a reason when a thread met what it cannot: the process has to end."""

MESSAGES_PER_POLL = 64


def start_thread(name: str, target: Callable[[], None], crash: Crash) -> threading.Thread:
    """A daemon thread; an exception that leaves it ends the worker instead of stopping in silence."""

    def run() -> None:
        try:
            target()
        except Exception as error:  # noqa: BLE001 (handed on)
            get_logger().exception("a thread failed", thread=name)
            crash(f"thread {name} failed: {error!r}")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Listener:
    """Hands every message of a bound socket to ``on_frames`` in a thread of its own.

    While ``on_frames`` blocks, messages wait in the socket up to its high-water mark, and then at
    the senders. It is used by this thread alone once started, and closed by it.
    """

    def __init__(
        self,
        name: str,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[Any]], None],
        crash: Crash,
        *,
        copy: bool,
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._copy = copy
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = start_thread(name, self._run, crash)

    def close(self) -> None:
        """What waits in the socket is given up. Returns when the thread has ended."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._stop_fd, zmq.POLLIN)
            while self._stop_fd not in dict(poller.poll()):
                for _ in range(MESSAGES_PER_POLL):
                    try:
                        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy)
                    except zmq.Again:
                        break
                    self._on_frames(frames)
        finally:
            self._socket.close(linger=0)
