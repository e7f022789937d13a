"""The receiving end: TokenSpeed's receivers asking for the tiny model's rows, and the right answer."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.gateway import Picture
from tests.peers.tokenspeed.remote import Remote

HIDDEN = 256
LEVELS = 3


@dataclass(frozen=True)
class Rows:
    """What the tower returns for one image, as the bytes a receiver should hold."""

    main: bytes
    deepstack: bytes

    @property
    def digest(self) -> dict[str, str]:
        return {
            "main": hashlib.sha256(self.main).hexdigest(),
            "deepstack": hashlib.sha256(self.deepstack).hexdigest(),
        }


def tower_rows(model: Path) -> Callable[[Picture], Rows]:
    """The tower of the model in this folder, called directly in this process."""
    import torch

    from encodepool_worker.towers.base import TowerItem
    from encodepool_worker.towers.load import load_tower
    from encodepool_worker.types import Grid

    torch.set_num_threads(1)
    tower = load_tower(model, device="cpu")

    def rows(picture: Picture) -> Rows:
        pixels = torch.from_numpy(picture.float32)
        out = tower.encode([TowerItem(pixels, (Grid(picture.t, picture.h, picture.w),))])
        main, deepstack = out[:, :HIDDEN].contiguous(), out[:, HIDDEN:].contiguous()
        return Rows(main.numpy().tobytes(), deepstack.numpy().tobytes())

    return rows


class Receivers:
    """TokenSpeed's real receivers, asking one worker for the tiny model's rows."""

    def __init__(self, remote: Remote, address: str) -> None:
        self.remote = remote
        self.address = address

    def ask(self, room: int, picture: Picture, **rest: Any) -> float:
        """When the frame left (monotonic)."""
        layout = {"tokens": picture.tokens, "hidden": HIDDEN, "levels": LEVELS, "dtype": "torch.float32"}
        asked = self.remote.call("ask", address=self.address, room=room, **(layout | rest))
        assert asked["refused"] is None, asked
        return float(asked["asked_at"])

    def verdict(self, room: int, timeout_s: float = 20.0, **rest: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.remote.call("verdict", room=room, timeout_s=timeout_s, **rest)
        return answer

    def digest(self, room: int, **rest: Any) -> dict[str, str]:
        answer: dict[str, str] = self.remote.call("digest", room=room, **rest)
        return answer

    def untouched(self, room: int, **rest: Any) -> bool:
        return bool(self.remote.call("untouched", room=room, **rest))

    def forget(self, room: int, **rest: Any) -> None:
        self.remote.call("forget", room=room, **rest)
