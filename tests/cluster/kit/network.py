"""Addresses of a cluster, and the part of its network that lies outside the nodes.

Each cluster has a slot, and with it addresses of its own: ports are then the same everywhere and
never taken by another cluster. All of them lie below the range for outgoing connections.

    127.231.SLOT.1       etcd, controllers; the API server when there are no nodes
    10.231.SLOT.0/24     the bridge: .1 the machine (API server, DNS), .11 node-1, .12 node-2
    10.(100+SLOT).N.0/24 pods of node N
    10.(140+SLOT).0.0/16 Services; .0.1 is the API server's
"""

import ipaddress
import json
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kit.programs import need

SLOTS = 32
API_PORT = 26443
ETCD_PORT = 26379
ETCD_PEER_PORT = 26380
CONTROLLER_PORT = 26257
SCHEDULER_PORT = 26259
LOOPBACK_PORTS = (API_PORT, ETCD_PORT, ETCD_PEER_PORT, CONTROLLER_PORT, SCHEDULER_PORT)


class NoFreeSlot(RuntimeError):
    """No set of addresses is free on this machine."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """All addresses of the cluster in ``slot``, in [0, SLOTS)."""

    slot: int

    @property
    def loopback(self) -> str:
        return f"127.231.{self.slot}.1"

    @property
    def nodes(self) -> str:
        return f"10.231.{self.slot}.0/24"

    @property
    def machine(self) -> str:
        """The machine's own address on the bridge."""
        return f"10.231.{self.slot}.1"

    @property
    def pods(self) -> str:
        return f"10.{100 + self.slot}.0.0/16"

    @property
    def services(self) -> str:
        return f"10.{140 + self.slot}.0.0/16"

    @property
    def api_service(self) -> str:
        return f"10.{140 + self.slot}.0.1"

    def node(self, number: int) -> str:
        """Address of node ``number``, counted from 1."""
        return f"10.231.{self.slot}.{10 + number}"

    def node_pods(self, number: int) -> str:
        return f"10.{100 + self.slot}.{number}.0/24"


def free_slot(taken: Iterable[int], *, nodes: bool) -> int:
    """A slot that no cluster on record has and whose addresses nobody else uses."""
    used = set(taken)
    routes = _routes() if nodes else []
    for slot in range(SLOTS):
        addresses = Addresses(slot)
        if slot not in used and _ports_free(addresses.loopback):
            wanted = (addresses.nodes, addresses.pods, addresses.services)
            if not any(route.overlaps(ipaddress.ip_network(net)) for route in routes for net in wanted):
                return slot
    raise NoFreeSlot(f"all {SLOTS} sets of addresses are in use ({len(used)} by clusters on record)")


def _routes() -> list[ipaddress.IPv4Network]:
    rows = json.loads(run("ip", "-j", "-4", "route", "show") or "[]")
    return [ipaddress.IPv4Network(row["dst"]) for row in rows if row["dst"] != "default"]


def _ports_free(address: str) -> bool:
    for port in LOOPBACK_PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def run(program: str, *arguments: object) -> str:
    """Run a program of the distribution; its output. Raises CalledProcessError with it."""
    done = subprocess.run(
        [need(program), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(map(str, arguments))}: {done.stderr or done.stdout}")
    return done.stdout


def _metric(identity: str) -> int:
    """Marks the routes of this cluster, so that removing them can hit no others."""
    return 1_000_000 + int(identity[2:8], 16)


def raise_bridge(identity: str, addresses: Addresses) -> None:
    """The bridge that joins the nodes, and dead ends for pod and Service addresses nobody has."""
    # A fixed MAC: else it changes with the ports, and stopping one node cuts off the others.
    octets = ipaddress.IPv4Address(addresses.machine).packed
    mac = ":".join(f"{octet:02x}" for octet in (0x02, 0x42, *octets))
    run("ip", "link", "add", identity, "address", mac, "type", "bridge")
    run("ip", "addr", "add", f"{addresses.machine}/24", "dev", identity)
    run("ip", "link", "set", identity, "up")
    for network in (addresses.pods, addresses.services):
        run("ip", "route", "add", "unreachable", network, "metric", _metric(identity))


def join_node(identity: str, addresses: Addresses, number: int, pid: int) -> None:
    """Connect the network namespace of process ``pid`` to the bridge as node ``number``."""
    port = f"{identity}n{number}"
    run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
    run("ip", "link", "set", port, "master", identity, "up")
    via = ("via", addresses.node(number), "dev", identity)
    run("ip", "route", "replace", addresses.node_pods(number), *via)
    if number == 1:  # Services are reached from the machine through the first node's kube-proxy.
        run("ip", "route", "replace", addresses.services, *via)


def part_node(identity: str, number: int) -> None:
    """Undo ``join_node`` once the node's processes are dead."""
    _delete_link(f"{identity}n{number}")


def _delete_link(name: str) -> None:
    """Not an error if it is gone: the kernel removes a dead node's links, too, in its own time."""
    link = Path("/sys/class/net", name)
    if link.exists():
        try:
            run("ip", "link", "del", name)
        except RuntimeError:
            if link.exists():
                raise


def remove_bridge(identity: str) -> None:
    """Undo ``raise_bridge`` and ``join_node``; what is not there is no error."""
    for port in Path("/sys/class/net").glob(f"{identity}n*"):
        _delete_link(port.name)
    _delete_link(identity)  # Its addresses and routes go with it.
    for row in json.loads(run("ip", "-j", "-4", "route", "show", "type", "unreachable") or "[]"):
        if row.get("metric") == _metric(identity):
            run("ip", "route", "del", "unreachable", row["dst"], "metric", row["metric"])
