"""A transfer engine in plain Python: TCP sockets, registered memory, faults on request.

For machines without Mooncake, and for tests: it keeps the Engine protocol's promises and can
break a peer's expectations in every way a network can (Faults). It moves one message at a time
per connection and copies nothing on either side.

One connection carries one conversation after the other (all numbers little-endian):

    hello      client -> server   "ENCP" u16 version u16 zero; the server answers the same
    write      client -> server   u8 1, u64 id, u32 n, then n times (u64 address, u64 bytes)
    verdict    server -> client   u64 id, u8 0 go on / 1 not registered here
    payload    client -> server   the bytes of all n slices
    landed     server -> client   u64 id, u8 0
    probe      client -> server   u8 2, u64 id, u32 0; answered by a verdict

The target checks every range before a byte of payload is sent, so a refused write costs nothing.
"""

import ctypes
import itertools
import socket
import struct
import threading
from collections.abc import Sequence

from ..errors import RegistrationFailed, TransportError, WriteRefused, WriteTimedOut
from .base import RawSlice
from .ranges import Ranges
from .tcp_faults import Fault, Faults

VERSION = 1
MAX_SLICES = 65_536
MAX_CONNECTIONS = 1_024

HELLO = struct.Struct("<4sHH")
REQUEST = struct.Struct("<BQI")
TARGET = struct.Struct("<QQ")
VERDICT = struct.Struct("<QB")
MAGIC = b"ENCP"
WRITE, PROBE = 1, 2
GO, NOT_REGISTERED = 0, 1

_PROBE_TIMEOUT_S = 10.0
_PIECE_BYTES = 4 << 20


class TcpEngine:
    """Listens on ``host`` (port 0: any free port). ``timeout_s`` bounds a wait without progress."""

    def __init__(
        self, host: str = "127.0.0.1", *, port: int = 0, timeout_s: float = 5.0, faults: Faults | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._faults = faults if faults is not None else Faults()
        self._ranges = Ranges()  # of these, all may be read here,
        self._targets = Ranges()  # and these may be written by peers
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle: dict[str, list[socket.socket]] = {}
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._busy: dict[socket.socket, list[tuple[int, int]]] = {}  # served writes and their targets
        self._writing = 0  # calls of write that may be reading memory here
        self._closed = False
        self._ending = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host.strip("[]"), port), family=family, backlog=128)
        except OSError as exc:
            raise TransportError(f"cannot listen on {host} port {port}: {exc}") from exc
        shown = f"[{host}]" if family == socket.AF_INET6 and not host.startswith("[") else host
        self._session = f"{shown}:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="encodepool-tcp-accept", daemon=True)
        self._acceptor.start()

    @property
    def session(self) -> str:
        return self._session

    @property
    def faults(self) -> Faults:
        """What goes wrong with writes that peers send here."""
        return self._faults

    def register(self, ptr: int, nbytes: int, *, receives: bool = True) -> None:
        if self._closed:
            raise RegistrationFailed("the engine is closed")
        self._ranges.add(ptr, nbytes)
        if receives:
            self._targets.add(ptr, nbytes)

    def unregister(self, ptr: int) -> None:
        """Returns when no peer's write can touch the range any more."""
        self._targets.remove(ptr)
        if not self._ranges.remove(ptr):
            return
        with self._lock:
            for sock in list(self._busy):
                if self._reaches_unregistered(sock):
                    _shut(sock)
            self._changed.wait_for(lambda: not any(map(self._reaches_unregistered, self._busy)))
        self._faults.forget_held()

    def _reaches_unregistered(self, sock: socket.socket) -> bool:
        return self._targets.missing(self._busy[sock]) is not None

    # --- the writing side

    def probe(self, session: str) -> bool:
        try:
            sock = self._connect(session, _PROBE_TIMEOUT_S)
        except (OSError, WriteRefused):
            return False
        try:
            number = next(self._ids)
            sock.sendall(REQUEST.pack(PROBE, number, 0))
            return VERDICT.unpack(_receive(sock, VERDICT.size)) == (number, GO)
        except OSError:
            return False
        finally:
            self._drop(sock)

    def write(self, session: str, slices: Sequence[RawSlice]) -> None:
        wanted = [one for one in slices if one[2]]
        missing = self._ranges.missing((source, nbytes) for source, _, nbytes in wanted)
        if missing is not None:
            raise WriteRefused(f"{missing[1]} bytes at {missing[0]:#x} are not registered here")
        if len(wanted) > MAX_SLICES:
            raise WriteRefused(f"{len(wanted)} slices in one write, at most {MAX_SLICES}")
        if not wanted:
            return
        with self._lock:
            if self._closed:
                raise WriteRefused("the engine is closed")
            self._writing += 1
        try:
            self._write(session, wanted)
        finally:
            with self._lock:
                self._writing -= 1
                self._changed.notify_all()

    def _write(self, session: str, wanted: Sequence[RawSlice]) -> None:
        sock = None
        sending = False
        try:
            sock = self._take(session)
            number = next(self._ids)
            targets = b"".join(TARGET.pack(target, nbytes) for _, target, nbytes in wanted)
            sock.sendall(REQUEST.pack(WRITE, number, len(wanted)) + targets)
            if VERDICT.unpack(_receive(sock, VERDICT.size)) != (number, GO):
                raise WriteRefused(f"{session} has not registered all of the target")
            sending = True
            for source, _, nbytes in wanted:
                _send(sock, source, nbytes)
            if VERDICT.unpack(_receive(sock, VERDICT.size)) != (number, GO):
                raise WriteRefused(f"{session} did not acknowledge the write")
        except TimeoutError as exc:
            self._drop(sock)
            what = f"{session} made no progress for {self._timeout_s} s"
            if sending:  # closing the connection released the source; what was sent may still land
                raise WriteTimedOut(what, released=True) from exc
            raise WriteRefused(what) from exc
        except OSError as exc:
            self._drop(sock)
            raise WriteRefused(f"{session}: {exc}") from exc
        except BaseException:
            self._drop(sock)
            raise
        with self._lock:
            if not self._closed:
                self._idle.setdefault(session, []).append(sock)
                return
        self._drop(sock)

    def _take(self, session: str) -> socket.socket:
        """A connection that is still good: a peer that restarted has closed the idle ones."""
        while True:
            with self._lock:
                idle = self._idle.get(session)
                sock = idle.pop() if idle else None
                if idle is not None and not idle:
                    del self._idle[session]
            if sock is None:
                self._forget_ended()
                return self._connect(session, self._timeout_s)
            if not _has_ended(sock):
                return sock
            self._drop(sock)

    def _forget_ended(self) -> None:
        """Drop the idle connections of peers that are gone: nobody writes to their sessions again."""
        with self._lock:
            idle = [(session, sock) for session, socks in self._idle.items() for sock in socks]
            ended = [(session, sock) for session, sock in idle if _has_ended(sock)]
            for session, sock in ended:
                self._idle[session].remove(sock)
                if not self._idle[session]:
                    del self._idle[session]
        for _, sock in ended:
            self._drop(sock)

    def _connect(self, session: str, timeout_s: float) -> socket.socket:
        host, _, port = session.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise WriteRefused(f"{session!r} is no session of this engine: host:port is")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        with self._lock:
            if self._closed:
                sock.close()
                raise WriteRefused("the engine is closed")
            self._open.add(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(HELLO.pack(MAGIC, VERSION, 0))
            magic, version, _ = HELLO.unpack(_receive(sock, HELLO.size))
        except BaseException:
            self._drop(sock)
            raise
        if magic != MAGIC or version != VERSION:
            self._drop(sock)
            raise WriteRefused(
                f"{session} speaks {magic!r} version {version}, not {MAGIC!r} version {VERSION}"
            )
        return sock

    def _drop(self, sock: socket.socket | None) -> None:
        if sock is not None:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    # --- the written side

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors: then those who wait are served later
                if self._ending.wait(0.1):
                    return
                continue
            with self._lock:
                if self._closed or len(self._open) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                self._open.add(sock)
                thread = threading.Thread(
                    target=self._serve, args=(sock,), name="encodepool-tcp", daemon=True
                )
                self._threads.add(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._faults.wait_while_frozen()
            magic, version, _ = HELLO.unpack(_receive(sock, HELLO.size))
            sock.sendall(HELLO.pack(MAGIC, VERSION, 0))
            if magic != MAGIC or version != VERSION:
                return
            while self._serve_one(sock):
                pass
        except OSError:  # the peer left, or stopped making sense to TCP
            pass
        finally:
            with self._lock:
                self._busy.pop(sock, None)
                self._changed.notify_all()
            self._drop(sock)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _serve_one(self, sock: socket.socket) -> bool:
        """One request; False when the conversation is over."""
        kind, number, count = REQUEST.unpack(_receive(sock, REQUEST.size))
        self._faults.wait_while_frozen()
        if kind == PROBE:
            sock.sendall(VERDICT.pack(number, GO))
            return True
        if kind != WRITE or not 0 < count <= MAX_SLICES:
            return False
        raw = _receive(sock, count * TARGET.size)
        targets: list[tuple[int, int]] = list(TARGET.iter_unpack(raw))
        with self._lock:  # with unregister: either it waits for us, or we see the range gone
            known = self._targets.missing(targets) is None
            if known:
                self._busy[sock] = targets
        if not known:
            sock.sendall(VERDICT.pack(number, NOT_REGISTERED))
            return True
        sock.sendall(VERDICT.pack(number, GO))
        fault = self._faults.take()
        if fault is None:
            for ptr, nbytes in targets:
                _fill(sock, memory(ptr, nbytes))
        else:
            self._faults.play(fault, [(ptr, _receive(sock, nbytes)) for ptr, nbytes in targets])
        with self._lock:
            del self._busy[sock]
            self._changed.notify_all()
        if fault is Fault.LATE:
            sock.recv(1)  # no answer: the peer waits until it gives up
        if fault in (Fault.LATE, Fault.DROP, Fault.TRUNCATE):
            return False
        self._faults.wait_before_answer()
        sock.sendall(VERDICT.pack(number, GO))
        return True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            socks = list(self._open)
        self._ending.set()
        _shut(self._listener)
        self._acceptor.join()
        self._listener.close()
        self._faults.end()
        for sock in socks:
            _shut(sock)
        with self._lock:
            self._changed.wait_for(lambda: self._writing == 0)
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        with self._lock:
            idle = [sock for socks in self._idle.values() for sock in socks]
            self._idle.clear()
        for sock in idle:
            self._drop(sock)


def _has_ended(sock: socket.socket) -> bool:
    """Whether an idle connection is of no use any more: nothing may arrive on it but its end."""
    timeout_s = sock.gettimeout()
    sock.setblocking(False)
    try:
        sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        sock.settimeout(timeout_s)
    return True


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more
        pass


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        view = view[got:]


def _send(sock: socket.socket, ptr: int, nbytes: int) -> None:
    """In pieces: sendall's timeout bounds the whole call, ours a wait without progress."""
    view = memory(ptr, nbytes)
    while view:
        sent = sock.send(view[:_PIECE_BYTES])
        view = view[sent:]


def memory(ptr: int, nbytes: int) -> memoryview:
    """Writable view of raw memory; whoever calls makes sure that it stays mapped."""
    return memoryview((ctypes.c_char * nbytes).from_address(ptr)).cast("B")
