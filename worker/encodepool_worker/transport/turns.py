"""Whose turn it is to write: quick receivers never wait for slow ones. No threads, no clock.

A peer is *quick* when its last write was over within ``slow_s``, *slow* when it was not, *new* before
its first. Quick ones have ``lanes`` writes at a time to themselves; a write of theirs that lasts
longer than ``slow_s`` no longer counts among these. All other writes together are ``lanes`` at a
time as well, and more only where some have lasted longer than ``lane_patience_s``; while new and slow
ones both wait, each of the two has half of these.

When several receivers freeze at once, all of them were quick a moment ago. So while as many writes as
there are lanes drag on, a peer has its turn only if it has been heard of since the last of them
began; any other is to be asked first whether it is there. It keeps its place meanwhile. Where nobody
can be asked, because all probes are taken, only writes of quick peers count for that, and whoever was
heard of within ``probe_fresh_s`` has its turn all the same; the others stay in line.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from .sender_types import Pace, Peer, SenderLimits

ASKED_AT_ONCE = 16
"""While so many have been asked within ``slow_s`` and have not answered, nobody else is: 256 probes then
last longer than those that froze together count as heard of just now."""


@dataclass(frozen=True, slots=True)
class _Write:
    pace: Pace
    since_s: float


class Turns:
    """Peers with something to write, and those that write. The sender's lock guards it."""

    def __init__(self, limits: SenderLimits) -> None:
        self._limits = limits
        self._most_slow = max(1, limits.max_lanes - limits.lanes)
        self._lines: dict[Pace, deque[Peer]] = {pace: deque() for pace in Pace}
        self._asked: dict[Peer, float] = {}
        self._writes: dict[Peer, _Write] = {}
        self._last: Pace | None = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def writing(self) -> int:
        return len(self._writes)

    def add(self, peer: Peer) -> None:
        """It has something to write and answers; whoever was asked on its turn has the next one."""
        if peer.listed:
            return
        peer.listed = True
        if self._asked.pop(peer, None) is None:
            self._lines[peer.pace].append(peer)
        else:
            self._lines[peer.pace].appendleft(peer)

    def remove(self, peer: Peer) -> None:
        """It has nothing to write any more."""
        self._asked.pop(peer, None)
        if peer.listed:
            peer.listed = False
            self._lines[peer.pace].remove(peer)

    def next(self, now_s: float, room: int) -> Peer | None:
        """Take the peer out of the line whose turn it is; ``asked`` or ``began`` follows for it.

        ``room``: how many probes may begin.
        """
        peer = self._first(now_s, room)
        if peer is not None:
            peer.listed = False
            self._lines[peer.pace].remove(peer)
        return peer

    def is_anyones(self, now_s: float, room: int) -> bool:
        return self._first(now_s, room) is not None

    def must_ask(self, peer: Peer, now_s: float, room: int) -> bool:
        """Whether it has been silent for long, or may have frozen with those whose writes drag on."""
        return peer.answered_s < self._heard_since_s(peer.pace, now_s, room)

    def asked(self, peer: Peer, now_s: float) -> None:
        """Its turn is put off until it has answered a probe."""
        self._asked[peer] = now_s

    def began(self, peer: Peer, now_s: float) -> None:
        self._writes[peer] = _Write(peer.pace, now_s)
        if peer.pace is not Pace.QUICK:
            self._last = peer.pace

    def ended(self, peer: Peer, now_s: float) -> None:
        """Its write has ended, well or not."""
        write = self._writes.pop(peer)
        peer.pace = Pace.SLOW if self._drags(write, now_s) else Pace.QUICK

    def _drags(self, write: _Write, now_s: float) -> bool:
        return now_s - write.since_s > self._limits.slow_s

    def _heard_since_s(self, pace: Pace, now_s: float, room: int) -> float:
        """Whoever was last heard of before that is to be asked."""
        limits = self._limits
        idle_since_s = now_s - limits.idle_s
        drag = [one for one in self._writes.values() if self._drags(one, now_s)]
        if not room:  # what was slow before is no sign that others have frozen
            drag = [one for one in drag if one.pace is Pace.QUICK]
        if len(drag) < limits.lanes:
            return idle_since_s
        since_s = max(one.since_s for one in drag)
        if pace is not Pace.QUICK or not room:  # those wait long in line, and would be asked each time
            since_s = min(since_s, now_s - limits.probe_fresh_s)
        return max(since_s, idle_since_s)

    def _first(self, now_s: float, room: int) -> Peer | None:
        """Who has its turn now, or is to be asked for it."""
        if not any(self._lines.values()):
            return None
        limits = self._limits
        asked = sum(now_s - at_s <= limits.slow_s for at_s in self._asked.values())
        for pace in self._open_paces(now_s):
            line, heard_since_s = self._lines[pace], self._heard_since_s(pace, now_s, room)
            # With no room only those that were idle are asked: they wait for a probe like new ones.
            ask_before_s = heard_since_s if room else now_s - limits.idle_s
            for peer in line:
                if peer.answered_s >= heard_since_s:
                    return peer
                if asked < ASKED_AT_ONCE and peer.answered_s < ask_before_s:
                    if asked < ASKED_AT_ONCE // 2:
                        return peer
                    # A rack that froze stands in line once and for all; others keep coming behind it.
                    return next(one for one in reversed(line) if one.answered_s < ask_before_s)
        return None

    def _open_paces(self, now_s: float) -> Iterator[Pace]:
        """Whose writes may begin, in the order of turns."""
        limits, writes = self._limits, self._writes.values()
        if len(writes) >= limits.max_lanes:
            return
        slow = [one for one in writes if one.pace is not Pace.QUICK or self._drags(one, now_s)]
        patient = [one.pace for one in slow if now_s - one.since_s <= limits.lane_patience_s]
        if len(writes) - len(slow) < limits.lanes:
            yield Pace.QUICK
        if len(slow) < self._most_slow and len(patient) < limits.lanes:
            new, slow_ones = ((patient.count(pace), pace is self._last) for pace in (Pace.NEW, Pace.SLOW))
            yield from (Pace.SLOW, Pace.NEW) if new > slow_ones else (Pace.NEW, Pace.SLOW)
