"""The control frames of TokenSpeed's embedding transfer: ZMQ multiparts <-> types.

Three messages, all parts ASCII except the pointers, which are 8 bytes little-endian (byte for
byte in docs/wire.md):

registration   6 parts, prefill -> encode, once per connection; part 0 is ``None``
transfer info  13 parts, prefill -> encode, one per (room, prefill rank)
status         3 parts, encode -> prefill

Parts beyond these are ignored, as the reference does. Whatever a peer sends, decoding returns a
value or raises WireError naming the part; a listener needs to catch nothing else.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import WireError
from ..types import ROOM_LIMIT, Receiver, Status

REGISTRATION_ROOM = b"None"
"""Part 0 of a registration frame, where other frames have a room."""

REGISTRATION_PARTS = 6
TRANSFER_INFO_PARTS = 13
STATUS_PARTS = 3

_POINTER = struct.Struct("<Q")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_HOST = re.compile(rb"[0-9A-Za-z._:%\[\]-]{1,255}")
_TEXT = re.compile(rb"[!-~]{1,255}")

Frame = bytes | bytearray | memoryview
"""One part of a message, as a socket hands it out."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A prefill rank presents itself. Transfer infos say all of it again."""

    session: str
    host: str
    status_port: int
    main_ptr: int = 0
    deepstack_ptr: int = 0


def decode_control(frames: Sequence[Frame], rank: int = 0) -> Registration | tuple[int, Receiver]:
    """A frame for encode rank ``rank``: a Registration, or (room, receiver). Raises WireError."""
    if not frames:
        raise WireError("frame", 0, "a message of 6 or 13 parts")
    if bytes(frames[0][:64]) == REGISTRATION_ROOM:
        _at_least(frames, REGISTRATION_PARTS, "registration")
        return Registration(
            host=_match(_HOST, "host", frames[1], "an address"),
            status_port=_number("status_port", frames[2], 1, 2**16),
            session=_match(_TEXT, "session", frames[3], "a transfer session"),
            main_ptr=_pointer("main_ptr", frames[4]),
            deepstack_ptr=_pointer("deepstack_ptr", frames[5]),
        )
    _at_least(frames, TRANSFER_INFO_PARTS, "transfer info")
    room = _number("room", frames[0], 0, ROOM_LIMIT)
    receiver = Receiver(
        host=_match(_HOST, "host", frames[1], "an address"),
        status_port=_number("status_port", frames[2], 1, 2**16),
        session=_match(_TEXT, "session", frames[3], "a transfer session"),
        main_ptr=_pointer("main_ptr", frames[4]),
        deepstack_ptr=_pointer("deepstack_ptr", frames[5]),
        n_rows=_number("n_rows", frames[6], 0, 2**31),
        hidden=_number("hidden", frames[7], 0, 2**31),
        dtype=_match(_TEXT, "dtype", frames[8], "a dtype"),
        has_deepstack=_flag("has_deepstack", frames[9]),
        fanout=_number("required_dst_info_num", frames[10], 1, 2**31),
        row_start=_number("row_start", frames[11], 0, 2**31),
        span=_number("span", frames[12], 0, 2**31),
        rank=rank,
    )
    return room, receiver


def encode_registration(registration: Registration) -> list[bytes]:
    return [
        REGISTRATION_ROOM,
        _ascii("host", registration.host),
        b"%d" % registration.status_port,
        _ascii("session", registration.session),
        _POINTER.pack(registration.main_ptr),
        _POINTER.pack(registration.deepstack_ptr),
    ]


def encode_transfer_info(room: int, receiver: Receiver) -> list[bytes]:
    return [
        b"%d" % room,
        _ascii("host", receiver.host),
        b"%d" % receiver.status_port,
        _ascii("session", receiver.session),
        _POINTER.pack(receiver.main_ptr),
        _POINTER.pack(receiver.deepstack_ptr),
        b"%d" % receiver.n_rows,
        b"%d" % receiver.hidden,
        _ascii("dtype", receiver.dtype),
        b"1" if receiver.has_deepstack else b"0",
        b"%d" % receiver.fanout,
        b"%d" % receiver.row_start,
        b"%d" % receiver.span,
    ]


def encode_status(room: int, status: Status, rank: int) -> list[bytes]:
    """Always three parts: a shorter frame kills the status thread of TokenSpeed's prefill."""
    return [b"%d" % room, b"%d" % status, b"%d" % rank]


def decode_status(frames: Sequence[Frame]) -> tuple[int, Status, int]:
    """(room, status, encode rank). Raises WireError, also for the numbers only the KV path sends."""
    _at_least(frames, STATUS_PARTS, "status")
    room = _number("room", frames[0], 0, ROOM_LIMIT)
    number = _number("status", frames[1], 0, 2**31)
    rank = _number("rank", frames[2], 0, 2**31)
    try:
        return room, Status(number), rank
    except ValueError:
        raise WireError("status", number, "0 (failed) or 5 (success)") from None


def _at_least(frames: Sequence[Frame], parts: int, kind: str) -> None:
    if len(frames) < parts:
        raise WireError("frame", len(frames), f"the {parts} parts of a {kind} frame")


def _number(field: str, part: Frame, low: int, limit: int) -> int:
    """Decimal digits only: int() would take signs, spaces and underscores as well."""
    raw = bytes(part[:64])
    if not _DECIMAL.fullmatch(raw):
        raise WireError(field, raw, "a decimal number")
    value = int(raw)
    if not low <= value < limit:
        raise WireError(field, value, f"in [{low}, {limit})")
    return value


def _pointer(field: str, part: Frame) -> int:
    if len(part) != _POINTER.size:
        raise WireError(field, bytes(part[:64]), "8 bytes")
    value: int = _POINTER.unpack(part)[0]
    return value


def _flag(field: str, part: Frame) -> bool:
    raw = bytes(part[:64])
    if raw not in (b"0", b"1"):
        raise WireError(field, raw, "0 or 1")
    return raw == b"1"


def _match(pattern: re.Pattern[bytes], field: str, part: Frame, requirement: str) -> str:
    raw = bytes(part[:256])
    if not pattern.fullmatch(raw):
        raise WireError(field, raw[:64], requirement)
    return raw.decode("ascii")


def _ascii(field: str, text: str) -> bytes:
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise WireError(field, text, "ASCII") from None
