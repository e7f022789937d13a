"""Phases of a group, its seal, stopping and starting, backoff."""

from dataclasses import replace

import pytest
from tests.operator.core.fake_cluster import START

from encodepool_operator.core.endpoints import Endpoint
from encodepool_operator.core.group import JITTER, GroupRules, Phase, backoff_s, derive, failed, started
from encodepool_operator.core.memo import Memo
from encodepool_operator.core.record import LastFailure, PortBlock, Seal, SealedPod
from encodepool_operator.core.snapshot import GroupSnapshot, PodPhase, Publication

CRASH = LastFailure(START, 7, "Error", "demo-0-0", exit_code=1)
PORTS = PortBlock(1, 2, 3, 4)


def test_a_group_whose_pods_are_all_ready_and_sealed_is_ready(make_pod, make_group, view_of):
    view = view_of(make_group(make_pod(0), make_pod(1)))
    assert (view.phase, view.ready, view.running, view.why) == (Phase.READY, True, True, "")


@pytest.mark.parametrize(
    ("facts", "sealed"),
    [
        ({}, True),
        ({"ready": False}, True),
        ({"started": False, "ready": False}, False),
        ({"phase": PodPhase.PENDING, "launched": False}, False),
    ],
)
def test_a_group_is_sealed_when_it_is_complete_and_started(make_pod, make_group, view_of, facts, sealed):
    view = view_of(make_group(make_pod(1, **facts), make_pod(0), sealed=False))
    expected = Seal((SealedPod("uid-0", 0), SealedPod("uid-1", 0)), START) if sealed else None
    assert view.seal == expected
    assert not view.ready, "it is proven ready only once the seal is written"


@pytest.mark.parametrize("indices", [(0,), (0, 0)])
def test_a_group_with_a_missing_index_is_not_sealed(make_pod, make_group, view_of, indices):
    pods = [make_pod(index, uid=f"u{i}") for i, index in enumerate(indices)]
    assert view_of(make_group(*pods, sealed=False, replicas=2)).seal is None


def test_a_sealed_group_is_not_sealed_again(make_pod, make_group, view_of):
    view = view_of(make_group(make_pod(ready=False)))
    assert (view.seal, view.phase, view.why) == (None, Phase.STARTING, "pod demo-0-0 is not ready")


def test_a_draining_group_is_not_ready_however_well_it_is(make_pod, make_group, view_of):
    view = view_of(make_group(make_pod(), record={"draining_since": START}))
    assert (view.phase, view.ready, view.draining) == (Phase.DRAINING, False, True)


@pytest.mark.parametrize(
    ("pods", "change", "gone"),
    [
        (0, {}, True),
        (1, {}, False),
        (0, {"current_pods": 1}, False),
        (0, {"observed_generation": 2}, False),
    ],
)
def test_a_group_is_gone_only_when_the_stop_was_acted_upon_and_no_pod_is_left(
    make_pod, make_group, view_of, pods, change, gone
):
    group = make_group(*[make_pod()][:pods], replicas=0, **({"current_pods": 0} | change))
    view = view_of(group)
    assert view.gone == gone
    assert view.phase is (Phase.STOPPED if gone else Phase.DRAINING)
    assert not view.running


def test_a_stopped_group_whose_pods_hang_on_a_lost_node_is_lost(make_pod, make_group, view_of):
    pod = make_pod(terminating_since=START, node_lost_since=START)
    assert view_of(make_group(pod, replicas=0)).phase is Phase.LOST


def test_a_failed_group_is_failing_until_its_pods_are_gone_then_waits(make_pod, make_group, view_of):
    record = {"failure": CRASH, "restarts": 2}
    ending = view_of(make_group(make_pod(), replicas=0, record=record))
    assert (ending.phase, ending.why) == (Phase.FAILING, "pod demo-0-0: Error (exit code 1)")
    waiting = view_of(make_group(replicas=0, record=record))
    assert waiting.phase is Phase.BACKOFF
    assert START < waiting.restart_at == waiting.wake_at <= START + 10
    assert view_of(make_group(replicas=0, record=record), at=waiting.restart_at).phase is Phase.STOPPED


@pytest.mark.parametrize(
    "record",
    [
        {"failure": CRASH, "restarts": 1},  # the first restart is immediate
        {"failure": replace(CRASH, counted=False), "restarts": 9},  # an eviction
        {"failure": replace(CRASH, incarnation=6), "restarts": 9},  # stopped for another reason since
        {"restarts": 9},
    ],
)
def test_a_stopped_group_that_need_not_wait_is_just_stopped(make_group, view_of, record):
    assert view_of(make_group(replicas=0, record=record)).phase is Phase.STOPPED


def test_too_many_restarts_stop_a_group_until_the_pool_is_annotated(make_group, view_of, make_spec):
    restart = make_spec(restart={"maxRestarts": 2}).restart
    third = make_group(replicas=0, record={"failure": CRASH, "restarts": 3, "resumed": "old"})
    view = view_of(third, at=START + 1e6, restart=restart, resume="old")
    assert (view.phase, view.exhausted, view.wake_at) == (Phase.BACKOFF, True, None)
    assert "encodepool.dev/resume" in view.why
    assert view_of(third, restart=restart, resume="new").phase is Phase.STOPPED
    second = make_group(replicas=0, record={"failure": CRASH, "restarts": 2})
    assert not view_of(second, restart=restart).exhausted


@pytest.mark.parametrize(
    ("restarts", "full"), [(0, 0), (1, 0), (2, 10), (3, 20), (4, 40), (8, 600), (500, 600)]
)
def test_backoff_doubles_up_to_its_maximum_and_jitter_only_shortens_it(make_spec, restarts, full):
    waits = [backoff_s(make_spec().restart.backoff, restarts, f"salt {i}") for i in range(50)]
    assert all(full * (1 - JITTER) <= wait <= full for wait in waits)
    assert len(set(waits)) > 40 or full == 0
    assert backoff_s(make_spec().restart.backoff, restarts, "salt 0") == waits[0]


@pytest.mark.parametrize(
    ("before", "counted", "healthy_s", "after"),
    [
        (0, True, 5, 1),
        (3, True, 5, 4),
        (3, False, 5, 3),
        (3, True, 1200, 1),
        (3, False, 1200, 0),
        (3, True, None, 4),
    ],
)
def test_failures_in_a_row_are_counted(make_record, rules, before, counted, healthy_s, after):
    seal = None if healthy_s is None else Seal((), START - healthy_s)
    record = make_record(restarts=before, seal=seal, draining_since=START)
    new = failed(record, replace(CRASH, counted=counted), replace(rules, resume="r"))
    assert (new.restarts, new.failure.at, new.draining_since, new.resumed) == (after, START, None, "r")


def test_a_new_start_keeps_count_and_evidence_only_of_its_own_revision(make_record, rules):
    old = make_record(
        restarts=4, failure=CRASH, seal=Seal((), START), withdrawn_at=START, draining_since=START
    )
    again = started(old, 8, "rev", PORTS, rules, START)
    assert (again.restarts, again.failure, again.incarnation) == (4, CRASH, 8)
    assert (again.seal, again.withdrawn_at, again.draining_since) == (None, None, None)
    assert started(old, 8, "other", PORTS, rules, START).restarts == 0
    assert started(old, 8, "rev", PORTS, replace(rules, resume="now"), START).restarts == 0
    assert started(None, 1, "rev", PORTS, rules, START).failure is None


def test_a_group_without_an_object_is_only_its_pods(make_pod, view_of):
    view = view_of(GroupSnapshot(3, None, (make_pod(),)))
    assert (view.phase, view.record, view.leader, view.draining) == (Phase.STOPPED, None, None, False)


def test_a_group_whose_object_is_being_deleted_is_draining(make_pod, make_group, view_of):
    view = view_of(make_group(make_pod(), deleting=True))
    assert (view.phase, view.ready, view.running) == (Phase.DRAINING, False, False)


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_group_whose_annotations_were_edited_is_recreated(make_pod, make_group, view_of, replicas):
    group = make_group(make_pod(), replicas=replicas)
    view = view_of(GroupSnapshot(0, replace(group.object, record=None), group.pods))
    assert (view.phase, view.failure.reason, view.failure.counted) == (
        Phase.FAILING,
        "RecordUnreadable",
        False,
    )
    assert (view.record.incarnation, view.record.revision) == (7, "")


def test_the_leader_is_pod_0_of_this_start_and_not_on_its_way_out(make_pod, make_group, view_of):
    assert view_of(make_group(make_pod(1), make_pod(0))).leader.index == 0
    assert view_of(make_group(make_pod(0, terminating_since=START))).leader is None
    assert view_of(make_group(make_pod(0, incarnation=6))).leader is None
    assert view_of(make_group(make_pod(1))).leader is None


def test_every_pod_with_the_label_is_known_not_only_the_leader(make_pod, make_group, view_of):
    label = Publication(1, 2, "m")
    view = view_of(make_group(make_pod(0), make_pod(1, publication=label)))
    assert [pod.index for pod in view.labelled] == [1]


def test_a_memo_computes_again_only_what_can_have_changed(make_pod, make_group, rules):
    memo = Memo()
    group = make_group(make_pod(ready=False))
    first = memo.view(group, rules, START)
    assert memo.view(group, rules, START + 1) is first
    assert memo.view(make_group(make_pod(ready=False)), rules, START + 1) is not first, "another snapshot"
    first = memo.view(group, rules, START)
    assert memo.view(group, replace(rules, resume="x"), START) is not first, "other rules"
    first = memo.view(group, rules, START)
    assert memo.view(group, rules, START - 1) is not first, "the clock went back"
    first = memo.view(group, rules, START)
    late = memo.view(group, rules, first.wake_at)
    assert late.failure is not None, "its time has come"
    assert memo.view(group, rules, first.wake_at + 5).failure.at == first.wake_at + 5


def test_a_memo_forgets_groups_that_are_gone(make_pod, make_group, rules):
    memo = Memo()
    memo.view(make_group(make_pod()), rules, START)
    memo.forget_all_but(frozenset())
    assert memo.views == {}


def test_a_memo_renders_an_entry_once_and_forgets_it_with_its_group():
    memo = Memo()
    entry = Endpoint("epd/demo/0-1", 0, 1, "10.0.0.1", 1, 2, "m", 1, True, False, "", "", "")
    lines = memo.rendered("demo", entry)
    assert memo.rendered("demo", replace(entry)) is lines
    assert memo.rendered("demo", replace(entry, ready=False)) is not lines
    memo.forget_all_but(frozenset())
    assert memo.lines == {}


def test_a_memo_gives_what_derive_gives(make_pod, make_group, rules: GroupRules):
    memo = Memo()
    for group in (make_group(make_pod()), make_group(make_pod(), sealed=False), make_group(replicas=0)):
        for at in (START, START + 5, START - 5, START + 5000):
            assert memo.view(group, rules, at) == derive(group, rules, at)
            assert memo.view(group, rules, at) == derive(group, rules, at)
