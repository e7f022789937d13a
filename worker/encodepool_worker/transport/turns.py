"""Whose turn it is to write: quick receivers never wait for slow ones. No threads, no clock.

A peer is *quick* when its last write was over within ``slow_s``, *slow* when it was not, *new* before
its first. Quick ones have ``lanes`` writes at a time to themselves; a write of theirs that lasts
longer than ``slow_s`` no longer counts among these. All other writes together are ``lanes`` at a
time as well, and more only where some have lasted longer than ``lane_patience_s``.

When several receivers freeze at once, all of them were quick a moment ago. So while as many writes as
there are lanes drag on, a peer has its turn only if it has been heard of since the last of them
began; any other is to be asked first whether it is there. It keeps its place meanwhile.
"""

from collections import deque
from dataclasses import dataclass

from .sender_types import Pace, Peer, SenderLimits

ASKED_AT_ONCE = 16
"""Turns end while so many peers have been asked on theirs within ``slow_s``, and have not answered."""


@dataclass(frozen=True, slots=True)
class _Write:
    quick: bool
    since_s: float


class Turns:
    """Peers with something to write, and those that write. The sender's lock guards it."""

    def __init__(self, limits: SenderLimits) -> None:
        self._limits = limits
        self._most_slow = max(1, limits.max_lanes - limits.lanes)
        self._lines: dict[Pace, deque[Peer]] = {pace: deque() for pace in Pace}
        self._asked: dict[Peer, float] = {}
        self._writes: dict[Peer, _Write] = {}

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

    def next(self, now_s: float) -> Peer | None:
        """Take the peer out of the line whose turn it is; ``asked`` or ``began`` follows for it."""
        line = self._open_line(now_s)
        if line is None:
            return None
        peer = line.popleft()
        peer.listed = False
        return peer

    def is_anyones(self, now_s: float) -> bool:
        return self._open_line(now_s) is not None

    def must_ask(self, peer: Peer, now_s: float) -> bool:
        """Whether it may have frozen with those whose writes drag on."""
        slow_since = [one.since_s for one in self._writes.values() if self._drags(one, now_s)]
        if len(slow_since) < self._limits.lanes:
            return False
        heard_since_s = max(slow_since)
        if peer.pace is not Pace.QUICK:  # they wait long in line, and would be asked each time
            heard_since_s = min(heard_since_s, now_s - self._limits.probe_fresh_s)
        return peer.answered_s < heard_since_s

    def asked(self, peer: Peer, now_s: float) -> None:
        """Its turn is put off until it has answered a probe."""
        self._asked[peer] = now_s

    def began(self, peer: Peer, now_s: float) -> None:
        self._writes[peer] = _Write(peer.pace is Pace.QUICK, now_s)

    def ended(self, peer: Peer, now_s: float) -> None:
        """Its write has ended, well or not."""
        write = self._writes.pop(peer)
        peer.pace = Pace.SLOW if self._drags(write, now_s) else Pace.QUICK

    def _drags(self, write: _Write, now_s: float) -> bool:
        return now_s - write.since_s > self._limits.slow_s

    def _open_line(self, now_s: float) -> deque[Peer] | None:
        """The line whose first peer has its turn now: quick ones before new before slow ones."""
        limits, writes = self._limits, self._writes.values()
        if len(writes) >= limits.max_lanes:
            return None
        if sum(now_s - at_s <= limits.slow_s for at_s in self._asked.values()) >= ASKED_AT_ONCE:
            return None
        slow = [one for one in writes if not one.quick or self._drags(one, now_s)]
        patient = [one for one in slow if now_s - one.since_s <= limits.lane_patience_s]
        may = {Pace.QUICK: len(writes) - len(slow) < limits.lanes}
        may[Pace.NEW] = may[Pace.SLOW] = len(slow) < self._most_slow and len(patient) < limits.lanes
        for pace, line in self._lines.items():
            if line and may[pace]:
                return line
        return None
