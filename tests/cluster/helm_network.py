"""What a pod's processes connect to, and a pod whose way to everything but the API server is cut."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.kit.network import run

TABLES = ("tcp", "tcp6", "udp", "udp6")
LISTENS = "0A"
SAMPLE_S = 0.25
"""A closed TCP connection stays in the tables for a minute, and reading them takes the kernel a while."""

Address = tuple[str, int]


def only_the_api_server(pid: int, address: str, port: int, served: int) -> None:
    """Drop what the network namespace of ``pid`` sends, loopback included, but for two things: what
    goes to the API server, and answers from the port ``served``."""
    inside = ("-t", pid, "-n", "--", "iptables", "-w")
    run("nsenter", *inside, "-A", "OUTPUT", "-p", "tcp", "-d", address, "--dport", port, "-j", "ACCEPT")
    run("nsenter", *inside, "-A", "OUTPUT", "-p", "tcp", "--sport", served, "!", "--syn", "-j", "ACCEPT")
    run("nsenter", *inside, "-A", "OUTPUT", "-j", "DROP")


def dropped(pid: int) -> int:
    """Packets that ``only_the_api_server`` has dropped."""
    listed = run("nsenter", "-t", pid, "-n", "--", "iptables", "-w", "-nvxL", "OUTPUT")
    (line,) = [line.split() for line in listed.splitlines() if "DROP" in line.split()[2:3]]
    return int(line[0])


def remotes(pid: int, served: int) -> Iterator[Address]:
    """The other ends of all sockets in the network namespace of ``pid``, but for those of the port
    ``served``."""
    for table in TABLES:
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, remote, state = line.split()[1:4]
            if state != LISTENS and _parse(local)[1] != served:
                yield _parse(remote)


def _parse(text: str) -> Address:
    """An IPv4 address as the kernel prints it; of an IPv6 one its last four bytes, which are the IPv4
    address where it is mapped."""
    address, _, port = text.partition(":")
    octets = bytes.fromhex(address[-8:])[::-1]
    return ".".join(map(str, octets)), int(port, 16)


@contextmanager
def connections(pids: list[int], served: int) -> Iterator[set[Address]]:
    """The set of all ``remotes`` while in the context; it is complete after it."""
    found: set[Address] = set()
    ended = threading.Event()

    def look() -> None:
        for pid in itertools.cycle(pids):
            found.update(remotes(pid, served))
            if ended.wait(SAMPLE_S):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
