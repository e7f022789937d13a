"""Taking one large bytes field out of a serialised protobuf message without copying it.

Protobuf copies a bytes field twice on its way to Python, which for a 200 MiB image costs more than
everything else in the frontend. So the field is cut out first and protobuf parses the rest.
"""

from collections.abc import Sequence

_MAX_FIELDS = 10_000

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


class _NotOurs(Exception):
    """Leave this message to protobuf: it is malformed, or of a form we do not cut."""


def cut_payload(raw: memoryview, path: Sequence[int]) -> tuple[bytes, memoryview | None]:
    """(the message with that field empty, the field's bytes) for a path of field numbers.

    The field stays present in the rest. Where a field of the path does not occur exactly once, or
    the message is not well formed, the answer is (the whole message, None).
    """
    try:
        rest, payload = _cut(raw, path, [_MAX_FIELDS])
    except _NotOurs:
        return bytes(raw), None
    return (rest, payload) if payload is not None else (bytes(raw), None)


def _cut(raw: memoryview, path: Sequence[int], budget: list[int]) -> tuple[bytes, memoryview | None]:
    parts: list[bytes] = []
    payload: memoryview | None = None
    seen = False
    at = kept = 0
    while at < len(raw):
        budget[0] -= 1
        if budget[0] < 0:
            raise _NotOurs
        start = at
        tag, at = _varint(raw, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, at = _varint(raw, at)
            continue
        if kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            continue
        if kind != _DELIMITED or number == 0:
            raise _NotOurs
        nbytes, at = _varint(raw, at)
        stop = at + nbytes
        if stop > len(raw):
            raise _NotOurs
        if number == path[0]:
            if seen:
                raise _NotOurs
            seen = True
            parts.append(bytes(raw[kept:start]))
            if len(path) == 1:
                payload, inner = raw[at:stop], b""
            else:
                inner, payload = _cut(raw[at:stop], path[1:], budget)
            parts += [_as_varint(tag), _as_varint(len(inner)), inner]
            kept = stop
        at = stop
    if at != len(raw):
        raise _NotOurs
    parts.append(bytes(raw[kept:]))
    return b"".join(parts), payload


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        if at + index >= len(raw):
            raise _NotOurs
        byte = raw[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise _NotOurs


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
