"""B3: a content whose rows are in the store, from the hand-over to the receiver's Success.

Against Mooncake's write of the same bytes: the difference may be 200 us. Then against a hit in the cache of
the reference's own loop; a hit in the second tier against one in the first, which may cost no copy more; and
what naming a content costs, by itself.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from benchmarks.frame import Line, Pair, Run
from benchmarks.no_tower import MERGE, spec_of
from benchmarks.programs import wait_until
from benchmarks.rank import NoPeer, Peer, Rank, Rooms
from benchmarks.raw import RawMooncake
from benchmarks.reference_programs import ReferenceLoop

from encodepool_worker.frontend.hashing import ContentKeys, TensorBytes
from encodepool_worker.types import Grid, Modality

KIB, MIB = 1 << 10, 1 << 20
HIDDEN = 4096
ROW_BYTES = HIDDEN * 4
ALLOWED_US = 200.0
ROUND_S = 0.2
FIRST_TIER = 8 * MIB


def pairs(run: Run) -> Iterator[Pair]:
    peer = Peer("mooncake", 4 * MIB)
    run.stack.callback(peer.close)
    raw = RawMooncake(4 * MIB)
    rank = run.stack.enter_context(
        Rank(transport="mooncake", hidden=HIDDEN, max_rows=1024, tiers=[FIRST_TIER, 64 * MIB])
    )
    rank.meet(peer)
    reference = ReferenceLoop(run.stack, transport="mooncake", hidden=HIDDEN, max_rows=MIB // ROW_BYTES)
    for nbytes in (64 * KIB, MIB):
        key = nbytes.to_bytes(16, "little")
        n_tokens = nbytes // ROW_BYTES
        rank.fill(key, n_tokens, peer)
        ours = partial(_median_us, partial(hit, rank, peer, key, rank.pixels(n_tokens)))
        yield Pair(
            "B3 cache hit",
            f"hit of {nbytes // KIB} KiB, less the write: of {ALLOWED_US:g} us",
            "us",
            ours,
            "raw write",
            partial(_median_us, partial(raw.write, peer, nbytes)),
            Line(at_most=1.0),
            lambda ours, theirs: (ours - theirs) / ALLOWED_US,
            is_fixed=True,
        )
        theirs = partial(
            reference.ask, "hit_us", n_tokens=n_tokens, session=peer.session, ptr=peer.ptr, round_s=ROUND_S
        )
        what = f"hit of {nbytes // KIB} KiB"
        yield Pair("B3 cache hit", what, "us", ours, "reference's loop", theirs, Line(at_most=1.0))
    yield _second_tier(rank, peer)
    yield from _naming()


def hit(rank: Rooms, peer: Peer | NoPeer, key: bytes, pixels: Any) -> float:
    """Seconds from the hand-over of an item to its receiver's Success."""
    n_tokens, room = len(pixels) // MERGE**2, rank.new_room()
    rank.announce(room, n_tokens, peer)
    began_s = time.perf_counter()
    rank.submit(room, key, pixels, (1, 2, 2 * n_tokens))
    rank.landed(1)
    return time.perf_counter() - began_s


def _second_tier(rank: Rank, peer: Peer) -> Pair:
    """The first content filled here has to leave the first tier, for those filled after it."""
    n_tokens = MIB // ROW_BYTES
    keys = [bytes([1, index]) * 8 for index in range(1 + FIRST_TIER // MIB)]
    for key in keys:
        rank.fill(key, n_tokens, peer)
    old, new = keys[0], keys[-1]
    pixels = rank.pixels(n_tokens)
    hit(rank, peer, old, pixels)
    wait_until(lambda: rank.counter('encodepool_hits_total{tier="host"}'), 10, "a hit in the second tier")
    return Pair(
        "B3 cache hit",
        "hit of 1 MiB in the second tier",
        "us",
        partial(_median_us, partial(hit, rank, peer, old, pixels)),
        "in the first",
        partial(_median_us, partial(hit, rank, peer, new, pixels)),
        Line(at_most=1.1),
    )


def _naming() -> Iterator[Pair]:
    keys = ContentKeys(model="m", revision="", spec=spec_of(HIDDEN), preprocessing="")
    for mib in (1, 16):
        payload = memoryview(np.random.default_rng(0).bytes(mib * MIB))
        pixels = TensorBytes("pixel_values", "bfloat16", (mib * MIB // 48, 24), payload)
        target = memoryview(bytearray(len(payload)))

        def name(pixels: TensorBytes = pixels) -> float:
            began_s = time.perf_counter()
            keys.of(Modality.IMAGE, (Grid(1, 2, 2),), pixels, ())
            return time.perf_counter() - began_s

        def copy(source: Any = payload, target: Any = target) -> float:
            began_s = time.perf_counter()
            target[:] = source
            return time.perf_counter() - began_s

        what = f"naming a content of {mib} MiB"
        yield Pair(
            "B3 cache hit", what, "us", partial(_median_us, name), "a copy of it", partial(_median_us, copy)
        )


def _median_us(once: Callable[[], float]) -> float:
    times: list[float] = []
    while sum(times) < ROUND_S:
        times.append(once())
    return 1e6 * statistics.median(times)
