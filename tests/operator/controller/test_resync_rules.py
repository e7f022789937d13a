import asyncio

import pytest

from encodepool_operator.controller.metrics import Metrics
from encodepool_operator.controller.resync import PERIOD_S, Resync, Watched, WatchStalled
from encodepool_operator.kube.cache import Cache
from encodepool_operator.kube.client import Listed
from encodepool_operator.kube.errors import ApiError, Unreachable
from encodepool_operator.kube.kinds import CONFIG_MAP, POD

WATCHED = (Watched(POD, "app"), Watched(CONFIG_MAP, "app"))


def pod(name, version, uid=""):
    return {
        "metadata": {"namespace": "ns", "name": name, "uid": uid or name, "resourceVersion": str(version)}
    }


class Server:
    """Lists what it is told to; ``error`` is raised instead."""

    def __init__(self):
        self.pods = []
        self.version = 100
        self.error = None

    async def list(self, kind, namespace, selector, version):
        if self.error is not None:
            raise self.error
        return Listed(list(self.pods) if kind is POD else [], str(self.version))


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def cache():
    return Cache({}, lambda kind, before, after: None)


@pytest.fixture
def resync(server, cache, clock):
    made = Resync(server, cache, WATCHED, ("",), Metrics(), clock)
    asyncio.run(made.fill())
    return made


def compare(resync, owed=True):
    return asyncio.run(resync._all(WATCHED, owed=owed))


def test_a_list_repairs_the_cache_at_once(resync, server, cache, clock):
    cache.put(POD, pod("old", 5))
    cache.put(POD, pod("gone", 6))
    cache.put(POD, pod("newer-than-the-list", 500))
    server.pods = [pod("old", 50), pod("new", 60)]
    assert compare(resync)
    found = {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in cache.all(POD)}
    assert found == {"old": "50", "new": "60", "newer-than-the-list": "500"}
    assert resync.complete_s == clock()


def test_a_watch_that_tells_of_it_late_is_alive(resync, server, cache, clock):
    cache.put(POD, pod("gone", 6))
    server.pods = [pod("new", 60)]
    compare(resync)
    resync.heard(POD, "ADDED", pod("new", 60))
    resync.heard(POD, "DELETED", pod("gone", 70))
    clock.pass_s(PERIOD_S)
    resync._check()


@pytest.mark.parametrize("told", [None, pod("new", 59), pod("else", 99)])
def test_a_watch_that_has_not_told_of_it_a_period_later_is_stalled(resync, server, clock, told):
    server.pods = [pod("new", 60)]
    compare(resync)
    if told is not None:
        resync.heard(POD, "MODIFIED", told)
    clock.pass_s(PERIOD_S - 1)
    resync._check()
    clock.pass_s(1)
    with pytest.raises(WatchStalled, match="ns/new"):
        resync._check()


def test_what_was_deleted_while_a_watch_began_anew_is_not_held_against_it(resync, server, cache, clock):
    cache.put(POD, pod("gone", 6))
    cache.put(POD, pod("stays", 7))
    server.pods = [pod("stays", 7)]
    compare(resync)
    # The watch listed again, so it is awake; it will never tell of what was deleted before.
    resync.heard(POD, None, pod("stays", 7))
    assert resync._relisted == {POD}
    compare(resync, owed=False)
    clock.pass_s(PERIOD_S)
    resync._check()


def test_a_watch_that_began_anew_and_found_nothing_owes_no_deletions(resync, server, cache, clock):
    cache.put(POD, pod("gone", 6))
    cache.put(POD, pod("last", 7))
    server.pods = [pod("last", 7)]
    compare(resync)
    # It lists again after the last one has gone too: of an empty list there is nothing to tell.
    server.pods = []
    compare(resync)
    assert cache.get(POD, "ns", "last") is None
    clock.pass_s(PERIOD_S)
    resync._check()


@pytest.mark.parametrize(("version", "stalled"), [(99, True), (101, False)])
def test_a_watch_that_tells_of_what_came_later_owes_no_deletion(
    resync, server, cache, clock, version, stalled
):
    """It may have listed again while there was nothing, and that nobody notices."""
    cache.put(POD, pod("gone", 6))
    cache.put(POD, pod("last", 7))
    server.pods = [pod("last", 7)]
    compare(resync)
    resync.heard(POD, "ADDED", pod("new", version))
    clock.pass_s(PERIOD_S)
    if stalled:
        with pytest.raises(WatchStalled, match="ns/gone"):
            resync._check()
    else:
        resync._check()


def test_a_list_that_fails_is_not_a_comparison(resync, server, clock):
    filled_s = resync.complete_s
    clock.pass_s(5)
    server.error = Unreachable("down")
    assert not compare(resync)
    assert resync.complete_s == filled_s


def test_a_list_whose_version_was_given_up_on_the_way_is_not_a_comparison(resync, server):
    server.error = ApiError(410, "Expired", "too old")
    assert not compare(resync)


def test_a_kind_that_is_not_served_leaves_the_others_alone(resync, server, cache):
    server.error = ApiError(404, "NotFound", "no such kind")
    cache.put(POD, pod("a", 5))
    assert compare(resync)
    assert cache.get(POD, "ns", "a") is not None
