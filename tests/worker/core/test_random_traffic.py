"""Long runs of realistic traffic with everything that can go wrong, at known rates.

Where the state machine of ``test_pipeline_machine`` looks for short lives that break a rule, this
looks for what builds up over thousands of events; and it must have met everything that a pipeline
counts, or it would show nothing.
"""

import random
from collections import Counter
from dataclasses import replace

from encodepool_worker.core.limits import COUNTERS
from encodepool_worker.core.room import RoomState
from encodepool_worker.testing import (
    Driver,
    make_item,
    make_layout,
    make_limits,
    make_receiver,
    make_shards,
)

N_EVENTS = 2500
TOKENS = [1, 3, 5, 6, 8, 12, 20, 38]  # 16 bytes each, half of them twice that (deepstack)
WEIGHTS = {
    "request": 20,
    "receivers": 20,
    "one_receiver": 6,
    "moved_receiver": 3,
    "again": 4,
    "odd_frame": 3,
    "odd_request": 3,
    "meddle": 2,
    "tower": 24,
    "write": 40,
    "settle": 6,
    "copy": 24,
    "wait": 12,
}


class Traffic:
    def __init__(self, seed: int, second_tier_bytes: int) -> None:
        self.chance = random.Random(seed)
        self.driver = Driver(
            make_limits(
                1024,
                second_tier_bytes=second_tier_bytes,
                max_items_per_batch=4,
                max_tokens_per_batch=40,
                max_quarantined_bytes=300,
                max_tombstones=120,
                max_rooms=60,
            )
        )
        self.newest = 0

    def item(self, room, **changes):
        """Contents repeat, popular ones more often; a room keeps its own."""
        content = int(len(TOKENS) * 2 * random.Random(room).random() ** 2)
        layout = make_layout(TOKENS[content % len(TOKENS)], levels=content // len(TOKENS))
        return make_item(room, f"content {content}", layout=layout, **changes)

    def shards(self, room):
        return make_shards(["p", "q", "r"][: 1 + room % 3], layout=self.item(room).layout)

    def recent(self):
        return max(1, self.newest - int(self.chance.expovariate(0.25)))

    def request(self):
        self.newest += 1
        patience_s = self.chance.choice([None, None, 4.0, 20.0, 100.0])
        deadline_s = None if patience_s is None else self.driver.clock.now_s + patience_s
        self.driver.submit(self.item(self.newest, deadline_s=deadline_s))

    def receivers(self):
        room = self.newest + 1 if self.chance.random() < 0.4 else self.recent()
        shards = self.shards(room)
        self.chance.shuffle(shards)
        self.driver.announce(room, *shards)

    def one_receiver(self):
        room = self.recent()
        self.driver.announce(room, self.chance.choice(self.shards(room)))

    def moved_receiver(self):
        """A repeated request: the prefill waits at another address now."""
        room = self.recent()
        receiver = self.chance.choice(self.shards(room))
        self.driver.announce(room, replace(receiver, main_ptr=0x8_0000 + 64 * self.chance.randrange(9)))

    def again(self):
        done = [
            r for r in range(max(1, self.newest - 60), self.newest) if self.driver.state(r) is RoomState.DONE
        ]
        for room in self.chance.sample(done, min(2, len(done))):
            self.driver.announce(room, *self.shards(room))

    def odd_frame(self):
        room = self.recent()
        layout = self.item(room).layout
        fanout = self.chance.choice([1, 2, 5])
        span = self.chance.choice([None, 999])
        session = self.chance.choice("pqx")
        moved = make_receiver(session, layout=layout, fanout=fanout, main_ptr=0x9_0000, span=span)
        self.driver.announce(room, moved)

    def odd_request(self):
        room = self.recent()
        items = [
            self.item(room),
            make_item(room, "another"),
            self.item(room + 9, request_id=f"request-{room}"),
        ]
        self.driver.submit(self.chance.choice(items))

    def meddle(self):
        self.chance.choice([self.driver.refuse, self.driver.abort])(self.recent())

    def tower(self):
        rooms = self.driver.batch_rooms
        if not rooms:
            return
        if self.chance.random() < 0.15:
            self.driver.batch_failed()
        else:
            bad = [room for room in rooms if self.chance.random() < 0.04]
            self.driver.encoded(dict.fromkeys(bad, "not finite"))

    def write(self):
        if not self.driver.writes:
            return
        write = self.driver.writes[self.chance.choice(sorted(self.driver.writes))]
        who, luck = (write.room, write.receiver.session), self.chance.random()
        if luck < 0.85:
            self.driver.land(*who)
        else:
            self.driver.miss(*who, late=luck > 0.93)

    def settle(self):
        if self.driver.late:
            write = self.driver.late[min(self.driver.late)]
            self.driver.settle(write.room, write.receiver.session, by_probe=self.chance.random() < 0.5)

    def copy(self):
        if self.driver.demotes:
            entry = self.chance.choice(sorted(self.driver.demotes))
            self.driver.demoted(entry, failed=self.chance.random() < 0.15)

    def wait(self):
        self.driver.wait(self.chance.choice([0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 15.0]))

    def run(self, n_events):
        for name in self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=n_events):
            getattr(self, name)()
        self.driver.finish()
        return self.driver.pipeline.snapshot().counters


def test_nothing_builds_up_and_everything_was_met():
    seen = Counter()
    for seed, second_tier_bytes in enumerate((0, 0, 300, 2000)):
        seen.update(Traffic(seed, second_tier_bytes).run(N_EVENTS))
    assert {name for name in COUNTERS if not seen[name]} == set()
