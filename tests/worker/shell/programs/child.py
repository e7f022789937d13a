"""A small child of a supervisor: keeps the promises of encodepool_worker.child, and one habit."""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from encodepool_worker.child import Child

parser = argparse.ArgumentParser()
parser.add_argument(
    "habit",
    choices=["good", "dies", "speaks", "babbles", "ends", "stubborn", "slow", "silent", "orphan", "fails"],
)
parser.add_argument("--notes", type=Path, required=True)
parser.add_argument("--run-dir", type=Path)
parser.add_argument("--lifeline-fd", type=int)
parser.add_argument("--heartbeat-fd", type=int)
args = parser.parse_args()

stop = threading.Event()


def note(text: str) -> None:
    with args.notes.open("a") as file:
        file.write(f"{text}\n")


def on_term(*_: object) -> None:
    note("term")
    if args.habit != "stubborn":
        stop.set()


signal.signal(signal.SIGTERM, on_term)


def on_farewell(reason: str) -> None:
    note(f"farewell {reason}")
    os._exit(1)


child = Child(args.lifeline_fd, args.heartbeat_fd)
child.on_farewell = on_farewell
if args.habit != "silent":
    child.start()
(args.run_dir / f"socket.{os.getpid()}").touch()
note(f"pid {os.getpid()}")
note(f"run_dir {args.run_dir} {args.run_dir.stat().st_mode & 0o777:o}")
if args.habit not in ("slow", "silent"):
    child.ready()
if args.habit in ("dies", "speaks", "babbles", "ends"):
    # Not before the other child lives, so that its end can be seen.
    other = args.notes.with_name("notes.0")
    while not (other.exists() and "pid" in other.read_text()):
        stop.wait(0.01)
if args.habit == "dies":
    sys.exit(7)
if args.habit == "speaks":
    child.last_words("the device is on fire")
    os._exit(3)
if args.habit == "babbles":
    child.last_words("no end of it")
    os.set_blocking(args.heartbeat_fd, True)
    for _ in range(1000):
        os.write(args.heartbeat_fd, b"!" * 4096)
    os._exit(3)
if args.habit == "ends":
    sys.exit(0)
if args.habit == "orphan" and os.fork() == 0:
    # A grandchild that outlives its parent's interest: PID 1 inherits it.
    if os.fork() == 0:
        note(f"orphan {os.getpid()}")
        os._exit(0)
    os._exit(0)
# Waiting in pieces lets the main thread run its signal handler.
while not stop.wait(0.05):
    pass
if args.habit == "fails":
    sys.exit(5)
