"""A receiving rank that is only memory: an engine with registered bytes, in a process of its own.

    python -m benchmarks.peer mooncake 1048576

Prints {"session", "ptr"}. Each line in is how many seconds an answer to a write is held back (tcp
only), echoed when it holds. Ends when standard input does; may be stopped and killed at will.
"""

import ctypes
import json
import mmap
import os
import sys

from encodepool_worker.transport.choose import make_engine
from encodepool_worker.transport.tcp import TcpEngine

HOST = "127.0.0.1"


def main(backend: str, nbytes: int) -> None:
    memory = mmap.mmap(-1, nbytes)
    ptr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(ptr, 1, nbytes)  # every page is there before anything is timed
    engine = make_engine(backend, HOST)
    engine.register(ptr, nbytes)
    print(json.dumps({"session": engine.session, "ptr": ptr}), flush=True)
    for line in sys.stdin:
        assert isinstance(engine, TcpEngine)
        engine.faults.delay(float(line))
        print(line.strip(), flush=True)
    os._exit(0)  # Mooncake's threads never end by themselves


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
