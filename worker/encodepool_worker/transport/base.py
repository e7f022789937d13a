"""What the sender needs of a transfer engine, and what it answers about each write.

An engine moves bytes one-sided: it writes from memory registered here to memory registered at a
peer, which is named by its session (``host:port``). Engines: ``mooncake`` (TCP or RDMA) and
``tcp`` (pure Python, with faults on request).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

RawSlice = tuple[int, int, int]
"""(address here, address at the peer, bytes)."""

MAX_SLICES_PER_BATCH = 512
"""Mooncake's TCP transport refuses a batch beyond 1,024 queued transfers a peer; half of that."""


class Engine(Protocol):
    """One transfer engine. All methods may be called from any thread, and block."""

    @property
    def session(self) -> str:
        """Names this engine to its peers: ``host:port``."""
        ...

    def register(self, ptr: int, nbytes: int, *, receives: bool = True) -> None:
        """Make [ptr, ptr + nbytes) a source here and a target for peers. Raises RegistrationFailed.

        Without ``receives`` peers may not write there, where the engine can keep them from it:
        ``tcp`` does, Mooncake knows no such memory (any peer may write whatever is registered).
        """
        ...

    def unregister(self, ptr: int) -> None:
        """Undo ``register``; unknown addresses are ignored."""
        ...

    def probe(self, session: str) -> bool:
        """Whether the peer answers. May block for a minute on a frozen one; disturbs no write."""
        ...

    def write(self, session: str, slices: Sequence[RawSlice]) -> None:
        """Write all slices and return when the peer has them.

        Raises WriteRefused when nothing of it can land any more, WriteTimedOut when it may.
        """
        ...

    def close(self) -> None:
        """Free the engine. Afterwards nothing it began can read memory here. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """The bytes of write ``write_id`` are in the peer's memory."""

    write_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A write failed. With ``may_land_late`` exactly one Settled follows for it."""

    write_id: int
    reason: str
    may_land_late: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """A write that timed out can touch memory no more.

    ``by_probe``: the peer has answered a probe since, so what is under way lands within moments;
    otherwise its session is gone or the engine that timed out has been closed.
    """

    write_id: int
    by_probe: bool


SenderEvent = Done | Failed | Settled
