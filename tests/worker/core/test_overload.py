"""More is asked of a worker than it can do: what it gets done in time, in simulated time.

The tower takes a fixed time for a batch and some for each token; requests come at random, with a
deadline, and many repeat a content. Capacity is what the same pipeline does for a client that always has
some requests under way and no deadline.
"""

import heapq
import itertools
import random
from collections import deque

import pytest

from encodepool_worker.core import instructions as do
from encodepool_worker.core.events import Announced, BatchEncoded, Submitted, Written
from encodepool_worker.core.pipeline import Pipeline
from encodepool_worker.testing import make_item, make_layout, make_limits, make_receiver
from encodepool_worker.types import Status

BASE_S, TOKEN_S = 0.02, 0.002
WRITE_S = 0.005
TOKENS = [4, 4, 8, 16, 32]
BATCH_TOKENS = 64
RAMP_S, COUNTED_S = 4.0, 16.0
UNDER_WAY = 24
REPEATED_WITHIN_S = 2.0


class Worker:
    """A pipeline whose tower and writes take their time. Counts tokens that landed, by room."""

    def __init__(self, slowness=lambda now_s: 1.0):
        self.pipeline = Pipeline(make_limits(64 * 1024, max_tokens_per_batch=BATCH_TOKENS))
        self.now_s = 0.0
        self.landed: dict[int, float] = {}
        self.over: dict[int, float] = {}
        self._coming: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._slowness = slowness

    def send(self, room, content, n_tokens, deadline_s=None):
        layout = make_layout(n_tokens)
        item = make_item(room, content, layout=layout, cost=n_tokens, deadline_s=deadline_s)
        self._handle(Announced(room, make_receiver(layout=layout)))
        self._handle(Submitted(room, item, pixels=room, pixel_bytes=1))

    def run_until(self, until_s):
        """Whatever happens up to then."""
        while True:
            due_s = self.pipeline.next_deadline_s()
            at_s = min(self._coming[0][0] if self._coming else until_s, until_s if due_s is None else due_s)
            if at_s >= until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, at_s)
            if self._coming and self._coming[0][0] <= self.now_s:
                self._handle(heapq.heappop(self._coming)[2])
            else:
                self._carry_out(self.pipeline.handle_all((), self.now_s))

    def _handle(self, event):
        self._carry_out(self.pipeline.handle(event, self.now_s))

    def _later(self, seconds, event):
        heapq.heappush(self._coming, (self.now_s + seconds, next(self._order), event))

    def _carry_out(self, instructions):
        for one in instructions:
            match one:
                case do.RunBatch():
                    tokens = sum(job.item.cost for job in one.jobs)
                    self._later(
                        self._slowness(self.now_s) * (BASE_S + TOKEN_S * tokens), BatchEncoded(one.batch)
                    )
                case do.Write():
                    self._later(WRITE_S, Written(one.write))
                case do.SendStatus():
                    self.over[one.room] = self.now_s
                    if one.status is Status.SUCCESS:
                        self.landed[one.room] = self.now_s


class Requests:
    """New contents, and with a given share those of the last moments again."""

    def __init__(self, share_repeated, seed=0):
        self.chance = random.Random(seed)
        self._share = share_repeated
        self._rooms = itertools.count(1)
        self._recent: deque[tuple[float, tuple[str, int]]] = deque()

    def next(self, now_s):
        while self._recent and self._recent[0][0] < now_s - REPEATED_WITHIN_S:
            self._recent.popleft()
        room = next(self._rooms)
        if self._recent and self.chance.random() < self._share:
            return room, *self.chance.choice(self._recent)[1]
        content = (f"content {room}", self.chance.choice(TOKENS))
        self._recent.append((now_s, content))
        return room, *content


def counted(rooms, tokens):
    """Tokens a second, of those that ended while they were counted."""
    ended = [room for room, at_s in rooms.items() if RAMP_S <= at_s < RAMP_S + COUNTED_S]
    return sum(tokens[room] for room in ended) / COUNTED_S, len(ended) / COUNTED_S


def capacity(share_repeated):
    """(tokens, requests) a second."""
    worker, requests, tokens = Worker(), Requests(share_repeated), {}
    while worker.now_s < RAMP_S + COUNTED_S:
        while len(tokens) - len(worker.over) < UNDER_WAY:
            room, content, n = requests.next(worker.now_s)
            tokens[room] = n
            worker.send(room, content, n)
        worker.run_until(worker.now_s + 0.002)
    return counted(worker.landed, tokens)


def pushed(per_s, deadline_s, share_repeated, slowness=lambda now_s: 1.0):
    """Tokens a second that landed in their deadline, the worker, and room -> tokens of every request."""
    worker, requests, sent, due_s = Worker(slowness), Requests(share_repeated, seed=1), {}, {}
    while worker.now_s < RAMP_S + COUNTED_S:
        worker.run_until(worker.now_s + requests.chance.expovariate(per_s))
        room, content, n = requests.next(worker.now_s)
        sent[room], due_s[room] = n, worker.now_s + deadline_s
        worker.send(room, content, n, due_s[room])
    worker.run_until(worker.now_s + 2 * deadline_s)
    in_time = {room: at_s for room, at_s in worker.landed.items() if at_s <= due_s[room]}
    return counted(in_time, sent)[0], worker, sent


@pytest.mark.parametrize("share_repeated", [0.0, 0.5])
@pytest.mark.parametrize("deadline_s", [0.5, 2.0])
def test_what_is_done_in_time_stays_near_the_capacity(deadline_s, share_repeated):
    tokens_per_s, requests_per_s = capacity(share_repeated)
    done_per_s, worker, sent = pushed(4 * requests_per_s, deadline_s, share_repeated)
    assert done_per_s >= 0.9 * tokens_per_s
    assert worker.over.keys() == sent.keys(), "every receiver is told"
    counters = worker.pipeline.snapshot().counters
    # Some of the first are too late, before anything has been learnt.
    assert counters["expired"] <= 0.02 * counters["admitted"]


def test_a_tower_of_changing_speed_costs_little():
    chance = random.Random(3)
    tokens_per_s, requests_per_s = capacity(0.5)
    speeds = [0.7, 0.9, 1.0, 1.0, 1.1, 1.3]
    done_per_s, worker, sent = pushed(4 * requests_per_s, 1.0, 0.5, lambda now_s: chance.choice(speeds))
    assert done_per_s >= 0.9 * tokens_per_s
    assert worker.over.keys() == sent.keys()


def test_a_tower_that_becomes_slow_is_not_given_more_than_it_can_do():
    """What was taken for the faster tower is too much: some is given up so that the rest is in time."""
    tokens_per_s, requests_per_s = capacity(0.0)
    done_per_s, worker, sent = pushed(
        4 * requests_per_s, 2.0, 0.0, lambda now_s: 3.0 if now_s > RAMP_S else 1.0
    )
    assert done_per_s >= 0.8 * tokens_per_s / 3.0  # what was learnt on the way counts in
    assert worker.pipeline.snapshot().counters["given_up_items"] > 0
    assert worker.over.keys() == sent.keys()


def test_a_tower_that_was_slow_for_once_is_trusted_again():
    """What was learnt may be wrong: an idle worker takes an item all the same, and learns."""
    slow = iter([100.0] * 5)
    worker = Worker(lambda now_s: next(slow, 1.0))
    for room in range(1, 6):
        worker.send(room, f"slow {room}", 16)
        worker.run_until(worker.now_s + 10.0)
    for room in range(6, 16):  # predicted: 5 s
        worker.send(room, f"quick {room}", 16, worker.now_s + 1.0)
        worker.run_until(worker.now_s + 2.0)
    assert set(range(6, 16)) <= worker.landed.keys()


def test_no_size_is_starved():
    _, requests_per_s = capacity(0.0)
    _, worker, sent = pushed(4 * requests_per_s, 1.0, 0.0)
    for size in set(TOKENS):
        rooms = [room for room, tokens in sent.items() if tokens == size]
        assert sum(room in worker.landed for room in rooms) >= 0.1 * len(rooms), size
