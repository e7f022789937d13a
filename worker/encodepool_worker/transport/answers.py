"""What became of writes: counted, and kept until the sender's watcher tells it."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from .base import Done, Failed, SenderEvent, Settled
from .sender_types import Peer, QueuedWrite, Unsettled


class Answers:
    """``wake`` is called when there is something to tell. The sender's lock guards it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._outbox: deque[SenderEvent] = deque()
        self._troubled: set[Peer] = set()
        self.outcomes: Counter[str] = Counter()
        self.written_bytes = 0
        self.write_seconds = 0.0

    @property
    def troubled(self) -> list[Peer]:
        """Peers with late writes that are not settled."""
        return list(self._troubled)

    def late(self) -> Iterator[Unsettled]:
        return (one for peer in self._troubled for one in peer.unsettled)

    def take(self) -> list[SenderEvent]:
        """What is to be told now."""
        events = list(self._outbox)
        self._outbox.clear()
        return events

    def done(self, nbytes: int, seconds: float) -> None:
        """A write has ended well, which its lane tells."""
        self.outcomes["done"] += 1
        self.written_bytes += nbytes
        self.write_seconds += seconds

    def nothing_to_write(self, write_id: int) -> None:
        self.outcomes["done"] += 1
        self._tell(Done(write_id))

    def fail(self, writes: Iterable[QueuedWrite], outcome: str, reason: str) -> None:
        """Nothing of these writes was begun."""
        for write in writes:
            self.outcomes[outcome] += 1
            self._tell(Failed(write.write_id, reason, may_land_late=False))

    def is_late(self, peer: Peer, write: Unsettled) -> None:
        """A write has failed, which its lane tells, and may still land."""
        peer.unsettled.append(write)
        self._troubled.add(peer)

    def settle(self, peer: Peer, writes: Iterable[Unsettled], *, by_probe: bool) -> None:
        """These late writes of the peer cannot land any more."""
        gone = list(writes)
        peer.unsettled = [one for one in peer.unsettled if one not in gone]
        if not peer.unsettled:
            self._troubled.discard(peer)
        for one in gone:
            self._tell(Settled(one.write_id, by_probe))

    def _tell(self, event: SenderEvent) -> None:
        self._outbox.append(event)
        self._wake()
