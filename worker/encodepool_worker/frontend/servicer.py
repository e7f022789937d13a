"""``TokenSpeedEncoder/Encode``: read when there is room, check, name, ask for credit, hand over.

The method is registered stream-unary. On the wire that is the same as the unary call a gateway
makes, but the message is read only when this code asks for it; until then HTTP/2 flow control
leaves it in the gateway (docs/decisions/0004-pixel-budget.md).

The gateway does not look at the answer, and a prefill worker waits for minutes. So whatever is
refused is also told to the loop, whenever its room could be read: its receivers hear Failed at once.
The same holds for a call that is given up by its caller, or by us, before it was answered with OK:
OK means that the item was taken, and anything else leaves no work behind (``withdrawal``).
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from smg_grpc_proto.generated import tokenspeed_encoder_pb2 as encoder_pb2

from ..errors import RequestRefused
from ..logs import LimitedLog, get_logger
from ..types import RefusalKind, TowerSpec
from ..wire import intake
from ..wire.encode import EncodeItem, EncodeLimits, EncodeTensor, ShmSource, parse_encode
from .admission import NoCredit, NotServing
from .back import Answer, LoopLink, monotonic_deadline
from .counts import Counts
from .gate import Gate
from .hashing import ContentKeys, TensorBytes
from .health import Report
from .shared_memory import read_segment
from .withdrawal import Withdrawals

SERVICE = "tokenspeed.grpc.encoder.TokenSpeedEncoder"

READ_S = 30.0
"""For the whole message, from the moment there is room for it: 256 MiB at 70 Mbit/s. Less, where
others wait for that room (``gate.HURRIED_S``)."""

ANSWER_S = 10.0
"""For the loop's verdict on a submission; it answers in its next turn, at the latest after a second."""

CLOSE_S = 1.0

PIXEL_FIELD = "mm_inputs.items[0].encoder_input"

THREADS = 2
"""Parsing and hashing run here; both let go of the GIL. More would only hold more memory at once."""

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

OUTCOMES = {
    grpc.StatusCode.OK: "accepted",
    INVALID: "invalid",
    EXHAUSTED: "exhausted",
    UNAVAILABLE: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "late",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.INTERNAL: "broken",
}


class _GivenUp(Exception):
    """The gateway went away before the item was handed over."""


@dataclass(slots=True)
class _Call:
    """One Encode call after its message was read. ``raw`` is let go of with the hand-over.

    ``given_up``: nobody will hear that the item was taken.
    """

    hold: int
    raw: bytes
    deadline_s: float | None
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class _Named:
    """A checked item with its bytes in this process and the name of its content."""

    item: EncodeItem
    key: bytes
    pixels: TensorBytes
    side: tuple[TensorBytes, ...]


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What the call is answered. ``room`` is set where its receivers have to be told."""

    code: grpc.StatusCode
    text: str = ""
    room: int | None = None
    refused_field: str = ""


@dataclass(slots=True, kw_only=True)
class EncodeService:
    """Serves Encode for one event loop. ``serving`` says whether the worker takes work at all."""

    gate: Gate
    link: LoopLink
    spec: TowerSpec
    keys: ContentKeys
    counts: Counts
    serving: Callable[[], Report]
    read_s: float = READ_S
    answer_s: float = ANSWER_S
    clock: Callable[[], float] = time.monotonic
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="intake")
    )
    _running: set["asyncio.Task[_Verdict]"] = field(default_factory=set)
    _withdrawals: Withdrawals = field(default_factory=Withdrawals)
    _refusals: LimitedLog = field(default_factory=LimitedLog)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def handler(self) -> Any:
        """The service, for ``add_generic_rpc_handlers``. Messages stay bytes; they are parsed in a thread."""
        method = grpc.stream_unary_rpc_method_handler(
            self.encode, response_serializer=encoder_pb2.EncodeResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Encode": method})

    async def encode(self, _requests: object, context: Any) -> encoder_pb2.EncodeResponse:
        """The RPC. Ends with OK only when the loop has taken the item."""
        try:
            verdict = await self._answer(context)
        except asyncio.CancelledError:
            self._count(_Verdict(grpc.StatusCode.CANCELLED))
            raise
        self._count(verdict)
        if verdict.code is not grpc.StatusCode.OK:
            await context.abort(verdict.code, verdict.text)
        return encoder_pb2.EncodeResponse(accepted=True)

    async def close(self) -> None:
        """The end: after a drain nothing is under way, after a failure what is left is given up."""
        left = set(self._running)
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, context: Any) -> _Verdict:
        try:
            hold = await self.gate.enter(context.peer())
        except NoCredit as full:
            return _Verdict(EXHAUSTED, str(full))
        try:
            async with asyncio.timeout(self.read_s) as limit:
                self.gate.limit(hold, limit)
                raw = await context.read()
                self.gate.arrived(hold)
        except TimeoutError:
            hurried = self.gate.late(hold)
            within = f"{self.gate.hurried_s:g} s, and others wait" if hurried else f"{self.read_s:g} s"
            return _Verdict(grpc.StatusCode.DEADLINE_EXCEEDED, f"the message did not arrive within {within}")
        except BaseException:
            self.gate.drop(hold)
            raise
        if raw is grpc.aio.EOF:
            self.gate.drop(hold)
            return _Verdict(INVALID, "the call ended without a message")
        call = _Call(hold, raw, monotonic_deadline(context.time_remaining(), self.clock()))
        del raw
        # From here on the call's bytes belong to a task of their own: a gateway that gives up must
        # not make us forget bytes that a thread is still reading.
        task = self._loop.create_task(self._serve(call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.given_up = True
            raise

    async def _serve(self, call: _Call) -> _Verdict:
        """Never raises, and gives the hold back unless the loop took it."""
        verdict, answer = await self._take_in(call)
        if answer is not None:
            verdict = await self._wait_for_loop(call, answer)
        elif verdict.room is not None:
            self.link.refuse(verdict.room, verdict.text)
        return verdict

    async def _take_in(self, call: _Call) -> tuple[_Verdict, "asyncio.Future[Answer] | None"]:
        room = None
        try:
            named = await self._loop.run_in_executor(self._pool, self._name, call)
            room = named.item.room
            if call.given_up:
                raise _GivenUp
            return _Verdict(grpc.StatusCode.OK), self._submit(call, named)
        except RequestRefused as refused:
            verdict = _Verdict(INVALID, str(refused), refused.room, refused.field)
        except NoCredit as full:
            verdict = _Verdict(EXHAUSTED, str(full), room)
        except NotServing as reason:
            verdict = _Verdict(UNAVAILABLE, str(reason), room)
        except _GivenUp:
            verdict = _Verdict(grpc.StatusCode.CANCELLED, "the gateway gave up before the hand-over", room)
        except Exception as bug:  # noqa: BLE001 - one request must not end the others; it is reported
            get_logger().error("a request broke the frontend", room=room, exc_info=bug)
            verdict = _Verdict(grpc.StatusCode.INTERNAL, f"{type(bug).__name__}: {bug}", room)
        call.raw = b""
        self.gate.drop(call.hold)
        return verdict, None

    def _name(self, call: _Call) -> _Named:
        """In a thread: parse, fetch shared memory, hash. Raises RequestRefused."""
        message_bytes = self.gate.account.limits.message_bytes
        item = parse_encode(call.raw, self.spec, EncodeLimits(max_pixel_bytes=message_bytes))
        nbytes = len(call.raw) + _shared_bytes(item)
        if nbytes > message_bytes:
            raise RequestRefused(
                PIXEL_FIELD, f"{nbytes} bytes with its message, at most {message_bytes}", item.room
            )
        self._loop.call_soon_threadsafe(self.gate.measured, call.hold, nbytes)
        pixels = _fetch(item.pixels, item.room)
        side = tuple(_fetch(tensor, item.room) for tensor in item.side)
        started_s = self.clock()
        key = self.keys.of(item.modality, item.grids, pixels, side)
        self._loop.call_soon_threadsafe(self._hashed, nbytes, self.clock() - started_s)
        return _Named(item, key, pixels, side)

    def _submit(self, call: _Call, named: _Named) -> "asyncio.Future[Answer]":
        """Without a pause between the check and the hand-over, so that a drain comes after it."""
        serving = self.serving()
        if not serving.good:
            raise NotServing(f"this worker takes no work: {serving.reason}")
        item = named.item
        account = self.gate.account
        account.check(call.hold)
        submit = intake.Submit(
            seq=self.link.next_seq(),
            request_id=item.request_id,
            index=item.index,
            room=item.room,
            modality=item.modality,
            key=named.key,
            grids=tuple((grid.t, grid.h, grid.w) for grid in item.grids),
            n_tokens=item.n_tokens,
            cost=item.n_tokens,
            deadline_s=call.deadline_s,
            pixel_dtype=named.pixels.dtype,
            pixel_shape=named.pixels.shape,
            tensors=tuple(intake.TensorHeader(t.name, t.dtype, t.shape) for t in named.side),
        )
        answer = self.link.submit(submit, named.pixels.payload, *(t.payload for t in named.side))
        self._withdrawals.handed_over(item.room)
        answer.add_done_callback(partial(self._answered, call, item.room))
        account.hand_over(call.hold, submit.seq, item.n_tokens)
        call.raw = b""
        self.gate.refresh()
        return answer

    async def _wait_for_loop(self, call: _Call, answer: "asyncio.Future[Answer]") -> _Verdict:
        done, _ = await asyncio.wait((answer,), timeout=self.answer_s)
        if not done:  # the answer may still come, and then ``_answered`` is called
            call.given_up = True
            return _Verdict(UNAVAILABLE, f"the encode loop did not answer within {self.answer_s:g} s")
        said = answer.result()
        if isinstance(said, intake.Admitted):
            return _Verdict(grpc.StatusCode.OK)
        # The loop has told the receivers itself, where that was right: not if the room is another's.
        text = f"{said.field}: {said.reason}"
        if said.kind is RefusalKind.INVALID:
            return _Verdict(INVALID, text, refused_field=said.field)
        return _Verdict(EXHAUSTED if said.kind is RefusalKind.FULL else UNAVAILABLE, text)

    def _answered(self, call: _Call, room: int, answer: "asyncio.Future[Answer]") -> None:
        """The loop has taken the item, or not; whether or not anybody still waits for that."""
        if answer.cancelled():
            return
        said = answer.result()
        taken = isinstance(said, intake.Admitted)
        made = isinstance(said, intake.Admitted) and not said.repeated
        if self._withdrawals.answered(room, made=made, wanted=taken and not call.given_up):
            self.link.abort(room, "its call was given up before it was answered")

    def _hashed(self, nbytes: int, seconds: float) -> None:
        self.counts.add("encodepool_request_bytes_total", nbytes)
        self.counts.add("encodepool_hash_seconds_total", seconds)

    def _count(self, verdict: _Verdict) -> None:
        self.counts.add("encodepool_requests_total", outcome=OUTCOMES[verdict.code])
        if verdict.refused_field:
            self.counts.add_refused(verdict.refused_field)
        if verdict.text:
            self._refusals.info(
                "request refused", outcome=OUTCOMES[verdict.code], room=verdict.room, reason=verdict.text
            )


def _shared_bytes(item: EncodeItem) -> int:
    """Bytes of the item that lie in shared memory."""
    return sum(t.nbytes for t in (item.pixels, *item.side) if isinstance(t.payload, ShmSource))


def _fetch(tensor: EncodeTensor, room: int) -> TensorBytes:
    """The tensor with its bytes here. Raises RequestRefused."""
    payload = tensor.payload
    if isinstance(payload, ShmSource):
        data = read_segment(
            payload.name, payload.offset, payload.nbytes, field=f"{PIXEL_FIELD}.shm", room=room
        )
        return TensorBytes(tensor.name, tensor.dtype, tensor.shape, data)
    return TensorBytes(tensor.name, tensor.dtype, tensor.shape, payload)
