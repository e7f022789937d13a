"""B6: how long a healthy receiver waits for rows while others are frozen, dead or slow.

A rank serves one healthy receiver, room after room, while three others ask as often. In the one phase
all of them are well, in the other the three are not; both in turn, with other receivers, from the second
round on: the first is the finding out, whose longest wait is told below the table.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.frame import Line, Pair, Run
from benchmarks.rank import Peer, Rank

HIDDEN = 1024
N_TOKENS = 16
NBYTES = N_TOKENS * HIDDEN * 4
KEY = bytes(16)
OTHERS = 3
ROOMS = 300
"""Of the healthy receiver in one phase; each of the others asks at every third of them."""

SLOW_S = 0.3


def pairs(run: Run) -> Iterator[Pair]:
    for trouble, backend in (("frozen", "mooncake"), ("dead", "mooncake"), ("slow", "tcp")):
        yield _pair(run, trouble, backend)


def _pair(run: Run, trouble: str, backend: str) -> Pair:
    rank = run.stack.enter_context(
        Rank(transport=backend, hidden=HIDDEN, max_rows=N_TOKENS, tiers=[64 << 20])
    )
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
                [theirs] = rank.park(1, KEY, N_TOKENS)
                rank.announce(theirs, N_TOKENS, peer)
        [room] = rank.park(1, KEY, N_TOKENS)
        began_s = time.perf_counter()
        rank.announce(room, N_TOKENS, healthy)
        rank.ended(room)
        waits_s.append(time.perf_counter() - began_s)
    return waits_s


def _freeze(peer: Peer) -> None:
    peer.program.freeze()


def _kill(peer: Peer) -> None:
    peer.program.kill()


def _slow(peer: Peer) -> None:
    peer.program.ask(SLOW_S)


SPOIL: dict[str, Callable[[Peer], None]] = {"frozen": _freeze, "dead": _kill, "slow": _slow}
