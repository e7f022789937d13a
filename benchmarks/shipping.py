"""B2: rows from the store into a receiver's memory, against Mooncake's own batch write of the same bytes.

First through the sender alone, which probes, queues and picks lanes and engines. Then the whole way of
rows that lie ready: the receivers' frames, the loop, the sender, the write, and the frames that say Success.
Last the same way to the reference's real receivers, from our rank and from the reference's real manager and
senders: the same receivers, the same memory, as many bytes.
"""

import itertools
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.frame import Line, Pair, Run
from benchmarks.peer import HOST
from benchmarks.rank import Peer, Rank
from benchmarks.raw import RawMooncake
from benchmarks.reference_programs import Reference

from encodepool_worker.transport.base import Done, SenderEvent
from encodepool_worker.transport.choose import make_engine
from encodepool_worker.transport.regions import Region
from encodepool_worker.transport.sender import Sender
from encodepool_worker.types import Slice

KIB, MIB = 1 << 10, 1 << 20
HIDDEN = 4096
ROW_BYTES = HIDDEN * 4
ROUND_S = 0.2
MAX_BYTES = 256 * MIB
KEY = bytes(16)


def pairs(run: Run) -> Iterator[Pair]:
    sizes = [64 * KIB, MIB, 16 * MIB] if run.quick else [64 * KIB, MIB, 16 * MIB, 64 * MIB]
    counts = [1, 16] if run.quick else [1, 4, 16]
    cases = [(nbytes, count) for nbytes in sizes for count in counts if nbytes * count <= MAX_BYTES]
    peer = Peer("mooncake", MAX_BYTES)
    run.stack.callback(peer.close)
    raw = RawMooncake(MAX_BYTES)
    yield from _sender_alone(run, cases, peer, raw)
    rank = _rank(run, cases)
    yield from _whole_way(rank, cases, peer, raw)
    yield from _to_real_receivers(run, rank, cases)


def _sender_alone(run: Run, cases: Sequence[tuple[int, int]], peer: Peer, raw: RawMooncake) -> Iterator[Pair]:
    answers: queue.SimpleQueue[SenderEvent] = queue.SimpleQueue()
    sender = Sender(lambda: make_engine("mooncake", HOST), [Region(raw.ptr, MAX_BYTES)], answers.put)
    run.stack.callback(sender.close)

    def send(nbytes: int, count: int) -> float:
        began_s = time.perf_counter()
        for at in range(0, nbytes * count, nbytes):
            sender.submit(at, peer.session, [Slice(at, peer.ptr + at, nbytes)])
        for _ in range(count):
            event = answers.get(timeout=60)
            if not isinstance(event, Done):
                raise RuntimeError(f"a write failed: {event}")
        return time.perf_counter() - began_s

    for nbytes, count in cases:
        yield _pair("sender alone", nbytes, count, partial(send, nbytes, count), peer, raw)


def _rank(run: Run, cases: Sequence[tuple[int, int]]) -> Rank:
    most = max(nbytes for nbytes, _ in cases)
    return run.stack.enter_context(
        Rank(transport="mooncake", hidden=HIDDEN, max_rows=most // ROW_BYTES, tiers=[4 * most])
    )


def _whole_way(rank: Rank, cases: Sequence[tuple[int, int]], peer: Peer, raw: RawMooncake) -> Iterator[Pair]:
    rank.meet(peer)

    def ship(nbytes: int, count: int) -> float:
        n_tokens = nbytes // ROW_BYTES
        rooms = rank.park(count, nbytes.to_bytes(16, "little"), n_tokens)
        began_s = time.perf_counter()
        for index, room in enumerate(rooms):
            rank.announce(room, n_tokens, peer, index * nbytes)
        rank.landed(count)
        return time.perf_counter() - began_s

    filled: set[int] = set()
    for nbytes, count in cases:
        if nbytes not in filled:
            rank.fill(nbytes.to_bytes(16, "little"), nbytes // ROW_BYTES, peer)
            filled.add(nbytes)
        yield _pair("whole way", nbytes, count, partial(ship, nbytes, count), peer, raw)


def _to_real_receivers(run: Run, rank: Rank, cases: Sequence[tuple[int, int]]) -> Iterator[Pair]:
    """What is filled into the rank by now is what lies ready there."""
    encode = Reference(run.stack, "encode", arena_bytes=max(nbytes for nbytes, _ in cases))
    prefill = Reference(run.stack, "prefill", arena_bytes=MAX_BYTES)
    numbers = itertools.count(1)

    def ours(nbytes: int, count: int) -> list[float]:
        n_tokens = nbytes // ROW_BYTES
        rooms = rank.park(count, nbytes.to_bytes(16, "little"), n_tokens)
        return received(rank.address, rooms, n_tokens)

    def theirs(nbytes: int, count: int) -> list[float]:
        n_tokens, rooms = nbytes // ROW_BYTES, list(itertools.islice(numbers, count))
        encode.ask("park", rooms=rooms, n_tokens=n_tokens, hidden=HIDDEN)
        return received(encode.facts["address"], rooms, n_tokens)

    def received(address: str, rooms: list[int], n_tokens: int) -> list[float]:
        seconds: list[float] = prefill.ask(
            "receive", address=address, rooms=rooms, n_tokens=n_tokens, hidden=HIDDEN
        )
        return seconds

    for nbytes, count in cases:
        if run.quick and nbytes * count > 16 * MIB:
            continue
        mine, its = partial(ours, nbytes, count), partial(theirs, nbytes, count)
        what, against = f"to a real receiver, {_case(nbytes, count)}", "reference's managers"
        wait = partial(_wait_us, mine), against, partial(_wait_us, its)
        yield Pair("B2 shipping", f"a room {what}", "us", *wait, Line(at_most=1.0))
        if count > 1 and nbytes >= MIB:
            rate = partial(_all_mb_s, mine, nbytes * count), against, partial(_all_mb_s, its, nbytes * count)
            yield Pair("B2 shipping", f"all rooms {what}", "MB/s", *rate)


def _wait_us(receive: Callable[[], list[float]]) -> float:
    """From a room's frame to its Success: median over the rooms of as many rounds as fill the time of one."""
    waits_s: list[float] = []
    spent_s = 0.0
    while spent_s < ROUND_S:
        all_s, *each_s = receive()
        spent_s += all_s
        waits_s += each_s
    return 1e6 * statistics.median(waits_s)


def _all_mb_s(receive: Callable[[], list[float]], nbytes: int) -> float:
    return _rate(lambda: receive()[0], nbytes)


def _case(nbytes: int, count: int) -> str:
    size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
    return f"{count} x {size} at once"


def _pair(way: str, nbytes: int, count: int, ship: Callable[[], float], peer: Peer, raw: RawMooncake) -> Pair:
    line = Line(at_least=0.9) if nbytes >= MIB else Line()
    return Pair(
        "B2 shipping",
        f"{way}, {_case(nbytes, count)}",
        "MB/s",
        partial(_rate, ship, nbytes * count),
        "raw batch write",
        partial(_rate, partial(raw.write, peer, nbytes, count), nbytes * count),
        line,
    )


def _rate(move: Callable[[], float], nbytes: int) -> float:
    """MB/s over as many moves as fill the time of a round."""
    spent_s, moves = 0.0, 0
    while spent_s < ROUND_S:
        spent_s += move()
        moves += 1
    return nbytes * moves / spent_s / 1e6
