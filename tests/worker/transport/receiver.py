"""A receiving process: an engine and registered memory, driven by JSON lines on stdin.

    python receiver.py ENGINE NBYTES      first line out: {"session", "ptr", "nbytes"}

Commands: {"do": "read", "at", "nbytes"} -> {"sha256", "first", "last"}; {"do": "forget"}
unregisters the memory; for the tcp engine also freeze, thaw, delay, plan, land and held.
It ends when stdin does.
"""

import ctypes
import hashlib
import json
import mmap
import sys

from encodepool_worker.transport.base import Engine
from encodepool_worker.transport.mooncake import MooncakeEngine
from encodepool_worker.transport.tcp import TcpEngine
from encodepool_worker.transport.tcp_faults import Fault, Faults


def answer(command, engine, faults, memory, ptr):
    match command["do"]:
        case "read":
            data = memory[command["at"] : command["at"] + command["nbytes"]]
            return {"sha256": hashlib.sha256(data).hexdigest(), "first": data[0], "last": data[-1]}
        case "forget":
            return {"done": engine.unregister(ptr)}
        case "freeze":
            return {"done": faults.freeze()}
        case "thaw":
            return {"done": faults.thaw()}
        case "delay":
            return {"done": faults.delay(command["seconds"])}
        case "plan":
            return {"done": faults.plan(*map(Fault, command["faults"]))}
        case "land":
            return {"slices": faults.land()}
        case "held":
            return {"slices": faults.held}


def main(name, nbytes):
    memory = mmap.mmap(-1, nbytes)
    ptr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    faults = Faults()
    engine: Engine = (
        TcpEngine("127.0.0.1", faults=faults)
        if name == "tcp"
        else MooncakeEngine("127.0.0.1", protocol="tcp")
    )
    engine.register(ptr, nbytes)
    print(json.dumps({"session": engine.session, "ptr": ptr, "nbytes": nbytes}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), engine, faults, memory, ptr)), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
