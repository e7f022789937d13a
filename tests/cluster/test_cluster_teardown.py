"""Nothing of a test cluster remains: not after it is taken down, not after its owner was killed."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client
from tests.cluster.kit import teardown
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.pods import web_pod
from tests.cluster.kit.record import Record, locked, records
from tests.cluster.kit.waiting import wait_pod_ready

from encodepool_operator.local.processes import ProcessId, identify, is_running

START = """
import sys
from tests.cluster.kit.cluster import Cluster
Cluster.start(nodes=int(sys.argv[1]))
print("up", flush=True)
sys.stdin.read()
"""


def tree(roots: list[int]) -> set[ProcessId]:
    """The processes and all their descendants, those inside nodes and pods too."""
    found, todo = set(), list(roots)
    while todo:
        pid = todo.pop()
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
            todo += [int(child) for one in threads for child in (one / "children").read_text().split()]
        except OSError:
            continue
        if process := identify(pid):
            found.add(process)
    return found


@dataclass(frozen=True)
class Traces:
    """Everything by which a cluster could be found on this machine."""

    record: Record
    processes: frozenset[ProcessId]
    routes: frozenset[str]
    """All routes of the machine that lead into the cluster or stop there."""

    @classmethod
    def of(cls, record: Record) -> "Traces":
        roots = [process.pid for process in record.processes.values()]
        mine = (f"10.{100 + record.slot}.", f"10.{140 + record.slot}.", f"10.231.{record.slot}.")
        rows = json.loads(subprocess.check_output(["ip", "-j", "route"]) or "[]")
        return cls(
            record,
            frozenset(tree(roots)),
            frozenset(row["dst"] for row in rows if row["dst"].startswith(mine)),
        )

    def left(self) -> list[str]:
        """What of it is still there, a line each."""
        names = [path.name for path in Path("/sys/class/net").iterdir()]
        groups = list(Path("/sys/fs/cgroup").glob(f"**/{self.record.id}"))
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return [
            *(f"process {one.pid}" for one in self.processes if is_running(one)),
            *(f"link {name}" for name in names if name.startswith(self.record.id)),
            *(f"route {dst}" for dst in Traces.of(self.record).routes),
            *(f"cgroup {path}" for path in groups),
            *(f"mount {line}" for line in mounts if self.record.id in line),
            *([f"folder {self.record.folder}"] if self.record.folder.exists() else []),
        ]


def record_of(owner: int) -> Record | None:
    with locked() as base:
        return next((one for one in records(base) if one.owner and one.owner.pid == owner), None)


def run_pod_on_each(cluster: Cluster) -> None:
    with cluster.client() as api:
        for name in cluster.node_names:
            client.CoreV1Api(api).create_namespaced_pod("default", web_pod(f"on-{name}", nodeName=name))
        for name in cluster.node_names:
            wait_pod_ready(api, "default", f"on-{name}")


@pytest.fixture
def start_owner(nodes, spawn, tmp_path):
    """``start_owner(nodes)``: a process that starts a cluster and keeps it until it is killed."""
    del nodes  # Where nodes are impossible, this skips with the reason.
    log = tmp_path / "owner.log"
    return lambda count: (spawn([sys.executable, "-c", START, str(count)], log), log)


@pytest.mark.timeout(180)
def test_down_leaves_nothing_of_a_cluster_that_runs_pods(nodes):
    cluster = Cluster.start(nodes=2)
    try:
        run_pod_on_each(cluster)
        with locked() as base:
            (record,) = [one for one in records(base) if one.id == cluster.id]
        traces = Traces.of(record)
        # Five daemons and, in each node: init, containerd, kubelet, kube-proxy, shim, pause, httpd.
        assert len(traces.processes) >= 5 + 2 * 7
        assert len(traces.left()) > len(traces.processes)
    finally:
        cluster.down()

    assert traces.left() == []
    assert nodes.get("/readyz") == "ok"


@pytest.mark.timeout(180)
def test_the_next_start_removes_a_cluster_whose_owner_was_killed(nodes, start_owner, wait_for):
    owner, log = start_owner(1)
    wait_for(lambda: "up" in log.read_text().split(), 90, "the cluster of another process")
    record = record_of(owner.pid)
    run_pod_on_each(Cluster(record))
    owner.kill()
    owner.wait(10)
    traces = Traces.of(record)
    assert len(traces.processes) >= 5 + 7

    Cluster.start().down()

    assert traces.left() == []
    assert nodes.get("/readyz") == "ok", "the cluster of a living process was swept, too"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("last", ["etcd", "kube-apiserver", "node-1"])
def test_an_owner_killed_while_it_starts_a_cluster_leaves_nothing_after_a_sweep(start_owner, wait_for, last):
    owner, _ = start_owner(1)

    def has_started() -> Record | None:
        found = record_of(owner.pid)
        return found if found and last in found.processes else None

    traces = Traces.of(wait_for(has_started, 90, f"{last} in the record"))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(10)

    assert traces.record.id in teardown.sweep()
    assert traces.left() == []
