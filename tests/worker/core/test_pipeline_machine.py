"""Random lives of many rooms at once, against a shell that answers late, badly, or out of order.

``Witness`` checks after every event that each receiver is told once and truthfully, that
credit and pixels come back once, and that no byte changes while a write may read it; at the end
everything is answered and nothing may be left.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from encodepool_worker.core.events import (
    BatchEncoded,
    BatchFailed,
    Demoted,
    DemoteFailed,
    WriteSettled,
    Written,
)
from encodepool_worker.errors import WorkerError
from encodepool_worker.testing import Driver, make_item, make_layout, make_limits, make_receiver

# Rows of 16 bytes (one has deepstack: 32); the store's first tier holds 1024.
LAYOUTS = [
    make_layout(5),
    make_layout(6, levels=1),
    make_layout(12),
    make_layout(9),
    make_layout(24),
    make_layout(1),
    make_layout(40),  # more than half the store
    make_layout(12),
    make_layout(20),
    make_layout(38),  # more than half the store
    make_layout(80),  # more than the store
]
PLAN = [0, 1, 2, 0, 3, 4, 1, 0, 6, 2, 4, 0, 8, 10, 9, 3]  # which content a room has
NEAR = st.sampled_from([0, 0, 0, 1, 1, 2, 3, -1, -2])  # rooms back from the one submitted last
RARELY = st.sampled_from([False] * 9 + [True])
SECONDS = st.sampled_from([0.0, 0.5, 3.0, 3.0, 9.0, 11.0, 61.0])
STRAYS = [
    BatchEncoded(99999),
    BatchFailed(99999, ""),
    Written(99999),
    WriteSettled(99999, True),
    Demoted(99999),
    DemoteFailed(99999, ""),
]


class PipelineMachine(RuleBasedStateMachine):
    @initialize(
        quarantine_bytes=st.sampled_from([150, 4096]),
        tombstones=st.sampled_from([6, 50, 50]),
        rooms=st.sampled_from([8, 50, 50]),
        second_tier=st.sampled_from([0, 200, 1024, 1024, 3000]),
        ends=st.sampled_from([1, 512]),
        ranks=st.sampled_from([1, 1, 2]),
    )
    def open(self, quarantine_bytes, tombstones, rooms, second_tier, ends, ranks):
        self.newest = 10
        self.n_ranks = ranks
        self.driver = Driver(
            make_limits(
                1024,
                second_tier_bytes=second_tier,
                n_ranks=ranks,
                max_demotions=3,
                max_ends_per_turn=ends,
                max_quarantined_bytes=quarantine_bytes,
                max_items_per_batch=3,
                max_tokens_per_batch=40,
                max_tombstones=tombstones,
                max_rooms=rooms,
                story_records=50,
            )
        )

    def room(self, near):
        return self.newest - near

    def item(self, room, other_content=0, **changes):
        content = (PLAN[room % len(PLAN)] + other_content) % len(LAYOUTS)
        return make_item(room, f"content {content}", layout=LAYOUTS[content], **changes)

    # outside

    @rule(patience=st.sampled_from([None, None, None, 0.0, 5.0, 70.0]))
    def submit(self, patience):
        self.newest += 1
        deadline_s = None if patience is None else self.driver.clock.now_s + patience
        self.driver.submit(self.item(self.newest, deadline_s=deadline_s))

    @rule(n=st.integers(2, 5), claimed=st.booleans())
    def submit_several(self, n, claimed):
        for _ in range(n):
            if claimed:
                self.announce_all(-1, "p")
            self.submit(None)

    @rule(near=NEAR, other=RARELY)
    def submit_near(self, near, other):
        self.driver.submit(self.item(self.room(near), other))

    @rule(near=NEAR, twin=NEAR)
    def submit_under_the_name_of_another(self, near, twin):
        name = f"request-{self.room(twin)}"
        self.driver.submit(self.item(self.room(near), request_id=name))

    @rule(near=NEAR, session=st.sampled_from("pppqqr"), wrong=RARELY, moved=RARELY, more=RARELY)
    def announce(self, near, session, wrong, moved, more):
        """Even rooms have one receiver, odd rooms two that share; with two ranks, one at each."""
        room = self.room(near)
        layout = self.item(room).layout
        cut = -(-layout.n_tokens // 2)
        rank = {"p": 0, "q": 1, "r": room % 2}[session] if self.n_ranks > 1 else 0
        halves = {"p": (0, cut), "q": (cut, layout.n_tokens), "r": (cut, layout.n_tokens)}
        receiver = make_receiver(
            session,
            layout=layout,
            rows=halves[session] if room % 2 else None,
            fanout=(1 if self.n_ranks > 1 else 1 + room % 2) + more,
            rank=(rank + moved * more) % self.n_ranks,
            main_ptr=0x20_0000 if moved else 0x10_0000,
            span=99 if wrong else None,
        )
        self.driver.announce(room, receiver)

    @rule(near=NEAR, session=st.sampled_from("pq"))
    def announce_all(self, near, session):
        self.announce(near, session, False, False, False)
        if self.room(near) % 2 or self.n_ranks > 1:
            self.announce(near, "q" if session == "p" else "p", False, False, False)

    @rule(near=NEAR, refused=st.booleans())
    def meddle(self, near, refused):
        meddle = self.driver.refuse if refused else self.driver.abort
        meddle(self.room(near))

    @rule(seconds=SECONDS)
    def wait(self, seconds):
        self.driver.wait(seconds)

    @precondition(lambda self: self.driver.clock.now_s > 1150)
    @rule(seconds=SECONDS)
    def drain(self, seconds):
        self.driver.drain(seconds)

    # answers

    @precondition(lambda self: self.driver.batch)
    @rule(ends=st.sampled_from([*["well"] * 6, "one bad item", "all bad items", "failed", "failed"]))
    def tower_answers(self, ends):
        bad = self.driver.batch_rooms[: {"well": 0, "one bad item": 1}.get(ends)]
        if ends == "failed":
            self.driver.batch_failed()
        else:
            self.driver.encoded(dict.fromkeys(bad, "not finite"))

    @precondition(lambda self: self.driver.demotes)
    @rule(data=st.data(), failed=RARELY)
    def copy_answers(self, data, failed):
        entry = data.draw(st.sampled_from(sorted(self.driver.demotes)))
        self.driver.demoted(entry, failed=failed)

    def a_write(self, data, writes):
        number = data.draw(st.sampled_from(sorted(writes)))
        return writes[number].room, writes[number].receiver.session

    @precondition(lambda self: self.driver.writes)
    @rule(data=st.data())
    def write_lands(self, data):
        self.driver.land(*self.a_write(data, self.driver.writes))

    @precondition(lambda self: self.driver.writes)
    @rule(data=st.data(), late=st.booleans())
    def write_fails(self, data, late):
        self.driver.miss(*self.a_write(data, self.driver.writes), late=late)

    @precondition(lambda self: self.driver.late)
    @rule(data=st.data(), by_probe=st.booleans())
    def late_write_settles(self, data, by_probe):
        self.driver.settle(*self.a_write(data, self.driver.late), by_probe=by_probe)

    # our own bugs are loud

    @rule(stray=st.sampled_from(STRAYS))
    def stray_answers_raise(self, stray):
        with pytest.raises(WorkerError):
            self.driver.pipeline.handle(stray, self.driver.clock.now_s)

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.finish()


PipelineMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_no_interleaving_breaks_a_rule = PipelineMachine.TestCase
