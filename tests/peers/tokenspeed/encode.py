"""The encode side: TokenSpeed's real senders, which show whether our client is honest."""

import time
from typing import Any

from .memory import ELEMENT_BYTES, STATUS_NAMES, Arena, Bytes, Verdicts, pattern, sha256


class EncodeGroup:
    """A real bootstrap server and one real encode manager per rank.

    Every rank sends from the same memory, as every rank of a tower holds the same rows.
    """

    def __init__(self, tp_size: int, arena_bytes: int) -> None:
        from tokenspeed.runtime.epd.entities import EmbeddingArgs, EmbeddingManagerArgs
        from tokenspeed.runtime.epd.mooncake.conn import MooncakeEmbeddingBootstrapServer
        from tokenspeed.runtime.epd.mooncake.encode import MooncakeEmbeddingManagerEncode
        from tokenspeed.runtime.utils.network import get_free_port, get_local_ip_by_remote

        port = get_free_port()
        self.host = get_local_ip_by_remote()
        self.address = f"{self.host}:{port}"
        self.bootstrap = MooncakeEmbeddingBootstrapServer(port)
        self.arena = Arena(arena_bytes)
        self.pieces: dict[int, tuple[Bytes, Bytes]] = {}
        self.managers = [
            MooncakeEmbeddingManagerEncode(
                EmbeddingManagerArgs(port, tp_size, self.host),
                EmbeddingArgs(rank, 0, None, self.arena.address, self.arena.nbytes),
            )
            for rank in range(tp_size)
        ]
        self.verdicts = [Verdicts(manager) for manager in self.managers]


class EncodeHost:
    """Encode groups of any size in one process, each made when it is first named."""

    def __init__(self, arena_bytes: int = 64 << 20) -> None:
        from tokenspeed.runtime.epd.mooncake.sender import MooncakeEmbeddingSender

        self._sender = MooncakeEmbeddingSender
        self._arena_bytes = arena_bytes
        self._groups: dict[int, EncodeGroup] = {}

    def _group(self, tp_size: int) -> EncodeGroup:
        if tp_size not in self._groups:
            self._groups[tp_size] = EncodeGroup(tp_size, self._arena_bytes)
        return self._groups[tp_size]

    def info(self, tp_size: int = 1) -> dict[str, Any]:
        group = self._group(tp_size)
        ranks = [
            {"control": f"{group.host}:{m.rank_port}", "session": m.get_session_id()} for m in group.managers
        ]
        return {"bootstrap": group.address, "ranks": ranks}

    def submit(
        self,
        room: int,
        tokens: int,
        hidden: int,
        dtype: str = "torch.bfloat16",
        levels: int = 0,
        tp_size: int = 1,
    ) -> dict[str, str]:
        """Send the room's pattern from every rank; digests of both halves."""
        group = self._group(tp_size)
        row_bytes = hidden * ELEMENT_BYTES[dtype]
        main = group.arena.take(tokens * row_bytes)
        deepstack = group.arena.take(tokens * row_bytes * levels)
        main[:] = pattern(room, len(main))
        deepstack[:] = pattern(room, len(deepstack), 1)
        group.pieces[room] = (main, deepstack)
        for manager in group.managers:
            self._sender(manager, group.address, room).send(
                src_embedding_ptr=int(main.ctypes.data),
                n_tokens=tokens,
                hidden=hidden,
                dtype=dtype,
                nbytes=len(main),
                src_deepstack_ptr=int(deepstack.ctypes.data) if levels else 0,
                deepstack_width=hidden * levels,
                deepstack_nbytes=len(deepstack),
            )
        return {"main": sha256(main), "deepstack": sha256(deepstack)}

    def fail(self, room: int, reason: str, tp_size: int = 1) -> None:
        """Open the room and fail it on every rank, as TokenSpeed does when its tower fails."""
        group = self._group(tp_size)
        for manager in group.managers:
            self._sender(manager, group.address, room)
            manager.fail_room(room, reason)

    def verdict(self, room: int, timeout_s: float = 10.0, tp_size: int = 1) -> dict[str, Any]:
        """The worst verdict over the ranks, and its reason where there is one."""
        deadline = time.monotonic() + timeout_s
        each = [
            verdicts.wait(room, max(0.0, deadline - time.monotonic()))
            for verdicts in self._group(tp_size).verdicts
        ]
        worst = min((one["status"] for one in each), key=["Failed", "Timeout", "Success"].index)
        reasons = [one["reason"] for one in each if one["reason"] is not None]
        return {"status": worst, "reason": reasons[0] if reasons else None}

    def status(self, room: int, tp_size: int = 1) -> str:
        """What rank 0 knows of the room."""
        return STATUS_NAMES[self._group(tp_size).managers[0].room_status(room)]

    def forget(self, room: int, tp_size: int = 1) -> None:
        """Free the room's memory; call it after the verdict."""
        group = self._group(tp_size)
        for piece in group.pieces.pop(room):
            group.arena.give_back(piece)
