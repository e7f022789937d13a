"""One pool at a time, with the real planner and executor, on an API server of a few lines."""

import asyncio

import pytest
import structlog

from encodepool_operator.controller.execute import Executor
from encodepool_operator.controller.metrics import Metrics
from encodepool_operator.controller.queue import KeyQueue
from encodepool_operator.controller.reconcile import STRANGER_S, Reconciler
from encodepool_operator.kube.errors import ApiError, NotLeading, Unreachable
from encodepool_operator.kube.kinds import POOL, SERVICE, STATEFUL_SET

KEY = ("ns", "demo")
CONFLICT = ApiError(409, "Conflict", "the object has been modified")
QUOTA = ApiError(403, "Forbidden", "exceeded quota")


class Api:
    """Objects by kind and name. ``errors``: what an apply of this kind raises, in turn or (no list) always.
    ``strangers``: names that exist without our label, so that no watch tells of them."""

    def __init__(self, versions):
        self.objects = {}
        self.errors = {}
        self.strangers = {}
        self.wrote = []
        self._versions = versions

    async def apply(self, kind, obj, *, subresource="", create=False, dry_run=False):
        meta = obj["metadata"]
        key = (kind, meta["name"])
        self.wrote.append(f"{'ask ' if dry_run else ''}{kind.kind}/{subresource or meta['name']}")
        error = self.errors.get(kind)
        if isinstance(error, list):
            error = error.pop(0) if error else None
        if error is not None:
            raise error
        known = self.objects.get(key) or {}
        if create and (known or key in self.strangers):
            raise CONFLICT
        new = {**known, "status": obj["status"]} if subresource else {**known, **obj, "kind": kind.kind}
        mine = {"uid": f"uid-of-{meta['name']}", **known.get("metadata", {}), **meta}
        new["metadata"] = mine | {"resourceVersion": str(next(self._versions))}
        if kind is STATEFUL_SET:
            new["metadata"]["generation"] = 1
        if not dry_run:
            self.objects[key] = new
        return new

    async def get(self, kind, namespace, name):
        found = self.objects.get((kind, name)) or self.strangers.get((kind, name))
        if found is None:
            raise ApiError(404, "NotFound", name)
        return found


class Poster:
    def __init__(self):
        self.posted = []

    def post(self, obj, notice):
        self.posted.append((notice.reason, notice.message))


class Story:
    def __init__(self, stage, clock, make_pool):
        self.stage, self.clock, self.make_pool = stage, clock, make_pool
        self.api, self.poster, self.metrics = Api(stage._versions), Poster(), Metrics()
        self.queue = KeyQueue(clock)
        self.reconciler = Reconciler(
            stage.pools,
            stage.observer,
            Executor(self.api, stage.cache, stage.observer),
            self.queue,
            self.poster,
            self.metrics,
            clock=clock,
            now=lambda: 1_800_000_000.0 + clock(),
        )

    def put(self, generation=1, name="demo", **spec):
        """Apply the pool with this spec, as a user does; the status stays."""
        made = self.make_pool(**spec)
        made["metadata"] |= {"name": name, "generation": generation}
        known = self.api.objects.get((POOL, name), {})
        made |= {"status": known["status"]} if known else {}
        self.api.objects[POOL, name] = self.stage.put(made, uid="pool-uid")

    def look(self):
        """What one look wrote, and when the next is due."""
        self.api.wrote.clear()
        after_s = asyncio.run(self.reconciler._look(KEY))
        return list(self.api.wrote), after_s

    def rest(self):
        """Look as often as it is due within a second, until nothing is written; when the next look is due."""
        for _ in range(20):
            wrote, after_s = self.look()
            if not wrote and (after_s is None or after_s > 1):
                return after_s
            self.clock.pass_s(1)
        raise AssertionError(f"it does not come to rest: {wrote}")

    @property
    def status(self):
        return self.api.objects[POOL, "demo"]["status"]

    def reason(self, kind):
        return next((one["reason"] for one in self.status["conditions"] if one["type"] == kind), None)

    def groups(self):
        return sorted(name for kind, name in self.api.objects if kind is STATEFUL_SET)

    def warned(self, reason):
        return [message for found, message in self.poster.posted if found == reason]


@pytest.fixture
def story(stage, clock, make_pool):
    return Story(stage, clock, make_pool)


def test_a_new_pool_is_brought_as_far_as_it_goes_and_then_left_alone(story):
    story.put(replicas=2)
    wrote, after_s = story.look()
    assert story.groups() == ["demo-0", "demo-1"]
    # Numbers are stored before the starts that use them; list and status once in a burst.
    assert wrote.index("EncodePool/status") < wrote.index("StatefulSet/demo-0")
    assert wrote.count("ConfigMap/demo-endpoints") == 1
    assert 0 < after_s <= 1
    assert story.rest() > 10
    assert story.reason("Progressing") == "Moving"
    assert [reason for reason, _ in story.poster.posted].count("GroupStarted") == 2


def test_a_lost_race_is_run_again_at_once_and_a_row_of_them_ever_more_slowly(story):
    story.put()
    story.api.errors[STATEFUL_SET] = [CONFLICT]
    story.look()
    assert story.groups() == ["demo-0"]
    story.rest()
    story.put(2, replicas=2)
    story.api.errors[STATEFUL_SET] = CONFLICT
    waits = [story.look()[1] for _ in range(8)]
    assert 0 < waits[0] < 1 < waits[-1]
    assert story.reconciler._state(KEY).failures > 8
    story.api.errors.clear()
    story.rest()
    assert story.groups() == ["demo-0", "demo-1"]
    assert story.reconciler._state(KEY).failures == 0


def test_a_server_that_does_not_answer_is_asked_ever_more_seldom(story):
    story.put()
    story.api.errors[STATEFUL_SET] = Unreachable("no answer")
    waits = [story.look()[1] for _ in range(8)]
    assert waits[0] <= 1
    assert 30 < waits[-1] <= 60
    assert story.warned("WriteRefused") == []


def test_what_is_refused_is_told_and_asked_for_before_it_is_tried_again(story):
    story.put(replicas=2)
    story.api.errors[STATEFUL_SET] = QUOTA
    story.rest()
    assert (story.reason("Stalled"), story.groups()) == ("WriteRefused", [])
    assert story.warned("WriteRefused") == ["exceeded quota"] * 2
    used = story.status["lastIncarnation"]
    for _ in range(3):
        story.clock.pass_s(60)
        wrote, _ = story.look()
        assert set(wrote) <= {"ask StatefulSet/demo-0", "ask StatefulSet/demo-1"}
    assert story.status["lastIncarnation"] == used
    story.api.errors[STATEFUL_SET] = Unreachable("no answer")
    story.clock.pass_s(60)
    assert 0 < story.look()[1] <= 1
    story.api.errors.clear()
    story.clock.pass_s(1)
    story.rest()
    assert (story.reason("Stalled"), story.groups()) == (None, ["demo-0", "demo-1"])


def test_a_spec_that_cannot_be_used_is_told_once_and_touches_nothing(story):
    story.put(replicas=2)
    story.rest()
    story.put(2, replicas=-1)
    wrote, _ = story.look()
    assert wrote == ["EncodePool/status"]
    assert story.status["observedGeneration"] == 2
    assert (story.reason("Ready"), story.reason("Stalled")) == ("InvalidSpec", "InvalidSpec")
    story.clock.pass_s(60)
    assert story.look()[0] == []
    assert len(story.warned("InvalidSpec")) == 1
    assert story.groups() == ["demo-0", "demo-1"]
    story.put(3, replicas=2)
    story.rest()
    assert story.reason("Ready") == "Incomplete"
    assert story.reason("Stalled") is None


def test_who_corrects_the_pool_need_not_wait_for_the_next_try(story):
    story.put()
    story.api.errors[STATEFUL_SET] = QUOTA
    story.rest()
    story.api.errors.clear()
    assert story.look()[0] == []
    story.put(2, image="smaller:1")
    story.look()
    assert story.groups() == ["demo-0"]


def test_an_object_in_the_way_is_told_once_looked_at_and_never_written(story):
    taken = (SERVICE, "demo-peers")
    stranger = {"metadata": {"namespace": "ns", "name": "demo-peers", "uid": "x", "resourceVersion": "5"}}
    story.api.strangers[taken] = stranger
    story.put()
    assert 0 < story.rest() <= STRANGER_S
    assert story.reason("Stalled") == "NameTaken"
    for _ in range(3):
        story.clock.pass_s(STRANGER_S)
        assert "Service/demo-peers" not in story.look()[0]
    assert story.warned("NameTaken") == ["Service/demo-peers is there and is not ours"]
    del story.api.strangers[taken]
    story.rest()
    assert (story.reason("Stalled"), taken in story.api.objects) == (None, True)


def test_a_pool_that_ends_is_left_to_the_garbage_collector_and_forgotten(story):
    story.put()
    story.rest()
    pool = story.stage.put(story.api.objects[POOL, "demo"], deletionTimestamp="2026-01-01T00:00:00Z")
    story.stage.drop(story.stage.cache.get(STATEFUL_SET, "ns", "demo-0"))
    assert story.look() == ([], None)
    story.stage.drop(pool)
    assert story.look() == ([], None)
    assert story.reconciler._states == {}


def test_a_defect_of_one_pool_stops_no_other_and_a_lost_lease_stops_all(story):
    async def until(condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)

    async def run():
        story.put()
        story.put(name="broken")
        shown = story.stage.observer.snapshot

        def snapshot(key, *rest):
            if key == ("ns", "broken"):
                raise RuntimeError("a defect")
            return shown(key, *rest)

        story.stage.observer.snapshot = snapshot
        for key in (("ns", "broken"), KEY):
            story.queue.add(key)
        working = asyncio.create_task(story.reconciler.work())
        await until(story.groups)
        assert story.metrics.reconcile_failures.labels("defect")._value.get() == 1
        # It comes back by itself, later each time.
        story.clock.pass_s(1)
        story.queue.add(KEY)  # the worker looks at the clock again
        await until(lambda: story.metrics.reconcile_failures.labels("defect")._value.get() == 2)
        assert story.queue.age_s < 1
        story.put(2, replicas=2)
        story.api.errors[STATEFUL_SET] = NotLeading()
        story.queue.add(KEY)
        with pytest.raises(NotLeading):
            await asyncio.wait_for(working, 10)
        assert story.groups() == ["demo-0"]
        assert story.queue._working == {}

    with structlog.testing.capture_logs() as logs:  # rendering the tracebacks would take seconds
        asyncio.run(run())
    told = [entry["pool"] for entry in logs if entry["event"] == "a pool could not be reconciled"]
    assert told == ["ns/broken"] * 2


def test_news_that_come_in_a_burst_are_one_look(story):
    story.put()
    story.rest()
    state = story.reconciler._state(KEY)
    state.rested_s, state.took_s = story.clock(), 0.3
    for _ in range(5):
        story.reconciler.changed(KEY)
    assert story.queue.take_due() == (None, pytest.approx(0.3))
    story.clock.pass_s(0.31)
    assert story.queue.take_due()[0] == KEY
