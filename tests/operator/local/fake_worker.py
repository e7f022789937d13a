"""A stand-in for ``encodepool-worker serve``: the same processes, flags, files and manners, no tower.

A supervisor and one child, each a real process. The child binds the ports it was given, answers
/livez and /readyz, drains on SIGTERM, and goes when its supervisor goes. Files in the folder
``--control`` change its manners; each may end in ``.<group>`` to mean one group only:

    crash      the child ends at once with this text as its last words
    deaf       SIGTERM is ignored
    unready    /readyz says no
    drain      SIGTERM is followed by work until this file goes away
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    for name in ("control", "state-dir", "termination-log", "host", "model", "pool"):
        parser.add_argument(f"--{name}")
    for name in ("group", "incarnation", "grpc-port", "bootstrap-port", "metrics-port", "lifeline-fd"):
        parser.add_argument(f"--{name}", type=int)
    return parser.parse_known_args()[0]


def told(options: argparse.Namespace, manner: str) -> Path | None:
    for name in (manner, f"{manner}.{options.group}"):
        path = Path(options.control) / name
        if path.exists():
            return path
    return None


def supervise(options: argparse.Namespace) -> int:
    read_end, write_end = os.pipe()
    log = Path(options.state_dir) / "log" / f"{options.group}.{options.incarnation}.frontend.log"
    with log.open("ab") as stream:
        argv = [sys.executable, *sys.argv, "--lifeline-fd", str(read_end)]
        argv[2] = "child"
        child = subprocess.Popen(argv, pass_fds=[read_end], stdout=stream, stderr=stream, process_group=0)
    os.close(read_end)
    asked = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    pids = Path(options.state_dir) / "run" / f"{options.group}.{options.incarnation}.json"
    rows = [
        {"pid": pid, "group": options.group, "incarnation": options.incarnation, "role": role, "rank": None}
        for pid, role in ((os.getpid(), "supervisor"), (child.pid, "frontend"))
    ]
    pids.with_suffix(".new").write_text(json.dumps(rows))
    pids.with_suffix(".new").rename(pids)
    print(f"supervisor of group {options.group}", file=sys.stderr, flush=True)
    code = child.wait()
    pids.unlink()
    if asked and code == 0:
        return 0
    crash = told(options, "crash")
    reason = crash.read_text() if crash else f"the child ended with {code}"
    print(reason, file=sys.stderr, flush=True)
    Path(options.termination_log).write_text(reason)
    os.close(write_end)
    return 1


def follow_supervisor(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


async def serve(options: argparse.Namespace) -> int:
    if told(options, "crash"):
        return 3
    threading.Thread(target=follow_supervisor, args=[options.lifeline_fd], daemon=True).start()
    draining = asyncio.Event()
    if told(options, "deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, draining.set)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1]
        ready = not draining.is_set() and not told(options, "unready")
        good = path == b"/livez" or (path == b"/readyz" and ready)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" if good else b"HTTP/1.1 503 No\r\n\r\n")
        writer.close()

    for port in (options.grpc_port, options.bootstrap_port, options.metrics_port):
        await asyncio.start_server(answer, options.host, port)
    await draining.wait()
    while told(options, "drain"):
        await asyncio.sleep(0.02)
    return 0


if __name__ == "__main__":
    given = flags()
    code = asyncio.run(serve(given)) if given.command == "child" else supervise(given)
    sys.stderr.flush()
    os._exit(code)
