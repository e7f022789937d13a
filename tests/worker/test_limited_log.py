"""Lines that others cause do not fill the log, and it says how many are missing."""

import structlog
from structlog.testing import capture_logs

from encodepool_worker.logs import LimitedLog


def test_a_flood_is_cut_and_the_next_line_says_how_much_was_left_out():
    now_s = 0.0
    log = LimitedLog(per_s=2, burst=3, clock=lambda: now_s)
    structlog.reset_defaults()
    with capture_logs() as lines:
        for n in range(10):
            log.warning("room failed", room=n)
        now_s = 0.6
        log.warning("room failed", room=10)
        log.info("request refused", room=11)
        now_s = 60.0
        for n in range(20, 24):
            log.info("request refused", room=n)
    assert [line["room"] for line in lines] == [0, 1, 2, 10, 20, 21, 22]
    assert [line.get("left_out") for line in lines] == [None, None, None, 7, 1, None, None]
    assert {line["log_level"] for line in lines} == {"warning", "info"}
