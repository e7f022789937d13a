"""Conditions, counters and the abnormal groups of a pool."""

import json

import pytest
from tests.operator.core.fake_cluster import START

from encodepool_operator.core.consumer import consumer
from encodepool_operator.core.status import GROUP_LIMIT, MESSAGE_LIMIT, invalid


def conditions(cluster):
    return {item["type"]: (item["status"], item["reason"]) for item in cluster.status["conditions"]}


def test_a_pool_that_is_complete_says_so_in_every_way(cluster):
    pool = cluster(replicas=2, tensorParallelSize=4)
    pool.run()
    assert conditions(pool) == {
        "Ready": ("True", "Complete"),
        "Available": ("True", "Enough"),
        "Progressing": ("True", "Complete"),
        "Degraded": ("False", "NoGroupFailed"),
        "EndpointsPublished": ("True", "Listed"),
    }
    status = pool.status
    counters = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas", "unavailableReplicas")
    assert [status[key] for key in counters] == [2, 2, 2, 2, 0]
    assert (status["ranks"], status["readyRanks"]) == (8, 8)
    assert status["selector"] == "encodepool.dev/pool=demo,apps.kubernetes.io/pod-index=0"
    assert status["currentRevision"] == status["updateRevision"]
    assert status["observedGeneration"] == 1
    assert "groups" not in status
    assert status["consumer"] == consumer("epd", "demo")


def test_a_pool_that_is_coming_up_reconciles_and_warns_that_no_group_is_listed(cluster):
    pool = cluster(replicas=2)
    pool.reconcile()
    assert conditions(pool) == {
        "Ready": ("False", "Incomplete"),
        "Available": ("False", "TooFew"),
        "Progressing": ("True", "Moving"),
        "Degraded": ("False", "NoGroupFailed"),
        "EndpointsPublished": ("False", "NoGroupListed"),
        "Reconciling": ("True", "Incomplete"),
    }
    assert [(group["index"], group["phase"]) for group in pool.status["groups"]] == [
        (0, "Starting"),
        (1, "Starting"),
    ]


def test_progressing_says_what_happens_to_the_groups(cluster):
    def message():
        return next(one["message"] for one in pool.status["conditions"] if one["type"] == "Progressing")

    pool = cluster(replicas=2)
    pool.run()
    pool.edit(replicas=4)
    pool.reconcile()
    assert message() == "groups: 2 starting"
    pool.run()
    pool.edit(replicas=3)
    pool.reconcile()
    assert message() == "groups: 1 draining"
    pool.run()
    pool.edit(image="another")
    pool.reconcile()
    assert message() == f"groups: 3 to move to revision {pool.status['updateRevision']}, 1 draining"


def test_every_status_is_json_without_nulls(cluster):
    pool = cluster(replicas=2)
    pool.run()
    pool.evict(pool.pods_of(1)[0].uid)
    pool.reconcile()
    assert pool.status == json.loads(json.dumps(pool.status))
    assert "null" not in json.dumps(pool.status)


def test_the_status_is_bounded_and_shows_what_needs_a_human_first(cluster):
    pool = cluster(replicas=GROUP_LIMIT + 5)
    pool.reconcile()
    pool.settle()
    pool.restart_in_place(pool.pods_of(24)[0].uid)
    pool.reconcile()
    groups = pool.status["groups"]
    assert len(groups) == GROUP_LIMIT
    assert pool.status["groupsTruncated"] == 5
    assert (groups[0]["index"], groups[0]["phase"]) == (24, "Failing")
    assert [group["index"] for group in groups[1:]] == list(range(GROUP_LIMIT - 1))


def test_a_failed_group_is_shown_with_its_evidence_and_the_time_of_its_restart(cluster):
    pool = cluster(replicas=2)
    pool.run()
    for _ in range(2):
        pool.restart_in_place(pool.pods_of(0)[0].uid, exit_code=9, message="no such device")
        for _ in range(2):
            pool.reconcile()
            pool.settle()
        pool.reconcile()
    (group,) = pool.status["groups"]
    assert (group["phase"], group["restarts"]) == ("Backoff", 2)
    failure = group["lastFailure"]
    assert (failure["exitCode"], failure["message"], failure["pod"]) == (9, "no such device", "demo-0-0")
    assert group["nextRestartTime"].startswith("2027-01-15T08:00:")
    assert conditions(pool)["Degraded"] == ("True", "GroupsFailed")
    assert conditions(pool)["Available"] == ("True", "Enough"), "one of two may be down"


def test_several_failed_groups_are_counted_in_one_message(cluster):
    pool = cluster(replicas=3)
    pool.run()
    for index in (0, 2):
        pool.restart_in_place(pool.pods_of(index)[0].uid)
    pool.reconcile()
    (degraded,) = [item for item in pool.status["conditions"] if item["type"] == "Degraded"]
    assert degraded["message"].startswith("group 0 (and 1 more): pod demo-0-0: Error")


def test_the_time_of_a_condition_changes_only_with_its_value(cluster):
    pool = cluster(replicas=1)
    pool.run()
    before = {item["type"]: item["lastTransitionTime"] for item in pool.status["conditions"]}
    pool.now += 50
    pool.edit(replicas=2)
    pool.run()
    after = {item["type"]: item["lastTransitionTime"] for item in pool.status["conditions"]}
    assert after["EndpointsPublished"] == before["EndpointsPublished"]
    assert after["Ready"] == "2027-01-15T08:00:50.000Z"


def test_a_rollout_without_progress_is_stalled_after_its_deadline(cluster):
    pool = cluster(replicas=2, rollout={"progressDeadlineSeconds": 100})
    pool.run()
    pool.now += 5
    pool.edit(image="broken")
    pool.reconcile()
    pool.now += 11
    pool.reconcile()
    pool.settle()
    pool.reconcile()
    planned = pool.reconcile()
    assert planned.wake_at == START + 105, "nothing else will wake it"
    pool.now = planned.wake_at
    pool.reconcile()
    assert conditions(pool)["Progressing"] == ("False", "ProgressDeadlineExceeded")
    assert conditions(pool)["Stalled"] == ("True", "ProgressDeadlineExceeded")
    assert "Reconciling" not in conditions(pool)


def test_a_paused_rollout_has_no_deadline(cluster):
    pool = cluster(replicas=2)
    pool.run()
    pool.edit(image="x", rollout={"paused": True})
    assert pool.run() < 5
    assert conditions(pool)["Ready"] == ("True", "Complete"), "held groups are where they should be"
    assert pool.status["currentRevision"] != pool.status["updateRevision"]
    pool.kill(pool.pods_of(0)[0].uid)
    pool.reconcile()
    assert conditions(pool)["Progressing"] == ("False", "Paused")
    assert "Reconciling" not in conditions(pool)


def test_a_broken_time_in_the_status_starts_the_deadline_anew(cluster):
    pool = cluster(replicas=2)
    pool.reconcile()
    pool.status["rollout"]["progressedAt"] = "soon"
    pool.now += 5
    pool.reconcile()
    assert pool.status["rollout"]["progressedAt"] == "2027-01-15T08:00:05.000Z"


def test_exhausted_restarts_stall_the_pool(cluster):
    pool = cluster(replicas=2, restart={"maxRestarts": 1})
    pool.run()
    for _ in range(2):
        pool.restart_in_place(pool.pods_of(1)[0].uid)
        pool.run()
    assert conditions(pool)["Stalled"] == ("True", "RestartsExhausted")
    assert pool.listed() == ["0-1"]


def test_exhausted_ports_stall_the_pool_until_one_is_free(cluster):
    pool = cluster(replicas=3, network={"portRange": {"start": 10000, "size": 8}}, shared_host=True)
    pool.reconcile()
    pool.settle()
    pool.reconcile()
    pool.reconcile()
    planned = pool.reconcile()
    assert conditions(pool)["Stalled"] == ("True", "PortsExhausted")
    assert len(pool.listed()) == 2
    assert planned.wake_at == START + 30, "others free ports without telling"


def test_a_foreign_object_with_our_name_is_not_touched_and_told(cluster):
    pool = cluster(replicas=2)
    pool.foreign = frozenset({"StatefulSet/demo-0"})
    pool.run()
    assert sorted(pool.sets) == [1, 2]
    assert conditions(pool)["Stalled"] == ("True", "NameTaken")


def test_an_invalid_spec_is_stalled_and_what_runs_is_still_told(cluster):
    pool = cluster(replicas=1)
    pool.run()
    problems = ["spec.replicas: must be between 0 and 500, is 501", "x" * 2000]
    status = invalid(7, problems, pool.status, START + 9)
    found = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
    assert found["Ready"] == ("False", "InvalidSpec")
    assert found["Stalled"] == ("True", "InvalidSpec")
    assert found["Available"] == ("True", "Enough")
    assert (status["observedGeneration"], status["availableReplicas"]) == (7, 1)
    assert all(len(item["message"]) <= MESSAGE_LIMIT for item in status["conditions"])
    assert invalid(7, problems, status, START + 99) == status, "nothing changed, nothing to write"


@pytest.mark.parametrize("previous", [None, {}])
def test_an_invalid_spec_needs_no_status_before_it(previous):
    status = invalid(1, ["spec.model: needs name or path"], previous, START)
    assert [item["type"] for item in status["conditions"]] == ["Ready", "Stalled"]
