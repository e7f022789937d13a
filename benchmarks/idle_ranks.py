"""What an idle group of two ranks costs, beside the way of the reference, in the same run.

    python -m benchmarks.idle_ranks            # what `make bench-tp` runs

Ours: ``encodepool-worker serve`` with two ranks and nothing to do. The reference's ranks stay equal by
an object that rank 0 broadcasts to all others every 0.5 ms; two processes that do only that, over
gloo, stand for it. Printed is the processor time of each rank in percent of one core. Ends with exit
code 1 when a rank of ours takes more than ``LIMIT_PERCENT``.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

N_RANKS = 2
MEASURE_S = 8.0
START_S = 240.0
PAUSE_S = 0.0005
"""Between two broadcasts of the reference."""

LIMIT_PERCENT = 2.0
HOST = "127.0.0.1"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="bench-tp-") as folder:
        ours = measure_ours(Path(folder))
        theirs = measure_reference(Path(folder))
    print(f"{'':34}" + "".join(f"{f'rank {rank}':>10}" for rank in range(N_RANKS)))
    for name, used in (("idle group, % of a core", ours), ("a broadcast every 0.5 ms", theirs)):
        print(f"{name:34}" + "".join(f"{percent:10.2f}" for percent in used))
    good = max(ours) <= LIMIT_PERCENT
    print(f"line: at most {LIMIT_PERCENT:g} % of a core per rank: {'held' if good else 'MISSED'}")
    return 0 if good else 1


def measure_ours(folder: Path) -> list[float]:
    """Percent of a core of each rank of a group that is ready."""
    program = Path(sys.executable).parent / "encodepool-worker"
    subprocess.run([program, "make-tiny-model", folder / "model"], check=True, stdout=subprocess.DEVNULL)
    grpc, bootstrap, metrics, dist_init = free_ports(4)
    flags = {
        "model": folder / "model",
        "device": "cpu",
        "tensor-parallel-size": N_RANKS,
        "grpc-port": grpc,
        "bootstrap-port": bootstrap,
        "metrics-port": metrics,
        "dist-init-port": dist_init,
        "store-device-mib": 64,
        "log-level": "warning",
    }
    argv = [program, "serve", *(f"--{name}={value}" for name, value in flags.items())]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as worker:
        try:
            wait_until(lambda: worker.poll() is not None or is_ready(metrics), "the group is ready")
            ranks = [rank_of(worker.pid, number) for number in range(N_RANKS)]
            return used_percent(ranks)
        finally:
            worker.terminate()


def measure_reference(folder: Path) -> list[float]:
    """The same of processes that do nothing but the broadcast."""
    [port] = free_ports(1)
    ready = [folder / f"ready.{rank}" for rank in range(N_RANKS)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.idle_ranks", str(rank), str(port), str(ready[rank])],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(N_RANKS)
    ]
    try:
        wait_until(lambda: all(path.exists() for path in ready), "the broadcasts run")
        return used_percent([rank.pid for rank in ranks])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def broadcast(rank: int, port: int, ready: Path) -> None:
    """As the reference's ranks do between requests: an empty list of requests, from rank 0 to all."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=N_RANKS)
    requests: list[object] = [[]]
    dist.broadcast_object_list(requests)
    ready.touch()
    while True:
        dist.broadcast_object_list(requests)
        if rank == 0:
            time.sleep(PAUSE_S)


def used_percent(pids: Sequence[int]) -> list[float]:
    before, since = [cpu_s(pid) for pid in pids], time.monotonic()
    time.sleep(MEASURE_S)
    seconds = time.monotonic() - since
    return [100 * (cpu_s(pid) - used) / seconds for pid, used in zip(pids, before, strict=True)]


def cpu_s(pid: int) -> float:
    """Processor time of a process and its threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rank_of(supervisor: int, number: int) -> int:
    """The process of a rank among a supervisor's children."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"--rank" in words and words[words.index(b"--rank") + 1] == str(number).encode():
            return int(child)
    raise LookupError(f"rank {number} is not there: the group did not start")


def is_ready(metrics_port: int) -> bool:
    try:
        with DIRECT.open(f"http://{HOST}:{metrics_port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {START_S:g} s: {what}")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    if len(sys.argv) == 4:
        broadcast(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.exit(main())
