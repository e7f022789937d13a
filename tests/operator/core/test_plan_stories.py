"""Stories of a pool: what happens, in which order, and that nothing happens when nothing changed."""

from dataclasses import replace

import pytest
from tests.operator.core.fake_cluster import START, Story

from encodepool_operator.api import labels
from encodepool_operator.core.actions import (
    ApplyChild,
    DeletePod,
    DropRevision,
    Publish,
    RecordGroup,
    ReserveIncarnations,
    SaveRevision,
    StartGroup,
    StopGroup,
    Withdraw,
    WriteEndpoints,
    WriteStatus,
)
from encodepool_operator.core.memo import Memo
from encodepool_operator.core.plan import plan
from encodepool_operator.core.snapshot import PodPhase


def kinds(planned):
    return [type(action) for action in planned.actions]


@pytest.fixture
def pool(cluster):
    """Three groups, all listed, nothing left to do."""
    made = cluster(replicas=3)
    made.run()
    return made


def test_a_new_pool_takes_three_writes_a_group(cluster):
    pool = cluster(replicas=3)
    assert pool.run() <= 5
    writes = [type(action) for action in pool.executed if action.group is not None]
    assert writes == [StartGroup] * 3 + [RecordGroup] * 3 + [Publish] * 3
    assert pool.listed() == ["0-1", "1-2", "2-3"]


def test_the_numbers_of_a_plan_are_reserved_once_before_its_starts(cluster):
    planned = cluster(replicas=3).plan()
    order = kinds(planned)
    before = [SaveRevision, WriteEndpoints, *[ApplyChild] * 3]
    assert order == [*before, ReserveIncarnations, *[StartGroup] * 3, WriteStatus]
    assert planned.actions[5].last == 3


def test_a_pool_at_rest_is_not_written_to_however_often_it_is_looked_at(pool):
    for seconds in (0, 1, 3600, 1e7):
        pool.now += seconds
        assert pool.plan().actions == ()
    assert pool.plan().wake_at is None


def test_every_action_has_one_sentence_of_reason(pool):
    pool.restart_in_place(pool.pods_of(0)[0].uid)
    pool.edit(image="x", replicas=2)
    pool.run()
    assert all(action.reason and "\n" not in action.reason for action in pool.executed)


def test_the_label_comes_before_the_list(cluster):
    pool = cluster(replicas=1)
    for _ in range(2):
        pool.reconcile()
        pool.settle()
    assert kinds(pool.reconcile())[0] is Publish
    assert pool.listed() == []
    assert WriteEndpoints in kinds(pool.reconcile())
    assert pool.listed() == ["0-1"]


def test_a_label_that_could_not_be_written_keeps_the_group_off_the_list(cluster):
    pool = cluster(replicas=1)
    for _ in range(2):
        pool.reconcile()
        pool.settle()
    planned = pool.plan()
    pool.change(pool.pods_of(0)[0].uid, zone="z")  # the pod has changed since: 409
    pool.carry_out(planned.actions)
    assert pool.pods_of(0)[0].publication is None
    pool.run()
    assert pool.listed() == ["0-1"]


def test_a_crashed_group_leaves_label_and_list_before_it_is_stopped_and_restarts_at_once(pool):
    story = Story(pool)
    story.lines()
    pool.restart_in_place(pool.pods_of(1)[0].uid)
    assert kinds(pool.reconcile()) == [Withdraw, WriteEndpoints, StopGroup, WriteStatus]
    assert pool.listed() == ["0-1", "2-3"]
    pool.run()
    assert story.lines() == [
        "Withdraw 1",
        "StopGroup 1",
        "ReserveIncarnations None",
        "StartGroup 1",
        "RecordGroup 1",
        "Publish 1",
    ]
    assert pool.listed() == ["0-1", "1-4", "2-3"]
    assert pool.now == START


def test_a_second_crash_waits_and_a_third_longer(pool):
    waits = []
    for _ in range(3):
        before = pool.now
        pool.restart_in_place(pool.pods_of(0)[0].uid)
        pool.run()
        waits.append(pool.now - before)
    assert waits[0] == 0
    assert 7.5 <= waits[1] <= 10
    assert 15 <= waits[2] <= 20


def test_an_eviction_restarts_at_once_and_counts_for_nothing(pool):
    for _ in range(5):
        pool.evict(pool.pods_of(0)[0].uid)
        pool.run()
    assert pool.now == START
    assert len(pool.listed()) == 3


def test_a_pod_replaced_while_the_operator_was_down_is_found_by_its_uid(pool):
    uid = pool.pods_of(2)[0].uid
    pool.kill(uid)
    pool.settle()  # the controller has made a new pod of the same name, ready by now
    assert pool.pods_of(2)[0].ready
    pool.run()
    assert any(isinstance(action, StopGroup) and "PodReplaced" in action.reason for action in pool.executed)
    assert pool.listed() == ["0-1", "1-2", "2-4"]


def test_a_group_that_is_unready_for_a_moment_returns_after_10_s_and_not_before(pool):
    uid = pool.pods_of(0)[0].uid
    pool.change(uid, ready=False)
    assert kinds(pool.reconcile()) == [RecordGroup, Withdraw, WriteEndpoints, WriteStatus]
    pool.now += 3
    pool.change(uid, ready=True)
    pool.reconcile()
    assert pool.listed() == ["1-2", "2-3"]
    assert pool.plan().wake_at == START + 10
    pool.run()
    assert pool.now == START + 10
    assert pool.listed() == ["0-1", "1-2", "2-3"]


def test_a_label_taken_off_by_somebody_counts_as_a_withdrawal(pool):
    pool.change(pool.pods_of(0)[0].uid, publication=None)
    assert kinds(pool.reconcile()) == [RecordGroup, WriteEndpoints, WriteStatus]
    assert pool.listed() == ["1-2", "2-3"]
    pool.run()
    assert pool.now == START + 10
    assert len(pool.listed()) == 3


def test_an_edited_annotation_on_the_leader_is_put_right_without_a_gap(pool):
    pod = pool.pods_of(0)[0]
    pool.change(pod.uid, publication=replace(pod.publication, bootstrap_port=8998))
    assert kinds(pool.reconcile()) == [Publish]
    assert pool.plan().actions == ()


def test_an_edited_list_is_put_right(pool):
    pool.documents["workers.json"] = "{}"
    assert kinds(pool.reconcile()) == [WriteEndpoints]
    assert len(pool.listed()) == 3


def test_a_rollout_takes_one_healthy_group_at_a_time_and_settles(pool):
    pool.edit(image="x")
    story = Story(pool)
    story.lines()
    pool.run()
    assert story.lines(quiet=(WriteStatus, WriteEndpoints, ReserveIncarnations)) == [
        "SaveRevision None",
        *(
            f"{kind} {group}"
            for group in (2, 1, 0)
            for kind in ("RecordGroup", "Withdraw", "StopGroup", "StartGroup", "RecordGroup", "Publish")
        ),
    ]
    # Each waits until gateways send to the one that was listed last, and then settles.
    assert pool.now == START + 3 * (5 + 10)
    assert pool.condition("Ready") == ("True", "Complete")


def test_a_new_group_is_counted_on_only_once_gateways_have_had_time_to_take_it_up(cluster):
    """SMG drops what leaves the list at once and takes up a second later what joins it: a request
    that came between a group listed and another withdrawn in one write was answered with 503."""
    pool = cluster(replicas=1)
    pool.run()
    pool.edit(image="x")
    pool.executed.clear()
    while pool.listed() != ["0-1", "1-2"]:
        pool.reconcile()
        pool.settle()
    listed_at = pool.now
    assert pool.plan().wake_at == listed_at + 5
    pool.now += 4.9
    assert pool.plan().actions == ()
    pool.now += 0.1
    assert [type(action) for action in pool.plan().actions][:2] == [RecordGroup, Withdraw]
    pool.run()
    assert pool.listed() == ["1-2"]


def test_a_pool_that_need_not_settle_need_not_wait_for_gateways_either(cluster):
    pool = cluster(replicas=2, drain={"settleSeconds": 0})
    pool.run()
    pool.edit(image="x")
    pool.run()
    assert pool.now == START
    assert len(pool.listed()) == 2


def test_a_rollout_to_a_broken_image_costs_one_group_and_going_back_repairs_it(pool):
    pool.now += 5
    pool.edit(image="broken")
    pool.reconcile()
    pool.now += 10
    for _ in range(4):
        pool.reconcile()
        pool.control(2)
        for pod in pool.pods_of(2):
            if pod.terminating_since is not None:
                pool.kubelet(pod.uid)
    assert pool.listed() == ["0-1", "1-2"]
    assert [pod.phase for pod in pool.pods_of(2)] == [PodPhase.PENDING]
    pool.edit(image="")
    pool.run()
    assert pool.listed() == ["0-1", "1-2", "2-5"], "the healthy ones were not touched"


def test_groups_that_do_not_serve_move_first_and_outside_the_budget(cluster):
    pool = cluster(replicas=3)
    pool.reconcile()  # started, and no pod has come up: the image cannot be pulled
    pool.edit(image="good")
    stops = [action for action in pool.reconcile().actions if isinstance(action, StopGroup)]
    assert {action.group for action in stops} == {0, 1, 2}
    pool.run()
    assert len(pool.listed()) == 3


def test_a_broken_group_does_not_wait_for_its_backoff_when_the_spec_is_repaired(pool):
    for _ in range(2):
        pool.restart_in_place(pool.pods_of(0)[0].uid)
        for _ in range(3):
            pool.reconcile()
            pool.settle()
    assert pool.status["groups"][0]["phase"] == "Backoff"
    pool.edit(image="repaired")
    starts = [action for action in pool.reconcile().actions if isinstance(action, StartGroup)]
    assert [(action.group, action.record.restarts) for action in starts] == [(0, 0)]


def test_one_replica_is_replaced_by_surge_and_every_group_is_started_once(cluster):
    pool = cluster(replicas=1)
    pool.run()
    pool.edit(image="x")
    pool.executed.clear()
    pool.run()
    assert [action.group for action in pool.executed if isinstance(action, StartGroup)] == [1]
    assert pool.listed() == ["1-2"]
    empty = [a for a in pool.executed if isinstance(a, WriteEndpoints) and '"workers":[]' in str(a.documents)]
    assert empty == []


def test_surge_of_two_starts_as_many_groups_as_there_are(cluster):
    pool = cluster(replicas=3, rollout={"maxSurge": 2, "maxUnavailable": 0})
    pool.run()
    pool.edit(image="x")
    pool.executed.clear()
    pool.run()
    assert len([action for action in pool.executed if isinstance(action, StartGroup)]) == 3
    assert len(pool.listed()) == 3
    assert len(pool.sets) == 3


def test_below_the_partition_a_group_keeps_its_revision_even_when_it_fails(pool):
    old = pool.status["currentRevision"]
    pool.edit(image="x", rollout={"partition": 2})
    pool.run()
    pool.restart_in_place(pool.pods_of(0)[0].uid)
    pool.delete_set(1)
    pool.run()
    revisions = {index: pool.sets[index].annotations[labels.REVISION] for index in sorted(pool.sets)}
    new = pool.status["updateRevision"]
    assert list(revisions.values()).count(new) == len(revisions) - sum(i < 2 for i in revisions)
    assert revisions[0] == old
    assert pool.status["currentRevision"] == old
    assert old in pool.revisions


def test_a_rollout_that_empties_the_list_says_what_the_gateway_will_do(cluster):
    pool = cluster(replicas=1, rollout={"maxSurge": 0, "maxUnavailable": 1})
    pool.run()
    pool.now += 5
    pool.edit(image="x")
    reasons = [action.reason for action in pool.plan().actions if isinstance(action, RecordGroup)]
    assert "pixels to prefill" in reasons[0]


def test_scaling_down_drains_the_highest_and_deletes_it_once_it_is_gone(pool):
    pool.edit(replicas=1)
    pool.executed.clear()
    pool.run()
    assert {action.group for action in pool.executed if isinstance(action, StopGroup)} == {1, 2}
    assert sorted(pool.sets) == [0]
    assert pool.now == START + 10
    assert pool.listed() == ["0-1"]


def test_without_a_time_to_settle_a_group_is_still_off_label_and_list_before_its_stop(cluster):
    pool = cluster(replicas=2, drain={"settleSeconds": 0})
    pool.run()
    pool.edit(replicas=1)
    assert kinds(pool.reconcile()) == [Withdraw, WriteEndpoints, StopGroup, WriteStatus]


def test_a_draining_group_stays_the_victim_when_another_fails(pool):
    pool.edit(replicas=2)
    pool.reconcile()
    pool.restart_in_place(pool.pods_of(0)[0].uid)
    pool.run()
    assert sorted(pool.sets) == [0, 1]


def test_scaling_up_during_a_drain_starts_the_drained_group_again(pool):
    pool.edit(replicas=2)
    pool.reconcile()
    pool.edit(replicas=3)
    pool.run()
    assert pool.listed() == ["0-1", "1-2", "2-4"]


def test_a_new_group_takes_the_lowest_free_index(pool):
    pool.delete_set(1)
    pool.refresh()
    planned = pool.plan(fresh=False)
    assert [action.group for action in planned.actions if isinstance(action, StartGroup)] == [3], (
        "the pods of 1 are still there"
    )
    pool.carry_out(planned.actions)
    pool.settle()
    pool.edit(replicas=4)
    pool.run()
    assert sorted(pool.sets) == [0, 1, 2, 3]


def test_scaling_to_zero_leaves_nothing_and_an_empty_list(pool):
    pool.edit(replicas=0)
    pool.run()
    assert (pool.sets, pool.pods, pool.listed()) == ({}, [], [])
    assert pool.condition("Ready") == ("True", "Complete")
    assert pool.condition("EndpointsPublished") == ("False", "NoGroupListed")


def test_pods_on_a_lost_node_are_deleted_by_force_unless_they_hold_a_volume(pool):
    pod = pool.pods_of(0)[0]
    pool.lose_node(pod.node)
    pool.reconcile()
    pool.settle()
    planned = pool.reconcile()
    assert planned.wake_at == START + 300
    pool.now += 300
    forced = [action for action in pool.plan().actions if isinstance(action, DeletePod)]
    assert [(action.group, action.grace_s) for action in forced] == [(0, 0)]
    pool.change(pod.uid, exclusive_volume=True)
    assert DeletePod not in kinds(pool.plan())
    pool.change(pod.uid, exclusive_volume=False)
    pool.run()
    assert len(pool.listed()) == 3


def test_pods_without_an_object_are_deleted(pool):
    del pool.sets[1]  # deleted with --cascade=orphan
    planned = pool.reconcile()
    assert [a.grace_s for a in planned.actions if isinstance(a, DeletePod)] == [None]
    assert Withdraw in kinds(planned)
    pool.run()
    assert len(pool.listed()) == 3


def test_an_object_that_is_being_deleted_is_withdrawn_and_then_replaced(pool):
    pool.sets[1].deleting = True
    planned = pool.reconcile()
    assert Withdraw in kinds(planned)
    assert [action.group for action in planned.actions if isinstance(action, StartGroup)] == [3]
    assert "1-2" not in pool.listed()


def test_a_clock_set_back_moves_recorded_times_so_that_no_wait_lasts_as_long_as_the_jump(pool):
    pool.edit(replicas=2)
    pool.reconcile()
    pool.now -= 5000
    assert RecordGroup in kinds(pool.reconcile())
    before = pool.now
    pool.run()
    assert pool.now == before + 10
    assert sorted(pool.sets) == [0, 1]


def test_too_many_restarts_keep_the_group_and_its_evidence_until_the_pool_is_annotated(cluster):
    pool = cluster(replicas=1, restart={"maxRestarts": 1})
    pool.annotate(labels.RESUME, "set before, so it resumes nothing")
    pool.run()
    for _ in range(2):
        pool.restart_in_place(pool.pods_of(0)[0].uid, message="bad device")
        pool.run()
    assert pool.status["groups"][0]["lastFailure"]["message"] == "bad device"
    pool.now += 1e6
    assert kinds(pool.reconcile()) == [WriteStatus], "the progress deadline has passed"
    assert pool.plan().actions == ()
    pool.annotate(labels.RESUME, "go")
    pool.run()
    assert pool.listed() == ["0-3"]


def test_unused_revisions_are_dropped_beyond_the_limit(cluster):
    pool = cluster(replicas=1, revisionHistoryLimit=1)
    for image in "abcd":
        pool.edit(image=image)
        pool.run()
    assert len(pool.revisions) == 2
    assert any(isinstance(action, DropRevision) for action in pool.executed)


def test_a_group_on_a_revision_that_nobody_kept_moves_to_the_wanted_one(pool):
    pool.edit(image="x", rollout={"paused": True})
    pool.run()
    del pool.revisions[pool.status["currentRevision"]]
    pool.restart_in_place(pool.pods_of(0)[0].uid)
    pool.run()
    assert pool.sets[0].annotations[labels.REVISION] == pool.status["updateRevision"]
    assert len(pool.listed()) == 3


def test_an_unreadable_record_recreates_the_group(pool):
    snapshot = pool.snapshot()
    first, *rest = snapshot.groups
    broken = replace(first, object=replace(first.object, record=None))
    planned = plan(replace(snapshot, groups=(broken, *rest)), pool.now)
    assert kinds(planned)[:3] == [Withdraw, WriteEndpoints, StopGroup]
    pool.carry_out(planned.actions)
    pool.run()
    assert pool.listed() == ["0-4", "1-2", "2-3"]


def test_a_member_of_another_start_fails_the_group_at_any_time(pool):
    pool.change(pool.pods_of(0)[0].uid, incarnation=99)
    planned = pool.plan()
    assert any(isinstance(a, StopGroup) and "ForeignIncarnation" in a.reason for a in planned.actions)
    pool.run()
    assert pool.listed() == ["0-4", "1-2", "2-3"]


def test_a_served_name_changes_group_by_group_with_its_revision(pool):
    pool.edit(publish={"servedModelName": "new-name"})
    pool.reconcile()
    names = {worker["group"]: worker for worker in pool.entries()}
    assert len(names) == 3
    assert "new-name" not in pool.documents["workers.json"], "the old groups still answer to the old name"
    pool.run()
    assert pool.documents["workers.json"].count("new-name") == 3


def test_on_one_machine_every_start_has_its_own_ports(cluster):
    pool = cluster(replicas=3, shared_host=True)
    pool.run()
    ports = [entry[key] for entry in pool.entries() for key in ("grpcPort", "bootstrapPort")]
    assert len(set(ports)) == 6


def test_a_memo_changes_nothing_but_the_time_it_takes(pool):
    memo = Memo()
    pool.edit(image="x", replicas=4)
    for _ in range(60):
        pool.refresh()
        snapshot = pool.snapshot()
        planned = plan(snapshot, pool.now, memo)
        assert planned == plan(snapshot, pool.now)
        pool.carry_out(planned.actions)
        pool.settle()
        if not planned.actions and planned.wake_at is not None:
            pool.now = min(planned.wake_at, pool.now + 100)
    assert len(pool.listed()) == 4


def test_a_list_that_the_gateway_would_reject_is_never_planned(pool):
    snapshot = pool.snapshot()
    twins = [
        replace(group, pods=tuple(replace(pod, ips=("10.9.9.9",)) for pod in group.pods))
        for group in snapshot.groups
    ]
    first = twins[0].object.record.ports
    same = tuple(
        replace(group, object=replace(group.object, record=replace(group.object.record, ports=first)))
        for group in twins
    )
    with pytest.raises(ValueError, match="same url"):
        plan(replace(snapshot, groups=same), pool.now)
