"""B6: how long a healthy receiver waits for rows while others are frozen, dead or slow.

A rank serves one healthy receiver, room after room, while three others ask as often. In the one phase
all of them are well, in the other the three are not; both in turn, with other receivers, from the second
round on: the first is the finding out, whose longest wait is told below the table.

Then crowds: as many slow or frozen receivers as there may be sending threads, and 64 that accept
connections and say nothing. Of each the longest wait of a healthy receiver, finding out included, and beside
silent ones that of receivers which are new.
"""

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.frame import Line, Pair, Row, Run, fact
from benchmarks.peer import HOST
from benchmarks.rank import NoPeer, Peer, Rank

HIDDEN = 1024
N_TOKENS = 16
NBYTES = N_TOKENS * HIDDEN * 4
KEY = bytes(16)
OTHERS = 3
ROOMS = 300
"""Of the healthy receiver in one phase; each of the others asks at every third of them."""

SLOW_S = 0.3
CROWD = 8
SILENT = 64
CROWD_S = 6.0
"""A write to a frozen receiver times out after 5 s."""

NOBODY_WAITS_MS = 500.0


def pairs(run: Run) -> Iterator[Pair | Row]:
    for trouble, backend in (("frozen", "mooncake"), ("dead", "mooncake"), ("slow", "tcp")):
        yield _pair(run, trouble, backend)
    yield _longest(f"longest wait, {CROWD} others slow", _beside_a_crowd("slow", "tcp"))
    yield _longest(f"longest wait, {CROWD} others frozen in a write", _beside_a_crowd("frozen", "mooncake"))
    yield _longest(f"first wait, {SILENT} others silent", _beside_silent_ones("mooncake"))


def _longest(what: str, waits_s: Sequence[float]) -> Row:
    return fact(
        "B6 isolation", what, "ms", 1e3 * max(waits_s), "half a second", NOBODY_WAITS_MS, Line(at_most=1)
    )


def _pair(run: Run, trouble: str, backend: str) -> Pair:
    rank = run.stack.enter_context(_rank(backend))
    healthy, *others = [Peer(backend, NBYTES) for _ in range(1 + 2 * OTHERS)]
    for peer in (healthy, *others):
        run.stack.callback(peer.close)
        rank.meet(peer)
        rank.fill(KEY, N_TOKENS, peer)
    well, ill = others[:OTHERS], others[OTHERS:]
    for peer in ill:
        SPOIL[trouble](peer)
    longest_ms: list[float] = []
    run.remarks.append(
        f"B6 others {trouble}: longest wait of the healthy receiver, finding out included: ? ms"
    )
    place = len(run.remarks) - 1

    def p99(company: Sequence[Peer]) -> float:
        waits_ms = [1e3 * wait_s for wait_s in _phase(rank, healthy, company)]
        if company is ill:
            longest_ms.append(max(waits_ms))
            run.remarks[place] = (
                f"B6 others {trouble}: longest wait of the healthy receiver, finding out included: "
                f"{max(longest_ms):.1f} ms"
            )
        return statistics.quantiles(waits_ms, n=100)[-1]

    what = f"99th percentile of a wait, {OTHERS} others {trouble}"
    return Pair(
        "B6 isolation", what, "ms", partial(p99, ill), "all healthy", partial(p99, well), Line(at_most=1.5)
    )


def _phase(rank: Rank, healthy: Peer, company: Sequence[Peer]) -> list[float]:
    """Seconds from the healthy receiver's frame to its Success, for each of its rooms."""
    waits_s: list[float] = []
    for number in range(ROOMS):
        if number % OTHERS == 0:
            for peer in company:
                _ask(rank, peer)
        waits_s.append(_wait_s(rank, healthy))
    return waits_s


def _beside_a_crowd(trouble: str, backend: str) -> list[float]:
    """The waits of a healthy receiver, from the moment in which as many others as lanes go wrong."""
    with ExitStack() as stack:
        rank = stack.enter_context(_rank(backend))
        healthy, *crowd = [Peer(backend, NBYTES) for _ in range(1 + CROWD)]
        for peer in (healthy, *crowd):
            stack.callback(peer.close)
            rank.meet(peer)
            rank.fill(KEY, N_TOKENS, peer)
        for peer in crowd:
            SPOIL[trouble](peer)
        waits_s: list[float] = []
        again_s = time.monotonic()
        until_s = again_s + CROWD_S
        while (now_s := time.monotonic()) < until_s:
            if now_s >= again_s:
                again_s += SLOW_S
                for peer in crowd:
                    _ask(rank, peer)
            waits_s.append(_wait_s(rank, healthy))
        return waits_s


def _beside_silent_ones(backend: str) -> list[float]:
    """The first waits of new receivers, while others accept connections and say nothing."""
    with ExitStack() as stack:
        rank = stack.enter_context(_rank(backend))
        newcomers = [Peer(backend, NBYTES) for _ in range(3)]
        for peer in newcomers:
            stack.callback(peer.close)
            rank.meet(peer)
        rank.fill(KEY, N_TOKENS, newcomers.pop())
        for _ in range(SILENT):
            listener = stack.enter_context(socket.create_server((HOST, 0)))
            silent = NoPeer()
            silent.session = f"{HOST}:{listener.getsockname()[1]}"
            rank.meet(silent)
            _ask(rank, silent)
        return [_wait_s(rank, peer) for peer in newcomers]


def _rank(backend: str) -> Rank:
    return Rank(transport=backend, hidden=HIDDEN, max_rows=N_TOKENS, tiers=[64 << 20])


def _ask(rank: Rank, peer: Peer | NoPeer) -> int:
    """A receiver asks for the rows; the room."""
    [room] = rank.park(1, KEY, N_TOKENS)
    rank.announce(room, N_TOKENS, peer)
    return room


def _wait_s(rank: Rank, peer: Peer) -> float:
    """From its frame to its Success."""
    [room] = rank.park(1, KEY, N_TOKENS)
    began_s = time.perf_counter()
    rank.announce(room, N_TOKENS, peer)
    rank.ended(room)
    return time.perf_counter() - began_s


def _freeze(peer: Peer) -> None:
    peer.program.freeze()


def _kill(peer: Peer) -> None:
    peer.program.kill()


def _slow(peer: Peer) -> None:
    peer.program.ask(SLOW_S)


SPOIL: dict[str, Callable[[Peer], None]] = {"frozen": _freeze, "dead": _kill, "slow": _slow}
