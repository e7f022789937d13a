"""Pools whose workers really run on the nodes: manifests, processes, and what a pool leaves behind."""

import copy
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from kubernetes import client
from kubernetes.client import ApiClient
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.programs import need
from tests.cluster.kit.waiting import explain, wait_for
from tests.cluster.node_traffic import Published
from tests.cluster.operator_stage import Object, OperatorProcess, Pools, annotations_of

TINY = "tiny"
"""The name of the example."""

START_S = 300
"""Three workers import torch on two cores, perhaps beside other tests; alone it takes 15 s."""

MODELS = "/models"


def with_models_of(pool: Object, folder: Path, name: str) -> Object:
    """The same pool with model ``name`` out of a folder of the nodes, so that no pod makes its own."""
    out = copy.deepcopy(pool)
    out["spec"]["model"] |= {"path": f"{MODELS}/{name}", "cache": {"hostPath": {"path": str(folder)}}}
    del out["spec"]["podTemplate"]["spec"]["initContainers"]
    return out


class NodeWorkers:
    """The processes of workers in the pods of a cluster, seen and signalled from outside the nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _all(self) -> Iterator[psutil.Process]:
        for name in self._cluster.node_names:
            yield from psutil.Process(self._cluster.first_process(name)).children(recursive=True)

    def of(self, pool: str) -> list[str]:
        """Command lines of all that runs for a pool."""
        found = []
        for process in self._all():
            try:
                words = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if f"--pool={pool}" in words or ("--pool" in words and words[words.index("--pool") + 1] == pool):
                found.append(" ".join(words))
        return found

    def supervisor(self, pool: str, group: int) -> psutil.Process:
        """The pod's first process; the group must have exactly one."""
        wanted = {"serve", f"--pool={pool}", f"--group={group}"}
        (found,) = [process for process in self._all() if wanted <= set(process.cmdline())]
        return found

    def child(self, pool: str, group: int, module: str) -> psutil.Process:
        """``module`` is "encodepool_worker.shell" (rank 0) or "encodepool_worker.frontend"."""
        (found,) = [one for one in self.supervisor(pool, group).children() if module in one.cmdline()]
        return found

    def whole(self, pool: str, group: int) -> list[psutil.Process]:
        """The pod's first process, then all others."""
        first = self.supervisor(pool, group)
        return [first, *first.children(recursive=True)]

    def folders_of(self, uids: set[str]) -> list[str]:
        """What is left on the nodes of the pods with these uids: their volumes, mounted and on disk.

        A pod's /dev/shm is one of its volumes, a tmpfs.
        """
        found = []
        for name in self._cluster.node_names:
            node = Path(f"/proc/{self._cluster.first_process(name)}")
            found += [
                f"{name}: {line}" for line in (node / "mounts").read_text().splitlines() if _has(line, uids)
            ]
            pods = node / "root/var/lib/kubelet/pods"
            found += [f"{name}: {folder.name}" for folder in pods.iterdir() if folder.name in uids]
        return found


def _has(line: str, uids: set[str]) -> bool:
    return any(uid in line for uid in uids)


def inventory(api: ApiClient, namespace: str) -> set[str]:
    """Kind and name of everything in the namespace that a pool could bring with it, Events aside."""
    core, discovery = client.CoreV1Api(api), client.DiscoveryV1Api(api)
    apps, policy = client.AppsV1Api(api), client.PolicyV1Api(api)
    lists: dict[str, Callable[..., Any]] = {
        "ConfigMap": core.list_namespaced_config_map,
        "ControllerRevision": apps.list_namespaced_controller_revision,
        "EndpointSlice": discovery.list_namespaced_endpoint_slice,
        "PersistentVolumeClaim": core.list_namespaced_persistent_volume_claim,
        "Pod": core.list_namespaced_pod,
        "PodDisruptionBudget": policy.list_namespaced_pod_disruption_budget,
        "Secret": core.list_namespaced_secret,
        "Service": core.list_namespaced_service,
        "ServiceAccount": core.list_namespaced_service_account,
        "StatefulSet": apps.list_namespaced_stateful_set,
    }
    return {f"{kind}/{item.metadata.name}" for kind, ask in lists.items() for item in ask(namespace).items}


def uids_of(pools: Pools, pool: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pools.pods(pool)}


def group_of(identity: str) -> int:
    """The group of an entry in the list, by its id."""
    return int(identity.rpartition("/")[2].partition("-")[0])


def pod_of(identity: str) -> str:
    return f"{TINY}-{group_of(identity)}-0"


@dataclass
class Stage:
    """One namespace of the nodes with an operator and the example pool.

    ``operator`` is replaced when a test starts another; ``manifest`` is what was applied last;
    ``before`` is what the namespace held without any pool. ``measured`` is printed at the end.
    """

    cluster: Cluster
    api: ApiClient
    pools: Pools
    workers: NodeWorkers
    published: Published
    run_operator: Callable[[], OperatorProcess]
    operator: OperatorProcess
    manifest: Object
    before: set[str]
    measured: list[str] = field(default_factory=list)

    def kubectl(self, *argv: str, given: Object | None = None) -> str:
        """What it prints; ``given`` is its standard input. It must do what it is asked to."""
        command = [
            need("kubectl"),
            "--kubeconfig",
            self.cluster.kubeconfig,
            "-n",
            self.pools.namespace,
            *argv,
        ]
        text = None if given is None else yaml.safe_dump(given)
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def took(self, what: str, since: float, until: float | None = None) -> None:
        seconds = (time.monotonic() if until is None else until) - since
        self.measured.append(f"{what}: {seconds:.1f} s")

    def unlisted(self, what: str, identity: str, since: float) -> None:
        """Measure when the entry was first missing."""
        at = self.published.unlisted_at(identity, since)
        assert at is not None, f"{identity} has never been off the list"
        self.took(f"unlisted after {what}", since, at)

    def wait_ready(self, pool: str = TINY) -> None:
        with self._explained():
            self.pools.wait_ready(pool, START_S)

    def replicas(self, count: int) -> dict[str, Object]:
        """The pool with so many groups, all listed; what is listed, by id in the order of groups."""
        if self.pools.get(TINY)["spec"]["replicas"] != count:
            self.kubectl("scale", f"encodepool/{TINY}", f"--replicas={count}")
        self.wait_ready()
        wait_for(lambda: len(self.published.now) == count, 30, f"{count} groups in the list")
        return dict(sorted(self.published.now.items()))

    def wait_replaced(self, before: Mapping[str, Object], *gone: str) -> list[Object]:
        """The entries that have come for those with the ids ``gone``, once the list is full again."""

        def full() -> bool:
            found = self.published.now
            return len(found) == len(before) and not found.keys() & set(gone)

        with self._explained():
            wait_for(full, START_S, f"others in the list for {gone}")
        return [worker for name, worker in self.published.now.items() if name not in before]

    def last_failure(self, identity: str) -> Object:
        """As it is kept on the group's StatefulSet."""
        notes = annotations_of(self.pools.groups(TINY)[f"{TINY}-{group_of(identity)}"])
        failure: Object = json.loads(notes["encodepool.dev/last-failure"])
        return failure

    def told(self, since: int, reason: str, *words: str) -> bool:
        """An Event after the first ``since`` ones has this reason and all words, now or soon."""

        def is_there() -> bool:
            found = self.pools.events(TINY)[since:]
            return any(r == reason and all(word in message for word in words) for r, message in found)

        return wait_for(is_there, what=f"an Event {reason} with {words}")

    def delete(self, pool: str, uids: set[str]) -> None:
        """Returns when nothing is left of the pool, whose pods have had these uids: no object, no process,
        no volume."""

        def left() -> tuple[list[str], list[str], list[str]]:
            objects = inventory(self.api, self.pools.namespace) - self.before
            return sorted(objects), self.workers.of(pool), self.workers.folders_of(uids)

        assert all(left())  # else this would look in the wrong places
        self.kubectl("delete", f"encodepool/{pool}")
        try:
            wait_for(lambda: not any(left()), 120, "everything being gone")
        except AssertionError as error:
            raise AssertionError(f"{error}; left: {left()}") from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{error}\n{explain(self.api, self.pools.namespace)}") from error
