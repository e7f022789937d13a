"""How everything here is measured: two things in turn, many times, beside a control that must not move.

A figure of one machine at one moment says little. So each benchmark names what it is measured
against, both are measured in turn within one run, and what counts is their ratio: the median over the
repeats, with the lowest and the highest. Before and after each repeat a control is timed (a copy in memory,
bytes through a socket, both no work of ours). A repeat within which it moved by more than 15 %, or beside
which it was far slower than at its fastest, does not count: the two figures of it are not of one machine,
or of one that does something else. How fast the machine was from one repeat to the next does not matter to a
ratio of two figures taken side by side; where the other side is a fixed limit it does, so that there the
control may not have moved between the repeats either. Where fewer repeats count than were asked for, the
row is void: neither passed nor missed. What counts is decided by the control alone, never by a figure.
"""

import itertools
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

REPEATS = 5
MOVED = 1.15
"""How far the slower control of a repeat may lie above the faster."""

BUSY = 2.0
"""How far a control may lie above the fastest of the whole run."""

TRIES, MORE_TRIES = 2, 4
"""So many times the wanted repeats are measured at most; the larger where they take no longer than ..."""

PATIENCE_S = 8.0
"""... this."""

COPY_BYTES = 16 << 20
SOCKET_BYTES = 4 << 20
COPIES = 7
SENDS = 25
"""Many, as they are short: how two threads fall on the cores changes from one to the next."""


Sample = tuple[float, ...]
"""What the control took at one moment: seconds of each of its kinds."""


class Control:
    """A copy in memory, and bytes through a socket pair to another thread: the seconds of each.

    The fastest of some tries: what this machine can do at the moment.
    """

    def __init__(self, copy_bytes: int = COPY_BYTES, socket_bytes: int = SOCKET_BYTES) -> None:
        self._source = memoryview(bytearray(copy_bytes))
        self._target = memoryview(bytearray(copy_bytes))
        self._payload = memoryview(bytearray(socket_bytes))
        self._here, self._there = socket.socketpair()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __call__(self) -> Sample:
        return (
            min(seconds(self._copy) for _ in range(COPIES)),
            min(seconds(self._send) for _ in range(SENDS)),
        )

    def close(self) -> None:
        self._here.close()
        self._reader.join()
        self._there.close()

    def _copy(self) -> None:
        self._target[:] = self._source

    def _send(self) -> None:
        self._here.sendall(self._payload)
        self._here.recv(1)

    def _read(self) -> None:
        buffer, left = memoryview(bytearray(1 << 20)), len(self._payload)
        while taken := self._there.recv_into(buffer, min(left, len(buffer))):
            left -= taken
            if left == 0:
                left = len(self._payload)
                self._there.send(b"\0")


@dataclass(frozen=True, slots=True)
class Line:
    """What a ratio has to be for a pass."""

    at_least: float | None = None
    at_most: float | None = None

    def holds(self, ratio: float) -> bool:
        return (self.at_least is None or ratio >= self.at_least) and (
            self.at_most is None or ratio <= self.at_most
        )

    def __str__(self) -> str:
        parts = [(">=", self.at_least), ("<=", self.at_most)]
        return " ".join(f"{sign} {value:g}" for sign, value in parts if value is not None) or "-"


@dataclass(frozen=True, slots=True)
class Pair:
    """``ours`` measured against ``theirs``: two figures in one unit, or a limit that is a number.

    ``share`` makes the ratio of the two; ours over theirs unless it says otherwise. ``is_fixed``: the
    ratio contains a limit that is a number, and so depends on how fast the machine is.
    """

    bench: str
    what: str
    unit: str
    ours: Callable[[], float]
    against: str
    theirs: Callable[[], float]
    line: Line = Line()
    share: Callable[[float, float], float] = lambda ours, theirs: ours / theirs
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What a benchmark is given: ``stack`` ends what it starts, ``remarks`` are printed below the table."""

    stack: ExitStack
    quick: bool
    remarks: list[str]


@dataclass(slots=True)
class Row:
    """One line of the table. Medians over the kept repeats; ``low`` and ``high`` are of the ratio."""

    bench: str
    what: str
    unit: str
    ours: float
    against: str
    theirs: float
    ratio: float
    low: float
    high: float
    line: str
    verdict: str
    repeats: int
    measured: int
    control_moved: float


@dataclass(frozen=True, slots=True)
class Repeat:
    """Both figures once, and the control before and after."""

    ours: float
    theirs: float
    controls: tuple[Sample, Sample]


class Watch:
    """Takes the control, and remembers how fast it has been in this run."""

    def __init__(self, control: Callable[[], Sample]) -> None:
        self._control = control
        self._fastest: Sample = ()

    def __call__(self) -> Sample:
        sample = self._control()
        self._fastest = tuple(map(min, sample, self._fastest)) if self._fastest else sample
        return sample

    def counted(self, repeats: Sequence[Repeat], is_fixed: bool) -> list[Repeat]:
        """Those that the control lets count."""
        calm = [
            one
            for one in repeats
            if control_moved([one]) <= MOVED
            and all(
                value <= BUSY * fastest
                for sample in one.controls
                for value, fastest in zip(sample, self._fastest, strict=True)
            )
        ]
        return comparable(calm) if is_fixed else calm


def measure(pair: Pair, watch: Watch, repeats: int = REPEATS) -> Row:
    """One uncounted round, then repeats until enough of them count, or it is given up."""
    pair.ours()
    pair.theirs()
    taken: list[Repeat] = []
    counted: list[Repeat] = []
    before, began_s = watch(), time.perf_counter()
    while len(counted) < repeats:
        tries = MORE_TRIES if time.perf_counter() - began_s < PATIENCE_S else TRIES
        if len(taken) >= tries * repeats:
            break
        if len(taken) % 2:  # taking turns at being first, so that a drift favours neither
            theirs, ours = pair.theirs(), pair.ours()
        else:
            ours, theirs = pair.ours(), pair.theirs()
        after = watch()
        taken.append(Repeat(ours, theirs, (before, after)))
        before = after
        counted = watch.counted(taken, pair.is_fixed)
    return conclude(pair, counted, taken, repeats)


def conclude(pair: Pair, counted: Sequence[Repeat], taken: Sequence[Repeat], repeats: int) -> Row:
    """The row of the repeats that count; void, and of all that were taken, where those are too few."""
    is_void = len(counted) < repeats
    used = taken if is_void else counted
    ratios = [pair.share(one.ours, one.theirs) for one in used]
    middle = statistics.median(ratios)
    if is_void:
        verdict = "void"
    elif pair.line == Line():
        verdict = "-"
    else:
        verdict = "pass" if pair.line.holds(middle) else "miss"
    return Row(
        bench=pair.bench,
        what=pair.what,
        unit=pair.unit,
        ours=statistics.median(one.ours for one in used),
        against=pair.against,
        theirs=statistics.median(one.theirs for one in used),
        ratio=middle,
        low=min(ratios),
        high=max(ratios),
        line=str(pair.line),
        verdict=verdict,
        repeats=len(counted),
        measured=len(taken),
        control_moved=(control_moved(used) if pair.is_fixed else max(control_moved([one]) for one in used))
        - 1,
    )


def fact(bench: str, what: str, unit: str, ours: float, against: str, theirs: float, line: Line) -> Row:
    """A row of something that was counted over a whole benchmark: no repeats, and no control to void it."""
    ratio = ours / theirs
    verdict = "-" if line == Line() else "pass" if line.holds(ratio) else "miss"
    return Row(bench, what, unit, ours, against, theirs, ratio, ratio, ratio, str(line), verdict, 1, 1, 0.0)


def control_moved(repeats: Sequence[Repeat]) -> float:
    """Slowest over fastest control of these repeats, of the kind that moved the most."""
    kinds = zip(*(sample for one in repeats for sample in one.controls), strict=True)
    return max(float(max(kind) / min(kind)) for kind in kinds)


def comparable(repeats: Sequence[Repeat]) -> list[Repeat]:
    """The largest set of repeats between which the control moved by no more than 15 %."""
    best: list[Repeat] = []
    samples = [sample for one in repeats for sample in one.controls]
    for lowest in itertools.product(*(sorted(set(kind)) for kind in zip(*samples, strict=True))):
        inside = [
            one
            for one in repeats
            if all(
                low <= value <= low * MOVED
                for sample in one.controls
                for low, value in zip(lowest, sample, strict=True)
            )
        ]
        if len(inside) > len(best):
            best = inside
    return best


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
