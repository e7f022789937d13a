"""The probes under way, each in a thread, and the peers that wait until they may be probed."""

import threading
from collections.abc import Callable, Iterator

from .sender_types import Peer, Probe, SenderLimits


class Probes:
    """At most ``max_probes``; those of peers that did not answer the last time are half of them at most.

    A probe of a frozen peer lasts a minute on Mooncake, whoever has stopped waiting for it. ``run``
    carries out a probe. The sender's lock guards this.
    """

    def __init__(self, run: Callable[[Probe], None], limits: SenderLimits) -> None:
        self._run = run
        self._limits = limits
        self._under_way: set[Probe] = set()
        self._waiting: dict[Peer, float] = {}  # since when

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Probe]:
        return iter(self._under_way)

    def __contains__(self, peer: Peer) -> bool:
        """Whether it is being probed or waits for it."""
        return peer.probe is not None or peer in self._waiting

    @property
    def room(self) -> int:
        return self._limits.max_probes - len(self._under_way)

    @property
    def room_for_silent(self) -> int:
        """How many peers may be probed that did not answer the last time."""
        silent = sum(probe.peer.silent for probe in self._under_way)
        return min(self.room, self._limits.max_probes // 2 - silent)

    def room_for(self, peer: Peer) -> int:
        return self.room_for_silent if peer.silent else self.room

    def begin(self, peer: Peer, now_s: float) -> None:
        self._waiting.pop(peer, None)
        probe = peer.probe = Probe(peer, now_s)
        probe.thread = threading.Thread(target=self._run, args=(probe,), name="encodepool-probe", daemon=True)
        self._under_way.add(probe)
        probe.thread.start()

    def end(self, probe: Probe) -> None:
        self._under_way.discard(probe)
        probe.peer.probe = None

    def wait(self, peer: Peer, now_s: float) -> None:
        """Until there is room, at most ``probe_timeout_s``."""
        self._waiting[peer] = now_s

    def begin_waiting(self, now_s: float) -> None:
        """Those that have waited longest, as many as there is room for."""
        for peer in list(self._waiting)[: max(0, self.room)]:
            self.begin(peer, now_s)

    def kept_waiting(self) -> list[tuple[Peer, float]]:
        """Who waits, and since when."""
        return list(self._waiting.items())

    def give_up(self, peer: Peer) -> None:
        """Nobody waits for its probe any more."""
        self._waiting.pop(peer, None)
