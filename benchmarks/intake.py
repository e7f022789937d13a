"""B4: pixels from one process to another, as frontend and loop pass them on, against pickled objects.

Ours is a typed header and the pixels as a frame of their own, looked at where they arrived. Theirs is
``send_pyobj`` of the same array, the reference's way: nothing that ships unpickles.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from benchmarks.frame import Line, Pair, Run
from benchmarks.programs import Program

from encodepool_worker.types import Modality
from encodepool_worker.wire import intake

MIB = 1 << 20
WIDTH = 1536
ROUND_BYTES = 256 * MIB
"""Bytes of one figure."""


class Channel:
    """Messages to a sink of their own kind."""

    def __init__(self, run: Run, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, kind: str) -> None:
        self._sink = Program("benchmarks.intake_sink", str(folder), kind)
        run.stack.callback(self._sink.close)
        self._sink.answer()
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, 64)
        self.socket.connect(f"ipc://{folder / kind}")
        self._used_s = 0.0

    def figures(self, send: Callable[["zmq.Socket[bytes]"], object], count: int) -> tuple[float, float]:
        """Messages a second, and the CPU seconds of both processes."""
        here_s = time.process_time()
        self._sink.tell(count)
        began_s = time.perf_counter()
        for _ in range(count):
            send(self.socket)
        used_s = self._sink.answer()
        took_s = time.perf_counter() - began_s
        there_s, self._used_s = used_s - self._used_s, used_s
        return count / took_s, time.process_time() - here_s + there_s


def pairs(run: Run) -> Iterator[Pair]:
    folder = Path(tempfile.mkdtemp(prefix="encodepool-bench-"))
    run.stack.callback(shutil.rmtree, folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    run.stack.callback(context.destroy, linger=0)
    frames, objects = (Channel(run, context, folder, kind) for kind in ("frames", "objects"))
    for mib in (1, 16):
        pixels = np.ones((mib * MIB // 2 // WIDTH, WIDTH), dtype=np.uint16)
        count = max(1, ROUND_BYTES // (mib * MIB))
        ours = partial(frames.figures, partial(_send_frames, pixels), count)
        theirs = partial(objects.figures, partial(_send_object, pixels), count)
        yield Pair(
            "B4 intake",
            f"messages of {mib} MiB",
            "1/s",
            lambda ours=ours: ours()[0],  # type: ignore[misc]
            "send_pyobj",
            lambda theirs=theirs: theirs()[0],  # type: ignore[misc]
            Line(at_least=3.0) if mib == 16 else Line(),
        )
        per_gb = 1e9 / (count * pixels.nbytes)
        yield Pair(
            "B4 intake",
            f"CPU of both sides, messages of {mib} MiB",
            "s/GB",
            lambda ours=ours, per_gb=per_gb: ours()[1] * per_gb,  # type: ignore[misc]
            "send_pyobj",
            lambda theirs=theirs, per_gb=per_gb: theirs()[1] * per_gb,  # type: ignore[misc]
        )


def _send_frames(pixels: Any, socket: "zmq.Socket[bytes]") -> None:
    header = intake.Submit(
        seq=1,
        request_id="encode-0",
        index=0,
        room=1,
        modality=Modality.IMAGE,
        key=bytes(16),
        grids=((1, 2, len(pixels) // 2),),
        n_tokens=len(pixels) // 4,
        cost=len(pixels) // 4,
        deadline_s=None,
        pixel_dtype="bfloat16",
        pixel_shape=pixels.shape,
    )
    socket.send_multipart(intake.encode(header, pixels.data.cast("B")), copy=False)


def _send_object(pixels: Any, socket: "zmq.Socket[bytes]") -> None:
    socket.send_pyobj(
        {
            "request_id": "encode-0",
            "index": 0,
            "room": 1,
            "grids": [(1, 2, len(pixels) // 2)],
            "pixels": pixels,
        }
    )
