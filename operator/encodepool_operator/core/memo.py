"""What a shell may keep between the plans of one pool, so that an event costs what its group costs.

It holds results of pure functions with what they were computed from; throwing it away at any time
changes nothing but the time the next plan takes.
"""

from dataclasses import dataclass, field

from .endpoints import Endpoint, Lines, lines_of
from .group import GroupRules, GroupView, derive
from .snapshot import GroupSnapshot


@dataclass(frozen=True, slots=True)
class _Derived:
    rules: GroupRules
    at: float
    view: GroupView

    def holds(self, group: GroupSnapshot, rules: GroupRules, now: float) -> bool:
        stale_at = self.view.wake_at
        in_time = self.at <= now and (stale_at is None or now < stale_at)
        return self.view.source is group and self.rules == rules and in_time


@dataclass(slots=True)
class Memo:
    """One per pool, handed to every ``plan`` of it. Indices that are gone are dropped."""

    views: dict[int, _Derived] = field(default_factory=dict)
    lines: dict[int, tuple[Endpoint, Lines]] = field(default_factory=dict)

    def view(self, group: GroupSnapshot, rules: GroupRules, now: float) -> GroupView:
        """``derive``, computed again only when this group's snapshot is another object, the rules have
        changed, or time has made the old view stale."""
        known = self.views.get(group.index)
        if known is not None and known.holds(group, rules, now):
            return known.view
        view = derive(group, rules, now)
        recorded = group.object.record if group.object is not None else None
        if view.record == recorded and view.failure is None and view.seal is None:
            self.views[group.index] = _Derived(rules, now, view)
        else:  # it holds now itself
            self.views.pop(group.index, None)
        return view

    def rendered(self, pool: str, entry: Endpoint) -> Lines:
        known = self.lines.get(entry.group)
        if known is not None and known[0] == entry:
            return known[1]
        lines = lines_of(pool, entry)
        self.lines[entry.group] = (entry, lines)
        return lines

    def forget_all_but(self, indices: frozenset[int]) -> None:
        for index in self.views.keys() - indices:
            del self.views[index]
        for index in self.lines.keys() - indices:
            del self.lines[index]
