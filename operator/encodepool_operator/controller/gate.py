"""Which actions of a plan are carried out now, and which wait.

Three things hold an action back. The list and the status are written at most once a second, so that a burst
of changes is one write; the status waits for the list that it speaks of, and so does a stop that could come
later: the list must have lost a group before its workers are told to end. A group's object that somebody
edits again and again is repaired at once only the first time. And what the API server has refused is not
tried again before a wait that grows: the rest of the pool goes on meanwhile, and the status tells of it. A
refused start uses up a number, so before it is tried again it is asked for without effect.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from encodepool_operator.core import actions as planned
from encodepool_operator.core.actions import Action
from encodepool_operator.kube.backoff import wait_s

WRITE_PERIOD_S = 1.0
REPAIR_PERIOD_S = 10.0
"""Another controller may insist on its edit as we do: the two must not write as fast as they can."""

REFUSAL_S = 5.0
"""First wait after a refusal."""

ActionKey: TypeAlias = tuple[str, int | None, str]


def key_of(action: Action) -> ActionKey:
    """What stays the same when an action is planned again."""
    name = getattr(action, "name", "") or getattr(action, "pod", "")
    return type(action).__name__, action.group, str(name)


@dataclass(frozen=True, slots=True)
class Passed:
    """``wait_s``: when those held back are due, None if there are none. ``asks``: starts to be asked for
    without effect; ``note`` takes the answers. ``cleared``: a refusal has ended, because what was refused
    is not planned any more."""

    actions: list[Action]
    asks: list[planned.StartGroup]
    wait_s: float | None
    cleared: bool


@dataclass(slots=True)
class _Refusal:
    message: str
    times: int
    until_s: float


class Gate:
    """One per pool."""

    def __init__(self, clock: Callable[[], float], random_source: random.Random) -> None:
        self._clock = clock
        self._random = random_source
        self._written_s: dict[str, float] = {}
        self._repaired_s: dict[int, float] = {}
        self._refused: dict[ActionKey, _Refusal] = {}

    @property
    def refusals(self) -> tuple[str, ...]:
        return tuple(sorted({refusal.message for refusal in self._refused.values()}))

    def open(self) -> None:
        """The pool has changed: what was refused may be tried again at once."""
        self._refused.clear()

    def note(self, done: Sequence[Action], refused: Mapping[ActionKey, str]) -> None:
        """What became of the actions that were passed on, or of the starts that were asked for."""
        now_s = self._clock()
        for action in done:
            key = key_of(action)
            self._written_s[key[0]] = now_s
            if isinstance(action, planned.RepairGroup):
                self._repaired_s[action.group] = now_s
            self._refused.pop(key, None)
        for key, message in refused.items():
            before = self._refused.get(key)
            times = before.times + 1 if before is not None else 1
            self._refused[key] = _Refusal(message, times, now_s + wait_s(times, REFUSAL_S, self._random))

    def pass_on(self, actions: Sequence[Action], status: Mapping[str, Any] | None) -> Passed:
        """``status`` is the pool's as it is now."""
        now_s = self._clock()
        planned_keys = {key_of(action) for action in actions}
        outdated = [key for key in self._refused if key not in planned_keys]
        for key in outdated:
            del self._refused[key]
        waits: list[float] = []
        out: list[Action] = []
        asks: list[planned.StartGroup] = []
        blocked = list_waits = False
        for action in actions:
            due_s = self._due_s(action)
            if due_s > now_s:
                waits.append(due_s - now_s)
                # After an action for the whole pool that cannot be done, only the status is written.
                blocked = blocked or (action.group is None and key_of(action) in self._refused)
                list_waits = list_waits or isinstance(action, planned.WriteEndpoints)
            elif isinstance(action, planned.StartGroup) and key_of(action) in self._refused:
                asks.append(action)
            elif isinstance(action, planned.WriteStatus):
                if blocked or not list_waits:
                    out.append(action)
            elif not blocked and not (list_waits and _can_wait(action)):
                out.append(action)
        return Passed(_numbered(out, actions, status), asks, min(waits, default=None), bool(outdated))

    def _due_s(self, action: Action) -> float:
        key = key_of(action)
        refusal = self._refused.get(key)
        due_s = refusal.until_s if refusal is not None else 0.0
        if isinstance(action, planned.WriteEndpoints | planned.WriteStatus):
            due_s = max(due_s, self._written_s.get(key[0], -WRITE_PERIOD_S) + WRITE_PERIOD_S)
        if isinstance(action, planned.RepairGroup):
            due_s = max(due_s, self._repaired_s.get(action.group, -REPAIR_PERIOD_S) + REPAIR_PERIOD_S)
        return due_s


def _can_wait(action: Action) -> bool:
    """Whether it ends a group that has not failed. What has failed serves nobody any more."""
    if isinstance(action, planned.StopGroup):
        failure = action.record.failure
        return failure is None or failure.incarnation != action.record.incarnation
    return isinstance(action, planned.DeleteGroup)


def _numbered(out: list[Action], actions: Sequence[Action], status: Mapping[str, Any] | None) -> list[Action]:
    """Without starts no number is used, so none is stored: neither alone nor with the status."""
    if any(isinstance(action, planned.StartGroup) for action in out):
        return out
    if not any(isinstance(action, planned.ReserveIncarnations) for action in actions):
        return out
    kept: list[Action] = []
    before = dict(status or {})
    for action in out:
        if isinstance(action, planned.WriteStatus):
            wanted = {**action.status, "lastIncarnation": before.get("lastIncarnation", 0)}
            if wanted == before:
                continue
            action = replace(action, status=wanted)
        elif isinstance(action, planned.ReserveIncarnations):
            continue
        kept.append(action)
    return kept
