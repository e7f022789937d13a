"""Waits between tries: they double, are shortened at random, and have an upper end."""

import random

MAX_S = 60.0
JITTER = 0.5


def wait_s(failures: int, base_s: float, random_source: random.Random, max_s: float = MAX_S) -> float:
    """The wait after ``failures`` (>= 1) failures in a row, in (max/2, max] once it has grown."""
    full_s = min(max_s, base_s * 2.0 ** min(failures - 1, 20))
    return full_s * (1 - JITTER * random_source.random())
