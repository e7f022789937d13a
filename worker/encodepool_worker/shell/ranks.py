"""All ranks of the group, as the loop sees them: one tower, one store, one sender a rank.

An order goes to this rank's own threads and, where the group has more ranks, to theirs; what all
of them carry out is answered once, when the last has.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.events import BatchEncoded, BatchFailed, Demoted, DemoteFailed, Event
from ..core.gather import Answer, Gather, Order
from ..core.instructions import Demote, RetireEngine, RunBatch, Write
from ..transport.sender import Sender
from .mover import Mover
from .pixels import PixelTable
from .tower_runner import TowerRunner

if TYPE_CHECKING:
    from .rank_server import RankServer


class Answers:
    """The ranks' answers, folded; any thread. ``answer`` gets one event for each order of the loop."""

    def __init__(self, n_ranks: int, answer: Callable[[Event], None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._gather = Gather(n_ranks)

    def expect(self, order: Order) -> None:
        with self._lock:
            self._gather.begin(order)

    def add(self, rank: int, event: Event) -> None:
        """Raises WorkerError for an answer that nobody waits for."""
        if not isinstance(event, BatchEncoded | BatchFailed | Demoted | DemoteFailed):
            self._answer(event)
            return
        with self._lock:
            folded: Answer | None = self._gather.add(rank, event)
        if folded is not None:
            self._answer(folded)


class Ranks:
    """Carries out orders on every rank; nothing here waits. ``server`` speaks to the other ranks."""

    def __init__(
        self,
        answers: Answers,
        *,
        tower: TowerRunner,
        mover: Mover,
        sender: Sender,
        pixels: PixelTable,
        server: "RankServer | None",
    ) -> None:
        self.tower = tower
        self._answers = answers
        self._mover = mover
        self._sender = sender
        self._pixels = pixels
        self._server = server

    def run(self, order: RunBatch) -> None:
        self._answers.expect(order)
        if self._server is not None:
            pixels = self._pixels
            self._server.run(order, [pixels.get(job.pixels) for job in order.jobs])
        self.tower.submit(order)

    def demote(self, order: Demote) -> None:
        self._answers.expect(order)
        if self._server is not None:
            self._server.demote(order)
        self._mover.submit(order)

    def write(self, order: Write) -> None:
        if order.receiver.rank and self._server is not None:
            self._server.write(order)
        else:
            self._sender.submit(order.write, order.receiver.session, order.slices)

    def retire(self, order: RetireEngine) -> None:
        if order.rank and self._server is not None:
            self._server.retire(order)
        else:
            self._sender.retire(order.write)
