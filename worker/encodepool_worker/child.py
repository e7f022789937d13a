"""What a child process owes its supervisor: a heartbeat, last words, and to go when it goes.

Two pipes, inherited as numbers. The end of the *lifeline* means that the supervisor is gone, and
the child exits at once; a text on it says why all of them are about to end, and gives the child
``FAREWELL_S`` to tell whom it has to tell. On the *heartbeat* the child writes one byte a
second, ``s`` while it starts and ``r`` once it is ready; ``x`` announces its last words, which
run to the end of the stream.
"""

import os
import threading
from collections.abc import Callable

BEAT_INTERVAL_S = 1.0
STARTING = b"s"
READY = b"r"
LAST_WORDS = b"x"
FAREWELL_S = 3.0
MAX_LAST_WORDS_BYTES = 2000
"""Stays below PIPE_BUF (4096), so that one write is one piece."""


class Child:
    """Keeps both promises from two daemon threads; a number of -1 stands for "no such pipe"."""

    def __init__(
        self, lifeline_fd: int, heartbeat_fd: int, *, leave: Callable[[int], object] = os._exit
    ) -> None:
        self._lifeline_fd = lifeline_fd
        self._heartbeat_fd = heartbeat_fd
        self._leave = leave
        self.on_farewell: Callable[[str], object] | None = None
        """Called with the reason, from a thread of its own."""

        self._lock = threading.Lock()
        self._beat = STARTING
        self._stopped = threading.Event()

    def start(self) -> None:
        """First thing of the process, before anything that can take long."""
        if self._lifeline_fd >= 0:
            os.set_inheritable(self._lifeline_fd, False)
            threading.Thread(target=self._watch_lifeline, name="lifeline", daemon=True).start()
        if self._heartbeat_fd >= 0:
            os.set_inheritable(self._heartbeat_fd, False)
            # A supervisor that does not read must not block us for ever in a write.
            os.set_blocking(self._heartbeat_fd, False)
            threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True).start()

    def ready(self) -> None:
        """From now on, silence is judged as that of a working process."""
        self._beat = READY
        self._write(READY)

    def last_words(self, reason: str) -> None:
        """Why this process is about to fail; goes to the termination message. Ends the heartbeat."""
        self._stopped.set()
        self._write(LAST_WORDS + reason.encode()[:MAX_LAST_WORDS_BYTES])

    def _keep_beating(self) -> None:
        while True:
            self._write(self._beat)
            if self._stopped.wait(BEAT_INTERVAL_S):
                return

    def _write(self, payload: bytes) -> None:
        if self._heartbeat_fd < 0:
            return
        with self._lock:
            if self._stopped.is_set() and not payload.startswith(LAST_WORDS):
                return
            try:
                os.write(self._heartbeat_fd, payload)
            except OSError:
                pass  # Full: the supervisor hangs. Closed: it is gone, and the lifeline says so.

    def _watch_lifeline(self) -> None:
        while True:
            try:
                text = os.read(self._lifeline_fd, MAX_LAST_WORDS_BYTES)
            except OSError:
                text = b""
            if not text:
                self._leave(1)
                return
            if self.on_farewell is not None:
                self.on_farewell(text.decode(errors="replace"))
