"""One prefill rank: announces memory for a room, and waits until an encode rank has filled it.

The sequence is TokenSpeed's (docs/wire.md): ask the bootstrap server for the sizes and for the
address of the encode rank this rank is paired with, register there once, send one transfer info
per room, and take the verdict from an own PULL socket.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import zmq

from ..errors import ClientError, TransportError, WireError
from ..transport.base import Engine
from ..types import Receiver, RowLayout, Status, wire_dtype
from ..wire import control
from . import routes
from .arena import Arena, unwritten
from .endpoints import join_host_port
from .numbers import STORED

POLL_MS = 200
"""How soon the status thread sees that it has to end."""

MAX_FRAME_BYTES = 1024
"""A status frame has three short parts; a peer with a longer one is cut off."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows [start, start + n_rows) of an item, wanted by one rank."""

    start: int
    n_rows: int


def shard_of(n_rows: int, rank: int, tp_size: int) -> Shard:
    """The rows of one rank when ``n_rows`` are spread evenly: the first ranks get one more."""
    base, extra = divmod(n_rows, tp_size)
    return Shard(rank * base + min(rank, extra), base + (1 if rank < extra else 0))


@dataclass(frozen=True, slots=True)
class Rows:
    """Received rows: main ``[n, hidden]``, deepstack ``[n, levels * hidden]`` or None.

    Own memory, in the layout's dtype; bfloat16 as uint16 bits.
    """

    main: npt.NDArray[Any]
    deepstack: npt.NDArray[Any] | None


@dataclass(slots=True)
class _Route:
    """The encode rank that serves this rank, and the socket to it."""

    encode_rank: int
    encode_tp: int
    socket: "zmq.Socket[bytes]"


@dataclass(slots=True)
class _Waiting:
    """A room whose verdict is to come. ``piece`` is the start of its memory."""

    encode_rank: int
    piece: int
    verdict: Status | None = None
    given_up: bool = False
    arrived: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Announced:
    """A room this rank waits for; hand it to ``PrefillRank.wait`` or ``give_up``."""

    room: int
    address: tuple[str, int]
    layout: RowLayout
    shard: Shard


@dataclass(slots=True)
class FrameCounts:
    """Status frames that changed nothing, by reason."""

    malformed: int = 0
    unknown_room: int = 0
    foreign_rank: int = 0
    repeated: int = 0


class PrefillRank:
    """Rank ``rank`` of ``tp_size`` receivers. Safe from several threads; close it after use.

    ``host`` is the address of this machine as the encode side sees it. The engine is this rank's
    own: its session tells the receivers of a room apart. Raises ClientError.
    """

    def __init__(
        self, engine: Engine, host: str, *, rank: int = 0, tp_size: int = 1, arena_bytes: int
    ) -> None:
        self.rank = rank
        self.tp_size = tp_size
        self.host = host
        self.counts = FrameCounts()
        self._engine = engine
        self._arena = Arena(arena_bytes)
        self._lock = threading.Lock()
        self._routes: dict[tuple[str, int], _Route] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._status = self._context.socket(zmq.PULL)
        self._status.ipv6 = True
        self._status.linger = 0
        self._status.maxmsgsize = MAX_FRAME_BYTES
        bracketed = f"[{host}]" if ":" in host else host
        try:
            engine.register(self._arena.ptr, self._arena.nbytes)
            self._status.bind(f"tcp://{bracketed}:*")
        except (TransportError, zmq.ZMQError) as failed:
            self._status.close()
            self._context.term()
            engine.close()
            raise ClientError(f"cannot receive at {host}: {failed}") from failed
        bound = self._status.getsockopt_string(zmq.LAST_ENDPOINT)
        self.status_port = int(bound.rstrip("\0").rpartition(":")[2])
        self._thread = threading.Thread(target=self._take_verdicts, name="status", daemon=True)
        self._thread.start()

    def announce(
        self, address: tuple[str, int], room: int, layout: RowLayout, shard: Shard, timeout_s: float
    ) -> Announced:
        """Offer memory for ``shard`` of the room to the encode side at ``address``.

        ``timeout_s`` is for memory to become free. Raises ClientError.
        """
        main_bytes, deepstack_bytes = _shard_bytes(layout, shard)
        piece = self._arena.take(main_bytes + deepstack_bytes, timeout_s)
        try:
            with self._routed(address) as route:
                if room in self._waiting:
                    raise ClientError(f"room {room} is waited for already: rooms are used once")
                receiver = Receiver(
                    session=self._engine.session,
                    host=self.host,
                    status_port=self.status_port,
                    main_ptr=self._arena.ptr + piece,
                    deepstack_ptr=self._arena.ptr + piece + main_bytes if layout.levels else 0,
                    n_rows=shard.n_rows,
                    hidden=layout.hidden,
                    dtype=wire_dtype(layout.dtype),
                    has_deepstack=layout.levels > 0,
                    fanout=self.tp_size // route.encode_tp,
                    row_start=shard.start,
                    span=layout.n_tokens,
                )
                route.socket.send_multipart(control.encode_transfer_info(room, receiver), zmq.DONTWAIT)
                self._waiting[room] = _Waiting(route.encode_rank, piece)
        except BaseException as failed:
            self._arena.give_back(piece)  # nobody was told of it
            if isinstance(failed, zmq.ZMQError):
                raise ClientError(
                    f"the encode worker at {join_host_port(*address)} takes no more frames: {failed}"
                ) from failed
            raise
        return Announced(room, address, layout, shard)

    def wait(self, announced: Announced, timeout_s: float) -> Rows:
        """The rows, once the encode rank has said Success and every element has been written.

        Raises ClientError when it said Failed, or nothing in time.
        """
        room = announced.room
        with self._lock:
            waiting = self._waiting[room]
        if not waiting.arrived.wait(timeout_s):
            self.give_up(announced)
            raise ClientError(
                f"room {room} got no verdict within {timeout_s:g} s: is the encode worker alive, "
                "and can it reach this machine?"
            )
        if waiting.verdict is None:
            raise ClientError(f"the client was closed while it waited for room {room}")
        with self._lock:
            del self._waiting[room]
        if waiting.verdict is not Status.SUCCESS:
            self._arena.settle(waiting.piece)
            raise ClientError(f"the encode worker failed room {room}; its log says why")
        try:
            return self._copy_out(announced, waiting.piece)
        finally:
            self._arena.give_back(waiting.piece)

    def give_up(self, announced: Announced) -> None:
        """Wait no more. The memory stays out of use until the room's verdict comes, or for good.

        The way to the encode rank is asked for anew next time: it may have been replaced.
        """
        with self._lock:
            waiting = self._waiting.get(announced.room)
            if waiting is None:
                return
            if waiting.verdict is None:
                waiting.given_up = True
            else:
                del self._waiting[announced.room]
                self._arena.settle(waiting.piece)
            route = self._routes.pop(announced.address, None)
            if route is not None:
                route.socket.close()

    def close(self) -> None:
        """End the sockets and the engine; whoever waits gets a ClientError. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._thread.join()
        with self._lock:
            for waiting in self._waiting.values():
                waiting.arrived.set()
            for route in self._routes.values():
                route.socket.close()
            self._routes.clear()
        self._context.term()
        self._engine.unregister(self._arena.ptr)
        self._engine.close()

    def _copy_out(self, announced: Announced, piece: int) -> Rows:
        layout, shard = announced.layout, announced.shard
        main_bytes, deepstack_bytes = _shard_bytes(layout, shard)
        memory = self._arena.view(piece, main_bytes + deepstack_bytes)
        main = memory[:main_bytes].view(STORED[layout.dtype]).reshape(shard.n_rows, layout.hidden).copy()
        deepstack = None
        if layout.levels:
            width = layout.levels * layout.hidden
            deepstack = memory[main_bytes:].view(STORED[layout.dtype]).reshape(shard.n_rows, width).copy()
        for part in (main, deepstack):
            if part is not None and unwritten(part):
                raise ClientError(
                    f"room {announced.room} was called done, but not all of its rows were written: "
                    "do both sides use the same transfer backend?"
                )
        return Rows(main, deepstack)

    @contextmanager
    def _routed(self, address: tuple[str, int]) -> Iterator[_Route]:
        """The route to an encode side; it is asked for where it is not known. Holds the lock inside.

        Raises EndpointUnavailable, ClientError.
        """
        with self._lock:
            self._check_open()
            route = self._routes.get(address)
            if route is not None:
                yield route
                return
        encode_tp = routes.encode_tp_size(address)
        if self.tp_size % encode_tp:
            raise ClientError(
                f"{self.tp_size} receiving ranks cannot be paired with {encode_tp} encode ranks: "
                f"use a multiple of {encode_tp}"
            )
        encode_rank = self.rank // (self.tp_size // encode_tp)
        control_address = routes.control_address(address, encode_rank)
        hello = control.Registration(self._engine.session, self.host, self.status_port)
        with self._lock:
            self._check_open()
            if address not in self._routes:
                push = self._context.socket(zmq.PUSH)
                push.ipv6 = True
                push.linger = 0
                push.connect(f"tcp://{control_address}")
                push.send_multipart(control.encode_registration(hello), zmq.DONTWAIT)
                self._routes[address] = _Route(encode_rank, encode_tp, push)
            yield self._routes[address]

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClientError("the client is closed")

    def _take_verdicts(self) -> None:
        """Owns the status socket. A frame changes a room once, and only from the rank that was asked."""
        while not self._closing.is_set():
            if not self._status.poll(POLL_MS):
                continue
            frames = self._status.recv_multipart(zmq.DONTWAIT)
            try:
                room, status, rank = control.decode_status(frames)
            except WireError:
                self.counts.malformed += 1
                continue
            with self._lock:
                self._conclude(room, status, rank)
        self._status.close()

    def _conclude(self, room: int, status: Status, rank: int) -> None:
        waiting = self._waiting.get(room)
        if waiting is None:
            self.counts.unknown_room += 1
        elif rank != waiting.encode_rank:
            self.counts.foreign_rank += 1
        elif waiting.verdict is not None:
            self.counts.repeated += 1
        elif waiting.given_up:
            del self._waiting[room]
            self._arena.settle(waiting.piece)
        else:
            waiting.verdict = status
            waiting.arrived.set()


def local_host_towards(host: str, port: int) -> str:
    """This machine's address on the way to ``host``; no packet is sent. Raises ClientError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as failed:
        raise ClientError(f"{host} has no route from here: {failed.strerror or failed}") from failed


def _shard_bytes(layout: RowLayout, shard: Shard) -> tuple[int, int]:
    return shard.n_rows * layout.main_row_bytes, shard.n_rows * layout.deepstack_row_bytes
