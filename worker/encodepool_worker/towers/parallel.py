"""Several ranks that compute one tower together, and stay together when one of them fails.

Who does what, in this order, on every rank:

1. ``join`` once per process, from whichever thread; all ranks at the same (host, port): the
   dist-init address. It returns when all ranks are there, GroupLost after ``JOIN_TIMEOUT_S``.
   ``word`` must be the same on all: whoever has another one is sent away before he is one of them,
   and asks again for ``WORD_PATIENCE_S``, as rank 0 may be of a start that is just ending.
   Rank 0 listens at that address only. gloo (CPU) opens further connections between the ranks, on the
   interface that ``GLOO_SOCKET_IFNAME`` names (``lo`` for a group of one machine), else on the
   one of the host's name: set the variable in the environment that starts the rank.
   With a GPU the ranks of one host have a device each: pass ``cuda:N`` here and to ``load_tower``.
2. ``load_tower(..., parallel=...)`` reads this rank's part of the weights and returns once all
   ranks have theirs. Rank 0 may ``publish`` what the others ``look_up``.
3. ``tower.warm_up()`` on all ranks, then for every batch **the same number of votes on all**:
   ``tower.encode(items, batch=number)``, or ``agree(False)`` instead of it on a rank that cannot
   take part (its pixels are gone, its store is full); then ``agree(ok)`` once more where something
   after the tower may fail on one rank alone.

An exception in one rank's forward would leave the others inside an all-reduce for ever. But a
batch's all-reduces are known beforehand (two per layer, of a known shape), so a rank that failed
goes through the remaining ones with zeros, and says so in the vote at the end: the batch fails on
all ranks, and the group goes on. What no rank can do alone is repair a collective: when one fails
itself (a rank died, or was silent for ``COLLECTIVE_TIMEOUT_S``) the error is GroupLost, and the
process has to end.
"""

import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..errors import ConfigError, GroupLost, TowerError

JOIN_TIMEOUT_S = 600.0
"""How long ranks wait for each other before the first batch: a pod may have to fetch its image, and
a file system may be slow with the weights."""

WORD_PATIENCE_S = 60.0
WORD_AGAIN_S = 1.0

COLLECTIVE_TIMEOUT_S = 60.0
"""How long a rank may keep the others waiting inside a batch. Heartbeats end a group whose rank is
frozen long before; this is for a rank that is alive and stuck, as in the loop's rule for a batch."""

Shape = tuple[int, int]
T = TypeVar("T")


class TensorParallel:
    """This process's place among the ranks of a group. Made by ``join``; used by one thread at a time."""

    def __init__(self, rank: int, size: int, store: Store, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._store = store
        # Both are allocated before they are needed: a rank that has run out of memory uses them.
        self._ballot = torch.zeros(3, dtype=torch.int64, device=device)
        self._spare = torch.zeros(0, device=device)
        self._due: list[Shape] = []

    def agree(self, ok: bool, about: int = 0) -> bool:
        """One vote: did all ranks say yes, and about the same thing? Raises GroupLost."""
        return self.objection(ok, about) is None

    def objection(self, ok: bool, about: int = 0) -> str | None:
        """The same vote, with a sentence that says why the ranks cannot go on together."""
        # The least of: the ranks that say no; what it is about; its negative (so the most of it).
        self._ballot.copy_(torch.tensor([self.size if ok else self.rank, about, -about]))
        with _collective():
            dist.all_reduce(self._ballot, op=dist.ReduceOp.MIN)
            who, least, most = self._ballot.tolist()
        if who < self.size:
            return f"rank {who} failed"
        if least != -most:
            return "the ranks were given different batches"
        return None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place. Only within ``run``, and only what its plan says is next."""
        if not self._due or tuple(tensor.shape) != self._due[-1]:
            wanted = self._due[-1] if self._due else None
            raise TowerError(f"a sum of {tuple(tensor.shape)} was not planned, due is {wanted}")
        self._sum(tensor)

    def run(
        self, plan: Callable[[], Sequence[Shape]], dtype: torch.dtype, work: Callable[[], T], batch: int = 0
    ) -> T:
        """One batch on all ranks: a vote, ``work`` with its sums, a vote. The same result or none.

        ``plan`` returns the shapes of all sums that ``work`` makes, in order; ``dtype`` is theirs.
        The first vote is also about the plan and ``batch``, so that a rank that was given something
        else is found out. Whatever either raises, this rank takes part in every sum and vote of the
        batch, and raises it afterwards; TowerError if another rank failed. GroupLost is raised at once.
        """
        failed: Exception | None = None
        result: list[T] = []
        try:
            shapes = list(plan())
            self._make_spare(max((prod(shape) for shape in shapes), default=0), dtype)
        except Exception as error:  # noqa: BLE001 (raised below, once the others know)
            failed, shapes = error, []
        objection = self.objection(failed is None, crc32(repr((batch, shapes)).encode()))
        if failed is not None:
            raise failed
        if objection is not None:
            raise TowerError(f"the batch was not begun: {objection}")
        self._due = shapes[::-1]
        try:
            result.append(work())
            if self._due:
                raise TowerError(f"{len(self._due)} sums of the batch were left out")
        except GroupLost:
            raise
        except Exception as error:  # noqa: BLE001 (raised below, once the others know)
            failed = error
            # What the failed frames hold may be the memory that was missing.
            cause: BaseException | None = error
            while cause is not None:  # behind a tower's own error is torch's
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__
        while self._due:
            shape = self._due[-1]
            self._sum(self._spare[: prod(shape)].zero_())
        objection = self.objection(failed is None)
        if failed is not None:
            raise failed
        if objection is not None:
            raise TowerError(f"the batch was not finished: {objection}")
        return result[0]

    def meet(self, what: str, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait until all ranks are here; they may arrive minutes apart. Raises GroupLost."""
        names = [f"{what}/{rank}" for rank in range(self.size)]
        with _collective():
            self._store.set(names[self.rank], "here")
            self._store.wait(names, timedelta(seconds=timeout_s))

    def publish(self, name: str, text: str) -> None:
        """Leave a text where the ranks meet. Raises GroupLost."""
        with _collective():
            self._store.set(f"text/{name}", text)

    def look_up(self, name: str, timeout_s: float = JOIN_TIMEOUT_S) -> str:
        """The text that a rank published; waits for it. Raises GroupLost."""
        with _collective():
            self._store.wait([f"text/{name}"], timedelta(seconds=timeout_s))
            return bytes(self._store.get(f"text/{name}")).decode()

    def leave(self) -> None:
        """End this process's part. Ranks still in a collective get GroupLost."""
        dist.destroy_process_group()

    def _sum(self, tensor: torch.Tensor) -> None:
        with _collective():
            dist.all_reduce(tensor)
        self._due.pop()

    def _make_spare(self, n_values: int, dtype: torch.dtype) -> None:
        if self._spare.numel() < n_values or self._spare.dtype != dtype:
            self._spare = torch.zeros(n_values, dtype=dtype, device=self.device)


def join(
    rank: int,
    size: int,
    host: str,
    port: int,
    device: torch.device,
    *,
    word: str = "",
    join_timeout_s: float = JOIN_TIMEOUT_S,
    word_patience_s: float = WORD_PATIENCE_S,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> TensorParallel:
    """Meet the other ranks at (host, port). Raises ConfigError for an address or another ``word``
    than rank 0's, GroupLost for ranks that do not come, with their numbers."""
    if not 0 <= rank < size:
        raise ConfigError([f"rank must be in [0, {size}), is {rank}"])
    with _collective():
        if rank == 0:
            store = _open_store(host, port, size, join_timeout_s, _listen(host, port, size))
            store.set("word", word)
        else:
            store = _find_leader(rank, host, port, size, word, join_timeout_s, word_patience_s)
        _wait_for_all(store, rank, size, join_timeout_s)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=collective_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    return TensorParallel(rank, size, store, device)


def _open_store(
    host: str, port: int, size: int, timeout_s: float, listener: socket.socket | None = None
) -> Store:
    """Without a socket of ours rank 0's store would listen on all addresses of this machine."""
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        size,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return store


def _find_leader(
    rank: int, host: str, port: int, size: int, word: str, timeout_s: float, patience_s: float
) -> Store:
    """Rank 0's store. One of another word is asked again: it may be on its way out."""
    until_s = time.monotonic() + timeout_s
    patience_until_s: float | None = None
    while True:
        left_s = max(0.1, until_s - time.monotonic())
        store = _open_store(host, port, size, left_s)
        store.wait(["word"], timedelta(seconds=left_s))
        leader = bytes(store.get("word")).decode()
        if leader == word:
            return store
        now_s = time.monotonic()
        patience_until_s = patience_until_s or now_s + patience_s
        if now_s >= min(patience_until_s, until_s):
            raise ConfigError([f"rank {rank} is of another start of the group: {word}, rank 0 is {leader}"])
        del store  # its connection ends
        time.sleep(WORD_AGAIN_S)


def _wait_for_all(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Until every rank is here. The group's own timeout is too short for that: ranks may come minutes
    apart."""
    store.set(f"came/{rank}", "")
    try:
        store.wait([f"came/{other}" for other in range(size)], timedelta(seconds=timeout_s))
    except RuntimeError as failed:
        missing = [f"rank {other}" for other in range(size) if not store.check([f"came/{other}"])]
        if not missing:
            raise
        raise GroupLost(f"{' and '.join(missing)} did not come within {timeout_s:g} s") from failed


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as failed:
        raise ConfigError([f"the ranks cannot meet at {host}: {failed}"]) from failed
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as failed:
        listener.close()
        raise ConfigError(
            [f"the ranks cannot meet at {host}:{port} ({failed.strerror}): choose another dist_init_port"]
        ) from failed
    return listener


@contextmanager
def _collective() -> Iterator[None]:
    """What torch.distributed raises (all of it is RuntimeError or ValueError) means the end of the group."""
    try:
        yield
    except (RuntimeError, ValueError) as failed:
        raise GroupLost(f"the ranks lost each other: {failed}") from failed
