"""Structured logs on stderr: one line an event, ``key=value``, times in UTC."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup_logs(level: str, **context: object) -> None:
    """Once per process. ``context`` (role, rank, pool ...) stands in every line of it."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _with_context(context),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event", *context]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        # WriteLogger writes a line and its end at once: lines of processes that share a file stay whole.
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def get_logger() -> Any:
    """A structlog logger; ``setup_logs`` decides where its lines go."""
    return structlog.get_logger()


class LimitedLog:
    """Lines that other programs cause: the first ``burst`` of them, then ``per_s`` a second.

    A line after a gap says in ``left_out`` how many were not written. For one thread.
    """

    def __init__(
        self, per_s: float = 10.0, burst: int = 100, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._lines = float(burst)
        self._counted_s = clock()
        self._left_out = 0

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        now_s = self._clock()
        self._lines = min(self._burst, self._lines + (now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        if self._lines < 1:
            self._left_out += 1
            return
        self._lines -= 1
        if self._left_out:
            fields["left_out"] = self._left_out
            self._left_out = 0
        getattr(get_logger(), level)(event, **fields)


def _with_context(context: dict[str, object]) -> Any:
    """Every line, from whichever thread, says which process it comes from."""

    def add(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**context, **event}

    return add
