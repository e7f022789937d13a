"""A whole worker, and a client of it that sends at a given rate and keeps book of every room."""

import ctypes
import itertools
import mmap
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import zmq
from benchmarks.frame import Run
from benchmarks.peer import HOST
from benchmarks.programs import ROOT, environment
from tests.e2e.running import RunningWorker

from encodepool_worker.transport.choose import make_engine
from encodepool_worker.types import Receiver, Status
from encodepool_worker.wire.control import (
    Registration,
    decode_status,
    encode_registration,
    encode_transfer_info,
)

SAMPLE_S = 0.05


def start_worker(run: Run, model: Path, log: Path, **settings: Any) -> RunningWorker:
    """Ready to serve; it ends with the benchmark."""
    flags = {name.replace("_", "-"): value for name, value in settings.items()}
    program = Path(sys.executable).parent / "encodepool-worker"
    worker = RunningWorker(_spawn, program, model, log, _free_port, flags)
    run.stack.callback(worker.stop, 60)
    return worker.ready()


def _spawn(argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> Any:
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env=environment() | dict(env or {}),
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Sent:
    """One request and what became of it. Times are monotonic seconds."""

    request_id: str
    tokens: int
    sent_s: float
    code: grpc.StatusCode | None = None
    status: Status | None = None
    ended_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Both its call and its room have been answered."""
        return self.code is not None and self.status is not None

    def in_time(self, deadline_s: float) -> bool:
        return (
            self.status is Status.SUCCESS
            and self.ended_s is not None
            and self.ended_s <= self.sent_s + deadline_s
        )


class Client:
    """A gateway and a prefill worker at once: for each room a request and a receiver.

    All rows land in one place: what lies there is nobody's concern here, only when it came.
    """

    def __init__(self, worker: RunningWorker, *, nbytes: int, hidden: int, levels: int) -> None:
        self._hidden, self._levels = hidden, levels
        self._memory = mmap.mmap(-1, nbytes)
        self._ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._engine = make_engine("mooncake", HOST)
        self._engine.register(self._ptr, nbytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._status = self._context.socket(zmq.PULL)
        self._status.setsockopt(zmq.RCVHWM, 0)
        self._port = self._status.bind_to_random_port(f"tcp://{HOST}")
        self._control = self._context.socket(zmq.PUSH)
        self._control.connect(f"tcp://{worker.control()}")
        hello = Registration(self._engine.session, HOST, self._port)
        self._control.send_multipart(encode_registration(hello))
        self._encode = worker.encoder.Encode
        self._rooms = itertools.count(random.SystemRandom().randrange(2**62))
        self._open: dict[int, Sent] = {}
        self.changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._take_verdicts, daemon=True)
        self._thread.start()

    def send(self, request: Any, tokens: int, timeout_s: float) -> Sent:
        """Announce a new room and send ``request`` for it; never waits."""
        room = next(self._rooms)
        request.items[0].bootstrap_room = room
        sent = Sent(request.request_id, tokens, time.monotonic())
        with self.changed:
            self._open[room] = sent
        main_bytes = tokens * self._hidden * 4
        receiver = Receiver(
            session=self._engine.session,
            host=HOST,
            status_port=self._port,
            main_ptr=self._ptr,
            deepstack_ptr=self._ptr + main_bytes if self._levels else 0,
            n_rows=tokens,
            hidden=self._hidden,
            dtype="torch.float32",
            has_deepstack=self._levels > 0,
            fanout=1,
            row_start=0,
            span=tokens,
        )
        self._control.send_multipart(encode_transfer_info(room, receiver))
        call = self._encode.future(request, timeout=timeout_s)
        call.add_done_callback(lambda done: self._answered(sent, done.code()))
        return sent

    def wait(self, sent: Sequence[Sent], which: Callable[[Iterable[bool]], bool], timeout_s: float) -> None:
        """Until ``which`` (any, all) of these are over, or the time is."""
        with self.changed:
            self.changed.wait_for(lambda: which(one.is_over for one in sent), timeout_s)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
        self._engine.close()

    def _answered(self, sent: Sent, code: grpc.StatusCode) -> None:
        with self.changed:
            sent.code = code
            self.changed.notify_all()

    def _take_verdicts(self) -> None:
        while not self._closing.is_set():
            if not self._status.poll(100):
                continue
            room, status, _ = decode_status(self._status.recv_multipart())
            with self.changed:
                sent = self._open.pop(room, None)
                if sent is not None:
                    sent.status, sent.ended_s = status, time.monotonic()
                    self.changed.notify_all()


class MemoryWatch:
    """The largest memory of all processes of a worker, sampled."""

    def __init__(self, worker: RunningWorker) -> None:
        self._processes: list[psutil.Process] = worker.processes()
        self._peak_bytes = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def take_peak(self) -> int:
        """Since the last call."""
        peak, self._peak_bytes = max(self._peak_bytes, self._now()), 0
        return peak

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _now(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)

    def _sample(self) -> None:
        while not self._closing.wait(SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, self._now())
