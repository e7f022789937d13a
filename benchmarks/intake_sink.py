"""The far end of B4: takes messages as a rank would, or as the reference's does, in its own process.

    python -m benchmarks.intake_sink FOLDER frames|objects

Binds FOLDER/{in,out}; for each count on standard input it takes so many messages, then answers with the CPU
seconds this process has used.
"""

import json
import sys
import time
from pathlib import Path

import zmq

from encodepool_worker.wire import intake


def main(folder: Path, kind: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 64)
    socket.bind(f"ipc://{folder / kind}")
    print(json.dumps("bound"), flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            if kind == "frames":
                _, payloads = intake.decode(socket.recv_multipart(copy=False))
                assert payloads[0].nbytes
            else:
                # Only ever from the benchmark's own process, over a socket in its private folder: this is
                # what the reference does, and what ours is measured against. Nothing shipped unpickles.
                assert socket.recv_pyobj()["pixels"].nbytes
        print(json.dumps(time.process_time()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
