import pytest

from encodepool_operator.controller.podfacts import facts, trim
from encodepool_operator.core.record import shortened
from encodepool_operator.core.snapshot import PodPhase, Publication


def container(**state):
    return [{"name": "encode", "started": False, "restartCount": 0, "state": {}} | state]


def read(pod):
    """Facts of what the cache keeps of the pod; those of the whole pod must be the same."""
    pod["metadata"] |= {"uid": "u", "resourceVersion": "5"}
    kept = facts(trim(pod))
    assert facts(pod) == kept
    return kept


def test_a_ready_pod(make_pod):
    found = read(make_pod(1, 2))
    assert (found.name, found.uid, found.index, found.incarnation) == ("demo-1-2", "u", 2, 7)
    assert (found.ips, found.node, found.version) == (("10.0.0.5", "fd00::5"), "node-1", "5")
    assert found.launched
    assert found.started
    assert found.ready
    assert found.ready_changed_at == 1767225600
    assert found.publication is None


def test_a_pod_without_our_marks_is_not_read(make_pod):
    pod = make_pod()
    del pod["metadata"]["labels"]["encodepool.dev/incarnation"]
    assert read(pod) is None
    pod["metadata"]["labels"]["encodepool.dev/incarnation"] = "seven"
    assert read(pod) is None


def test_a_terminating_pod_is_not_ready_and_began_to_end_a_grace_period_before(make_pod):
    pod = make_pod()
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:15Z", "deletionGracePeriodSeconds": 75}
    found = read(pod)
    assert not found.ready
    assert found.terminating_since == 1767225600


def test_how_a_container_ended_is_read_from_now_or_before(make_pod):
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": "m", "finishedAt": "2026-01-01T00:00:00Z"}
    now = read(make_pod(containerStatuses=container(state={"terminated": ended})))
    before = read(
        make_pod(
            containerStatuses=container(
                restartCount=3,
                state={"waiting": {"reason": "CrashLoopBackOff"}},
                lastState={"terminated": ended},
            )
        )
    )
    for found in (now, before):
        assert (found.failure.exit_code, found.failure.reason) == (137, "OOMKilled")
        assert found.launched
        assert not found.started
    assert (before.restart_count, before.waiting) == (3, "CrashLoopBackOff")


@pytest.mark.parametrize(
    ("code", "reason", "log", "message"),
    [
        (137, "Error", "worker started\n", "killed by signal 9; its log ends: worker started"),
        (137, "Error", "", "killed by signal 9"),
        (137, "OOMKilled", "the log", "the log"),
        (1, "Error", "no model", "no model"),
        (128, "StartError", "no such program", "no such program"),
    ],
)
def test_the_log_of_what_was_killed_is_not_taken_for_the_reason(make_pod, code, reason, log, message):
    ended = {"exitCode": code, "reason": reason, "message": log}
    assert read(make_pod(containerStatuses=container(state={"terminated": ended}))).failure.message == message


def test_a_long_log_leaves_the_signal_where_it_is_read(make_pod):
    ended = {"exitCode": 137, "reason": "Error", "message": "é" * 4000 + " the end"}
    message = read(make_pod(containerStatuses=container(state={"terminated": ended}))).failure.message
    assert message.startswith("killed by signal 9; its log ends: …é")
    assert shortened(message) == message
    assert message.endswith("é the end")


def test_a_sidecar_of_the_user_is_not_the_worker(make_pod):
    pod = make_pod()
    pod["status"]["containerStatuses"].append(
        {"name": "side", "restartCount": 9, "state": {"terminated": {"exitCode": 1}}}
    )
    found = read(pod)
    assert (found.restart_count, found.failure) == (0, None)


@pytest.mark.parametrize(
    ("status", "waiting"),
    [
        ({"containerStatuses": container(state={"waiting": {"reason": "ContainerCreating"}})}, ""),
        (
            {
                "containerStatuses": container(
                    state={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off 10 s"}}
                )
            },
            "ImagePullBackOff",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "no  gpu",
                    }
                ],
                "containerStatuses": [],
            },
            "Unschedulable: no gpu",
        ),
    ],
)
def test_what_a_pod_waits_for_is_told_without_what_changes_each_time(make_pod, status, waiting):
    assert read(make_pod(**status)).waiting == waiting


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Failed", "reason": "Evicted"},
        {"conditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ],
)
def test_an_evicted_pod_is_disrupted(make_pod, status):
    assert read(make_pod(**status)).disrupted


def test_a_pod_whose_node_does_not_answer_has_not_ended(make_pod):
    assert read(make_pod(phase="Unknown")).phase is PodPhase.RUNNING


def test_the_zone_comes_from_the_label_that_the_api_server_sets(make_pod):
    pod = make_pod()
    pod["metadata"]["labels"]["topology.kubernetes.io/zone"] = "zone-1"
    assert read(pod).zone == "zone-1"


def test_a_publication_that_lacks_anything_is_one_that_no_group_has(make_pod):
    pod = make_pod()
    labels = pod["metadata"]["labels"]
    labels |= {"encodepool.dev/routable": "true", "llm-d.ai/role": "encode"}
    pod["metadata"]["annotations"] = {
        "sglang.ai/bootstrap-port": "10000",
        "smg.ai/worker-ports": "10001",
        "encodepool.dev/model-id": "acme/vl",
        "encodepool.dev/published-at": "2027-01-15T08:00:00.500Z",
        "other": "x",
    }
    published = read(pod).publication
    assert published == Publication(10000, 10001, "acme/vl")
    assert published.at == 1800000000.5
    pod["metadata"]["annotations"]["smg.ai/worker-ports"] = "many"
    assert read(pod).publication == Publication(10000, 0, "acme/vl")
    del labels["llm-d.ai/role"]
    assert read(pod).publication == Publication(0, 0, "")
    del labels["encodepool.dev/routable"]
    assert read(pod).publication is None
