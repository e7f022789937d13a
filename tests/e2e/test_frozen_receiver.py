"""A receiver that stops (SIGSTOP) costs its own rooms, and healthy ones no second."""

import grpc
import pytest
from tests.e2e.gateway import image_request
from tests.e2e.receiving import Receivers

pytestmark = pytest.mark.real

WORKER = {"transfer_timeout_seconds": 5, "quarantine_seconds": 10}

BARE_MOONCAKE_S = {"never written to": 61, "written to before": 30}
"""How long one frozen receiver holds up every other one in the reference, and in bare Mooncake."""


@pytest.fixture
def doomed(worker, tokenspeed):
    """Receivers in a process of their own, to be frozen."""
    remote = tokenspeed("prefill").ready()
    yield Receivers(remote, worker.bootstrap)
    remote.close()


@pytest.fixture
def refused_room(worker, new_room, new_picture):
    """A room whose request was refused: a receiver that asks for it is told, and nothing is written."""
    room, picture = new_room(), new_picture()
    request = image_request(room, picture)
    request.mm_inputs.items[0].placeholders[0].length += 1
    with pytest.raises(grpc.RpcError):
        worker.encode(request)
    return room, picture


@pytest.mark.parametrize("warm", [False, True], ids=["never written to", "written to before"])
def test_a_frozen_receiver_delays_healthy_ones_by_less_than_a_second(
    warm,
    worker,
    receivers,
    doomed,
    refused_room,
    new_room,
    new_picture,
    direct,
    clock,
    record_property,
    request,
):
    def healthy_room():
        """Seconds from the healthy receiver's frame to its verdict."""
        room, picture = new_room(), new_picture()
        worker.encode(image_request(room, picture))
        asked_at = receivers.ask(room, picture)
        verdict = receivers.verdict(room, timeout_s=90)
        assert verdict["status"] == "Success"
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)
        return verdict["at"] - asked_at

    before_s = max(healthy_room() for _ in range(5))
    if warm:
        room, picture = new_room(), new_picture()
        worker.encode(image_request(room, picture))
        doomed.ask(room, picture)
        assert doomed.verdict(room)["status"] == "Success"

    # It asks for a room, and then for a refused one on the same connection: once that is answered,
    # the worker knows the first frame as well. Then it stops.
    frozen_room, picture = new_room(), new_picture(16, 16)
    doomed.ask(frozen_room, picture)
    doomed.ask(*refused_room)
    assert doomed.verdict(refused_room[0])["status"] == "Failed"
    doomed.remote.freeze()
    worker.encode(image_request(frozen_room, picture))
    frozen_at = clock()

    delays = []
    while clock() - frozen_at < 8:  # longer than a transfer's time, so that its end is seen as well
        delays.append(healthy_room())
    reference_s = BARE_MOONCAKE_S[request.node.callspec.id]
    print(
        f"healthy rooms while a receiver is frozen: {len(delays)}, slowest {max(delays):.3f} s "
        f"(before: {before_s:.3f} s, bare Mooncake: {reference_s} s)"
    )
    record_property("slowest_healthy_room_s", round(max(delays), 3))
    assert max(delays) - before_s < 1

    # The room of the frozen one ends as well: Failed is there for it when it wakes.
    doomed.remote.thaw()
    verdict = doomed.verdict(frozen_room, timeout_s=60)
    print(
        f"the frozen receiver's room: {verdict['status']}, {verdict['at'] - frozen_at:.1f} s after it froze"
    )
    assert verdict["status"] == "Failed"
    assert healthy_room() < before_s + 1


def test_a_killed_receiver_costs_its_own_room_only(
    worker, receivers, doomed, refused_room, new_room, new_picture, direct, wait_for
):
    lost, picture = new_room(), new_picture()
    doomed.ask(lost, picture)
    doomed.ask(*refused_room)
    assert doomed.verdict(refused_room[0])["status"] == "Failed"  # so both frames have arrived
    doomed.remote.kill()
    worker.encode(image_request(lost, picture))

    room, other = new_room(), new_picture()
    worker.encode(image_request(room, other))
    asked_at = receivers.ask(room, other)
    verdict = receivers.verdict(room)
    assert verdict["status"] == "Success"
    assert verdict["at"] - asked_at < 1
    assert receivers.digest(room) == direct(other).digest
    receivers.forget(room)
    wait_for(lambda: f"room={lost} " in worker.log_tail(), 5, "the lost room to have failed")
