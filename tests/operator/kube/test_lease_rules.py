"""The Lease against an API server of a few lines that knows versions; the real one is in tests/cluster."""

import asyncio
import copy

import pytest

from encodepool_operator.kube.errors import ApiError, Unreachable
from encodepool_operator.kube.lease import DEADLINE_S, VALID_S, Lease, LeaseLost, LeaseName


class Leases:
    """One Lease, with the API server's rules for versions."""

    def __init__(self):
        self.stored = None
        self.version = 10
        self.down = False

    def _store(self, lease):
        self.version += 1
        self.stored = copy.deepcopy(lease)
        self.stored["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.stored)

    async def get(self, kind, namespace, name):
        if self.down:
            raise Unreachable("down")
        if self.stored is None:
            raise ApiError(404, "NotFound", "no")
        return copy.deepcopy(self.stored)

    async def create(self, kind, obj, *, tries):
        if self.down:
            raise Unreachable("down")
        if self.stored is not None:
            raise ApiError(409, "AlreadyExists", "there")
        return self._store(obj)

    async def replace(self, kind, obj):
        if self.down:
            raise Unreachable("down")
        if obj["metadata"]["resourceVersion"] != self.stored["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "changed")
        return self._store(obj)

    @property
    def holder(self):
        return self.stored["spec"]["holderIdentity"]


@pytest.fixture
def leases():
    return Leases()


def make(leases, clock, identity):
    return Lease(leases, LeaseName("ns", "operator", identity), clock=clock)


async def turns(*of):
    for lease in of:
        await lease._turn()


def test_the_first_takes_it_and_the_second_waits(leases, clock):
    async def story():
        one, two = make(leases, clock, "one"), make(leases, clock, "two")
        await turns(one, two)
        assert (one.is_held(), two.is_held()) == (True, False)
        assert one.held.is_set()
        # As long as it is renewed, the second goes on waiting.
        for _ in range(20):
            clock.pass_s(2)
            await turns(one, two)
        assert (leases.holder, two.is_held()) == ("one", False)

    asyncio.run(story())


def test_a_lease_that_is_not_renewed_is_taken_after_its_validity(leases, clock):
    async def story():
        one, two = make(leases, clock, "one"), make(leases, clock, "two")
        await turns(one, two)
        clock.pass_s(DEADLINE_S)
        assert not one.is_held()  # it stops by itself before anybody else may begin
        await turns(two)
        assert not two.is_held()
        clock.pass_s(VALID_S - DEADLINE_S)
        await turns(two)
        assert two.is_held()
        assert leases.stored["spec"]["leaseTransitions"] == 2
        with pytest.raises(LeaseLost, match="taken by two"):
            await turns(one)
        assert not one.held.is_set()
        # It has seen the other's Lease by now, and could write to it.
        await one.release()
        assert (leases.holder, one.is_held()) == ("two", False)

    asyncio.run(story())


def test_a_released_lease_is_taken_at_once(leases, clock):
    async def story():
        one, two = make(leases, clock, "one"), make(leases, clock, "two")
        await turns(one, two)
        await one.release()
        assert not one.is_held()
        await turns(two)
        assert two.is_held()

    asyncio.run(story())


def test_a_renewal_whose_answer_was_lost_does_not_keep_it_from_being_released(leases, clock):
    async def story():
        one = make(leases, clock, "one")
        await turns(one)
        leases._store(leases.stored)
        await one.release()
        assert leases.holder == ""

    asyncio.run(story())


def test_a_replica_that_never_held_it_releases_nothing(leases, clock):
    async def story():
        one, two = make(leases, clock, "one"), make(leases, clock, "two")
        await turns(one, two)
        await two.release()
        assert leases.holder == "one"

    asyncio.run(story())


def test_the_clock_of_another_machine_plays_no_part(leases, clock):
    async def story():
        one, two = make(leases, clock, "one"), make(leases, clock, "two")
        await turns(one)
        leases.stored["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
        await turns(two)
        assert not two.is_held()

    asyncio.run(story())


def test_a_holder_without_a_server_gives_up_in_time(leases, clock):
    async def story():
        one = make(leases, clock, "one")
        await turns(one)
        leases.down = True
        clock.pass_s(DEADLINE_S - 0.1)
        assert one.is_held()
        clock.pass_s(0.2)
        with pytest.raises(LeaseLost, match="not renewed"):
            await one.run()

    asyncio.run(story())


def test_a_restarted_process_of_the_same_name_goes_on_at_once(leases, clock):
    async def story():
        await turns(make(leases, clock, "one"))
        again = make(leases, clock, "one")
        await turns(again)
        assert again.is_held()

    asyncio.run(story())


def test_a_deleted_lease_is_made_again(leases, clock):
    async def story():
        one = make(leases, clock, "one")
        await turns(one)
        leases.stored = None
        leases.replace = _gone
        await turns(one)
        del leases.replace
        await turns(one)
        assert one.is_held()
        assert leases.holder == "one"

    async def _gone(kind, obj):
        raise ApiError(404, "NotFound", "no")

    asyncio.run(story())
