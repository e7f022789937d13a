"""Incarnation numbers and port blocks."""

from dataclasses import replace

import pytest
from tests.operator.core.fake_cluster import manifest

from encodepool_operator.api.parse import parse_pool
from encodepool_operator.core.addresses import (
    AddressBook,
    free_blocks,
    highest_incarnation,
    offset,
    port_space,
    slot_of,
)
from encodepool_operator.core.record import GroupRecord, PortBlock
from encodepool_operator.core.snapshot import GroupObject, GroupSnapshot, PodFacts, Snapshot


@pytest.fixture
def snapshot():
    """``snapshot(size=40, shared_host=True, groups=...)``"""

    def make(*, size=40, host_network=False, **more):
        network = {"portRange": {"start": 10000, "size": size}, "hostNetwork": host_network}
        return Snapshot(parse_pool(manifest(network=network)), **more)

    return make


def group(index, incarnation, *ports):
    record = GroupRecord(incarnation, "rev", PortBlock(*ports), 0.0)
    return GroupSnapshot(index, GroupObject(1, 1, 1, 1, record))


def test_a_block_is_bootstrap_grpc_and_dist_init_and_on_a_shared_network_metrics(snapshot):
    network = snapshot().pool.spec.network
    assert port_space(network, shared_host=False).block(2) == PortBlock(10006, 10007, 10008, 9400)
    assert port_space(network, shared_host=True).block(2) == PortBlock(10008, 10009, 10010, 10011)
    assert port_space(replace(network, host_network=True), shared_host=False).shared


def test_the_walk_starts_at_an_offset_of_the_pools_uid_and_wraps(snapshot):
    space = port_space(snapshot().pool.spec.network, shared_host=True)
    assert space.slots == 10
    assert [slot_of(space, "u", n) for n in range(20)] == [(offset("u") + n) % 10 for n in range(20)]
    assert offset("u") != offset("v")


def test_no_port_comes_twice_before_the_range_is_walked(snapshot):
    seen = snapshot(shared_host=True)
    book = AddressBook(seen)
    given = []
    for _ in range(10):  # one group that is started over and over
        address = book.assign(0, seen.pool.spec.network)
        given.append(address)
    assert [address.incarnation for address in given] == list(range(1, 11))
    assert len({port for address in given for port in address.ports}) == 40
    assert book.assign(0, seen.pool.spec.network).ports == given[0].ports


@pytest.mark.parametrize(
    ("groups", "last", "expected"),
    [
        ((), 0, 0),
        ((), 12, 12),
        ((group(0, 15, 1, 2, 3, 4), group(1, 3, 5, 6, 7, 8)), 12, 15),
        ((GroupSnapshot(0, None, (PodFacts("p", "u", 0, 21),)),), 12, 21),
        ((GroupSnapshot(0, GroupObject(1, 1, 1, 1, None)),), 12, 12),
    ],
)
def test_the_next_number_is_above_everything_that_shows_one(snapshot, groups, last, expected):
    assert highest_incarnation(snapshot(groups=groups, last_incarnation=last)) == expected


def test_a_number_whose_block_is_held_is_skipped_for_good(snapshot):
    space = port_space(snapshot().pool.spec.network, shared_host=True)
    third = space.block(slot_of(space, "uid-demo", 3))
    seen = snapshot(shared_host=True, last_incarnation=2, groups=(group(5, 1, *third),))
    book = AddressBook(seen)
    assert book.assign(0, seen.pool.spec.network).incarnation == 4
    assert book.assign(1, seen.pool.spec.network).incarnation == 5


def test_a_group_may_use_its_own_last_block_again(snapshot):
    space = port_space(snapshot().pool.spec.network, shared_host=True)
    mine = space.block(slot_of(space, "uid-demo", 3))
    seen = snapshot(shared_host=True, last_incarnation=2, groups=(group(5, 1, *mine),))
    assert AddressBook(seen).assign(5, seen.pool.spec.network).ports == mine


def test_taken_ports_and_ports_of_orphaned_pods_are_held(snapshot):
    space = port_space(snapshot().pool.spec.network, shared_host=True)
    taken = frozenset({space.block(slot_of(space, "uid-demo", 8)).dist_init})
    orphan = GroupSnapshot(4, None, (PodFacts("p", "u", 0, incarnation=7),))
    edited = GroupSnapshot(5, GroupObject(1, 1, 1, 1, None), (PodFacts("q", "v", 0, incarnation=19),))
    seen = snapshot(shared_host=True, taken_ports=taken, groups=(orphan, edited))
    first = AddressBook(seen).assign(0, seen.pool.spec.network)
    assert first.incarnation == 20  # slots of 7 and 19, and 8 (= 18): 20 has the slot of 10
    assert free_blocks(seen, seen.pool.spec.network) == 7


def test_starts_of_one_plan_never_share_a_block(snapshot):
    seen = snapshot(shared_host=True, size=16)
    book = AddressBook(seen)
    blocks = [book.assign(index, seen.pool.spec.network) for index in range(4)]
    assert len({port for address in blocks for port in address.ports}) == 16
    assert book.assign(4, seen.pool.spec.network) is None, "every block is held"
    assert book.last == 4


def test_on_a_pod_network_nothing_is_held_because_hosts_differ(snapshot):
    seen = snapshot(size=4, groups=(group(0, 1, 10000, 10001, 10002, 9400),), taken_ports=frozenset({10000}))
    assert AddressBook(seen).assign(1, seen.pool.spec.network).ports.bootstrap == 10000
    assert free_blocks(seen, seen.pool.spec.network) == 1
