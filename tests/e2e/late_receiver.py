"""A receiver in a process of its own, light enough to be stopped, continued and killed at will.

    python -m tests.e2e.late_receiver NBYTES

It has a real Mooncake engine, one piece of memory for each room, and a status socket. When a room
fails, it keeps what lies in the room's memory and uses the memory for something else at once, as a
prefill worker may. JSON lines: {"do": "ask", "control", "room", "tokens", "hidden", "levels"};
{"do": "look", "room"} -> {"status", "at", "written_after"}; {"do": "save", "room", "path"} writes what
lay there when the verdict came. The first line out says {"session"}.
"""

import ctypes
import json
import mmap
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from encodepool_worker.transport.mooncake import MooncakeEngine
from encodepool_worker.types import Receiver, Status
from encodepool_worker.wire.control import (
    Registration,
    decode_status,
    encode_registration,
    encode_transfer_info,
)

HOST = "127.0.0.1"
UNTOUCHED, REUSED = 0xA5, 0x5A


class LateReceiver:
    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._used = 0
        self._engine = MooncakeEngine(HOST)
        self._engine.register(self._base, nbytes)
        self.session = self._engine.session
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._status = self._context.socket(zmq.PULL)
        self._port = self._status.bind_to_random_port(f"tcp://{HOST}")
        self._control: zmq.Socket[bytes] | None = None
        self._pieces: dict[int, slice] = {}
        self._verdicts: dict[int, tuple[Status, float, bytes]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, control: str, room: int, tokens: int, hidden: int, levels: int) -> None:
        if self._control is None:
            self._control = self._context.socket(zmq.PUSH)
            self._control.connect(f"tcp://{control}")
            self._control.send_multipart(
                encode_registration(Registration(self.session, HOST, self._port, 0, 0))
            )
        main_bytes = tokens * hidden * 4
        piece = slice(self._used, self._used + main_bytes * (1 + levels))
        self._used = -(-piece.stop // 4096) * 4096
        self._memory[piece] = bytes([UNTOUCHED]) * (piece.stop - piece.start)
        self._pieces[room] = piece
        start = self._base + piece.start
        where = Receiver(
            session=self.session,
            host=HOST,
            status_port=self._port,
            main_ptr=start,
            deepstack_ptr=start + main_bytes,
            n_rows=tokens,
            hidden=hidden,
            dtype="torch.float32",
            has_deepstack=True,
            fanout=1,
            row_start=0,
            span=tokens,
        )
        self._control.send_multipart(encode_transfer_info(room, where))

    def look(self, room: int) -> dict[str, Any]:
        verdict = self._verdicts.get(room)
        if verdict is None:
            return {"status": None, "at": None, "written_after": 0}
        status, at_s, _ = verdict
        now = self._memory[self._pieces[room]]
        changed = len(now) - now.count(REUSED) if status is Status.FAILED else 0
        return {"status": status.name, "at": at_s, "written_after": changed}

    def save(self, room: int, path: str) -> None:
        Path(path).write_bytes(self._verdicts[room][2])

    def _listen(self) -> None:
        while True:
            room, status, _ = decode_status(self._status.recv_multipart())
            piece = self._pieces[room]
            self._verdicts[room] = (status, time.monotonic(), bytes(self._memory[piece]))
            if status is Status.FAILED:
                self._memory[piece] = bytes([REUSED]) * (piece.stop - piece.start)


def main() -> None:
    receiver = LateReceiver(int(sys.argv[1]))
    print(json.dumps({"session": receiver.session}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(receiver, request.pop("do"))(**request)), flush=True)


if __name__ == "__main__":
    main()
