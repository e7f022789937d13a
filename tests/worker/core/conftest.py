"""A driver that must have come to rest, with everything given back, when its test ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from encodepool_worker.testing import Driver, make_limits


@pytest.fixture
def open_driver() -> Iterator[Callable[..., Driver]]:
    """``open_driver(store_bytes=..., **limits)``; every driver is finished at teardown."""
    drivers: list[Driver] = []

    def open_one(store_bytes: int = 64 * 1024, **limits: Any) -> Driver:
        drivers.append(Driver(make_limits(store_bytes, **limits)))
        return drivers[-1]

    yield open_one
    for driver in drivers:
        driver.finish()


@pytest.fixture
def driver(open_driver: Callable[..., Driver]) -> Driver:
    return open_driver()
