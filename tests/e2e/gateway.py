"""What the gateway sends: Encode requests built field by field as SMG builds them."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from smg_grpc_proto.generated import common_pb2, tokenspeed_encoder_pb2, tokenspeed_scheduler_pb2

PATCH_WIDTH = 1536
"""Channels 3 x temporal patch 2 x patch 16 x 16: the tiny model's, and Qwen3-VL's."""

MERGE = 2
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Picture:
    """A preprocessed image: ``h`` x ``w`` patches of seeded noise; the same seed, the same image.

    With ``t`` above 1 a video of so many frame pairs. The values are exact in bfloat16, so that a
    request in float32 asks for the same rows.
    """

    h: int
    w: int
    seed: int
    has_nan: bool = False
    t: int = 1
    patch_width: int = PATCH_WIDTH

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w

    @property
    def tokens(self) -> int:
        return self.patches // MERGE**2

    @cached_property
    def bfloat16(self) -> Any:
        """[patches, patch_width] as the 16 bits of each value."""
        values = np.random.default_rng(self.seed).uniform(-1, 1, (self.patches, self.patch_width))
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if self.has_nan:
            bits[0, 0] = 0x7FC0
        return bits

    @cached_property
    def float32(self) -> Any:
        return (self.bfloat16.astype(np.uint32) << 16).view(np.float32)

    def payload(self, dtype: str) -> bytes:
        data: bytes = {"bfloat16": self.bfloat16, "float32": self.float32}[dtype].tobytes()
        return data


def tensor(shape: list[int], dtype: str, data: bytes) -> Any:
    return tokenspeed_scheduler_pb2.TensorData(shape=shape, dtype=dtype, inline=data)


def image_request(room: int, picture: Picture, dtype: str = "bfloat16", request_id: str = "") -> Any:
    """One image (or video) for one room, pixels inline."""
    patches = picture.patches
    data = picture.payload(dtype)
    grid = np.array([picture.t, picture.h, picture.w], dtype=np.int64).tobytes()
    kind = "image" if picture.t == 1 else "video"
    item = tokenspeed_scheduler_pb2.MultimodalItem(
        modality=common_pb2.IMAGE if picture.t == 1 else common_pb2.VIDEO,
        content_hash=hashlib.sha256(data).digest(),
        encoder_input=tensor([patches, picture.patch_width], dtype, data),
        model_specific_tensors={
            f"{kind}_grid_thw": tensor([1, 3], "int64", grid),
            "patches_per_image": tensor([1], "int64", np.array([patches], dtype=np.int64).tobytes()),
        },
        placeholders=[tokenspeed_scheduler_pb2.PlaceholderRange(offset=7, length=picture.tokens)],
    )
    return tokenspeed_encoder_pb2.EncodeRequest(
        request_id=request_id or f"encode-{room:016x}",
        mm_inputs=tokenspeed_scheduler_pb2.MultimodalInputs(items=[item]),
        items=[tokenspeed_encoder_pb2.EncodeItemAssignment(bootstrap_room=room)],
    )


@contextmanager
def pixels_in_shared_memory(request: Any) -> Iterator[Any]:
    """The same request with its pixels in a segment, which is gone once it was answered."""
    encoder_input = request.mm_inputs.items[0].encoder_input
    data = bytes(encoder_input.inline)
    name = f"smg-tokenspeed-{os.getpid()}-{time.time_ns()}-1"
    path = SHM / name
    path.touch(0o600)
    path.write_bytes(data)
    encoder_input.shm.CopyFrom(
        common_pb2.ShmHandle(name=name, offset=0, nbytes=len(data), owner_id=f"smg:{os.getpid()}")
    )
    try:
        yield request
    finally:
        path.unlink(missing_ok=True)
