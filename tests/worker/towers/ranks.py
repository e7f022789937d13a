"""Real ranks for the tests of the sharded towers.

``python -m tests.worker.towers.ranks SOCKET N`` imports what is slow to import once, forks N times,
and each copy connects to SOCKET and obeys: one JSON object a line in, one out. It ends when its
connection does. ``Ranks`` is the other side.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

DEADLINE_S = 100.0

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Rank:
    """The tests' end of one process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(DEADLINE_S)
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid = int(self._lines.readline())

    def tell(self, **order: Any) -> None:
        self._connection.sendall(json.dumps(order, default=str).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        return json.loads(line) if line else {"error": "gone", "text": ""}

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


class Ranks:
    """A group of them."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    def all(self, **order: Any) -> list[dict[str, Any]]:
        """The same order to every rank, and their answers."""
        return self.each([order] * len(self.ranks))

    def each(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for rank, order in zip(self.ranks, orders, strict=True):
            rank.tell(**order)
        return [rank.answer() for rank in self.ranks]


class Obedient:
    """One rank: an order's ``do`` names the method."""

    def __init__(self) -> None:
        self.parallel: Any = None
        self.towers: dict[str, Any] = {}

    def join(self, rank: int, size: int, port: int, collective_timeout_s: float) -> dict[str, Any]:
        import torch

        from encodepool_worker.towers.parallel import join

        self.parallel = join(
            rank,
            size,
            "127.0.0.1",
            port,
            torch.device("cpu"),
            join_timeout_s=30,
            collective_timeout_s=collective_timeout_s,
        )
        return {}

    def load(self, name: str, folder: str, **how: Any) -> dict[str, Any]:
        from encodepool_worker.towers.load import load_tower

        before = bytes_read()
        tower: Any = load_tower(folder, parallel=self.parallel, **how)
        self.towers[name] = tower
        return {
            "bytes_read": bytes_read() - before,
            "n_values": sum(parameter.numel() for parameter in tower.module.parameters()),
        }

    def encode(
        self, name: str, items: list[Any], out: str, batch: int = 0, raise_at: str = "", kind: str = ""
    ) -> dict[str, Any]:
        """``raise_at`` names the submodule before which an exception of ``kind``, or a signal, is raised."""
        from safetensors.torch import save_file

        tower = self.towers[name]
        hooks = []
        if raise_at:

            def fail(*_: Any) -> None:
                if kind in SIGNALS:
                    os.kill(os.getpid(), SIGNALS[kind])
                else:
                    raise exceptions()[kind]("made by the test")

            hooks.append(tower.module.get_submodule(raise_at).register_forward_pre_hook(fail))
        try:
            rows = tower.encode(made_items(tower.spec, items), batch=batch)
        finally:
            for hook in hooks:
                hook.remove()
        save_file({"rows": rows}, out)
        return {}

    def warm_up(self, name: str) -> dict[str, Any]:
        self.towers[name].warm_up()
        return {}

    def agree(self, ok: bool) -> dict[str, Any]:
        return {"agreed": self.parallel.agree(ok)}

    def leave(self) -> dict[str, Any]:
        self.parallel.leave()
        return {}


def made_items(spec: Any, items: list[Any]) -> list[Any]:
    """``[[grids, seed], ...]`` as items with seeded pixels."""
    import torch

    from encodepool_worker.towers.base import TowerItem
    from encodepool_worker.types import Grid

    made = []
    for grids, seed in items:
        shape = tuple(Grid(*grid) for grid in grids)
        n_patches = sum(grid.patches for grid in shape)
        generator = torch.Generator().manual_seed(seed)
        made.append(TowerItem(torch.randn(n_patches, spec.patch_width, generator=generator), shape))
    return made


def exceptions() -> dict[str, type[Exception]]:
    import torch

    return {"runtime": RuntimeError, "memory": torch.OutOfMemoryError, "other": ZeroDivisionError}


def bytes_read() -> int:
    """By this process, with read calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def obey(path: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(f"{os.getpid()}\n".encode())
    rank = Obedient()
    for line in connection.makefile("r"):
        order = json.loads(line)
        try:
            answer = getattr(rank, order.pop("do"))(**order)
        except Exception as error:  # noqa: BLE001 (it is the answer)
            answer = {"error": type(error).__name__, "text": str(error)}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def main(path: str, n_ranks: int) -> None:
    import torch

    import encodepool_worker.towers.qwen2_5_vl
    import encodepool_worker.towers.qwen3_vl  # noqa: F401

    torch.set_num_threads(1)
    children = []
    for _ in range(n_ranks):
        pid = os.fork()
        if pid == 0:
            obey(path)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
