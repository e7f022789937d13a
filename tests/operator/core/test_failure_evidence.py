"""What shows that a group has failed, before and after its seal."""

import pytest
from tests.operator.core.fake_cluster import START

from encodepool_operator.core.evidence import sentence
from encodepool_operator.core.group import Phase
from encodepool_operator.core.record import LastFailure
from encodepool_operator.core.snapshot import ContainerFailure, PodPhase

ENDED = ContainerFailure(137, "OOMKilled", "killed", at=START - 3)


@pytest.mark.parametrize(
    ("facts", "reason", "counted"),
    [
        ({"restart_count": 1, "failure": ENDED}, "OOMKilled", True),
        ({"restart_count": 1}, "ContainerEnded", True),
        ({"phase": PodPhase.FAILED, "failure": ENDED, "ready": False}, "OOMKilled", True),
        ({"phase": PodPhase.SUCCEEDED, "failure": ContainerFailure(0, "")}, "ContainerEnded", True),
        ({"phase": PodPhase.FAILED, "disrupted": True, "failure": ENDED}, "Evicted", False),
        ({"terminating_since": START - 1, "disrupted": True}, "Evicted", False),
        ({"terminating_since": START - 1, "failure": ENDED}, "PodDeleted", False),
        ({"uid": "another"}, "PodReplaced", False),
        ({"incarnation": 6}, "ForeignIncarnation", False),
    ],
)
def test_a_sealed_group_fails_when_a_pod_shows_it(make_pod, make_group, view_of, facts, reason, counted):
    group = make_group(make_pod(0), make_pod(1, **facts), uids=["uid-0", "uid-1"])
    view = view_of(group)
    assert view.phase is Phase.FAILING
    assert not view.ready
    assert (view.failure.reason, view.failure.counted) == (reason, counted)
    assert view.failure.pod == "demo-0-1"


def test_a_sealed_group_fails_when_a_pod_is_missing(make_pod, make_group, view_of):
    group = make_group(make_pod(0), uids=["uid-0", "uid-1"], replicas=2)
    failure = view_of(group).failure
    assert (failure.reason, failure.message, failure.counted) == (
        "PodMissing",
        "1 of 2 pods are missing",
        False,
    )


def test_a_deleted_pod_explains_the_crash_of_its_peer_so_nothing_is_counted(make_pod, make_group, view_of):
    group = make_group(make_pod(0, restart_count=1), make_pod(1, terminating_since=START))
    assert view_of(group).failure.reason == "PodDeleted"


def test_the_evidence_is_what_the_container_left(make_pod, make_group, view_of):
    long = ContainerFailure(3, "Error", "x" * 400 + "the end", at=START + 99)
    failure = view_of(make_group(make_pod(phase=PodPhase.FAILED, failure=long))).failure
    assert (failure.exit_code, failure.container, failure.node, failure.incarnation) == (
        3,
        "encode",
        "node-1",
        7,
    )
    assert failure.message.endswith("the end")
    assert len(failure.message.encode()) <= 256
    assert failure.at == START, "a container cannot have ended in the future"


@pytest.mark.parametrize(
    ("other", "failed"),
    [
        ({"launched": False, "started": False, "ready": False, "phase": PodPhase.PENDING}, False),
        ({}, True),
    ],
)
def test_a_crash_during_start_waits_for_pods_that_have_not_run_yet(
    make_pod, make_group, view_of, other, failed
):
    group = make_group(make_pod(0, restart_count=1, ready=False), make_pod(1, **other), sealed=False)
    assert (view_of(group).failure is not None) == failed


def test_a_crash_during_start_waits_for_pods_that_do_not_exist_yet(make_pod, make_group, view_of):
    group = make_group(make_pod(0, restart_count=1, ready=False), sealed=False, replicas=2)
    view = view_of(group)
    assert (view.failure, view.phase, view.why) == (None, Phase.STARTING, "pod demo-0-0 is not ready")


def test_a_process_that_never_got_up_has_run(make_pod, make_group, view_of):
    pod = make_pod(phase=PodPhase.FAILED, launched=False, started=False, ready=False, failure=ENDED)
    assert view_of(make_group(pod, sealed=False)).failure.reason == "OOMKilled"


def test_a_start_that_takes_too_long_has_failed(make_pod, make_group, view_of):
    pulling = make_pod(
        launched=False, started=False, ready=False, phase=PodPhase.PENDING, waiting="ImagePullBackOff"
    )
    group = make_group(pulling, sealed=False)
    early = view_of(group)
    assert (early.phase, early.why) == (Phase.STARTING, "pod demo-0-0: ImagePullBackOff")
    assert early.wake_at == START - 60 + 1800
    late = view_of(group, at=early.wake_at).failure
    assert (late.reason, late.counted) == ("StartupDeadline", True)
    assert "ImagePullBackOff" in late.message


@pytest.mark.parametrize(
    ("pods", "why"),
    [([], "0 of 2 pods exist"), ([{"started": False, "ready": False}], "pod demo-0-0 is not started")],
)
def test_a_start_says_what_it_waits_for(make_pod, make_group, view_of, pods, why):
    group = make_group(*[make_pod(i, **facts) for i, facts in enumerate(pods)], sealed=False, replicas=2)
    assert view_of(group).why == why


def test_nothing_to_wait_for_is_said_plainly(make_pod, make_group, view_of):
    assert view_of(make_group(make_pod(), sealed=False, record={"started_at": START - 1800})).why.endswith(
        "nothing"
    )


def test_a_sealed_group_that_is_not_ready_for_as_long_as_a_start_may_take_has_failed(
    make_pod, make_group, view_of
):
    group = make_group(make_pod(0), make_pod(1, ready=False), make_pod(2, ready=False, ready_changed_at=None))
    early = view_of(group)
    assert (early.ready, early.failure, early.wake_at) == (False, None, START - 50 + 1800)
    assert view_of(group, at=early.wake_at).failure.reason == "NotReady"


@pytest.mark.parametrize("since", [START - 10, START - 300])
def test_a_lost_node_fails_its_group_after_a_while_without_counting(make_pod, make_group, view_of, since):
    view = view_of(make_group(make_pod(ready=False, node_lost_since=since)))
    if since == START - 10:
        assert (view.phase, view.failure, view.wake_at) == (Phase.LOST, None, START + 290)
    else:
        assert (view.failure.reason, view.failure.counted) == ("NodeLost", False)


def test_a_lost_node_is_waited_for_for_ever_if_told_so(make_pod, make_group, view_of, make_spec):
    restart = make_spec(restart={"lostNodeSeconds": 0}).restart
    group = make_group(make_pod(ready=False, node_lost_since=START - 1000))
    assert view_of(group, restart=restart).phase is Phase.LOST


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (LastFailure(0, 1, "PodMissing", message="1 of 2"), "PodMissing: 1 of 2"),
        (LastFailure(0, 1, "Error", "p", exit_code=1), "pod p: Error (exit code 1)"),
    ],
)
def test_a_failure_is_told_in_one_sentence(failure, text):
    assert sentence(failure) == text
