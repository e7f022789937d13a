"""Rank 0's end of the channel to the other ranks: orders out, answers in, a beat both ways.

One thread owns the socket. Nobody may connect without the token that was made for this start and
left where the ranks meet: the handshake refuses him before he can send anything. Once a follower
has said Hello, it must be heard every second; one that is silent for ``SILENCE_S``, or that says
what it cannot, ends the group. So does an order that cannot be handed over, and a follower that
has not said Hello within ``HELLO_S``. Until the process ends, the answers of the others are taken:
whoever may be told because of them still is.
"""

import hmac
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from ..core import events
from ..core import instructions as do
from ..errors import GroupLost, WireError, WorkerError
from ..logs import LimitedLog, get_logger
from ..towers.parallel import JOIN_TIMEOUT_S
from ..wire import ranks as wire
from .control_socket import bracketed
from .metrics import Metrics
from .pixels import Pixels
from .rank_messages import event_of, job_header
from .threads import MESSAGES_PER_POLL, Crash, start_thread

BEAT_S = 1.0
SILENCE_S = 5.0
"""After which a rank counts as dead or frozen; as the supervisor's patience."""

MAX_ORDERS = 65_536
"""Orders that wait for one follower. It takes them at once, or is silent and the group ends."""

MAX_KNOWN = 16_384
"""Receivers of one follower whose registrations it is told, each once a second. Anyone can send
registrations, and only those of a receiver that it has written to matter."""

HELLO_S = JOIN_TIMEOUT_S
"""For the other ranks to say Hello, once rank 0 can serve."""

END_LINGER_MS = 2000
USER = b"rank"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Where ZMQ asks whether somebody may connect (RFC 27)."""

HANDSHAKE_MS = 5000


@dataclass(slots=True)
class _Follower:
    """What rank 0 knows about another rank. ``heard_s`` counts once it has joined."""

    joined: bool = False
    heard_s: float = 0.0
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Sessions that it was told to write to, the latest last."""

    told: set[str] = field(default_factory=set)
    """Those of them whose registration it has been told of since the last beat."""

    outgoing: wire.Outgoing = field(default_factory=wire.Outgoing)
    incoming: wire.Incoming = field(default_factory=wire.Incoming)
    samples: dict[str, float] = field(default_factory=dict)


class RankServer:
    """``answer`` gets (rank, event) for what a follower has done, ``joined`` its number once it may
    be told to receivers; both from the channel's thread.

    ``expected`` is the Hello that a follower must give, but for its rank. Raises OSError where
    ``host`` cannot be bound. ``crash`` ends the group.
    """

    def __init__(
        self,
        host: str,
        expected: wire.Hello,
        *,
        answer: Callable[[int, events.Event], None],
        joined: Callable[[int], None],
        metrics: Metrics,
        crash: Crash,
    ) -> None:
        self._expected = expected
        self._answer = answer
        self._joined = joined
        self._metrics = metrics
        self._crash = crash
        self._log = LimitedLog(per_s=1, burst=10)
        self.token = secrets.token_hex(16)
        self._followers = {rank: _Follower() for rank in range(1, expected.size)}
        self._orders: queue.Queue[tuple[int, wire.FromLeader, Sequence[wire.Payload]]] = queue.Queue(
            MAX_ORDERS
        )
        self._registering = threading.Lock()  # for what is known
        # A context of its own: the door keeper answers for all sockets of a context.
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.IPV6, 1)
        self._router.setsockopt(zmq.PLAIN_SERVER, 1)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_ANSWER_BYTES)
        self._router.setsockopt(zmq.SNDHWM, MAX_ORDERS)
        # Without these an order for a follower that is gone would vanish in silence.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._router.bind(f"tcp://{bracketed(host)}:*")
        except zmq.ZMQError as error:
            self._close()
            raise OSError(error.errno, error.strerror) from error
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"tcp://{bracketed(host)}:{port}"
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = start_thread("ranks", self._run, crash)

    # --- orders; from any thread, never waiting

    def run(self, order: do.RunBatch, pixels: Sequence[Pixels]) -> None:
        """``pixels`` are those of the jobs, in their order; read until they are sent."""
        jobs = tuple(job_header(job, one) for job, one in zip(order.jobs, pixels, strict=True))
        self._to_all(wire.Batch(order.batch, jobs), [one.payload for one in pixels])

    def demote(self, order: do.Demote) -> None:
        source, target = (tuple((e.start, e.stop) for e in part) for part in (order.source, order.target))
        self._to_all(wire.Demote(order.entry, source, target))

    def write(self, order: do.Write) -> None:
        rank, session = order.receiver.rank, order.receiver.session
        known = self._followers[rank].known
        with self._registering:
            known[session] = None
            known.move_to_end(session)
            if len(known) > MAX_KNOWN:
                known.popitem(last=False)
        slices = tuple((s.source, s.target, s.nbytes) for s in order.slices)
        self._put(rank, wire.Write(order.write, session, slices))

    def retire(self, order: do.RetireEngine) -> None:
        self._put(order.rank, wire.Retire(order.write))

    def registered(self, rank: int, session: str) -> None:
        """A receiver introduced itself to ``rank``."""
        follower = self._followers[rank]
        with self._registering:
            if session not in follower.known or session in follower.told:
                return
            follower.told.add(session)
        self._put(rank, wire.Registered(session))

    def samples(self) -> dict[str, float]:
        """Sums over the followers."""
        total: dict[str, float] = {}
        for follower in self._followers.values():
            for name, value in follower.samples.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def close(self) -> None:
        """Tell the followers that this is the end, and stop. No order is given afterwards."""
        self._stopping = True
        self._wake()
        self._thread.join()
        os.close(self._wake_fd)

    def _to_all(self, message: wire.FromLeader, payloads: Sequence[wire.Payload] = ()) -> None:
        for rank in self._followers:
            self._put(rank, message, payloads)

    def _put(self, rank: int, message: wire.FromLeader, payloads: Sequence[wire.Payload] = ()) -> None:
        try:
            self._orders.put_nowait((rank, message, payloads))
        except queue.Full:
            raise GroupLost(f"{MAX_ORDERS} orders wait for the other ranks") from None
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # --- the channel's thread

    def _run(self) -> None:
        try:
            self._serve()
        except WorkerError as lost:
            self._crash(str(lost))
            self._listen_on(str(lost))
        finally:
            self._close()

    def _close(self) -> None:
        self._router.close(linger=END_LINGER_MS)
        self._zap.close(linger=0)
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for one in (self._router, self._zap, self._wake_fd):
            poller.register(one, zmq.POLLIN)
        beat_s = time.monotonic()
        join_by_s = beat_s + HELLO_S
        while True:
            now_s = time.monotonic()
            if now_s >= beat_s:
                beat_s = now_s + BEAT_S
                for rank, follower in self._followers.items():
                    with self._registering:
                        follower.told.clear()
                    if follower.joined:
                        self._send(rank, wire.Beat())
            wait_s = max(0.0, beat_s - now_s)
            ready = dict(poller.poll(int(wait_s * 1000) + 1))
            late_s = time.monotonic() - (now_s + wait_s)
            if late_s > BEAT_S:  # whoever froze us froze the others as well, or their beats wait for us
                join_by_s += late_s
                for follower in self._followers.values():
                    follower.heard_s += late_s
            if self._zap in ready:
                self._admit()
            if self._router in ready:
                self._receive()
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._hand_out()
            if self._stopping:
                self._say_end()
                return
            self._check_silence(time.monotonic())
            if self._missing and time.monotonic() > join_by_s:
                names = " and ".join(f"rank {rank}" for rank in self._missing)
                raise GroupLost(f"{names} did not join within {HELLO_S:g} s of rank 0 being ready")

    def _hand_out(self) -> None:
        """What waits now; whoever adds more wakes us again."""
        for _ in range(self._orders.qsize()):
            rank, message, payloads = self._orders.get_nowait()
            if self._followers[rank].joined:
                try:
                    self._send(rank, message, payloads)
                except GroupLost as lost:
                    self._not_begun(rank, message, str(lost))
                    raise
            else:
                raise GroupLost(f"rank {rank} was given an order before it had joined")

    def _listen_on(self, reason: str) -> None:
        """The group is lost: take answers, give no orders, until the end."""
        poller = zmq.Poller()
        for one in (self._router, self._wake_fd):
            poller.register(one, zmq.POLLIN)
        while True:
            while not self._orders.empty():
                rank, message, _ = self._orders.get_nowait()
                self._not_begun(rank, message, reason)
            if self._stopping:
                return
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._router in ready:
                try:
                    self._receive()
                except WorkerError as problem:
                    self._log.warning("an answer after the end of the group", problem=str(problem))

    def _not_begun(self, rank: int, message: wire.FromLeader, reason: str) -> None:
        """A write that no rank has heard of may be told at once."""
        if isinstance(message, wire.Write):
            self._answer(rank, events.WriteFailed(message.write, reason, False))

    def _say_end(self) -> None:
        for rank, follower in self._followers.items():
            try:
                if follower.joined:
                    self._send(rank, wire.End())
            except GroupLost as lost:
                self._log.warning("a rank was not told of the end", rank=rank, problem=str(lost))

    def _send(self, rank: int, message: wire.FromLeader, payloads: Sequence[wire.Payload] = ()) -> None:
        self._send_one(rank, message)
        for piece, pixels in wire.pieces(payloads):
            self._send_one(rank, piece, pixels)

    def _send_one(self, rank: int, message: wire.FromLeader, *payloads: wire.Payload) -> None:
        frames = self._followers[rank].outgoing.encode(message, *payloads)
        try:
            self._router.send_multipart([b"%d" % rank, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise GroupLost(f"rank {rank} has left {MAX_ORDERS} orders unread") from None
        except zmq.ZMQError as error:
            raise GroupLost(f"rank {rank} cannot be reached: {error.strerror}") from error

    def _receive(self) -> None:
        for _ in range(MESSAGES_PER_POLL):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = int(identity) if identity.isdigit() else -1
            follower = self._followers.get(rank)
            if follower is None:
                self._refuse(identity, f"there is no rank {identity!r} to follow")
                continue
            self._take(rank, follower, frames)

    def _take(self, rank: int, follower: _Follower, frames: list[bytes]) -> None:
        follower.heard_s = time.monotonic()
        if not follower.joined:
            self._meet(rank, follower, frames)
            return
        try:
            message = follower.incoming.from_follower(frames)
        except WireError as error:
            raise GroupLost(f"rank {rank} cannot be understood: {error}") from error
        if isinstance(message, wire.Beat):
            follower.samples = message.samples
        else:
            self._answer(rank, event_of(message))

    def _meet(self, rank: int, follower: _Follower, frames: list[bytes]) -> None:
        """The first message must be a Hello like ours; what else comes is left over from one turned away."""
        incoming = wire.Incoming()
        try:
            hello = incoming.from_follower(frames)
        except WireError as error:
            self._log.warning("a message of a rank that has not joined", rank=rank, problem=str(error))
            return
        if not isinstance(hello, wire.Hello):
            return
        problem = _difference(hello, self._expected, rank)
        if problem:
            self._refuse(b"%d" % rank, problem)
            return
        follower.joined, follower.incoming = True, incoming
        self._send(rank, wire.Welcome())
        get_logger().info("a rank has joined", joined=rank)
        self._joined(rank)

    def _refuse(self, identity: bytes, reason: str) -> None:
        """A new start of the group is the way out; until then others may still be the right ones."""
        self._metrics.add("encodepool_ranks_refused_total")
        self._log.warning("a rank was turned away", who=identity.decode(errors="replace"), reason=reason)
        try:
            self._router.send_multipart(
                [identity, *wire.Outgoing().encode(wire.TurnedAway(reason))], zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            self._log.warning("it could not be told", reason=error.strerror)

    def _admit(self) -> None:
        """One question of ZMQ's handshake: user and token must be right."""
        version, request, _domain, address, _identity, mechanism, *secret = self._zap.recv_multipart()
        good = (
            mechanism == b"PLAIN"
            and len(secret) == 2
            and secret[0] == USER
            and hmac.compare_digest(secret[1], self.token.encode())
        )
        if not good:
            self._metrics.add("encodepool_ranks_refused_total")
            self._log.warning("a stranger was turned away", peer=address.decode(errors="replace"))
        code, text = (b"200", b"OK") if good else (b"400", b"no rank of this group")
        self._zap.send_multipart([version, request, code, text, secret[0] if good else b"", b""])

    @property
    def _missing(self) -> list[int]:
        return [rank for rank, follower in self._followers.items() if not follower.joined]

    def _check_silence(self, now_s: float) -> None:
        for rank, follower in self._followers.items():
            if follower.joined and now_s - follower.heard_s > SILENCE_S:
                raise GroupLost(f"rank {rank} has been silent for {now_s - follower.heard_s:.1f} s")


def _difference(hello: wire.Hello, expected: wire.Hello, rank: int) -> str:
    """Why this follower is none of ours; empty if it is."""
    for name in ("v", "rank", "incarnation", "size", "tower", "tiers"):
        said, wanted = getattr(hello, name), rank if name == "rank" else getattr(expected, name)
        if said != wanted:
            return f"rank {rank} has {name} {said}, rank 0 {wanted}"
    return ""
