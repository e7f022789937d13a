"""The prefill side: TokenSpeed's real receivers, which judge what an encode worker sends."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .memory import ELEMENT_BYTES, UNTOUCHED, Arena, Bytes, Verdicts, sha256


@dataclass
class Wanted:
    """What one rank asked for in one room."""

    receiver: Any
    main: Bytes
    deepstack: Bytes


class PrefillRank:
    """One tensor-parallel rank: a real manager with its own Mooncake engine."""

    def __init__(self, tp_size: int, rank: int, arena_bytes: int) -> None:
        from tokenspeed.runtime.epd.entities import EmbeddingArgs, EmbeddingManagerArgs
        from tokenspeed.runtime.epd.mooncake.prefill import MooncakeEmbeddingManagerPrefill

        self.rank = rank
        # As in TokenSpeed's engine the manager owns no buffer: receive memory is registered apart.
        self.manager = MooncakeEmbeddingManagerPrefill(
            EmbeddingManagerArgs(0, tp_size, None), EmbeddingArgs(rank, 0, None, 0, 0)
        )
        self.verdicts = Verdicts(self.manager)
        self.arena = Arena(arena_bytes)
        if self.manager.engine.register(self.arena.address, self.arena.nbytes) != 0:
            raise RuntimeError("Mooncake did not register the receive memory")
        self.rooms: dict[int, Wanted] = {}

    def info(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "status_port": self.manager.rank_port,
            "session": self.manager.get_session_id(),
            "arena": self.arena.address,
        }


class PrefillHost:
    """Prefill groups of any size in one process, each made when it is first named.

    A room is asked for on some or all ranks of the group of ``tp_size``; verdict, digest and the
    rest speak of the ranks that asked.
    """

    def __init__(self, arena_bytes: int = 64 << 20) -> None:
        from tokenspeed.runtime.epd.mooncake.receiver import MooncakeEmbeddingReceiver
        from tokenspeed.runtime.epd.prefill_admission import shard_rows

        self._receiver = MooncakeEmbeddingReceiver
        self._shard_rows = shard_rows
        self._arena_bytes = arena_bytes
        self._groups: dict[int, list[PrefillRank]] = {}

    def _group(self, tp_size: int) -> list[PrefillRank]:
        if tp_size not in self._groups:
            self._groups[tp_size] = [PrefillRank(tp_size, rank, self._arena_bytes) for rank in range(tp_size)]
        return self._groups[tp_size]

    def _asked(self, room: int, tp_size: int) -> list[PrefillRank]:
        ranks = [node for node in self._group(tp_size) if room in node.rooms]
        if not ranks:
            raise KeyError(f"no rank asked for room {room}")
        return ranks

    def info(self, tp_size: int = 1) -> list[dict[str, Any]]:
        return [node.info() for node in self._group(tp_size)]

    def ask(
        self,
        address: str,
        room: int,
        tokens: int,
        hidden: int,
        dtype: str = "torch.bfloat16",
        levels: int = 0,
        tp_size: int = 1,
        ranks: Sequence[int] | None = None,
        shard: bool = False,
        announce: Mapping[str, Any] | None = None,
        times: int = 1,
    ) -> dict[str, Any]:
        """Open ``room`` at the encode worker behind ``address`` and tell it where the rows go.

        With ``shard`` each rank asks for its own rows, as TokenSpeed does. ``announce`` overrides
        what the frame says (its memory stays as ``tokens`` needs it). ``times`` repeats the frame.
        Returns when the first frame left (``asked_at``, monotonic), or why there is no receiver.
        """
        row_bytes = hidden * ELEMENT_BYTES[dtype]
        asked_at = None
        for node in self._group(tp_size):
            if ranks is not None and node.rank not in ranks:
                continue
            if room in node.rooms:
                raise ValueError(f"room {room} is open on rank {node.rank}; forget it first")
            receiver = self._receiver(node.manager, address, room)
            if node.manager.check_status(room) == 0:
                reason = node.manager.failure_records.get(room, "refused")
                receiver.clear()
                node.verdicts.forget(room)
                return {"asked_at": None, "refused": reason}
            start, count = self._shard_rows(tokens, node.rank, tp_size) if shard else (0, tokens)
            main = node.arena.take(count * row_bytes)
            deepstack = node.arena.take(count * row_bytes * levels)
            main[:] = UNTOUCHED
            deepstack[:] = UNTOUCHED
            node.rooms[room] = Wanted(receiver, main, deepstack)
            frame = {
                "dst_embedding_ptr": int(main.ctypes.data),
                "n_tokens": count,
                "hidden": hidden,
                "dtype": dtype,
                "dst_deepstack_ptr": int(deepstack.ctypes.data) if levels else 0,
                "has_deepstack": levels > 0,
                "row_start": start,
                "span": tokens,
            } | dict(announce or {})
            if asked_at is None:
                asked_at = time.monotonic()
            for _ in range(times):
                receiver.pre_alloc(**frame)
        return {"asked_at": asked_at, "refused": None}

    def verdict(self, room: int, timeout_s: float = 10.0, tp_size: int = 1) -> dict[str, Any]:
        """``status`` over all ranks that asked (the worst one), ``at`` of the last, and each rank's."""
        deadline = time.monotonic() + timeout_s
        each = {
            node.rank: node.verdicts.wait(room, max(0.0, deadline - time.monotonic()))
            for node in self._asked(room, tp_size)
        }
        worst = min((one["status"] for one in each.values()), key=["Failed", "Timeout", "Success"].index)
        moments = [one["at"] for one in each.values() if one["at"] is not None]
        reasons = [one["reason"] for one in each.values() if one["reason"] is not None]
        return {
            "status": worst,
            "at": max(moments, default=None),
            "reason": reasons[0] if reasons else None,
            "ranks": {str(rank): one["status"] for rank, one in each.items()},
        }

    def digest(self, room: int, tp_size: int = 1, shard: bool = False) -> dict[str, str]:
        """sha256 of both halves as received; ``shard`` joins the ranks' rows in rank order.

        Without ``shard`` all ranks must hold the same bytes.
        """
        pieces = [node.rooms[room] for node in self._asked(room, tp_size)]
        if shard:
            mains = [np.concatenate([piece.main for piece in pieces])]
            deepstacks = [np.concatenate([piece.deepstack for piece in pieces])]
        else:
            mains = [piece.main for piece in pieces]
            deepstacks = [piece.deepstack for piece in pieces]
        out = {}
        for name, halves in (("main", mains), ("deepstack", deepstacks)):
            digests = {sha256(np.ascontiguousarray(half)) for half in halves}
            if len(digests) != 1:
                raise ValueError(f"room {room}: the ranks hold different {name} rows")
            out[name] = digests.pop()
        return out

    def save(self, room: int, path: str, tp_size: int = 1) -> None:
        """Write what each rank received as ``main.<rank>`` and ``deepstack.<rank>`` of an .npz."""
        arrays = {}
        for node in self._asked(room, tp_size):
            arrays[f"main.{node.rank}"] = node.rooms[room].main
            arrays[f"deepstack.{node.rank}"] = node.rooms[room].deepstack
        np.savez(Path(path), **arrays)

    def untouched(self, room: int, tp_size: int = 1) -> bool:
        """True when nothing was written into the room's memory."""
        return all(
            bool((half == UNTOUCHED).all())
            for node in self._asked(room, tp_size)
            for half in (node.rooms[room].main, node.rooms[room].deepstack)
        )

    def forget(self, room: int, tp_size: int = 1) -> None:
        """Close the room as TokenSpeed does after a verdict; it may be asked for again."""
        for node in self._asked(room, tp_size):
            wanted = node.rooms.pop(room)
            wanted.receiver.clear()
            node.verdicts.forget(room)
            node.arena.give_back(wanted.main)
            node.arena.give_back(wanted.deepstack)

    def receive(
        self,
        address: str,
        rooms: Sequence[Sequence[int]],
        hidden: int,
        dtype: str = "torch.bfloat16",
        levels: int = 0,
        window: int = 32,
        timeout_s: float = 60.0,
    ) -> list[dict[str, Any]]:
        """Ask for every ``(room, tokens)``, at most ``window`` at once; verdict and digest of each."""
        out: list[dict[str, Any]] = []
        in_flight: deque[tuple[int, dict[str, Any]]] = deque()

        def conclude() -> None:
            room, asked = in_flight.popleft()
            if asked["refused"] is not None:
                out.append({"room": room, "status": "Refused", "reason": asked["refused"]})
                return
            entry = self.verdict(room, timeout_s) | {"room": room, "asked_at": asked["asked_at"]}
            if entry["status"] == "Success":
                entry |= self.digest(room)
            out.append(entry)
            self.forget(room)

        for room, tokens in rooms:
            if len(in_flight) >= window:
                conclude()
            in_flight.append((room, self.ask(address, room, tokens, hidden, dtype, levels)))
        while in_flight:
            conclude()
        return out
