"""Ranks that are killed or frozen: the group ends as a whole, soon, says why, and tells its receivers.

The group in one pod has a supervisor that watches both ranks; a group of two pods has nothing but
the channel between them.
"""

import signal
from types import SimpleNamespace

import psutil
import pytest
from tests.e2e.gateway import image_request
from tests.e2e.raising_rank import COMMAND, HELD
from tests.e2e.receiving import Receivers
from tests.e2e.running import RunningWorker

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
def groups(fork, tiny_model, free_port, tmp_path_factory):
    """All groups of the module: they start together."""
    folder = tmp_path_factory.mktemp("groups")

    def start(name, n_pods):
        port, pods = free_port(), []
        for index in range(n_pods):
            reason = folder / f"{name}.{index}"
            flags = {
                "tensor-parallel-size": 2,
                "ranks-per-pod": 2 // n_pods,
                "pod-index": index,
                "dist-init-port": port,
                "termination-log": reason,
                "store-device-mib": 64,
            }
            log = folder / f"{name}.{index}.log"
            worker = RunningWorker(fork, COMMAND, tiny_model, log, free_port, flags)
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


@pytest.fixture
def owed(shared_prefill, new_room, new_picture, wait_for):
    """``owed(pod)``: rank 1 has the plan of a batch and does not begin; who is told when it is lost."""

    def begin(pod):
        receivers = Receivers(shared_prefill, pod.worker.bootstrap)
        held, alone = new_room(), new_room()
        picture = new_picture(*HELD)
        receivers.ask(held, picture, tp_size=2)
        receivers.ask(alone, picture, tp_size=2)  # no request comes for this one
        assert pod.worker.encode(image_request(held, picture)).accepted
        wait_for(lambda: "encodepool_batch_age_seconds" in pod.worker.metrics(), what="a batch is under way")

        def told():
            for room in (held, alone):
                verdict = receivers.verdict(room, tp_size=2)
                assert verdict["ranks"] == {"0": "Failed", "1": "Failed"}, verdict

        return told

    return begin


def test_a_rank_killed_between_plan_and_forward_ends_the_group(groups, owed):
    [pod] = groups.one
    told = owed(pod)
    pod.rank(1).kill()
    told()
    reason = pod.ends()
    assert reason.startswith(("rank 1 was killed by signal 9", "rank 0: the ranks lost each other")), reason


def test_the_death_of_rank_0_ends_the_pods_of_the_others(groups):
    leader, follower = groups.beheaded
    assert follower.worker.metrics()["encodepool_ready"] == 1
    leader.rank(0).kill()
    assert leader.ends().startswith("rank 0 was killed by signal 9")
    assert "rank 0 has been silent for " in follower.ends()


def test_a_pod_that_freezes_inside_a_sum_ends_the_group(groups, owed):
    leader, follower = groups.frozen
    frozen = follower.worker.processes()
    told = owed(leader)
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    told()
    assert leader.ends().startswith("rank 0: rank 1 has been silent for ")
    for process in reversed(frozen):
        process.send_signal(signal.SIGCONT)
    assert follower.ends()
    _, alive = psutil.wait_procs(frozen, 5)
    assert not alive
