"""Ready once and never again: what readiness needs, what takes it away, and what liveness sees."""

import asyncio

import pytest

from encodepool_worker.frontend.health import Health, Phase
from encodepool_worker.wire.intake import State


def state(turn_s=0.0, **facts):
    known = {"routed": True, "queue_items": 0, "queue_cost": 0}
    return State(turn_s=turn_s, **(known | facts))


def ready(health, now_s, n_routed=1, serving=True):
    return health.ready(now_s, n_routed=n_routed, serving=serving)


@pytest.mark.parametrize(
    ("report", "n_routed", "serving", "reason"),
    [
        (None, 1, True, "the loop has not reported yet: the model is loading"),
        (state(routed=False), 1, True, "the loop is not registered yet"),
        (state(), 0, True, "0 of 1 ranks are in the route table"),
        (state(), 1, False, "the gRPC port is not open"),
        (state(turn_s=-6.0), 1, True, "the loop's last turn was 6.0 s ago"),
    ],
)
def test_a_start_is_not_ready_while_anything_is_missing(report, n_routed, serving, reason):
    health = Health(1)
    if report is not None:
        health.heard(report)
    assert ready(health, 0.0, n_routed, serving).reason == reason
    assert health.phase is Phase.STARTING

    health.heard(state(turn_s=0.0))
    assert ready(health, 0.0).good


def test_ready_stays_when_a_rank_is_looked_up_less_or_the_loop_is_busy():
    health = Health(1)
    health.heard(state(0.0))
    assert ready(health, 0.0).good
    health.heard(state(1.0, queue_items=100))
    assert ready(health, 5.9).good


def test_a_loop_that_was_silent_for_over_5_s_is_withdrawn_for_good():
    health = Health(1)
    health.heard(state(0.0))
    assert ready(health, 5.0).good
    assert not ready(health, 5.1).good
    assert not health.alive(5.1).good

    health.heard(state(6.0))
    assert health.alive(6.0).good
    assert ready(health, 6.0).reason == "the loop's last turn was 5.1 s ago"


def test_a_late_report_of_an_earlier_turn_does_not_make_the_loop_look_older():
    health = Health(1)
    health.heard(state(10.0))
    health.heard(state(2.0))
    assert health.turn_age_s(11.0) == 1.0


@pytest.mark.parametrize(
    ("expected_s", "age_s", "good"),
    [(None, 59.0, True), (None, 61.0, False), (1.0, 61.0, False), (20.0, 199.0, True), (20.0, 201.0, False)],
)
def test_a_batch_may_take_60_s_or_ten_times_what_was_expected(expected_s, age_s, good):
    health = Health(1)
    health.heard(state(0.0, batch_age_s=0.0))
    assert ready(health, 0.0).good

    health.heard(state(100.0, batch_age_s=age_s, batch_expected_s=expected_s))
    assert health.alive(100.0).good is good
    assert ready(health, 100.0).good is good


def test_a_batch_grows_older_between_reports():
    health = Health(1)
    health.heard(state(0.0, batch_age_s=57.0))
    assert health.alive(2.0).good
    assert "a batch has been running for 61 s" in health.alive(4.0).reason


def test_a_worker_that_drains_is_alive_and_never_ready_again():
    health = Health(1)
    health.heard(state(0.0))
    assert ready(health, 0.0).good
    health.drain("the worker is draining")
    assert ready(health, 0.0).reason == "the worker is draining"
    assert health.alive(0.0).good
    assert health.draining


def test_a_loop_that_never_reported_is_starting_and_alive():
    assert Health(1).alive(1000.0).good


def test_nobody_waits_for_a_silent_loop_that_is_not_ready_yet(world, clock, monkeypatch):
    """Only readiness is lost for good, so only then a probe may hold up this process for a moment."""

    async def story():
        async with world(ready=False) as w:
            waits = []
            monkeypatch.setattr(w.frontend._link, "wait", waits.append)
            w.rank0.silent = True
            await w.rank0.send(state(turn_s=clock() - 6))
            await w.until(lambda: not w.frontend.alive().good, "the silence")
            for path in ("/livez", "/readyz", "/metrics"):
                await w.probe(path)
            assert waits == []

            w.rank0.silent = False
            await w.become_ready()
            assert waits == []

    asyncio.run(story())
