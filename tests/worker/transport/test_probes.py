"""Which peers may be probed, when many are silent."""

import pytest

from encodepool_worker.transport.probes import Probes
from encodepool_worker.transport.sender_types import Peer, SenderLimits

NOW_S = 1000.0


@pytest.fixture
def run():
    """The probes that have been begun; each is over at once."""
    return []


@pytest.fixture
def probes(run):
    return Probes(run.append, SenderLimits(max_probes=4))


def test_silent_peers_have_half_of_the_probes(probes, run):
    silent = [Peer(f"s:{number}", silent=True) for number in range(3)]
    for peer in silent[:2]:
        assert probes.room_for(peer) > 0
        probes.begin(peer, NOW_S)
    assert probes.room_for(silent[2]) == 0
    assert probes.room_for(Peer("new:1")) == 2
    assert len(probes) == 2
    probes.end(silent[0].probe)
    assert probes.room_for(silent[2]) == 1


def test_a_peer_found_silent_counts_as_one_although_its_probe_goes_on(probes, run):
    peers = [Peer(f"p:{number}") for number in range(2)]
    for peer in peers:
        probes.begin(peer, NOW_S)
        peer.silent = True
    assert probes.room_for_silent == 0
    assert probes.room == 2


def test_who_waits_longest_is_probed_first(probes, run):
    first = [Peer(f"p:{number}") for number in range(4)]
    for peer in first:
        probes.begin(peer, NOW_S)
    waiting = [Peer(f"q:{number}") for number in range(3)]
    for number, peer in enumerate(waiting):
        probes.wait(peer, NOW_S + number)
    probes.begin_waiting(NOW_S + 5)
    assert probes.kept_waiting() == [(peer, NOW_S + number) for number, peer in enumerate(waiting)]
    probes.give_up(waiting[0])
    probes.end(first[0].probe)
    probes.begin_waiting(NOW_S + 5)
    assert waiting[1].probe is not None
    assert waiting[1].probe.started_s == NOW_S + 5
    assert waiting[2].probe is None
    assert waiting[2] in probes
    assert waiting[0] not in probes
