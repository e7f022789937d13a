"""The peers a sender knows, at most so many; the longest unused idle one makes room for another."""

from collections import Counter
from collections.abc import Callable, Iterator

from .sender_types import Peer, PeerState


class PeerBook:
    """``forget`` is told the session of each peer that is dropped. The sender's lock guards it."""

    def __init__(self, max_peers: int, forget: Callable[[str], None]) -> None:
        self._max_peers = max_peers
        self._forget = forget
        self._peers: dict[str, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def used(self, session: str, now_s: float) -> Peer:
        """The peer, made if need be, as used now. Peers with something going on are never dropped."""
        peer = self._peers.get(session)
        if peer is None:
            idle = [one for one in self if one.is_idle] if len(self._peers) >= self._max_peers else []
            if idle:
                oldest = min(idle, key=lambda one: one.used_s)
                del self._peers[oldest.session]
                self._forget(oldest.session)
            peer = self._peers[session] = Peer(session)
        peer.used_s = now_s
        return peer

    def states(self) -> dict[str, int]:
        """How many peers are in each state."""
        counts = Counter(peer.state for peer in self)
        return {state.value: counts[state] for state in PeerState}
