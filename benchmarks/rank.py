"""A rank driven as its frontend and its receivers drive it: both their ends of the sockets are here."""

import http.server
import itertools
import json
import queue
import random
import shutil
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import zmq
from benchmarks.no_tower import MERGE, spec_of
from benchmarks.peer import HOST
from benchmarks.programs import START_S, Program

from encodepool_worker.types import Modality, Receiver, Status, TowerSpec
from encodepool_worker.wire import intake
from encodepool_worker.wire.bootstrap import (
    ParallelSizes,
    RankAddress,
    RankRegistration,
    decode_query,
    decode_registration,
    encode_address,
    encode_sizes,
)
from encodepool_worker.wire.control import (
    Registration,
    decode_status,
    encode_registration,
    encode_transfer_info,
)

PATIENCE_S = 60.0


class Peer:
    """A receiver's memory (``benchmarks.peer``)."""

    def __init__(self, backend: str, nbytes: int) -> None:
        self.program = Program("benchmarks.peer", backend, str(nbytes))
        said = self.program.answer()
        self.session: str = said["session"]
        self.ptr: int = said["ptr"]

    def close(self) -> None:
        self.program.close()


class NoPeer:
    """Where nothing is written, for the rank whose transport is none; or a place that is only named."""

    def __init__(self, session: str = f"{HOST}:1", ptr: int = 4096) -> None:
        self.session, self.ptr = session, ptr


class RouteTable(http.server.HTTPServer):
    """A bootstrap server of one rank: it registers, and receivers ask where it is."""

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Route)
        self.registered: queue.SimpleQueue[RankRegistration] = queue.SimpleQueue()
        self.rank: RankRegistration | None = None
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Route(http.server.BaseHTTPRequestHandler):
    server: RouteTable

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.rank = decode_registration(body)
        self.server.registered.put(self.server.rank)
        self._answer(b"")

    def do_GET(self) -> None:
        query = decode_query(dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query)))
        rank = self.server.rank
        assert rank is not None
        if query.wants_sizes:
            self._answer(encode_sizes(ParallelSizes(rank.world_size, rank.dp_size)))
        else:
            self._answer(encode_address(RankAddress(rank.host, rank.port)))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Rooms:
    """The receivers of a rank, of ours or of the reference: their frames, and what they are told."""

    def __init__(self, spec: TowerSpec) -> None:
        self.spec = spec
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.PUSH)
        self._status = self._context.socket(zmq.PULL)
        self._status_port = self._status.bind_to_random_port(f"tcp://{HOST}")
        self._rooms = itertools.count(random.SystemRandom().randrange(2**62))

    def pixels(self, n_tokens: int) -> npt.NDArray[np.uint16]:
        """bfloat16 ones for an item of so many tokens."""
        return np.full((n_tokens * MERGE**2, self.spec.patch_width), 0x3F80, dtype=np.uint16)

    def new_room(self) -> int:
        return next(self._rooms)

    def submit(self, room: int, key: bytes, pixels: Any, grid: tuple[int, int, int]) -> int:
        """Hand an item over, as the frontend does; returns its number."""
        raise NotImplementedError

    def meet(self, peer: Peer | NoPeer) -> None:
        """The receiver introduces itself."""
        hello = Registration(peer.session, HOST, self._status_port)
        self._control.send_multipart(encode_registration(hello))

    def announce(self, room: int, n_tokens: int, peer: Peer | NoPeer, offset: int = 0) -> None:
        """The receiver says where in its memory the rows of ``room`` go."""
        receiver = Receiver(
            session=peer.session,
            host=HOST,
            status_port=self._status_port,
            main_ptr=peer.ptr + offset,
            deepstack_ptr=peer.ptr + offset if self.spec.levels else 0,
            n_rows=n_tokens,
            hidden=self.spec.hidden,
            dtype=f"torch.{self.spec.dtype}",
            has_deepstack=self.spec.levels > 0,
            fanout=1,
            row_start=0,
            span=n_tokens,
        )
        self._control.send_multipart(encode_transfer_info(room, receiver))

    def verdict(self, timeout_s: float = PATIENCE_S) -> tuple[int, Status]:
        """(room, status) of the next room that ends. Raises RuntimeError when none does."""
        if not self._status.poll(int(1000 * timeout_s)):
            raise RuntimeError(f"no room ended within {timeout_s:g} s")
        room, status, _ = decode_status(self._status.recv_multipart())
        return room, status

    def landed(self, count: int) -> None:
        """Wait until so many rooms have ended well. Raises RuntimeError."""
        for _ in range(count):
            room, status = self.verdict()
            if status is not Status.SUCCESS:
                raise RuntimeError(f"room {room} failed")

    def ended(self, room: int) -> None:
        """Wait until this room has ended well, whatever becomes of others. Raises RuntimeError."""
        while True:
            found, status = self.verdict()
            if found == room:
                break
        if status is not Status.SUCCESS:
            raise RuntimeError(f"room {room} failed")


class Rank(Rooms):
    """One rank process; see ``benchmarks.rank_process`` for what it is made of."""

    def __init__(
        self,
        *,
        transport: str,
        hidden: int = 256,
        max_rows: int = 1,
        tiers: Sequence[int] = (256 << 20,),
        tower: str = "none",
        spec: TowerSpec | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(spec or spec_of(hidden))
        self._folder = Path(tempfile.mkdtemp(prefix="encodepool-bench-"))
        self._routes = RouteTable()
        given = {
            "transport": transport,
            "tower": tower,
            "hidden": hidden,
            "max_rows": max_rows,
            "tiers": list(tiers),
            "settings": {
                "run_dir": str(self._folder),
                "bootstrap_port": self._routes.server_port,
                **settings,
            },
        }
        self.program = Program("benchmarks.rank_process", json.dumps(given))
        self._intake = self._context.socket(zmq.PUSH)
        self._back = self._context.socket(zmq.PULL)
        self._back.setsockopt(zmq.RCVHWM, 0)
        self._numbers = itertools.count(1)
        self.address = f"{HOST}:{self._routes.server_port}"
        """Of its bootstrap server, as receivers are told it."""
        try:
            port = self._registered().port
        except BaseException:
            self.close()
            raise
        self._intake.connect(f"ipc://{self._folder / intake.INTAKE_SOCKET}")
        self._back.connect(f"ipc://{self._folder / intake.BACK_SOCKET}")
        self._control.connect(f"tcp://{HOST}:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.program.close()
        self._routes.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _registered(self) -> RankRegistration:
        """Its registration. Raises RuntimeError when it ends without one."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            try:
                return self._routes.registered.get(timeout=0.1)
            except queue.Empty:
                if self.program.process.poll() is not None:
                    break
        raise RuntimeError(f"the rank did not register\n{self.program.errors()}")

    def submit(self, room: int, key: bytes, pixels: Any, grid: tuple[int, int, int]) -> int:
        seq, n_tokens = next(self._numbers), len(pixels) // MERGE**2
        header = intake.Submit(
            seq=seq,
            request_id=f"request-{room}",
            index=0,
            room=room,
            modality=Modality.IMAGE,
            key=key,
            grids=(grid,),
            n_tokens=n_tokens,
            cost=n_tokens,
            deadline_s=None,
            pixel_dtype="bfloat16",
            pixel_shape=pixels.shape,
        )
        self._intake.send_multipart(intake.encode(header, pixels.data.cast("B")), copy=False)
        return seq

    def admitted(self, numbers: Iterable[int]) -> None:
        """Wait until all of these submissions have been taken. Raises RuntimeError."""
        missing = set(numbers)
        until_s = time.monotonic() + PATIENCE_S
        while missing:
            if not self._back.poll(max(0, int(1000 * (until_s - time.monotonic())))):
                raise RuntimeError(f"{len(missing)} submissions were not answered")
            for message in intake.decode_back(self._back.recv_multipart()):
                if isinstance(message, intake.Refused):
                    raise RuntimeError(f"refused: {message.field}: {message.reason}")
                if isinstance(message, intake.Admitted):
                    missing.discard(message.seq)

    def counter(self, sample: str) -> float:
        """One of the loop's metrics, as its next report has it."""
        while True:
            for message in intake.decode_back(self._back.recv_multipart()):
                if isinstance(message, intake.State):
                    return message.counters.get(sample, 0.0)

    def landed(self, count: int) -> None:
        super().landed(count)
        while self._back.poll(0):  # answers that nobody waited for
            self._back.recv_multipart()

    def park(self, count: int, key: bytes, n_tokens: int) -> list[int]:
        """Rooms of one content whose rows lie in the store; their receivers have not spoken yet."""
        pixels = self.pixels(n_tokens)
        rooms = [self.new_room() for _ in range(count)]
        self.admitted([self.submit(room, key, pixels, (1, 2, 2 * n_tokens)) for room in rooms])
        return rooms

    def fill(self, key: bytes, n_tokens: int, peer: Peer | NoPeer) -> None:
        """Have the content encoded, and sent once."""
        [room] = self.park(1, key, n_tokens)
        self.announce(room, n_tokens, peer)
        self.landed(1)
