"""``python -m tests.warm.server FD``: has imported what a worker imports, and forks a process per request.

No thread, socket of ZMQ, channel of gRPC or engine of Mooncake exists here: none of them survives a fork.
Mooncake is not even imported, as it reads its environment when it is loaded.

A request is one packet on ``FD``: the command and the numbers of its descriptors as JSON, then a socket for
the answers and those descriptors. The answers are the pid and, at the end, the exit code. The server ends,
and all that it has forked with it, when ``FD`` does.
"""

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress

from setproctitle import setproctitle
from tests.warm.interpreter import become

PRELOADED = (
    "torch",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "encodepool_worker.cli.main",
    "encodepool_worker.cli.serve",
    "encodepool_worker.frontend.app",
    "encodepool_worker.frontend.follower",
    "encodepool_worker.frontend.model",
    "encodepool_worker.shell.follower",
    "encodepool_worker.shell.meeting",
    "encodepool_worker.shell.rank",
    "encodepool_worker.shell.tiers",
    "encodepool_worker.supervisor",
    "encodepool_worker.towers.load",
)
MAX_REQUEST_BYTES = 1 << 16
MAX_DESCRIPTORS = 16


class Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._answers: dict[int, socket.socket] = {}  # pid -> where its exit code goes
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asked for the processes
        self._selector.register(read_fd, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    os.read(read_fd, 512)
                elif not self._serve():
                    return self._end()
            self._reap()

    def _serve(self) -> bool:
        """One request; False at the end of all requests."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not packet:
            return False
        request = json.loads(packet)
        answers, *given = descriptors
        pid = os.fork()
        if pid == 0:
            wanted = dict(zip(request["descriptors"], given, strict=True))
            become(request["argv"], descriptors=wanted, environ=request["environ"], enter=os.setsid)
        for descriptor in given:
            os.close(descriptor)
        self._answers[pid] = socket.socket(fileno=answers)
        self._answers[pid].send(str(pid).encode())
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            with self._answers.pop(pid) as answers, suppress(OSError):  # nobody may be interested any more
                answers.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _end(self) -> None:
        for pid in self._answers:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def fork_children() -> None:
    """From now on the worker's supervisor forks its children too."""
    from types import SimpleNamespace
    from typing import Any

    from encodepool_worker.supervisor import Supervisor

    def fork(argv: list[str], *, stdout: int | None, pass_fds: tuple[int, ...], **_: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            output, errors = (1, 2) if stdout is None else (stdout, stdout)
            wanted = {0: os.open(os.devnull, os.O_RDONLY), 1: output, 2: errors}
            wanted |= {number: number for number in pass_fds}
            become(argv, descriptors=wanted, enter=lambda: os.setpgid(0, 0))
        return SimpleNamespace(pid=pid, returncode=None)

    Supervisor.popen = staticmethod(fork)  # type: ignore[assignment]


def main() -> None:
    setproctitle("warm python")  # while its arguments and environment still lie where they were put
    for name in PRELOADED:
        importlib.import_module(name)
    fork_children()
    if (count := len(os.listdir("/proc/self/task"))) != 1:
        raise SystemExit(f"{count} threads run after the imports: a fork would have only one of them")
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
