import asyncio
from dataclasses import replace

import pytest

from encodepool_operator.controller.events import (
    EACH_LIMIT,
    QUEUE_LIMIT,
    EventPoster,
    Notice,
    grouped,
    notices,
)
from encodepool_operator.controller.execute import Outcome
from encodepool_operator.controller.health import Progress, stuck
from encodepool_operator.controller.metrics import Metrics
from encodepool_operator.controller.reconcile import Reconciler
from encodepool_operator.core import actions
from encodepool_operator.core.record import GroupRecord, LastFailure, PortBlock
from encodepool_operator.core.snapshot import Publication, RevisionRecord
from encodepool_operator.kube.errors import NotLeading, Unreachable

RECORD = GroupRecord(3, "r", PortBlock(1, 2, 3, 4), 0.0)
REVISION = RevisionRecord("r", 1, "s", "{}")
FAILURE = LastFailure(0.0, 3, "OOMKilled")


def words(*done):
    return [(notice.type, notice.reason) for notice in notices(done)]


def test_a_failure_is_a_warning_and_a_planned_stop_is_not():
    failed = actions.StopGroup(0, REVISION, replace(RECORD, failure=FAILURE), "group 0 failed")
    planned = actions.StopGroup(0, REVISION, RECORD, "group 0 has been drained")
    earlier = actions.StopGroup(
        0, REVISION, replace(RECORD, failure=replace(FAILURE, incarnation=2)), "group 0 has been drained"
    )
    assert words(failed) == [("Warning", "GroupFailed")]
    assert words(planned) == words(earlier) == [("Normal", "GroupStopped")]


def test_book_keeping_makes_no_events():
    seal = actions.RecordGroup(0, 1, REVISION, RECORD, "it is complete")
    drain = replace(seal, record=replace(RECORD, draining_since=1.0))
    assert words(seal, actions.WriteStatus({}, "r"), actions.ReserveIncarnations(1, "r")) == []
    assert words(drain) == [("Normal", "GroupDraining")]


def test_what_somebody_edited_is_told():
    repair = actions.RepairGroup(0, 1, REVISION, RECORD, (), "the object of group 0 was edited")
    assert words(repair) == [("Warning", "GroupRepaired")]


def test_many_like_actions_become_one_event():
    publish = actions.Publish(0, "p", "u", Publication(1, 2, "m"), "group 0 is ready")
    assert len(notices([publish] * EACH_LIMIT)) == EACH_LIMIT
    (one,) = notices([publish] * 50)
    assert one.message == "50 times, first: group 0 is ready"


def test_what_is_refused_for_every_group_is_one_event_too():
    each = [Notice("Warning", "WriteRefused", f"pod {i} is too large") for i in range(50)]
    taken = Notice("Warning", "NameTaken", "Service/demo-peers is there")
    assert grouped([*each, taken]) == [
        Notice("Warning", "WriteRefused", "50 times, first: pod 0 is too large"),
        taken,
    ]


def test_a_plan_that_is_refused_group_by_group_makes_one_event(pool):
    class Poster:
        def __init__(self):
            self.posted = []

        def post(self, obj, notice):
            self.posted.append(notice)

    poster, metrics = Poster(), Metrics()
    reconciler = Reconciler(None, None, None, None, poster, metrics)
    refused = {("StartGroup", i, ""): f"group {i} is too large" for i in range(40)}
    state = reconciler._state(("ns", "demo"))
    assert reconciler._after_trouble(("ns", "demo"), state, pool, Outcome(refused=refused)) == 0
    assert [notice.message for notice in poster.posted] == ["40 times, first: group 0 is too large"]
    assert metrics.reconcile_failures.labels("refused")._value.get() == 40


@pytest.fixture
def pool(make_pool):
    return make_pool()


class Server:
    def __init__(self):
        self.got = []
        self.error = None

    async def create(self, kind, obj):
        if self.error is not None:
            raise self.error
        self.got.append(obj)


def test_an_event_names_the_pool_and_nothing_fails_with_it(pool):
    async def story():
        server, metrics = Server(), Metrics()
        poster = EventPoster(server, metrics, "me")
        poster.post(pool, Notice("Normal", "GroupStarted", "x" * 5000))
        running = asyncio.create_task(poster.run())
        while not server.got:
            await asyncio.sleep(0)
        for count, server.error in enumerate((Unreachable("down"), NotLeading()), 1):
            poster.post(pool, Notice("Normal", "GroupStarted", "again"))
            while metrics.events_dropped._value.get() < count:
                assert not running.done()
                await asyncio.sleep(0)
        running.cancel()
        return server.got

    (event,) = asyncio.run(story())
    assert event["involvedObject"]["uid"] == "pool-uid"
    assert (event["metadata"]["namespace"], event["reportingComponent"]) == ("ns", "encodepool-operator")
    assert len(event["message"]) == 1024


def test_a_burst_of_events_is_bounded(pool):
    metrics = Metrics()
    poster = EventPoster(Server(), metrics, "me")
    for _ in range(QUEUE_LIMIT + 3):
        poster.post(pool, Notice("Normal", "GroupStarted", "r"))
    assert metrics.events_dropped._value.get() == 3


GOOD = Progress(queue_s=1, resync_s=100, resync_limit_s=900, lease_s=3, lease_limit_s=60)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, ""),
        ({"resync_s": None}, ""),
        ({"queue_s": 301}, "pool has waited"),
        ({"resync_s": 901}, "nothing has been listed"),
        ({"lease_s": 61}, "lease"),
    ],
)
def test_alive_means_that_it_gets_on(facts, why):
    found = stuck(replace(GOOD, **facts))
    assert bool(found) == bool(why)
    assert why in found
