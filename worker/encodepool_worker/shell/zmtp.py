"""The receiving end of ZMTP 3.0, as a PUSH socket of ZMQ speaks to it, with every length bounded.

ZMQ's own PULL socket bounds the length of a part but not the number of parts: whoever reaches the
port can send one message of millions of empty parts, two bytes each, for which it keeps 64 bytes
each until the message ends. Here a connection costs one buffer: of a message the first ``max_parts``
parts are kept, and one that goes on and on ends its connection.
"""

import errno
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""Version 3.0 (no heartbeats), mechanism NULL, not as a server."""

READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL"
HELLO = GREETING + bytes((4, len(READY))) + READY

MORE, LONG, COMMAND = 1, 2, 4

ENDLESS_PARTS = 1000
"""So many parts are no mistake any more."""

READ_BYTES = 4096
"""Some fifteen frames of a receiver, or two thousand messages without content of whoever floods."""

MESSAGES_AT_ONCE = 256
"""Given out at most; what one read brought beyond is kept, and nothing is read before it is given out."""

PEERS_AT_ONCE = 16
"""Looked after at most, each with one read."""

HANDSHAKE_S = 10.0
"""From the connection to its READY, where its place is needed."""

KEEPALIVE_IDLE_S = 30

SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What keeps a connection from being accepted without ending it: it goes on waiting."""

ACCEPT_AGAIN_S = 0.2


class NotZmtp(Exception):
    """The peer speaks another protocol, another version, or goes beyond a bound."""


@dataclass(slots=True)
class Decoder:
    """Bytes of one connection to whole messages. Raises NotZmtp."""

    max_parts: int
    max_part_bytes: int
    greeted: bool = False
    ready: bool = False
    _rest: bytes = b""
    _parts: list[bytes] = field(default_factory=list)
    _surplus: int = 0

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that these bytes complete."""
        data = self._rest + data
        at = 0
        messages: list[list[bytes]] = []
        if not self.greeted:
            # The eight bytes between are padding, and ZMQ does not keep them zero.
            if data[:1] not in (b"", SIGNATURE[:1]) or data[9:10] not in (b"", SIGNATURE[9:]):
                raise NotZmtp("another protocol")
            if len(data) < len(GREETING):
                self._rest = data
                return messages
            if data[10] < 3 or data[12:32] != GREETING[12:32]:
                raise NotZmtp(f"version {data[10]}, mechanism {data[12:32]!r}")
            self.greeted = True
            at = len(GREETING)
        while (frame := self._frame(data, at)) is not None:
            flags, body, at = frame
            if flags & COMMAND:
                self._command(body)
                continue
            if not self.ready:
                raise NotZmtp("a message before READY")
            if len(self._parts) < self.max_parts:
                self._parts.append(body)
            else:
                self._surplus += 1
            if self._surplus > ENDLESS_PARTS:
                raise NotZmtp(f"a message of over {ENDLESS_PARTS} parts")
            if not flags & MORE:
                messages.append(self._parts)
                self._parts, self._surplus = [], 0
        self._rest = data[at:]
        return messages

    def _frame(self, data: bytes, at: int) -> tuple[int, bytes, int] | None:
        """(flags, body, where the next frame begins); None until all of it is there."""
        if at >= len(data):
            return None
        flags = data[at]
        if flags & ~(MORE | LONG | COMMAND):
            raise NotZmtp(f"flags {flags}")
        start = at + (9 if flags & LONG else 2)
        if start > len(data):
            return None
        nbytes = int.from_bytes(data[at + 1 : start], "big")
        if nbytes > self.max_part_bytes:
            raise NotZmtp(f"a part of {nbytes} bytes, at most {self.max_part_bytes}")
        stop = start + nbytes
        return (flags, data[start:stop], stop) if stop <= len(data) else None

    def _command(self, body: bytes) -> None:
        """READY once; what else a peer may say needs no answer under version 3.0."""
        if body.startswith(b"\x05READY"):
            self.ready = True
        elif body.startswith(b"\x05ERROR"):
            raise NotZmtp("the peer reports an error")


@dataclass(slots=True)
class _Peer:
    sock: socket.socket
    decoder: Decoder
    since_s: float


class ZmtpServer:
    """Accepts PUSH sockets on one port, for a thread that waits at ``fileno`` or until ``due_s``.

    Nothing is read but by ``receive``; until then senders wait. ``on_problem`` is told why a connection
    was closed. Raises OSError where the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        *,
        max_parts: int,
        max_part_bytes: int,
        max_peers: int,
        on_problem: Callable[[str], None],
    ) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address, family=family, backlog=512)
        self._listener.setblocking(False)
        self._max_parts = max_parts
        self._max_part_bytes = max_part_bytes
        self._max_peers = max_peers
        self._on_problem = on_problem
        self._peers: dict[int, _Peer] = {}
        self._messages: deque[list[bytes]] = deque()  # read, and not given out yet
        self._accept_again_s = math.inf  # finite while no connection is accepted
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        """Readable when ``receive`` may have something to do."""
        return self._epoll.fileno()

    def due_s(self) -> float:
        """Monotonic time at which ``receive`` is to be called in any case; infinite mostly."""
        return -math.inf if self._messages else self._accept_again_s

    def receive(self) -> list[list[bytes]]:
        """The next messages, at most ``MESSAGES_AT_ONCE``. Never waits."""
        if time.monotonic() >= self._accept_again_s:
            self._accept_again_s = math.inf
            self._epoll.register(self._listener, select.EPOLLIN)
        for _ in range(PEERS_AT_ONCE):
            # One at a time: who is looked after goes to the end of the kernel's line, the others stay.
            if len(self._messages) >= MESSAGES_AT_ONCE or not (ready := self._epoll.poll(0, 1)):
                break
            [(fd, _)] = ready
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._peers:
                self._read(self._peers[fd])
        return [self._messages.popleft() for _ in range(min(len(self._messages), MESSAGES_AT_ONCE))]

    def close(self) -> None:
        """What waits in the connections is given up."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it is gone again, or there is no descriptor for it
            if error.errno in SHORT_OF and not self._make_room():
                # Nobody who has introduced himself gives way, and asking on would spin.
                self._epoll.unregister(self._listener)
                self._accept_again_s = time.monotonic() + ACCEPT_AGAIN_S
                self._on_problem(f"a connection has to wait: {error.strerror}")
            return
        if len(self._peers) >= self._max_peers and not self._make_room():
            sock.close()
            self._on_problem(f"{self._max_peers} connections are open")
            return
        sock.setblocking(False)
        _keep_alive(sock)
        peer = _Peer(sock, Decoder(self._max_parts, self._max_part_bytes), time.monotonic())
        self._peers[sock.fileno()] = peer
        self._epoll.register(sock, select.EPOLLIN)
        try:
            sock.send(HELLO)  # into an empty buffer: whole or not at all
        except OSError:
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        try:
            self._messages.extend(peer.decoder.feed(data))
        except NotZmtp as problem:
            self._drop(peer)
            self._on_problem(str(problem))

    def _make_room(self) -> bool:
        """Ends a connection that has not introduced itself in time, if there is one."""
        late_s = time.monotonic() - HANDSHAKE_S
        for peer in self._peers.values():
            if not peer.decoder.ready and peer.since_s < late_s:
                self._drop(peer)
                return True
        return False

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.sock.fileno()]
        self._epoll.unregister(peer.sock)
        peer.sock.close()


def _keep_alive(sock: socket.socket) -> None:
    """A prefill pod that vanished leaves a half-open connection; this is how it ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
