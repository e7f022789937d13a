"""Our client receives from TokenSpeed's own encode side: what it says of our worker can be believed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from tests.peers.tokenspeed.memory import pattern

from encodepool_worker.client.receiver import PrefillRank, shard_of
from encodepool_worker.errors import ClientError
from encodepool_worker.transport.choose import make_engine
from encodepool_worker.types import RowLayout

pytestmark = pytest.mark.real

HIDDEN, LEVELS = 256, 3


@pytest.fixture(scope="module")
def prefill():
    """``prefill(tp_size)``: our receiving ranks, each with a real Mooncake engine."""
    groups = {}

    def ranks(tp_size):
        if tp_size not in groups:
            groups[tp_size] = [
                PrefillRank(
                    make_engine("mooncake", "127.0.0.1"),
                    "127.0.0.1",
                    rank=rank,
                    tp_size=tp_size,
                    arena_bytes=32 << 20,
                )
                for rank in range(tp_size)
            ]
        return groups[tp_size]

    yield ranks
    for group in groups.values():
        for rank in group:
            rank.close()


@pytest.fixture(scope="module")
def encode(tokenspeed):
    """A process of its own: it remembers the memory of our engines by their ports, which come back."""
    remote = tokenspeed("encode")
    yield remote
    remote.close()


@pytest.fixture
def reference(encode):
    """``reference(encode_tp)``: the address of TokenSpeed's bootstrap server."""

    def address(encode_tp=1):
        host, port = encode.call("info", tp_size=encode_tp)["bootstrap"].rsplit(":", 1)
        return host, int(port)

    return address


@pytest.fixture
def layout():
    return lambda n_tokens, dtype="bfloat16", levels=LEVELS: RowLayout(n_tokens, HIDDEN, levels, dtype)


def announce(ranks, address, room, layout):
    return [
        (
            rank,
            rank.announce(address, room, layout, shard_of(layout.n_tokens, rank.rank, rank.tp_size), 10),
        )
        for rank in ranks
    ]


def received(offers):
    """Main and deepstack bytes, the ranks' shares joined."""
    parts = [rank.wait(offer, 20) for rank, offer in offers]
    main = b"".join(part.main.tobytes() for part in parts)
    deepstack = b"".join(part.deepstack.tobytes() for part in parts if part.deepstack is not None)
    return main, deepstack


@pytest.mark.parametrize(("encode_tp", "prefill_tp"), [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("work_first", [True, False], ids=["work first", "frames first"])
def test_every_byte_of_a_room_is_the_reference_pattern(
    encode_tp, prefill_tp, work_first, prefill, reference, encode, layout, new_room
):
    room, wanted = new_room(), layout(11)
    submit = {"room": room, "tokens": 11, "hidden": HIDDEN, "levels": LEVELS, "tp_size": encode_tp}
    if work_first:
        encode.call("submit", **submit)
    offers = announce(prefill(prefill_tp), reference(encode_tp), room, wanted)
    if not work_first:
        encode.call("submit", **submit)

    main, deepstack = received(offers)
    assert main == pattern(room, wanted.main_bytes).tobytes()
    assert deepstack == pattern(room, wanted.deepstack_bytes, 1).tobytes()
    encode.call("forget", room=room, tp_size=encode_tp)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("levels", [0, 1])
def test_every_row_type_is_received(dtype, levels, prefill, reference, encode, layout, new_room):
    room, wanted = new_room(), layout(3, dtype, levels)
    encode.call("submit", room=room, tokens=3, hidden=HIDDEN, dtype=f"torch.{dtype}", levels=levels)
    main, deepstack = received(announce(prefill(1), reference(), room, wanted))
    assert main == pattern(room, wanted.main_bytes).tobytes()
    assert deepstack == pattern(room, wanted.deepstack_bytes, 1).tobytes()
    encode.call("forget", room=room)


def test_many_rooms_from_several_threads(prefill, reference, encode, layout, new_room):
    rooms = {new_room(): 1 + i % 24 for i in range(64)}
    for room, tokens in rooms.items():
        encode.call("submit", room=room, tokens=tokens, hidden=HIDDEN, levels=LEVELS)
    address, ranks = reference(), prefill(1)

    def one(room):
        return received(announce(ranks, address, room, layout(rooms[room])))

    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(rooms, pool.map(one, rooms), strict=True))
    wrong = [
        room
        for room, tokens in rooms.items()
        if answers[room]
        != (
            pattern(room, layout(tokens).main_bytes).tobytes(),
            pattern(room, layout(tokens).deepstack_bytes, 1).tobytes(),
        )
    ]
    assert wrong == []
    for room in rooms:
        encode.call("forget", room=room)


def test_a_contract_that_the_reference_refuses_is_an_error(prefill, reference, encode, layout, new_room):

    room = new_room()
    encode.call("submit", room=room, tokens=8, hidden=HIDDEN, levels=LEVELS)
    [(rank, offer)] = announce(prefill(1), reference(), room, layout(9))
    with pytest.raises(ClientError, match=f"failed room {room}"):
        rank.wait(offer, 20)
    encode.call("forget", room=room)


def test_success_without_data_is_not_believed(prefill, reference, encode, layout, new_room, push_status):
    """TokenSpeed's receiver believes it (see its README); ours looks at its memory."""

    room = new_room()
    [(rank, offer)] = announce(prefill(1), reference(), room, layout(4))
    push_status(rank.status_port, [str(room).encode(), b"5", b"0"])
    with pytest.raises(ClientError, match="not all of its rows were written"):
        rank.wait(offer, 20)


def test_malformed_status_frames_leave_the_client_listening(
    prefill, reference, encode, layout, new_room, push_status
):
    """A frame of two parts kills the status thread of TokenSpeed's prefill."""
    [rank] = prefill(1)
    push_status(
        rank.status_port,
        [b"6", b"5"],
        [b""],
        [b"x", b"5", b"0"],
        [b"6", b"9", b"0"],
        [b"6", b"5", b"0", b"more"],
    )
    room, wanted = new_room(), layout(4)
    encode.call("submit", room=room, tokens=4, hidden=HIDDEN, levels=LEVELS)
    main, _ = received(announce([rank], reference(), room, wanted))
    assert main == pattern(room, wanted.main_bytes).tobytes()
    encode.call("forget", room=room)


@pytest.fixture
def push_status():
    context = zmq.Context()

    def send(port, *messages):
        link = context.socket(zmq.PUSH)
        link.setsockopt(zmq.LINGER, 5_000)
        link.connect(f"tcp://127.0.0.1:{port}")
        for parts in messages:
            link.send_multipart(parts)
        link.close()

    yield send
    context.term()
