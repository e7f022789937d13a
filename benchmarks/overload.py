"""B7: what a worker gets done in its deadline when more is asked of it than it can do.

Capacity is what the same worker does for a client that keeps a few requests under way and waits for
them; then requests come at a multiple of that rate, whatever happens to them, each with a deadline, and
only what has landed within it counts. Both are in tokens, so that refusing the large items gains nothing.
Some of the requests repeat a content of the last moments; capacity is measured with as many.

The tower is slow enough, and a batch short enough, for the deadline to be some batches long, as beside a GPU.
"""

import itertools
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.frame import Line, Pair, Row, Run, fact
from benchmarks.loop_overhead import write_model
from benchmarks.serving import Client, MemoryWatch, Sent, start_worker

from encodepool_worker.types import Grid, Modality
from encodepool_worker.wire.encode import build_encode

TOWER = {"depth": 32, "hidden_size": 512, "intermediate_size": 2048}
"""Some 200 ms for 16 tokens on one core. Client, frontend and what a rank does for a request are on the
same two cores, and take what is the same share of a tower's time as beside a GPU only if it is this slow."""

HIDDEN, LEVELS, PATCH_WIDTH = 256, 3, 1536
SIDES = (8, 8, 12, 8, 8)
"""Of the images that are asked for, in turn, in patches: four of 16 tokens for each of 36."""

BATCH_TOKENS = 36
DEADLINE_S = 5.0
UNDER_WAY = 12
"""Requests of the client that waits."""

RAMP_S = 4.0
COUNTED_S = 15.0
REPEATED_WITHIN_S = 8.0
"""A repeated content was new within the last so many seconds."""

GROUPS = 8


def pairs(run: Run) -> Iterator[Pair | Row]:
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="encodepool-bench-")))
    worker = start_worker(
        run,
        write_model(folder / "model", **TOWER),
        folder / "log",
        load_format="dummy",
        max_tokens_per_batch=BATCH_TOKENS,
        store_device_mib=64,
    )
    largest = max(SIDES) ** 2 // 4 * HIDDEN * (1 + LEVELS) * 4
    client = Client(worker, nbytes=largest, hidden=HIDDEN, levels=LEVELS)
    run.stack.callback(client.close)
    memory = MemoryWatch(worker)
    run.stack.callback(memory.close)
    book = Book()
    # Each row takes four minutes and more, so not every factor with every share.
    factors = {0.5: [4.0]} if run.quick else {0.0: [4.0], 0.5: [0.5, 1.0, 2.0, 4.0], 0.9: [4.0]}
    for share in factors:
        load = Load(client, memory, book, share)
        for factor in factors[share]:
            line = Line(at_least=0.9) if factor >= 1 and share <= 0.5 else Line()
            yield Pair(
                "B7 overload",
                f"done in {DEADLINE_S:g} s at {factor:g}x, {share:.0%} repeated",
                "tokens/s",
                lambda load=load, factor=factor: load.pushed(factor),  # type: ignore[misc]
                "capacity",
                load.capacity,
                line,
            )
    yield from book.facts()
    run.remarks.extend(book.remarks())


class Images:
    """Requests of new and of repeated contents."""

    def __init__(self, share_repeated: float) -> None:
        self._share = share_repeated
        self._owed = 0.0  # repeats, of the requests so far
        self._random = random.Random(7)
        self._sides = itertools.cycle(SIDES)
        self._numbers = itertools.count(time.monotonic_ns())
        self._recent: deque[tuple[float, int, int]] = deque()
        self._noise = {
            side: np.random.default_rng(side).integers(
                0x3E00, 0x3F00, (side * side, PATCH_WIDTH), dtype=np.uint16
            )
            for side in set(SIDES)
        }

    def request(self) -> tuple[Any, int]:
        """A request without its room, and its tokens."""
        now_s = time.monotonic()
        while self._recent and self._recent[0][0] < now_s - REPEATED_WITHIN_S:
            self._recent.popleft()
        self._owed += self._share
        if self._recent and self._owed >= 1:
            self._owed -= 1
            _, side, number = self._random.choice(self._recent)
        else:
            side, number = next(self._sides), next(self._numbers)
            self._recent.append((now_s, side, number))
        pixels = self._noise[side].copy()
        # Eight values that no other image has: bytes of its number, as small bfloat16 numbers.
        pixels[0, :8] = 0x3F00 + np.frombuffer(number.to_bytes(8, "little"), dtype=np.uint8).astype(np.uint16)
        tokens = side * side // 4
        request = build_encode(
            request_id=f"{self._random.getrandbits(64):016x}",
            room=0,
            modality=Modality.IMAGE,
            pixel_dtype="bfloat16",
            pixel_shape=(side * side, PATCH_WIDTH),
            pixels=pixels.data.cast("B"),
            grids=[Grid(1, side, side)],
            n_tokens=tokens,
        )
        return request, tokens


class Load:
    """One share of repeated contents: capacity, and loads that are multiples of it."""

    def __init__(self, client: Client, memory: MemoryWatch, book: "Book", share_repeated: float) -> None:
        self._client, self._memory, self._book = client, memory, book
        self._share = share_repeated
        self._images = Images(share_repeated)
        self._known: deque[tuple[float, float]] = deque(maxlen=3)

    def capacity(self) -> float:
        """Tokens a second for a client that waits; what counts is over when it lands."""
        counted_s = time.monotonic() + RAMP_S / 2
        until_s = counted_s + COUNTED_S
        under_way: list[Sent] = []
        sent: list[Sent] = []
        while time.monotonic() < until_s:
            under_way = [one for one in under_way if not one.is_over]
            while len(under_way) < UNDER_WAY:
                under_way.append(self._client.send(*self._images.request(), timeout_s=30))
                sent.append(under_way[-1])
            self._client.wait(under_way, any, 1.0)
        self._finish(sent)
        landed = [one for one in sent if one.in_time(30) and _within(one, counted_s, until_s)]
        rate = sum(one.tokens for one in landed) / COUNTED_S
        self._known.append((rate, len(landed) / COUNTED_S))
        self._book.rest_bytes.append(self._memory.take_peak())
        return rate

    def pushed(self, factor: float) -> float:
        """Tokens a second that landed in time while requests came at ``factor`` times the capacity."""
        if not self._known:
            self.capacity()
        per_s = factor * statistics.median(items for _, items in self._known)
        began_s = time.monotonic()
        counted_s, until_s = began_s + RAMP_S, began_s + RAMP_S + COUNTED_S
        sent: list[Sent] = []
        while (now_s := time.monotonic()) < until_s:
            due_s = began_s + len(sent) / per_s
            if now_s < due_s:
                time.sleep(due_s - now_s)  # the rate is the load's, whatever comes of it
            sent.append(self._client.send(*self._images.request(), timeout_s=DEADLINE_S))
        self._finish(sent)
        self._book.add(factor, self._share, sent, self._memory.take_peak())
        landed = [one for one in sent if one.in_time(DEADLINE_S) and _within(one, counted_s, until_s)]
        return sum(one.tokens for one in landed) / COUNTED_S

    def _finish(self, sent: Sequence[Sent]) -> None:
        """Every room has its verdict, and every call its answer, or 10 s have passed."""
        self._client.wait(sent, all, 10.0)


@dataclass(slots=True)
class Book:
    """What became of every request of the loads above capacity, and the worker's memory."""

    requests: dict[tuple[float, float], list[Sent]] = field(default_factory=dict)
    rest_bytes: list[int] = field(default_factory=list)
    pushed_bytes: list[int] = field(default_factory=list)

    def add(self, factor: float, share: float, sent: Sequence[Sent], peak_bytes: int) -> None:
        self.requests.setdefault((factor, share), []).extend(sent)
        if factor > 1:
            self.pushed_bytes.append(peak_bytes)

    def facts(self) -> Iterator[Row]:
        every = [one for sent in self.requests.values() for one in sent]
        silent = sum(one.status is None for one in every)
        yield fact(
            "B7 overload",
            "rooms that were told nothing",
            "rooms",
            silent,
            "all",
            len(every),
            Line(at_most=0.0),
        )
        # The first quarter is the worker's way to its working size.
        rest, pushed = self.rest_bytes[len(self.rest_bytes) // 4 :], self.pushed_bytes
        yield fact(
            "B7 overload",
            "largest memory above capacity",
            "MiB",
            max(pushed) / 2**20,
            "at capacity",
            max(rest) / 2**20,
            Line(at_most=1.25),
        )
        above = sorted(
            (one for (factor, _), sent in self.requests.items() if factor > 1 for one in sent),
            key=lambda one: one.request_id,
        )
        step = -(-len(above) // GROUPS)
        groups = [_share_done(above[at : at + step]) for at in range(0, len(above), step)]
        yield fact(
            "B7 overload",
            "done, of the worst eighth of the request ids in their order",
            "share",
            min(groups),
            "of all",
            _share_done(above),
            Line(at_least=0.5),
        )

    def remarks(self) -> Iterator[str]:
        for (factor, share), sent in self.requests.items():
            taken = [one for one in sent if one.code is not None and one.code.value[0] == 0]
            in_time = sum(one.in_time(DEADLINE_S) for one in taken)
            late = sum(one.in_time(3600) for one in taken) - in_time
            yield (
                f"B7 at {factor:g}x, {share:.0%} repeated: {len(sent)} asked, {len(taken)} taken, {in_time} "
                f"landed in time, {late} late, {len(taken) - in_time - late} failed"
            )


def _share_done(sent: Sequence[Sent]) -> float:
    return sum(one.tokens for one in sent if one.in_time(DEADLINE_S)) / sum(one.tokens for one in sent)


def _within(one: Sent, from_s: float, until_s: float) -> bool:
    return one.ended_s is not None and from_s <= one.ended_s < until_s
