"""Incarnation numbers and port blocks: pure functions of what exists.

Every start of a group gets the pool's next incarnation and with it the next block of the port
range, so no (host, port) of a pool is used again before the whole range has been walked: prefill
workers keep what they know about an address for ever, and gateways trip over a known URL with a new
identity. Nothing is allocated, so nothing is released and nothing can leak.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from encodepool_operator.api.types import Network

from .record import PortBlock
from .snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PortSpace:
    """Blocks of ``stride`` ports in [start, start + size), numbered by slot from 0.

    ``shared``: several groups use one host's ports (hostNetwork, or all on one machine), so a block
    has a metrics port of its own and held blocks are skipped. On a pod network every pod has its
    own address and ``metrics_port`` is fixed.
    """

    start: int
    size: int
    shared: bool
    metrics_port: int

    @property
    def stride(self) -> int:
        return 4 if self.shared else 3

    @property
    def slots(self) -> int:
        return self.size // self.stride

    def block(self, slot: int) -> PortBlock:
        first = self.start + slot * self.stride
        return PortBlock(first, first + 1, first + 2, first + 3 if self.shared else self.metrics_port)


@dataclass(frozen=True, slots=True)
class Address:
    incarnation: int
    ports: PortBlock


def port_space(network: Network, shared_host: bool) -> PortSpace:
    ports = network.port_range
    return PortSpace(ports.start, ports.size, network.host_network or shared_host, network.metrics_port)


def offset(uid: str) -> int:
    """Where a pool begins its walk, so that two pools rarely use the same ports at one time."""
    return int.from_bytes(sha256(uid.encode()).digest()[:8], "big")


def slot_of(space: PortSpace, uid: str, incarnation: int) -> int:
    return (offset(uid) + incarnation) % space.slots


def highest_incarnation(snapshot: Snapshot) -> int:
    """The highest number that was ever given out, as far as anything still shows it."""
    highest = snapshot.last_incarnation
    for group in snapshot.groups:
        if group.object is not None and group.object.record is not None:
            highest = max(highest, group.object.record.incarnation)
        for pod in group.pods:
            highest = max(highest, pod.incarnation)
    return highest


class AddressBook:
    """Hands out the addresses of one plan's starts, in order.

    ``last`` is the highest incarnation given out so far, by this plan or before it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.last = highest_incarnation(snapshot)
        self._given: dict[int, PortBlock] = {}

    def assign(self, group: int, network: Network) -> Address | None:
        """The address of the next start of ``group``; None when every block is held.

        An incarnation whose block is held by another group is skipped for good.
        """
        space = port_space(network, self._snapshot.shared_host)
        held = frozenset(self._held_ports(group, space)) if space.shared else frozenset()
        uid = self._snapshot.pool.metadata.uid
        for incarnation in range(self.last + 1, self.last + 1 + space.slots):
            ports = space.block(slot_of(space, uid, incarnation))
            if held.isdisjoint(ports):
                self.last = incarnation
                self._given[group] = ports
                return Address(incarnation, ports)
        return None

    def _held_ports(self, group: int, space: PortSpace) -> Iterator[int]:
        """Ports on the shared network that belong to anybody but ``group``."""
        yield from self._snapshot.taken_ports
        for other in self._snapshot.groups:
            if other.index == group:
                continue
            if other.object is not None and other.object.record is not None:
                yield from other.object.record.ports
            else:  # only its pods tell which block they use
                for pod in other.pods:
                    yield from space.block(slot_of(space, self._snapshot.pool.metadata.uid, pod.incarnation))
        for index, ports in self._given.items():
            if index != group:
                yield from ports


def free_blocks(snapshot: Snapshot, network: Network) -> int:
    """Blocks that nobody holds: a metric, and what the condition about exhaustion reports."""
    space = port_space(network, snapshot.shared_host)
    if not space.shared:
        return space.slots
    held = frozenset(AddressBook(snapshot)._held_ports(-1, space))
    return sum(held.isdisjoint(space.block(slot)) for slot in range(space.slots))
