"""The controller's own log, and the ends of everybody's."""

import logging
import sys
from pathlib import Path

TAIL_BYTES = 8192


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def setup_logs(level: int = logging.INFO) -> None:
    """Structured lines on stderr, once per process."""
    # Here, because structlog takes longer to import than a whole `status`.
    import structlog

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
