"""B4: pixels from one process to another, as frontend and loop pass them on, against pickled objects.

Ours is a typed header and the pixels as a frame of their own, looked at where they arrived; pixels that a
gateway left in shared memory are copied from there first. Theirs is ``send_pyobj`` of the same array, which
the reference can still be set to use, and which nothing that ships here does; and the channel between the
reference's own frontend and loop, with its real codec on both sides.
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
from benchmarks.reference_programs import ReferenceChannel

from encodepool_worker.frontend.shared_memory import SHM_FOLDER, read_segment
from encodepool_worker.types import Modality
from encodepool_worker.wire import intake

MIB = 1 << 20
WIDTH = 1536
ROUND_BYTES = 128 * MIB
"""Bytes of one figure."""


Measured = tuple[float, float]
"""Messages a second, and the CPU seconds of both processes."""


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

    def figures(self, send: Callable[["zmq.Socket[bytes]"], object], count: int) -> Measured:
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
    for mib in (16,) if run.quick else (1, 16):
        pixels = np.ones((mib * MIB // 2 // WIDTH, WIDTH), dtype=np.uint16)
        count = max(1, ROUND_BYTES // (mib * MIB))
        line = Line(at_least=3.0) if mib == 16 else Line()
        inline = partial(frames.figures, partial(_send_frames, pixels, pixels.data.cast("B")), count)
        pickled = partial(objects.figures, partial(_send_object, pixels), count)
        yield from _both(f"messages of {mib} MiB", inline, pickled, count * pixels.nbytes, line)
        send_shared = partial(_send_shared, _segment(run, pixels), pixels)
        shared = partial(frames.figures, send_shared, count)
        what = f"messages of {mib} MiB from shared memory"
        yield from _both(what, shared, pickled, count * pixels.nbytes, line)
        yield from against_reference(run, inline, pixels.shape, count)


def against_reference(
    run: Run, ours: Callable[[], Measured], shape: tuple[int, int], count: int
) -> Iterator[Pair]:
    nbytes = shape[0] * shape[1] * 2
    theirs = partial(ReferenceChannel(run.stack).figures, shape, count)
    what = f"messages of {nbytes // MIB} MiB"
    yield from _both(what, ours, theirs, count * nbytes, Line(), "reference's channel")


def _both(
    what: str,
    ours: Callable[[], Measured],
    theirs: Callable[[], Measured],
    nbytes: int,
    line: Line,
    against: str = "pickled",
) -> Iterator[Pair]:
    """The rate, which has a line, and the CPU."""
    yield Pair("B4 intake", what, "1/s", lambda: ours()[0], against, lambda: theirs()[0], line)
    per_gb = 1e9 / nbytes
    yield Pair(
        "B4 intake",
        f"CPU of both sides, {what}",
        "s/GB",
        lambda: ours()[1] * per_gb,
        against,
        lambda: theirs()[1] * per_gb,
    )


def _segment(run: Run, pixels: Any) -> str:
    """A name in shared memory, where a gateway would have put the pixels; gone with the benchmark."""
    file = tempfile.NamedTemporaryFile(dir=SHM_FOLDER, prefix="encodepool-bench-")  # noqa: SIM115
    segment = run.stack.enter_context(file)
    segment.write(pixels.data.cast("B"))
    segment.flush()
    return Path(segment.name).name


def _send_shared(name: str, pixels: Any, socket: "zmq.Socket[bytes]") -> None:
    """As the frontend does: ``pixels`` says only what lies in the segment."""
    _send_frames(pixels, read_segment(name, 0, pixels.nbytes, field="pixels", room=None), socket)


def _send_frames(pixels: Any, payload: memoryview | bytearray, socket: "zmq.Socket[bytes]") -> None:
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
    socket.send_multipart(intake.encode(header, payload), copy=False)


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
