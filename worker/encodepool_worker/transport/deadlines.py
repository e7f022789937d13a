"""What becomes due in the sender as time passes, and when to look again."""

from collections.abc import Collection, Iterable
from math import inf

from .sender_types import Peer, Probe, SenderLimits, Unsettled


class Deadlines:
    """One look at the clock (monotonic). Each question returns what is due and remembers the rest."""

    def __init__(self, now_s: float, limits: SenderLimits) -> None:
        self._now_s = now_s
        self._limits = limits
        self._next_s = inf

    @property
    def wait_s(self) -> float | None:
        """The seconds until something else will be due; None while nothing is expected."""
        return None if self._next_s == inf else max(0.0, self._next_s - self._now_s)

    def look_at(self, at_s: float | None) -> None:
        """Something will be due then."""
        if at_s is not None:
            self._next_s = min(self._next_s, at_s)

    def unanswered(self, probes: Iterable[Probe]) -> list[Probe]:
        """Probes whose peers count as silent from now on."""
        return [one for one in probes if self._is_due(one.started_s + self._limits.probe_timeout_s)]

    def kept_waiting(self, waiting: Iterable[tuple[Peer, float]]) -> list[Peer]:
        """Peers that have waited for a probe as long as they would have had for its answer."""
        return [peer for peer, since_s in waiting if self._is_due(since_s + self._limits.probe_timeout_s)]

    def given_up(self, troubled: Collection[Peer]) -> list[tuple[Peer, Unsettled]]:
        """Late writes for whose peers nobody waits any longer: too long silent, or too many bytes."""
        late = [(peer, one) for peer in troubled for one in peer.unsettled]
        if sum(one.nbytes for _, one in late) <= self._limits.max_unsettled_bytes:
            late = [pair for pair in late if self._is_due(pair[1].since_s + self._limits.max_unsettled_s)]
        if late:  # an engine that is still in use is asked for again
            self.look_at(self._now_s + self._limits.probe_pause_s)
        return late

    def to_probe(self, troubled: Iterable[Peer], room: int) -> list[Peer]:
        """Peers with late writes whose next probe should begin, at most ``room``."""
        limits = self._limits
        quiet = [peer for peer in troubled if peer.probe is None and not peer.busy]
        due = [peer for peer in quiet if self._is_due(peer.probe_again_s)]
        begun = due[: max(0, room)]
        if begun:
            self.look_at(self._now_s + limits.probe_timeout_s)
        if len(begun) < len(due):
            self.look_at(self._now_s + limits.probe_pause_s)
        return begun

    def _is_due(self, at_s: float) -> bool:
        if at_s > self._now_s:
            self.look_at(at_s)
        return at_s <= self._now_s
