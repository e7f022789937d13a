"""Good Encode requests made bad, one rule at a time: every refusal that a request can earn by itself."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from smg_grpc_proto.generated import common_pb2

SHM = Path("/dev/shm")
SEGMENT = f"encodepool-test-{os.getpid()}-refusals"

ITEM = "mm_inputs.items[0]"
PIXELS = f"{ITEM}.encoder_input"
SIDE = f"{ITEM}.model_specific_tensors"
GRID = f"{SIDE}[image_grid_thw]"


class Refusal(NamedTuple):
    """``spoil(request)`` makes the request one that is refused by ``field``."""

    name: str
    spoil: Callable[[Any], object]
    field: str


def item(request: Any) -> Any:
    return request.mm_inputs.items[0]


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Sets a field of the item by its path; a list replaces a repeated field."""

    def spoil(request: Any) -> None:
        *steps, last = path.split(".")
        target = item(request)
        for step in steps:
            target = getattr(target, step)
        if isinstance(value, list):
            getattr(target, last)[:] = value
        else:
            setattr(target, last, value)

    return spoil


def grid(*sides: int, shape: tuple[int, ...] = (1, 3), dtype: str = "int64") -> Callable[[Any], None]:
    def spoil(request: Any) -> None:
        tensor = item(request).model_specific_tensors["image_grid_thw"]
        tensor.inline = struct.pack(f"<{len(sides)}q", *sides)
        tensor.shape[:] = shape
        tensor.dtype = dtype

    return spoil


def side(name: str, dtype: str, shape: list[int], payload: bytes = b"") -> Callable[[Any], None]:
    def spoil(request: Any) -> None:
        tensor = item(request).model_specific_tensors[name]
        tensor.dtype, tensor.inline = dtype, payload
        tensor.shape[:] = shape

    return spoil


def placeholders(*lengths: int) -> Callable[[Any], None]:
    def spoil(request: Any) -> None:
        del item(request).placeholders[:]
        for length in lengths:
            item(request).placeholders.add(offset=1, length=length)

    return spoil


def segment(name: str = SEGMENT, more: int = 0, offset: int = 0) -> Callable[[Any], None]:
    """Pixels in the segment ``name``, said to be ``more`` bytes longer than they are."""

    def spoil(request: Any) -> None:
        tensor = item(request).encoder_input
        nbytes = len(tensor.inline) + more
        tensor.shm.CopyFrom(
            common_pb2.ShmHandle(name=name, nbytes=nbytes, offset=offset, owner_id=f"smg:{os.getpid()}")
        )

    return spoil


def shorter(nbytes: int) -> Callable[[Any], None]:
    def spoil(request: Any) -> None:
        tensor = item(request).encoder_input
        tensor.inline = (tensor.inline + b"\0" * 8)[: len(tensor.inline) - nbytes]

    return spoil


REFUSALS = [
    Refusal("request id too long", lambda r: setattr(r, "request_id", "x" * 257), "request_id"),
    Refusal("no inputs", lambda r: r.ClearField("mm_inputs"), "mm_inputs"),
    Refusal("no item", lambda r: r.mm_inputs.ClearField("items"), "mm_inputs.items"),
    Refusal("two items", lambda r: r.mm_inputs.items.add(), "mm_inputs.items"),
    Refusal("audio", put("modality", common_pb2.AUDIO), f"{ITEM}.modality"),
    Refusal("unknown modality", put("modality", 9), f"{ITEM}.modality"),
    Refusal("no pixels", lambda r: item(r).ClearField("encoder_input"), PIXELS),
    Refusal("no payload", lambda r: item(r).encoder_input.ClearField("inline"), PIXELS),
    Refusal("dtype outside the list", put("encoder_input.dtype", "float64"), f"{PIXELS}.dtype"),
    Refusal("dtype of no pixels", put("encoder_input.dtype", "int64"), f"{PIXELS}.dtype"),
    Refusal("no dtype", put("encoder_input.dtype", ""), f"{PIXELS}.dtype"),
    Refusal("another dtype of the list", put("encoder_input.dtype", "float32"), f"{PIXELS}.inline"),
    Refusal("flat shape", put("encoder_input.shape", [64 * 1536]), f"{PIXELS}.shape"),
    Refusal("shape of another model", put("encoder_input.shape", [64, 1176]), f"{PIXELS}.shape"),
    Refusal("no patches", put("encoder_input.shape", [0, 1536]), f"{PIXELS}.shape"),
    Refusal("other patches than the grid's", put("encoder_input.shape", [60, 1536]), f"{PIXELS}.shape"),
    Refusal("too many pixels", put("encoder_input.shape", [2**32 - 1, 1536]), f"{PIXELS}.shape"),
    Refusal("too few bytes", shorter(2), f"{PIXELS}.inline"),
    Refusal("too many bytes", shorter(-2), f"{PIXELS}.inline"),
    Refusal("remote pixels", put("encoder_input.remote.transport", "nixl"), f"{PIXELS}.remote"),
    Refusal("no grid", lambda r: item(r).ClearField("model_specific_tensors"), GRID),
    Refusal("a video without its grid", put("modality", common_pb2.VIDEO), f"{SIDE}[video_grid_thw]"),
    Refusal("zero grid", grid(1, 0, 8), GRID),
    Refusal("odd grid", grid(1, 1, 64), GRID),
    Refusal("negative grid", grid(1, -8, -8), GRID),
    Refusal("grid beyond 32 bits", grid(2**62, 8, 8), GRID),
    Refusal("grid whose product overflows", grid(2**30, 2**30, 2**30), GRID),
    Refusal("grid of too many patches", grid(1, 1024, 1024), GRID),
    Refusal("grid of other patches", grid(1, 8, 16), f"{PIXELS}.shape"),
    Refusal("grid of another dtype", grid(1, 8, 8, shape=(2, 3), dtype="uint32"), f"{GRID}.dtype"),
    Refusal("flat grid", grid(1, 8, 8, shape=(3,)), f"{GRID}.shape"),
    Refusal("grid of no rows", grid(shape=(0, 3)), f"{GRID}.shape"),
    Refusal("short grid", grid(1, 8), f"{GRID}.inline"),
    Refusal("no placeholders", placeholders(), f"{ITEM}.placeholders"),
    Refusal("empty placeholder", placeholders(16, 0), f"{ITEM}.placeholders[1].length"),
    Refusal("fewer placeholders", placeholders(15), f"{ITEM}.placeholders"),
    Refusal("more placeholders", placeholders(16, 2**32 - 1), f"{ITEM}.placeholders"),
    Refusal("side tensor of no dtype", side("x", "float64", [1], bytes(8)), f"{SIDE}[x].dtype"),
    Refusal("side tensor of other bytes", side("x", "int64", [2], bytes(8)), f"{SIDE}[x].inline"),
    Refusal("huge side tensor", side("x", "int64", [2**32 - 1] * 8), f"{SIDE}[x].shape"),
    Refusal("side tensor with a path", side("a/b", "int64", [1], bytes(8)), SIDE),
    Refusal("segment with a path", segment("../etc/passwd"), f"{PIXELS}.shm.name"),
    Refusal("segment with a slash", segment(f"/{SEGMENT}"), f"{PIXELS}.shm.name"),
    Refusal("segment without a name", segment(""), f"{PIXELS}.shm.name"),
    Refusal("segment that is not there", segment("smg-tokenspeed-0-0-0"), f"{PIXELS}.shm"),
    Refusal("segment said to be longer", segment(more=2), f"{PIXELS}.shm.nbytes"),
    Refusal("segment too short", segment(offset=64), f"{PIXELS}.shm"),
    Refusal("segment beyond 64 bits", segment(offset=2**64 - 1), f"{PIXELS}.shm.offset"),
    Refusal("segment that is a link", segment(f"{SEGMENT}-link"), f"{PIXELS}.shm"),
    Refusal("segment that is a pipe", segment(f"{SEGMENT}-pipe"), f"{PIXELS}.shm"),
]
"""For an image of 8 x 8 patches in bfloat16, as ``image_request`` makes it."""

IF_ROOT = [Refusal("segment of another user", segment(f"{SEGMENT}-theirs"), f"{PIXELS}.shm")]
"""Only root can make such a segment."""


def make_segments(nbytes: int) -> list[Path]:
    """The segments the table speaks of; the caller removes them."""
    whole, link, pipe, theirs = (SHM / f"{SEGMENT}{end}" for end in ("", "-link", "-pipe", "-theirs"))
    whole.write_bytes(bytes(nbytes))
    link.symlink_to(whole)
    os.mkfifo(pipe)
    if os.geteuid() == 0:
        theirs.write_bytes(bytes(nbytes))
        os.chown(theirs, 65534, 65534)
        return [whole, link, pipe, theirs]
    return [whole, link, pipe]
