"""One pool at a time: snapshot, plan, act, until the plan is empty; then wait for news or the clock.

What goes wrong with a pool stays with that pool: it is tried again after a wait that grows, and what the
API server refuses is told in the pool's status.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from encodepool_operator.api.parse import InvalidPool, parse_pool
from encodepool_operator.api.types import EncodePool
from encodepool_operator.core import actions as planned
from encodepool_operator.core import status as statuses
from encodepool_operator.core.memo import Memo
from encodepool_operator.core.plan import plan, upkeep
from encodepool_operator.core.snapshot import Trouble
from encodepool_operator.kube.backoff import wait_s
from encodepool_operator.kube.errors import KubeError, NotLeading

from .events import EventPoster, Notice, grouped, notices
from .execute import Executor, Outcome, Work
from .gate import Gate, key_of
from .gauges import PoolGauges
from .metrics import Metrics
from .observe import Observer
from .pools import PoolKey, Pools
from .queue import KeyQueue

MAX_STEPS = 20
"""Plans of one pool in a row; others are let in after that."""

CONFLICT_S = 0.05
FAILURE_S = 1.0
"""First waits after a failed precondition and after a failure."""

STRANGER_S = 10.0
"""How often an object of our name that we cannot watch is looked at."""

SETTLE_S = 0.02
"""After a look at a pool the next one waits at least so long: the events of a burst come together."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _State:
    """What is kept of a pool between looks; all of it may be lost.

    ``source`` is what ``pool`` was parsed from. ``strangers`` are objects of our names that are not in
    the cache, because they lack our label. ``rested_s``: when the last look ended, ``took_s`` how long
    it took.
    """

    gate: Gate
    memo: Memo = field(default_factory=Memo)
    source: tuple[Any, ...] = ()
    pool: EncodePool | None = None
    problems: tuple[str, ...] = ()
    failures: int = 0
    strangers: set[str] = field(default_factory=set)
    rested_s: float = 0.0
    took_s: float = 0.0


class Reconciler:
    """``clock`` is monotonic, ``now`` the wall clock that the planner is given."""

    def __init__(
        self,
        pools: Pools,
        observer: Observer,
        executor: Executor,
        queue: KeyQueue[PoolKey],
        poster: EventPoster,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._pools = pools
        self._observer = observer
        self._executor = executor
        self._queue = queue
        self._poster = poster
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._random = random.Random()
        self._states: dict[PoolKey, _State] = {}
        self.gauges = PoolGauges(metrics, clock, now)
        self.schema_problem = ""

    def changed(self, key: PoolKey) -> None:
        """Something of this pool is news: look at it soon."""
        state = self._states.get(key)
        pause_s = 0.0
        if state is not None:
            pause_s = state.rested_s + max(SETTLE_S, min(state.took_s, 1.0)) - self._clock()
        self._queue.add(key, max(0.0, pause_s))

    async def work(self) -> None:
        """Look at pools as they come, until cancelled. Raises NotLeading."""
        while True:
            key = await self._queue.take()
            began_s = self._clock()
            after_s: float | None = None
            try:
                after_s = await self._look(key)
            except NotLeading:
                raise
            except Exception as error:
                # A defect that one pool shows must not stop the others.
                log.error("a pool could not be reconciled", pool="/".join(key), exc_info=error)
                self._metrics.reconcile_failures.labels("defect").inc()
                after_s = self._failed(self._state(key), FAILURE_S)
            finally:
                ended_s = self._clock()
                state = self._states.get(key)
                if state is not None:
                    state.rested_s, state.took_s = ended_s, ended_s - began_s
                self._metrics.reconcile_seconds.observe(ended_s - began_s)
                if after_s is not None:
                    self._queue.add(key, after_s)
                self._queue.done(key)

    async def _look(self, key: PoolKey) -> float | None:
        """Bring the pool on as far as it goes now; seconds until the next look, None = when told."""
        for _ in range(MAX_STEPS):
            held = self._pools.get(key)
            if held is None or held.pool is None:
                self._states.pop(key, None)
                self._queue.forget(key)
                self.gauges.forget(key)
                return None
            if "deletionTimestamp" in held.pool["metadata"]:
                return None  # the garbage collector takes it from here
            state = self._state(key)
            usable = self._parse(state, held.pool)
            if usable is None and (wait_for_s := await self._tell_invalid(state, held.pool)) is not None:
                return wait_for_s
            pool = usable or self._observer.last_used(key, Work.of_invalid(held.pool).meta)
            if pool is None:
                return None
            await self._recheck_strangers(key, state)
            snapshot = self._observer.snapshot(key, pool, state.strangers, self._troubles(state))
            if usable is None:
                step = upkeep(snapshot, state.problems, self._now(), state.memo)
            else:
                step = plan(snapshot, self._now(), state.memo)
            self.gauges.note(key, snapshot, state.memo)
            passed = state.gate.pass_on(step.actions, snapshot.status)
            if passed.cleared:
                continue  # a refusal has lost its cause, and the status told of it
            if passed.asks:
                if not await self._ask(state, Work.of(pool, held.pool), passed.asks):
                    return self._failed(state, FAILURE_S)
                continue
            if not passed.actions:
                state.failures = 0
                return self._next_look(step.wake_at, passed.wait_s, state)
            outcome = await self._executor.carry_out(Work.of(pool, held.pool), passed.actions)
            self._note_done(state, held.pool, outcome)
            if not outcome.complete:
                wait_for_s = self._after_trouble(key, state, held.pool, outcome)
                if wait_for_s > 0:
                    return wait_for_s
        return 0.0

    def _state(self, key: PoolKey) -> _State:
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State(Gate(self._clock, self._random))
        return state

    def _parse(self, state: _State, obj: Mapping[str, Any]) -> EncodePool | None:
        """The pool, parsed again only when something else than its status has changed."""
        meta = obj["metadata"]
        source = (meta.get("uid"), meta.get("generation"), meta.get("labels"), meta.get("annotations"))
        if source != state.source:
            try:
                state.pool, state.problems = parse_pool(obj), ()
            except InvalidPool as error:
                state.pool, state.problems = None, tuple(str(problem) for problem in error.problems)
            state.source = source
            state.gate.open()
        return state.pool

    def _troubles(self, state: _State) -> tuple[Trouble, ...]:
        schema = (Trouble("SchemaOutdated", self.schema_problem),) if self.schema_problem else ()
        return (*schema, *(Trouble("WriteRefused", message) for message in state.gate.refusals))

    async def _tell_invalid(self, state: _State, obj: Mapping[str, Any]) -> float | None:
        """Say in the status what is wrong with the spec; in how many seconds to try again, None if done."""
        meta, before = obj["metadata"], obj.get("status") or None
        wanted = statuses.invalid(int(meta.get("generation", 0)), state.problems, before, self._now())
        if wanted == before:
            return None
        write = planned.WriteStatus(wanted, "the spec cannot be used")
        outcome = await self._executor.carry_out(Work.of_invalid(obj), [write])
        if not outcome.complete:
            return self._failed(state, FAILURE_S)
        self._poster.post(obj, Notice("Warning", "InvalidSpec", "; ".join(state.problems)))
        return None

    # After a look

    def _note_done(self, state: _State, obj: Mapping[str, Any], outcome: Outcome) -> None:
        state.gate.note(outcome.done, outcome.refused)
        for action in outcome.done:
            self._metrics.actions.labels(type(action).__name__).inc()
            if isinstance(action, planned.StopGroup):
                failure = action.record.failure
                if failure is not None and failure.incarnation == action.record.incarnation:
                    self._metrics.restarts.labels(failure.reason).inc()
        for notice in notices(outcome.done):
            self._poster.post(obj, notice)

    def _next_look(self, wake_at: float | None, held_back_s: float | None, state: _State) -> float | None:
        waits = [held_back_s] if held_back_s is not None else []
        if wake_at is not None:
            waits.append(max(0.0, wake_at - self._now()))
        if state.strangers:
            waits.append(STRANGER_S)
        return min(waits, default=None)

    def _after_trouble(self, key: PoolKey, state: _State, obj: Mapping[str, Any], outcome: Outcome) -> float:
        """In how many seconds to look again; 0 = at once."""
        count = self._metrics.reconcile_failures
        told: list[Notice] = []
        for name in outcome.foreign:
            count.labels("foreign").inc()
            if not self._executor.sees(key[0], name) and name not in state.strangers:
                state.strangers.add(name)
                told.append(Notice("Warning", "NameTaken", f"{name} is there and is not ours"))
        count.labels("refused").inc(len(outcome.refused))
        told += [Notice("Warning", "WriteRefused", message) for message in outcome.refused.values()]
        for notice in grouped(told):
            self._poster.post(obj, notice)
        if outcome.failed:
            count.labels("failed").inc()
            return self._failed(state, FAILURE_S)
        if outcome.changed or outcome.foreign:
            count.labels("changed").inc(outcome.changed)
            again_s = self._failed(state, CONFLICT_S)
            return again_s if state.failures > 1 else 0.0  # the cache has been brought up to date
        return 0.0  # the gate holds back what was refused, so the next look is about telling of it

    async def _ask(self, state: _State, work: Work, starts: Sequence[planned.StartGroup]) -> bool:
        """Whether what was refused would be refused again; False if the server does not say now."""
        for start in starts:
            try:
                why = await self._executor.ask(work, start)
            except KubeError as error:
                log.warning("cannot ask now", pool=work.meta.name, group=start.group, why=str(error))
                self._metrics.reconcile_failures.labels("failed").inc()
                return False
            state.gate.note([] if why else [start], {key_of(start): why} if why else {})
        return True

    def _failed(self, state: _State, base_s: float) -> float:
        state.failures += 1
        return wait_s(state.failures, base_s, self._random)

    async def _recheck_strangers(self, key: PoolKey, state: _State) -> None:
        for name in sorted(state.strangers):
            try:
                if self._executor.sees(key[0], name) or not await self._executor.is_there(key[0], name):
                    state.strangers.discard(name)
            except KubeError as error:
                log.info("cannot look at an object in the way", object=name, why=str(error))
