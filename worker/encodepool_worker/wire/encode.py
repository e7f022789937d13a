"""``TokenSpeedEncoder/Encode``: the gateway's protobuf message <-> a checked item.

What SMG sends is described field by field in docs/wire.md. ``parse_encode`` decides everything
that the message and the tower's spec can decide, before anything is allocated for the request;
every refusal names its field, and its room wherever that could be read.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from smg_grpc_proto import tokenspeed_encoder_pb2

from ..errors import RequestRefused
from ..types import DTYPE_BYTES, ROOM_LIMIT, ROW_DTYPES, Grid, Modality, TowerSpec
from .intake import MAX_DIMENSIONS, MAX_SIDE_TENSORS
from .protobuf import cut_payload

MODALITY_IMAGE, MODALITY_AUDIO, MODALITY_VIDEO = 1, 2, 3
"""Numbers of smg.grpc.common.Modality; 0 (unspecified) means image."""

GRID_TENSORS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}

MAX_SIDE_BYTES = 1 << 20
MAX_PLACEHOLDERS = 65_536
MAX_REQUEST_ID = 256

_INLINE_PATH = (2, 1, 3, 3)  # mm_inputs, items, encoder_input, inline
_SHM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_ITEM = "mm_inputs.items[0]"


@dataclass(frozen=True, slots=True)
class EncodeLimits:
    """What one item may weigh."""

    max_patches: int = 262_144
    max_pixel_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class ShmSource:
    """A POSIX shared-memory segment that holds ``nbytes`` at ``offset``; ``name`` has no slash.

    Only what the message says: whoever opens it checks owner and size.
    """

    name: str
    offset: int
    nbytes: int
    owner_id: str


@dataclass(frozen=True, slots=True)
class EncodeTensor:
    """Row-major, little-endian, ``nbytes`` long: here, or in a segment still to be read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    payload: bytes | memoryview | ShmSource


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """One item of one room, as asked for and found possible.

    ``pixels`` is [patches, patch_width]; ``n_tokens`` rows come out of the tower. ``side`` are the
    other tensors by name, the grid tensor among them; all of them inline.
    """

    request_id: str
    index: int
    room: int
    modality: Modality
    pixels: EncodeTensor
    grids: tuple[Grid, ...]
    n_tokens: int
    side: tuple[EncodeTensor, ...]


def parse_encode(request: Any, spec: TowerSpec, limits: EncodeLimits) -> EncodeItem:
    """An EncodeRequest, or its serialised bytes, as a checked item.

    From bytes the pixels are a view of them; protobuf itself would copy them twice. Raises
    RequestRefused, with the room where that could be read.
    """
    inline: memoryview | None = None
    if isinstance(request, bytes | bytearray | memoryview):
        request, inline = _read(request)
    room = _room(request)
    try:
        return _parse(request, inline, room, spec, limits)
    except RequestRefused as refusal:
        refusal.room = room
        raise


def build_encode(
    *,
    request_id: str,
    room: int,
    modality: Modality,
    pixel_dtype: str,
    pixel_shape: tuple[int, int],
    pixels: bytes | memoryview | ShmSource,
    grids: Sequence[Grid],
    n_tokens: int,
    placeholder_offset: int = 0,
    placeholder_token_id: int | None = None,
    content_hash: bytes = b"",
    side: Sequence[EncodeTensor] = (),
) -> Any:
    """The EncodeRequest a gateway would send for this item; the grid tensor follows from ``grids``."""
    request = tokenspeed_encoder_pb2.EncodeRequest(request_id=request_id)
    request.items.add(bootstrap_room=room)
    item = request.mm_inputs.items.add(
        modality=MODALITY_VIDEO if modality is Modality.VIDEO else MODALITY_IMAGE, content_hash=content_hash
    )
    _put(item.encoder_input, pixel_dtype, pixel_shape, pixels)
    numbers = [number for grid in grids for number in (grid.t, grid.h, grid.w)]
    name = GRID_TENSORS[modality]
    grid_payload = struct.pack(f"<{len(numbers)}q", *numbers)
    _put(item.model_specific_tensors[name], "int64", (len(grids), 3), grid_payload)
    for tensor in side:
        if tensor.name != name:
            _put(item.model_specific_tensors[tensor.name], tensor.dtype, tensor.shape, tensor.payload)
    item.placeholders.add(offset=placeholder_offset, length=n_tokens)
    if placeholder_token_id is not None:
        item.placeholder_token_id = placeholder_token_id
    return request


def _put(tensor: Any, dtype: str, shape: tuple[int, ...], payload: bytes | memoryview | ShmSource) -> None:
    tensor.dtype = dtype
    tensor.shape.extend(shape)
    if isinstance(payload, ShmSource):
        tensor.shm.name = payload.name
        tensor.shm.offset = payload.offset
        tensor.shm.nbytes = payload.nbytes
        tensor.shm.owner_id = payload.owner_id
    else:
        tensor.inline = bytes(payload)


def _read(raw: bytes | bytearray | memoryview) -> tuple[Any, memoryview | None]:
    """The message without its pixels, and the pixels."""
    rest, inline = cut_payload(memoryview(raw).cast("B"), _INLINE_PATH)
    try:
        return tokenspeed_encoder_pb2.EncodeRequest.FromString(rest), inline
    except Exception as exc:  # only protobuf can fail here; its word goes on to the caller
        raise RequestRefused("message", f"not an EncodeRequest: {exc}") from exc


def _room(request: Any) -> int:
    if len(request.items) != 1:
        _refuse("items", f"{len(request.items)} room assignments, one RPC serves exactly one")
    room = int(request.items[0].bootstrap_room)
    if not 0 <= room < ROOM_LIMIT:
        _refuse("items[0].bootstrap_room", f"{room} is not in [0, 2**63)")
    return room


def _parse(
    request: Any, inline: memoryview | None, room: int, spec: TowerSpec, limits: EncodeLimits
) -> EncodeItem:
    if len(request.request_id) > MAX_REQUEST_ID:
        _refuse("request_id", f"{len(request.request_id)} characters, at most {MAX_REQUEST_ID}")
    if not request.HasField("mm_inputs"):
        _refuse("mm_inputs", "missing")
    if len(request.mm_inputs.items) != 1:
        _refuse("mm_inputs.items", f"{len(request.mm_inputs.items)} items, one RPC serves exactly one")
    item = request.mm_inputs.items[0]
    modality = _modality(item.modality)
    shape, nbytes = _pixel_size(item, spec, limits)
    side = _side(item)
    grids = _grids(side, GRID_TENSORS[modality], spec, limits)
    patches = sum(grid.patches for grid in grids)
    if patches != shape[0]:
        _refuse(f"{_ITEM}.encoder_input.shape", f"{shape[0]} patches, the grids have {patches}")
    n_tokens = sum(spec.token_count(grid) for grid in grids)
    _placeholders(item.placeholders, n_tokens)
    payload = _payload(item.encoder_input, inline, nbytes, limits)
    return EncodeItem(
        request_id=request.request_id or f"room-{room}",
        index=0,
        room=room,
        modality=modality,
        pixels=EncodeTensor("pixels", item.encoder_input.dtype, shape, nbytes, payload),
        grids=grids,
        n_tokens=n_tokens,
        side=side,
    )


def _modality(number: int) -> Modality:
    if number == MODALITY_AUDIO:
        _refuse(f"{_ITEM}.modality", "audio is not served: this pool encodes images and videos")
    if number == MODALITY_VIDEO:
        return Modality.VIDEO
    if number not in (0, MODALITY_IMAGE):
        _refuse(f"{_ITEM}.modality", f"{number} is no modality known here")
    return Modality.IMAGE


def _pixel_size(item: Any, spec: TowerSpec, limits: EncodeLimits) -> tuple[tuple[int, int], int]:
    """Shape and bytes of the pixels as declared; nothing of the payload is looked at."""
    field = f"{_ITEM}.encoder_input"
    if not item.HasField("encoder_input"):
        _refuse(field, "missing")
    tensor = item.encoder_input
    if tensor.dtype not in ROW_DTYPES:
        _refuse(f"{field}.dtype", f"{tensor.dtype[:32]!r} is not one of {', '.join(ROW_DTYPES)}")
    if len(tensor.shape) != 2 or tensor.shape[1] != spec.patch_width:
        shape = list(tensor.shape[: MAX_DIMENSIONS + 1])
        _refuse(f"{field}.shape", f"{shape} is not [patches, {spec.patch_width}]")
    rows = tensor.shape[0]
    if not 0 < rows <= limits.max_patches:
        _refuse(f"{field}.shape", f"{rows} patches, between 1 and {limits.max_patches} are served")
    nbytes = rows * spec.patch_width * DTYPE_BYTES[tensor.dtype]
    if nbytes > limits.max_pixel_bytes:
        _refuse(f"{field}.shape", f"{nbytes} bytes of pixels, at most {limits.max_pixel_bytes} are served")
    return (rows, spec.patch_width), nbytes


def _payload(
    tensor: Any, inline: memoryview | None, nbytes: int, limits: EncodeLimits
) -> bytes | memoryview | ShmSource:
    field = f"{_ITEM}.encoder_input"
    kind = tensor.WhichOneof("payload")
    if kind == "inline":
        payload: bytes | memoryview = tensor.inline if inline is None else inline
        if len(payload) != nbytes:
            _refuse(f"{field}.inline", f"{len(payload)} bytes, shape and dtype say {nbytes}")
        return payload
    if kind == "shm":
        return _shm(tensor.shm, nbytes)
    if kind == "remote":
        name = tensor.remote.transport[:32]
        _refuse(f"{field}.remote", f"transport {name!r} is not served; send pixels inline or through shm")
    _refuse(field, "has no payload")


def _shm(handle: Any, nbytes: int) -> ShmSource:
    field = f"{_ITEM}.encoder_input.shm"
    if not _SHM_NAME.fullmatch(handle.name):
        _refuse(f"{field}.name", f"{handle.name[:64]!r} is no name of a segment (no path, no leading dot)")
    if handle.nbytes != nbytes:
        _refuse(f"{field}.nbytes", f"{handle.nbytes} bytes, shape and dtype say {nbytes}")
    if handle.offset + handle.nbytes >= 2**63:
        _refuse(f"{field}.offset", f"{handle.offset} is out of range")
    return ShmSource(handle.name, handle.offset, handle.nbytes, handle.owner_id[:MAX_REQUEST_ID])


def _side(item: Any) -> tuple[EncodeTensor, ...]:
    """The side tensors by name; together at most MAX_SIDE_BYTES, all of them inline."""
    field = f"{_ITEM}.model_specific_tensors"
    if len(item.model_specific_tensors) > MAX_SIDE_TENSORS:
        _refuse(field, f"{len(item.model_specific_tensors)} tensors, at most {MAX_SIDE_TENSORS} are served")
    out = []
    total = 0
    for name in sorted(item.model_specific_tensors):
        if not _TENSOR_NAME.fullmatch(name):
            _refuse(field, f"{name[:64]!r} is no name of a tensor")
        tensor = item.model_specific_tensors[name]
        at = f"{field}[{name}]"
        if tensor.dtype not in DTYPE_BYTES:
            _refuse(f"{at}.dtype", f"{tensor.dtype[:32]!r} is not one of {', '.join(DTYPE_BYTES)}")
        if len(tensor.shape) > MAX_DIMENSIONS:
            _refuse(f"{at}.shape", f"{len(tensor.shape)} dimensions, at most {MAX_DIMENSIONS}")
        nbytes = DTYPE_BYTES[tensor.dtype]
        for side in tensor.shape:
            nbytes *= side
        total += nbytes
        if total > MAX_SIDE_BYTES:
            _refuse(f"{at}.shape", f"side tensors beyond {MAX_SIDE_BYTES} bytes are not served")
        if tensor.WhichOneof("payload") != "inline":
            _refuse(at, "side tensors are served inline only")
        payload = tensor.inline
        if len(payload) != nbytes:
            _refuse(f"{at}.inline", f"{len(payload)} bytes, shape and dtype say {nbytes}")
        out.append(EncodeTensor(name, tensor.dtype, tuple(tensor.shape), nbytes, payload))
    return tuple(out)


def _grids(
    side: tuple[EncodeTensor, ...], name: str, spec: TowerSpec, limits: EncodeLimits
) -> tuple[Grid, ...]:
    field = f"{_ITEM}.model_specific_tensors[{name}]"
    tensor = next((one for one in side if one.name == name), None)
    if tensor is None:
        _refuse(field, "missing")
    if tensor.dtype != "int64":
        _refuse(f"{field}.dtype", f"{tensor.dtype} is not int64")
    if len(tensor.shape) != 2 or tensor.shape[1] != 3 or tensor.shape[0] == 0:
        _refuse(f"{field}.shape", f"{list(tensor.shape)} is not [grids, 3]")
    assert not isinstance(tensor.payload, ShmSource)
    grids = []
    patches = 0
    for t, h, w in struct.iter_unpack("<3q", tensor.payload):
        if min(t, h, w) <= 0 or max(t, h, w) >= 2**31:
            _refuse(field, f"{[t, h, w]} has a side that is not in [1, 2**31)")
        if h % spec.merge_size or w % spec.merge_size:
            _refuse(field, f"{[t, h, w]} has a height or width that is no multiple of {spec.merge_size}")
        patches += t * h * w
        if patches > limits.max_patches:
            _refuse(field, f"the grids have over {limits.max_patches} patches")
        grids.append(Grid(t, h, w))
    return tuple(grids)


def _placeholders(ranges: Any, n_tokens: int) -> None:
    field = f"{_ITEM}.placeholders"
    if not 0 < len(ranges) <= MAX_PLACEHOLDERS:
        _refuse(field, f"{len(ranges)} ranges, between 1 and {MAX_PLACEHOLDERS} are served")
    total = 0
    for index, one in enumerate(ranges):
        if one.length == 0:
            _refuse(f"{field}[{index}].length", "0 tokens")
        total += one.length
    if total != n_tokens:
        _refuse(field, f"{total} tokens, the grids give {n_tokens}")


def _refuse(field: str, reason: str) -> NoReturn:
    raise RequestRefused(field, reason)
