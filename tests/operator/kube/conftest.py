"""Objects as the API server shows them, and a clock that tests set."""

from collections.abc import Callable
from typing import Any

import pytest


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_object() -> Callable[..., dict[str, Any]]:
    """``make_object("name", version, uid="u1")``"""

    def make(name: str, version: int, uid: str = "u1", **metadata: Any) -> dict[str, Any]:
        meta = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version), **metadata}
        return {"metadata": meta}

    return make
