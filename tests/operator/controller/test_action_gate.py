import random
from dataclasses import replace

import pytest

from encodepool_operator.controller.gate import REFUSAL_S, REPAIR_PERIOD_S, Gate, key_of
from encodepool_operator.core import actions
from encodepool_operator.core.record import GroupRecord, LastFailure, PortBlock
from encodepool_operator.core.snapshot import RevisionRecord

RECORD = GroupRecord(1, "r", PortBlock(1, 2, 3, 4), 0.0)
REVISION = RevisionRecord("r", 1, "s", "{}")


def start(group):
    return actions.StartGroup(group, 1, REVISION, RECORD, "it is missing")


def write_status(**status):
    return actions.WriteStatus(status, "it has changed")


def names(passed):
    return [(type(action).__name__, action.group) for action in passed.actions]


@pytest.fixture
def gate(clock):
    return Gate(clock, random.Random(1))


def test_list_and_status_are_written_once_a_second(gate, clock):
    plan = [actions.WriteEndpoints({}, "r"), write_status(a=1)]
    passed = gate.pass_on(plan, None)
    assert (len(passed.actions), passed.wait_s) == (2, None)
    gate.note(passed.actions, {})
    clock.pass_s(0.4)
    passed = gate.pass_on(plan, None)
    assert passed.actions == []
    assert passed.wait_s == pytest.approx(0.6)
    clock.pass_s(0.6)
    assert len(gate.pass_on(plan, None).actions) == 2


def test_the_status_does_not_speak_of_a_list_that_is_still_to_be_written(gate, clock):
    gate.note([actions.WriteEndpoints({}, "r")], {})
    clock.pass_s(0.4)
    plan = [actions.WriteEndpoints({"a": "b"}, "r"), write_status(a=1)]
    assert gate.pass_on(plan, None).actions == []
    clock.pass_s(0.6)
    assert len(gate.pass_on(plan, None).actions) == 2
    # One that is refused may never be written, and somebody has to tell of it.
    gate.note([], {key_of(plan[0]): "no right"})
    assert names(gate.pass_on(plan, None)) == [("WriteStatus", None)]


def test_no_group_that_serves_is_stopped_before_the_list_has_lost_it(gate, clock):
    drained = actions.StopGroup(0, REVISION, RECORD, "it has been drained")
    failed = actions.StopGroup(
        1, REVISION, replace(RECORD, failure=LastFailure(0.0, RECORD.incarnation, "Error")), "it failed"
    )
    gone = actions.DeleteGroup(2, "it is stopped")
    plan = [actions.WriteEndpoints({"a": "b"}, "r"), drained, failed, gone, start(3)]
    gate.note([actions.WriteEndpoints({}, "r")], {})
    clock.pass_s(0.4)
    passed = gate.pass_on(plan, None)
    assert names(passed) == [("StopGroup", 1), ("StartGroup", 3)]
    assert passed.wait_s == pytest.approx(0.6)
    clock.pass_s(0.6)
    assert gate.pass_on(plan, None).actions == plan


def test_who_edits_a_group_again_and_again_is_not_answered_each_time_at_once(gate, clock):
    first, second = (actions.RepairGroup(group, 1, REVISION, RECORD, (), "r") for group in (0, 1))
    passed = gate.pass_on([first], None)
    assert names(passed) == [("RepairGroup", 0)]
    gate.note(passed.actions, {})
    passed = gate.pass_on([first, second, start(2)], None)
    assert names(passed) == [("RepairGroup", 1), ("StartGroup", 2)]
    assert passed.wait_s == REPAIR_PERIOD_S
    clock.pass_s(REPAIR_PERIOD_S)
    assert names(gate.pass_on([first], None)) == [("RepairGroup", 0)]


def test_what_was_refused_waits_and_the_rest_goes_on(gate, clock):
    reserve, bad, good = actions.ReserveIncarnations(2, "r"), start(0), start(1)
    plan = [reserve, bad, good, write_status(lastIncarnation=2)]
    assert len(gate.pass_on(plan, None).actions) == 4
    gate.note([reserve, good], {key_of(bad): "no quota"})
    assert gate.refusals == ("no quota",)
    passed = gate.pass_on(plan, None)
    assert names(passed) == [("ReserveIncarnations", None), ("StartGroup", 1), ("WriteStatus", None)]
    assert 0 < passed.wait_s <= REFUSAL_S
    clock.pass_s(REFUSAL_S)
    passed = gate.pass_on(plan, None)
    # It is asked for without effect first.
    assert passed.asks == [bad]
    assert ("StartGroup", 0) not in names(passed)
    gate.note([bad], {})
    assert ("StartGroup", 0) in names(gate.pass_on(plan, None))


def test_without_a_start_no_number_is_used_up(gate):
    bad = start(0)
    status = {"lastIncarnation": 4, "replicas": 1}
    gate.note([], {key_of(bad): "no quota"})
    plan = [actions.ReserveIncarnations(5, "r"), bad, write_status(lastIncarnation=5, replicas=2)]
    passed = gate.pass_on(plan, status)
    assert names(passed) == [("WriteStatus", None)]
    assert passed.actions[0].status == {"lastIncarnation": 4, "replicas": 2}
    # Else every look would write the next number.
    plan[-1] = write_status(lastIncarnation=5, replicas=1)
    assert gate.pass_on(plan, status).actions == []


def test_after_a_refusal_that_concerns_the_whole_pool_only_the_status_is_written(gate):
    bad = actions.ApplyChild("Service", "demo-peers", {}, "it is missing")
    gate.note([], {key_of(bad): "no right"})
    plan = [bad, actions.ReserveIncarnations(1, "r"), start(0), write_status(lastIncarnation=1, a=1)]
    assert names(gate.pass_on(plan, None)) == [("WriteStatus", None)]


def test_waits_grow_with_each_refusal(gate, clock):
    waits = []
    for _ in range(8):
        gate.note([], {key_of(start(0)): "no quota"})
        wait_s = gate.pass_on([start(0)], None).wait_s
        waits.append(wait_s)
        clock.pass_s(wait_s)
    assert waits[0] <= REFUSAL_S < waits[3]
    assert max(waits) <= 60


def test_a_refusal_ends_when_its_cause_does(gate):
    gate.note([], {key_of(start(0)): "no quota"})
    passed = gate.pass_on([], None)
    assert passed.cleared
    assert gate.refusals == ()
    assert not gate.pass_on([], None).cleared


def test_a_changed_pool_is_tried_at_once(gate):
    gate.note([], {key_of(start(0)): "image is required"})
    assert gate.pass_on([start(0)], None).actions == []
    gate.open()
    assert names(gate.pass_on([start(0)], None)) == [("StartGroup", 0)]
    gate.note([start(0)], {})
    assert gate.refusals == ()
