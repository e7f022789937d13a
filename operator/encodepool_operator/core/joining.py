"""Which manifest should be in the file, from what was last heard of each source. Pure; times in seconds.

A source is one pool's list, or the manifest with the prefill and decode workers. Nothing is said before
every source was heard of once, so the file never holds half a list. A list that cannot be used leaves
that source's last good one in force. One that has disappeared counts as it was for ``GONE_S``: the
operator writes a deleted list again at once, and SMG loses a worker that comes back within 5 s for up
to 60 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .manifest import ManifestProblems, Merged, Worker, merge, read_list, read_manifest

GONE_S = 5.0


@dataclass(slots=True)
class _Source:
    read_as_manifest: bool
    workers: Sequence[Worker] | None = None
    text: str | None = None
    gone_at_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Joint:
    """``merged`` is None as long as nothing may be written. ``problems`` say why the file is not, or is
    not all, what the sources say now. ``wake_at_s``: when time alone will change the answer."""

    merged: Merged | None
    problems: tuple[str, ...]
    wake_at_s: float | None


@dataclass(slots=True)
class Joiner:
    """``pools`` name the sources, in the order in which their workers are written; ``manifest`` names
    the one with the other roles, "" if there is none."""

    pools: Sequence[str]
    manifest: str = ""
    _sources: dict[str, _Source] = field(init=False)

    def __post_init__(self) -> None:
        self._sources = {name: _Source(False) for name in self.pools}
        if self.manifest:
            self._sources[self.manifest] = _Source(True)

    def heard(self, source: str, text: str | None, now_s: float) -> None:
        """``text`` is what the source holds now, None if it is not there."""
        one = self._sources[source]
        if text is None:
            if one.gone_at_s is None:
                one.gone_at_s = now_s
            one.problem = "is not there"
            return
        one.gone_at_s, one.problem = None, ""
        if text == one.text:
            return
        try:
            one.workers = read_manifest(text) if one.read_as_manifest else read_list(text)
        except ManifestProblems as error:
            one.problem = str(error)
        else:
            one.text = text

    def joint(self, now_s: float) -> Joint:
        problems = [f"{name}: {one.problem}" for name, one in self._sources.items() if one.problem]
        if any(one.workers is None for one in self._sources.values()):
            return Joint(None, tuple(problems) or ("not every list has been read yet",), None)
        waits = [one.gone_at_s + GONE_S for one in self._sources.values() if one.gone_at_s is not None]
        base = self._now(self._sources[self.manifest], now_s) if self.manifest else ()
        lists = [(name, self._now(self._sources[name], now_s)) for name in self.pools]
        wake_at_s = min((at_s for at_s in waits if at_s > now_s), default=None)
        try:
            return Joint(merge(base, lists), tuple(problems), wake_at_s)
        except ManifestProblems as error:
            return Joint(None, (*problems, *error.problems), wake_at_s)

    @staticmethod
    def _now(one: _Source, now_s: float) -> Sequence[Worker]:
        # A manifest that is taken away says nothing about its workers: they run without it.
        gone = one.gone_at_s is not None and now_s >= one.gone_at_s + GONE_S
        return () if gone and not one.read_as_manifest else one.workers or ()
