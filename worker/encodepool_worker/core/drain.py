"""The end of a worker: what it is asked to finish, and which rooms it has to fail for that."""

from collections import deque
from collections.abc import Iterable

DRAINING = "the worker is draining"
STOPPED = "the worker stopped before it was done"


class Drain:
    """Not begun, begun (nothing new is taken), stopped (past its deadline), drained (nothing is left).

    Rooms that the drain ends wait in line, since they may be too many for one turn.
    """

    def __init__(self) -> None:
        self.deadline_s: float | None = None
        self.stopped = False
        self.drained = False
        self._doomed: deque[tuple[int, str]] = deque()

    @property
    def begun(self) -> bool:
        return self.deadline_s is not None

    @property
    def has_doomed(self) -> bool:
        return bool(self._doomed)

    def begin(self, deadline_s: float, rooms: Iterable[int]) -> None:
        """``rooms`` have only receivers; no request for them will be taken any more."""
        self.deadline_s = deadline_s
        self._doomed.extend((room, DRAINING) for room in rooms)

    def must_stop(self, now_s: float) -> bool:
        return self.deadline_s is not None and self.deadline_s <= now_s and not self.stopped

    def stop(self, rooms: Iterable[int]) -> None:
        """Once is enough: what comes later is refused. Failed rooms tell when it is safe."""
        self.stopped = True
        self._doomed.extend((room, STOPPED) for room in rooms)

    def next_doomed(self) -> tuple[int, str]:
        """A room to end, and why. It may have ended by itself."""
        return self._doomed.popleft()

    def next_turn_s(self, now_s: float) -> float | None:
        """When the pipeline has to be asked again."""
        if self._doomed:
            return now_s
        return None if self.stopped else self.deadline_s
