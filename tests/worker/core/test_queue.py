"""The order in which jobs come to the tower."""

import random

import pytest

from encodepool_worker.core.queue import BatchQueue, Pixels
from encodepool_worker.testing import make_item, make_layout


@pytest.fixture
def queue():
    return BatchQueue()


def add(queue, content, *, claimed=(), unclaimed=(), oversize=False, cost=4, now_s=0.0):
    item = make_item(1, content, layout=make_layout(), cost=cost)
    job = queue.add(item, Pixels(1, 1, cost, 1), 64, oversize=oversize, now_s=now_s)
    for room in claimed:
        queue.join(job, room, claimed=True)
    for room in unclaimed:
        queue.join(job, room, claimed=False)
    return job


def drain(queue):
    order = []
    while (job := queue.head()) is not None:
        order.append(job)
        queue.remove(job)
    return order


def test_jobs_come_in_admission_order(queue):
    jobs = [add(queue, name, unclaimed=[i]) for i, name in enumerate("dacb")]
    assert drain(queue) == jobs
    assert queue.head() is None
    assert (len(queue), queue.cost, queue.oldest_s) == (0, 0, None)


def test_claimed_jobs_come_first(queue):
    a, b, c = (add(queue, name, unclaimed=[i]) for i, name in enumerate("abc"))
    queue.claim(c, 2)
    queue.claim(b, 1)
    assert drain(queue) == [b, c, a]


def test_a_job_that_loses_its_claimed_room_goes_back_to_its_place(queue):
    a = add(queue, "a", unclaimed=[1])
    b = add(queue, "b", claimed=[2], unclaimed=[3])
    assert queue.head() is b
    assert queue.leave(b, 2) is False
    assert drain(queue) == [a, b]


def test_the_job_goes_with_its_last_room(queue):
    job = add(queue, "a", claimed=[1], unclaimed=[2], cost=9)
    assert queue.cost == 9
    assert queue.leave(job, 2) is False
    assert queue.leave(job, 1) is True
    assert queue.get(job.key) is None
    assert (len(queue), queue.cost, queue.head()) == (0, 0, None)


def test_an_oversize_job_waits_aside_until_it_is_claimed(queue):
    big = add(queue, "big", unclaimed=[1], oversize=True)
    small = add(queue, "small", unclaimed=[2])
    assert queue.head() is small
    assert not queue.oversize_claimed
    queue.claim(big, 1)
    assert queue.oversize_claimed
    assert queue.head() is big
    queue.remove(big)
    assert not queue.oversize_claimed


def test_an_oversize_job_whose_claimed_room_left_waits_aside_again(queue):
    big = add(queue, "big", claimed=[1], unclaimed=[2], oversize=True)
    queue.leave(big, 1)
    assert not queue.oversize_claimed
    assert queue.head() is None


def test_a_split_leaves_the_others_in_their_place(queue):
    a = add(queue, "a", claimed=[1, 2], unclaimed=[3])
    b = add(queue, "b", unclaimed=[4])
    assert list(queue.split(a)) == [1, 2]
    assert drain(queue) == [a, b]


def test_the_oldest_job_shows_how_long_work_waits(queue):
    a = add(queue, "a", unclaimed=[1], now_s=5.0)
    add(queue, "b", claimed=[2], now_s=6.0)
    assert queue.oldest_s == 5.0
    queue.remove(a)
    assert queue.oldest_s == 6.0


def test_one_job_for_each_content(queue):
    add(queue, "a", unclaimed=[1])
    with pytest.raises(ValueError, match="queued already"):
        add(queue, "a", unclaimed=[2])


def test_order_holds_through_any_history(queue):
    """Against a list that is sorted anew each time; also shows that stale heap entries go away."""
    chance = random.Random(3)
    jobs, room = [], 0
    for turn in range(5000):
        act = chance.random()
        if act < 0.4 or not jobs:
            room += 1
            jobs.append(add(queue, f"job {turn}", unclaimed=[room], oversize=chance.random() < 0.2))
        elif act < 0.75:
            job = chance.choice(jobs)
            room += 1
            queue.join(job, room, claimed=chance.random() < 0.6)
        else:
            job = chance.choice(jobs)
            gone = queue.leave(job, chance.choice([*job.claimed, *job.unclaimed]))
            if gone:
                jobs.remove(job)
        if turn % 5 == 0 and len(jobs) > 20:
            head = queue.head()
            if head:
                queue.remove(head)
                jobs.remove(head)
        in_turn = sorted(
            (j for j in jobs if j.claimed or not j.oversize), key=lambda j: (not j.claimed, j.order)
        )
        assert queue.head() is (in_turn[0] if in_turn else None)
        assert queue.oversize_claimed is any(j.oversize and j.claimed for j in jobs)
    assert len(queue) == len(jobs)
    assert len(queue._claimed) + len(queue._unclaimed) <= 4 * len(jobs) + 2048


def test_places_that_no_longer_hold_do_not_pile_up(queue):
    jobs = [add(queue, name, unclaimed=[0], oversize=name == "c") for name in "abc"]
    for room in range(1, 2000):
        for job in jobs:
            queue.join(job, room, claimed=True)
            assert queue.head() is job
            queue.leave(job, room)
    assert len(queue._claimed) + len(queue._unclaimed) < 2100
    assert drain(queue) == jobs[:2]
