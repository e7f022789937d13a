"""The encode loop: the one thread that runs the pipeline.

A turn takes what has arrived, lets the pipeline decide once, and hands its instructions out; none
of that waits. Between turns it sleeps until something arrives, the pipeline's next deadline, or a
second has passed. After a turn it reports its state to the frontend: a loop that no longer turns
is noticed by the report that does not come.
"""

import math
import time
from collections.abc import Callable, Sequence

from ..core.events import DrainStarted, Event, Tick, WriteFailed
from ..core.instructions import (
    Admit,
    Conclude,
    Demote,
    Drained,
    DropPixels,
    Instruction,
    Outcome,
    Refuse,
    RetireEngine,
    ReturnCredit,
    RunBatch,
    SendStatus,
    Write,
)
from ..core.pipeline import Pipeline
from ..logs import LimitedLog, get_logger
from ..wire import intake
from .inbox import Inbox
from .intake_socket import BackChannel
from .metrics import Metrics, pipeline_samples
from .pixels import PixelTable
from .ranks import Ranks
from .status_sender import StatusSender

MAX_SLEEP_S = 1.0
RETRY_UNSENT_S = 0.05
REPORT_EVERY_S = 0.1
"""At most ten reports a second: a busy loop has hundreds of turns."""

METRICS_EVERY_S = 1.0

STORY_RECORDS = 12
"""Of a failed room's story in its log line: the last ones say how it failed."""

FAREWELL_S = 1.0
"""For telling receivers when this process has to end."""

FAREWELL_BEHIND_S = 1.5
"""The same, where there are so many that a second is not enough."""

DRAIN_UNASKED_S = 5.0
"""After SIGTERM the frontend says when to drain; if it does not, the loop starts by itself."""


class Loop:
    """Owns the pipeline, and everything only the owner thread may touch. ``run`` is used once."""

    def __init__(
        self,
        pipeline: Pipeline,
        inbox: Inbox,
        *,
        back: BackChannel,
        ranks: Ranks,
        statuses: StatusSender,
        pixels: PixelTable,
        metrics: Metrics,
        tiers: Sequence[str],
        drain_s: float,
        more_samples: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._pipeline = pipeline
        self._inbox = inbox
        self._back = back
        self._ranks = ranks
        self._statuses = statuses
        self._pixels = pixels
        self._metrics = metrics
        self._tiers = tiers
        self._drain_s = drain_s
        self._more_samples = more_samples
        self._drained = False
        self._draining = False
        self._routed = False
        self._asked_to_end_s = math.inf
        self._lost: str | None = None
        self._farewell_until_s = math.inf
        self._reported_s = -math.inf
        self._reported_routed = False
        self._measured_s = -math.inf
        self._samples: dict[str, float] = {}
        self._log = get_logger()
        self._failures = LimitedLog()

    def routed(self) -> None:
        """The bootstrap server lists every rank. From any thread; a report says so at once."""
        self._routed = True
        self._inbox.answer(Tick())

    def ask_to_end(self) -> None:
        """SIGTERM came. From any thread or a signal handler; noticed within a second."""
        self._asked_to_end_s = min(self._asked_to_end_s, time.monotonic())

    def lose(self, reason: str) -> None:
        """This process cannot go on: ``run`` ends within ``FAREWELL_S``. From any thread."""
        self._lost = self._lost or reason
        self._inbox.answer(Tick())

    def run(self) -> str | None:
        """Until everything accepted has been drained, or until everyone has been told who may be since
        ``lose`` was called: then its reason. Raises WorkerError where the loop cannot go on.
        """
        while not self._drained and not self._is_over(time.monotonic()):
            self._turn(self._inbox.take(self._sleep_s()))
        return self._lost

    def _is_over(self, now_s: float) -> bool:
        if now_s < self._farewell_until_s:
            return False
        due_s = self._pipeline.next_deadline_s()
        is_behind = due_s is not None and due_s <= now_s
        return not is_behind or now_s >= self._farewell_until_s + FAREWELL_BEHIND_S - FAREWELL_S

    def _sleep_s(self) -> float:
        now_s = time.monotonic()
        wake_s = min(now_s + MAX_SLEEP_S, self._farewell_until_s)
        deadline_s = self._pipeline.next_deadline_s()
        if deadline_s is not None:
            wake_s = min(wake_s, deadline_s)
        if self._back.has_unsent:
            wake_s = min(wake_s, now_s + RETRY_UNSENT_S)
        return max(0.0, wake_s - now_s)

    def _turn(self, events: Sequence[Event]) -> None:
        now_s = time.monotonic()
        if any(isinstance(event, DrainStarted) for event in events):
            self._draining = True
        if not self._draining and now_s >= self._asked_to_end_s + DRAIN_UNASKED_S:
            self._log.warning("nobody asked for the drain; starting it")
            self._draining = True
            events = [*events, DrainStarted(now_s + self._drain_s)]
        if self._lost is not None and math.isinf(self._farewell_until_s):
            # A drain without time: every room fails, and whoever has no write under way is told.
            self._farewell_until_s = now_s + FAREWELL_S
            events = [*events, DrainStarted(now_s)]
        for instruction in self._pipeline.handle_all(events or (Tick(),), now_s):
            if self._lost is None or not self._left_out(instruction):
                self._carry_out(instruction)
        self._statuses.close_unused()
        self._back.flush(self._report(time.monotonic()))

    def _left_out(self, instruction: Instruction) -> bool:
        """Nothing is begun any more, and a write that never began may be told at once."""
        if isinstance(instruction, Write):
            self._inbox.answer(WriteFailed(instruction.write, "the worker ends", False))
        return isinstance(instruction, Write | RunBatch | Demote | RetireEngine)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Write():
                self._ranks.write(instruction)
            case RunBatch():
                self._ranks.run(instruction)
            case Demote():
                self._ranks.demote(instruction)
            case SendStatus():
                receiver = instruction.receiver
                self._statuses.send(receiver.endpoint, instruction.room, instruction.status, receiver.rank)
            case Admit():
                self._back.send(intake.Admitted(seq=instruction.seq, repeated=instruction.repeated))
            case Refuse():
                self._back.send(
                    intake.Refused(
                        seq=instruction.seq,
                        kind=instruction.kind,
                        field=instruction.field,
                        reason=instruction.reason,
                    )
                )
            case ReturnCredit():
                self._back.send(intake.Credit(seq=instruction.seq))
            case DropPixels():
                self._pixels.drop(instruction.pixels)
            case RetireEngine():
                self._ranks.retire(instruction)
            case Conclude():
                self._conclude(instruction)
            case Drained():
                self._log.info("drained")
                self._back.send(intake.Drained())
                self._drained = True

    def _conclude(self, conclude: Conclude) -> None:
        self._metrics.add("encodepool_rooms_total", outcome=conclude.outcome.value)
        if conclude.hit_tier is not None:
            tier = self._tiers[conclude.hit_tier]
            self._metrics.add("encodepool_hit_bytes_total", conclude.nbytes, tier=tier)
        if conclude.outcome is Outcome.FAILED:
            story = " | ".join(self._pipeline.story(conclude.room)[-STORY_RECORDS:])
            self._failures.warning("room failed", room=conclude.room, reason=conclude.reason, story=story)

    def _report(self, now_s: float) -> intake.State | None:
        """What the frontend is to hear of this turn; None where it has just been told."""
        is_news = self._drained or self._routed != self._reported_routed
        if now_s < self._reported_s + REPORT_EVERY_S and not is_news:
            return None
        self._reported_s, self._reported_routed = now_s, self._routed
        snapshot = self._pipeline.snapshot()
        if now_s >= self._measured_s + METRICS_EVERY_S or self._drained:
            self._measured_s = now_s
            self._samples = (
                pipeline_samples(snapshot, now_s, self._tiers)
                | self._metrics.snapshot()
                | self._more_samples()
            )
        since_s = snapshot.batch_since_s
        return intake.State(
            turn_s=now_s,
            routed=self._routed,
            queue_items=snapshot.queue_items,
            queue_cost=snapshot.queue_cost,
            batch_age_s=None if since_s is None else max(0.0, now_s - since_s),
            batch_expected_s=snapshot.batch_expected_s,
            tokens_per_s=snapshot.tokens_per_s,
            predicted_wait_s=snapshot.predicted_wait_s,
            counters=self._samples,
        )
