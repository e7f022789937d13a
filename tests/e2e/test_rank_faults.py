"""Ranks that are killed or frozen: the group ends as a whole, soon, and says why.

The group in one pod has a supervisor that watches both ranks; a group of two pods has nothing but
the channel between them.
"""

import signal
from types import SimpleNamespace

import psutil
import pytest
from tests.e2e.gateway import image_request

pytestmark = pytest.mark.real

END_S = 10.0
SLACK_S = 5.0
"""For two busy cores."""


class Pod:
    """One worker, its ranks, and the reason it leaves."""

    def __init__(self, worker, reason_file, ranks):
        self.worker = worker
        self.reason_file = reason_file
        self.ranks = ranks

    def rank(self, number):
        [process] = [p for p in self.worker.processes() if f"--rank {number} " in " ".join(p.cmdline())]
        return process

    def ends(self, seconds=END_S + SLACK_S):
        """The reason, once the worker has failed within the time."""
        assert self.worker.process.wait(seconds) == 1, self.worker.log_tail()
        return self.reason_file.read_text()


@pytest.fixture(scope="module")
def groups(start_worker, free_port, tmp_path_factory):
    """All groups of the module: they start together."""
    folder = tmp_path_factory.mktemp("reasons")

    def start(name, n_pods):
        port, pods = free_port(), []
        for index in range(n_pods):
            reason = folder / f"{name}.{index}"
            worker = start_worker(
                tensor_parallel_size=2,
                ranks_per_pod=2 // n_pods,
                pod_index=index,
                dist_init_port=port,
                termination_log=reason,
                store_device_mib=64,
            )
            pods.append(Pod(worker, reason, range(index, index + 1)))
        return pods

    made = {"one": start("one", 1), "beheaded": start("beheaded", 2), "frozen": start("frozen", 2)}
    for pods in made.values():
        for pod in pods:
            pod.worker.ready()
    yield SimpleNamespace(**made)
    for pods in made.values():
        for pod in pods:
            assert pod.worker.process.poll() is not None, "the group outlived its test"


def begin_batch(pod, room, picture, wait_for):
    assert pod.worker.encode(image_request(room, picture)).accepted
    wait_for(lambda: "encodepool_batch_age_seconds" in pod.worker.metrics(), what="a batch is under way")


def test_a_rank_killed_between_plan_and_forward_ends_the_group(groups, new_room, new_picture, wait_for):
    [pod] = groups.one
    victim = pod.rank(1)
    victim.send_signal(signal.SIGSTOP)  # the plan reaches its machine, and rank 0 waits for its vote
    begin_batch(pod, new_room(), new_picture(), wait_for)
    victim.kill()
    reason = pod.ends()
    assert reason.startswith(("rank 1 was killed by signal 9", "rank 0: the ranks lost each other")), reason


def test_the_death_of_rank_0_ends_the_pods_of_the_others(groups):
    leader, follower = groups.beheaded
    assert follower.worker.metrics()["encodepool_ready"] == 1
    leader.rank(0).kill()
    assert leader.ends().startswith("rank 0 was killed by signal 9")
    assert "rank 0 has been silent for " in follower.ends()


def test_a_pod_that_freezes_inside_a_sum_ends_the_group(groups, new_room, new_picture, wait_for):
    leader, follower = groups.frozen
    frozen = follower.worker.processes()
    begin_batch(leader, new_room(), new_picture(64, 64), wait_for)
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    assert leader.ends().startswith("rank 0: rank 1 has been silent for ")
    for process in reversed(frozen):
        process.send_signal(signal.SIGCONT)
    assert follower.ends()
    _, alive = psutil.wait_procs(frozen, 5)
    assert not alive
