"""Is the loop alive, and may the gateway send us work? Judged from rank 0's own reports.

Readiness has three phases and moves in one direction only: starting, ready, withdrawn. A gateway
that sees an endpoint go and come back within seconds loses it for up to a minute, so one that was
lost stays lost; the pod is replaced.
"""

from dataclasses import dataclass
from enum import Enum

from ..wire.intake import State

MAX_TURN_AGE_S = 5.0
"""The loop reports at least once a second."""

MIN_BATCH_PATIENCE_S = 60.0
BATCH_PATIENCE_FACTOR = 10.0


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Report:
    """One verdict; ``reason`` is empty where it is good."""

    good: bool
    reason: str = ""


GOOD = Report(True)


class Health:
    """``n_ranks`` must be in the route table. Times are monotonic seconds, handed in."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self._phase = Phase.STARTING
        self._withdrawn_because = ""
        self.state: State | None = None
        self.draining = False
        self._batch_seen_s = 0.0

    @property
    def phase(self) -> Phase:
        return self._phase

    def heard(self, state: State) -> None:
        """A newer report of the loop."""
        if self.state is None or state.turn_s >= self.state.turn_s:
            self.state = state

    def drain(self, reason: str) -> None:
        self.draining = True
        self._withdraw(reason)

    def turn_age_s(self, now_s: float) -> float | None:
        return None if self.state is None else max(0.0, now_s - self.state.turn_s)

    def batch_age_s(self, now_s: float) -> float | None:
        """Age of the running batch: as reported, and older by the age of the report."""
        if self.state is None or self.state.batch_age_s is None:
            return None
        return self.state.batch_age_s + max(0.0, now_s - self.state.turn_s)

    def alive(self, now_s: float) -> Report:
        """Does the loop make progress? A loop that never reported is starting, which is fine."""
        turn_age_s = self.turn_age_s(now_s)
        if turn_age_s is None:
            return GOOD
        if turn_age_s > MAX_TURN_AGE_S:
            return Report(False, f"the loop's last turn was {turn_age_s:.1f} s ago")
        batch_age_s = self.batch_age_s(now_s)
        expected_s = (self.state.batch_expected_s if self.state else None) or 0.0
        patience_s = max(MIN_BATCH_PATIENCE_S, BATCH_PATIENCE_FACTOR * expected_s)
        if batch_age_s is not None and batch_age_s > patience_s:
            return Report(
                False, f"a batch has been running for {batch_age_s:.0f} s, {expected_s:.1f} s expected"
            )
        return GOOD

    def ready(self, now_s: float, *, n_routed: int, serving: bool) -> Report:
        """May the gateway send work? ``n_routed`` ranks registered, ``serving``: the gRPC port is open."""
        if self._phase is Phase.WITHDRAWN:
            return Report(False, self._withdrawn_because)
        alive = self.alive(now_s)
        if self._phase is Phase.READY:
            if not alive.good:
                self._withdraw(alive.reason)
            return alive
        missing = self._missing(alive, n_routed, serving)
        if missing:
            return Report(False, missing)
        self._phase = Phase.READY
        return GOOD

    def _missing(self, alive: Report, n_routed: int, serving: bool) -> str:
        """What a start still lacks."""
        if self.state is None:
            return "the loop has not reported yet: the model is loading"
        if not alive.good:
            return alive.reason
        if n_routed < self._n_ranks:
            return f"{n_routed} of {self._n_ranks} ranks are in the route table"
        if not self.state.routed:
            return "the loop is not registered yet"
        if not serving:
            return "the gRPC port is not open"
        return ""

    def _withdraw(self, reason: str) -> None:
        if self._phase is not Phase.WITHDRAWN:
            self._phase = Phase.WITHDRAWN
            self._withdrawn_because = reason
