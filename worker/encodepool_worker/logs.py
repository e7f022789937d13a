"""Structured logs on stderr: one line an event, ``key=value``, times in UTC."""

import logging
import sys
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


def _with_context(context: dict[str, object]) -> Any:
    """Every line, from whichever thread, says which process it comes from."""

    def add(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**context, **event}

    return add
