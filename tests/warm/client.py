"""The caller's side of `server`: processes as subprocess.Popen would start them, without the imports."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
"""For the server to import everything on a busy machine; a fork takes milliseconds."""

ROOM_FOR_TITLES = "x" * 4096
"""A command line is shown in the memory where the server's own and its environment lay."""


class WarmProcess:
    """What tests use of subprocess.Popen. It leads a session of its own."""

    def __init__(
        self, answers: socket.socket, args: list[str], stdin: IO[Any] | None, stdout: IO[Any] | None
    ) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        answers.settimeout(START_S)
        said = answers.recv(64)
        if not said:
            raise RuntimeError("the warm interpreter has ended; its log says why")
        self.pid = int(said)
        self.args = args
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
                said = self._answers.recv(64)
                self.returncode = int(said) if said else -signal.SIGKILL
                self._answers.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._answers], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """One process that has imported torch; ``popen`` forks it."""

    def __init__(self, log: Path, environ: Mapping[str, str]) -> None:
        """``environ``: what must be right already while torch is imported, such as its number of threads."""
        self._processes: list[WarmProcess] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("ab") as out, theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm.server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**environ, "ROOM_FOR_TITLES": ROOM_FOR_TITLES},
            )

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        environ: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes],
        stderr: IO[bytes],
        pass_fds: Sequence[int] = (),
    ) -> WarmProcess:
        """``python -m MODULE ...`` or ``encodepool-worker ...`` in the root of the checkout.

        ``stdin`` and ``stdout`` may be PIPE, and are text then.
        """
        words = [str(word) for word in argv]
        to_process: IO[str] | None = None
        from_process: IO[str] | None = None
        with ExitStack() as theirs:

            def given(descriptor: int) -> int:
                theirs.callback(os.close, descriptor)
                return descriptor

            if stdin == subprocess.PIPE:
                reads, writes = os.pipe()
                to_process = os.fdopen(writes, "w", encoding="utf-8")
                streams = [given(reads)]
            else:
                streams = [given(os.open(os.devnull, os.O_RDONLY))]
            if stdout == subprocess.PIPE:
                reads, writes = os.pipe()
                from_process = os.fdopen(reads, encoding="utf-8")
                streams.append(given(writes))
            else:
                assert not isinstance(stdout, int)
                streams.append(stdout.fileno())
            answers, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.enter_context(far)
            request = {"argv": words, "environ": dict(environ), "descriptors": [0, 1, 2, *pass_fds]}
            descriptors = [far.fileno(), *streams, stderr.fileno(), *pass_fds]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        self._processes.append(WarmProcess(answers, words, to_process, from_process))
        return self._processes[-1]

    def close(self) -> None:
        """Ends what still runs, too."""
        self._control.close()
        self._server.wait(30)
        for process in self._processes:
            process.wait(30)
