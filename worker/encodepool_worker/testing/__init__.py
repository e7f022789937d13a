"""For tests of the worker's core: builders with defaults, a clock, and a shell that is not there.

``Driver`` carries out a pipeline's instructions on a small region of ordinary memory, when the
test says so, and checks after every event what must always hold (see ``Witness``). The tower's
rows are ``rows_of``; bytes that land are compared with them.
"""

from .builders import (
    FakeClock,
    make_item,
    make_key,
    make_layout,
    make_limits,
    make_receiver,
    make_shards,
    rows_of,
)
from .driver import Driver, kinds, refusal
from .witness import Outstanding, Witness

__all__ = [
    "Driver",
    "FakeClock",
    "Outstanding",
    "Witness",
    "kinds",
    "make_item",
    "make_key",
    "make_layout",
    "make_limits",
    "make_receiver",
    "make_shards",
    "refusal",
    "rows_of",
]
