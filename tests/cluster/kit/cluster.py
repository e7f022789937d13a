"""A real Kubernetes cluster on this machine: started in seconds, removed without a trace."""

import os
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from tests.cluster.kit import cgroups, clients, network, plain_http, teardown
from tests.cluster.kit.audit import Asked, AuditLog
from tests.cluster.kit.certificates import Authority
from tests.cluster.kit.controlplane import ControlPlane
from tests.cluster.kit.images import write_standard_images
from tests.cluster.kit.network import Addresses
from tests.cluster.kit.node import SOCKET, Node
from tests.cluster.kit.pods import program_folder
from tests.cluster.kit.programs import need
from tests.cluster.kit.record import Record, locked, new_record, records
from tests.cluster.kit.requirements import refuse_unless_possible

from encodepool_operator.local.processes import GatedProcess, ProcessId, identify, is_running, kill_session

START_TIMEOUT_S = 90.0
POLL_S = 0.05
LOG_TAIL_CHARS = 3000
DEFAULT_RESOURCES: Mapping[str, str] = {"nvidia.com/gpu": "4", "rdma/hca": "4"}
"""Numbers in the status of each node; no device stands behind them."""


class ClusterFailed(RuntimeError):
    """The cluster did not come up, or a part of it ended; the message ends with that part's log."""


class Cluster:
    """A running control plane, and nodes if it was started with some.

    ``kubeconfig`` logs in as the administrator, by certificate.
    """

    def __init__(self, record: Record, resources: Mapping[str, str] = DEFAULT_RESOURCES) -> None:
        self._record = record
        self._resources = resources
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.id = record.id
        self.folder = record.folder
        self.kubeconfig = record.kubeconfig
        self.addresses = Addresses(record.slot)
        self.authority = Authority(self.folder / "pki")
        self._plane = ControlPlane(self.folder, self.addresses, self.authority, record.nodes)
        self.server = self._plane.server
        self._nodes = {
            node.name: node
            for number in range(1, record.nodes + 1)
            for node in [Node(self.id, self.folder, self.addresses, number, record.nodes)]
        }
        self._audit = AuditLog(self._plane.audit_log, self.get)
        self._ssl: ssl.SSLContext | None = None

    @classmethod
    def start(
        cls, *, nodes: int = 0, kept: bool = False, resources: Mapping[str, str] = DEFAULT_RESOURCES
    ) -> Self:
        """Bring up a cluster and wait until pods can be created and all nodes are Ready.

        It belongs to this process: once that is dead, the next start removes it. With ``kept`` it
        stays until it is taken down. Raises ProgramMissing, NodesImpossible or ClusterFailed; what
        was started by then is removed again.
        """
        refuse_unless_possible(nodes=bool(nodes))
        teardown.sweep()
        with locked() as base:
            slot = network.free_slot((record.slot for record in records(base)), nodes=bool(nodes))
            record = new_record(base, slot, identify(os.getpid()), nodes)
            cluster = cls(record, resources)
            try:
                # Before anybody else looks for free addresses.
                if nodes:
                    network.raise_bridge(cluster.id, cluster.addresses)
            except BaseException:
                teardown.remove(record)
                raise
        try:
            cluster._bring_up()
            if kept:
                record.owner = None
                record.save()
        except BaseException:
            cluster.down()
            raise
        return cluster

    def _bring_up(self) -> None:
        (self.folder / "log").mkdir()
        self._spawn("etcd", self._plane.etcd_argv())
        self._plane.make_certificates()
        self._wait("etcd", lambda: plain_http.ask(f"{self._plane.etcd}/health"))
        self._spawn("kube-apiserver", self._plane.api_server_argv())
        if self._nodes:
            self.authority.make("kube-proxy", "system:kube-proxy")
            self.authority.make("dns", "cluster-dns", ["system:masters"])
            write_standard_images(self.folder / "images.tar", program_folder())
        for node in self._nodes.values():
            node.prepare(self.authority, self.server)
        self._wait("the API server", lambda: self.get("/readyz") == "ok")
        self._spawn("kube-controller-manager", self._plane.controllers_argv())
        self._spawn("kube-scheduler", self._plane.scheduler_argv())
        if self._nodes:
            self._start_dns()
        for node in self._nodes.values():
            self._boot(node)
        with ThreadPoolExecutor() as pool:
            loads = [pool.submit(self._load_into, name, self.folder / "images.tar") for name in self._nodes]
            # With its default service account a namespace is ready for pods.
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self._wait("the default service account", lambda: self.get(account))
            for name in self._nodes:
                self._wait_node_ready(name)
            for load in loads:
                load.result()

    # -- processes

    def _spawn(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        # Not our environment: proxies and Go settings of this machine are not for the cluster.
        env = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder), "LANG": "C.UTF-8"}
        gated = GatedProcess(argv, env, self.folder / "log" / f"{name}.log")
        self._record.processes[name] = gated.process
        self._record.save()
        self._children[name] = gated.open_gate()
        return self._children[name]

    def _wait(self, what: str, condition: Callable[[], Any]) -> None:
        """Until ``condition`` is true; an HTTP error or refused connection counts as not yet."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        last: Exception | None = None
        while True:
            try:
                if condition():
                    return
            except OSError as error:
                last = error
            for name, process in self._record.processes.items():
                if not is_running(process):
                    log = self.folder / "log" / f"{name}.log"
                    tail = log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
                    raise ClusterFailed(f"{name} ended while waiting for {what}; its log ends:\n{tail}")
            if time.monotonic() > deadline_s:
                raise ClusterFailed(f"{what}: not within {START_TIMEOUT_S} s; last error: {last}")
            time.sleep(POLL_S)

    def _start_dns(self) -> None:
        corefile = self.folder / "Corefile"
        account = self.authority.kubeconfig_of_certificate(self.folder / "dns.kubeconfig", self.server, "dns")
        corefile.write_text(
            f".:53 {{\n  bind {self.addresses.machine}\n  errors\n"
            f"  kubernetes cluster.local in-addr.arpa {{\n    kubeconfig {account}\n    ttl 1\n  }}\n}}\n"
        )
        self._spawn("dns", [str(need("cluster-dns")), "-conf", str(corefile)])

    def _boot(self, node: Node) -> None:
        cgroups.make(node.cgroup)
        process = self._spawn(node.name, node.argv())
        ours = os.readlink("/proc/self/ns/net")
        self._wait(
            f"the namespaces of {node.name}", lambda: os.readlink(f"/proc/{process.pid}/ns/net") != ours
        )
        network.join_node(self.id, self.addresses, node.number, process.pid)

    def _wait_node_ready(self, name: str, after: str = "") -> None:
        """``after``: a heartbeat that does not count, as it is from before the node was stopped."""

        def ready() -> bool:
            condition = self._ready_condition(name)
            return condition.get("status") == "True" and condition["lastHeartbeatTime"] > after

        self._wait(f"{name} to be Ready", ready)
        numbers = {"status": {"capacity": dict(self._resources), "allocatable": dict(self._resources)}}
        self._request("PATCH", f"/api/v1/nodes/{name}/status", numbers)

    def _ready_condition(self, name: str) -> dict[str, str]:
        conditions = self.get(f"/api/v1/nodes/{name}")["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == "Ready"), {})

    # -- requests as the administrator, and clients

    def get(self, path: str) -> Any:
        """What the API server answers to a GET; text where it is not JSON. Raises OSError."""
        return self._request("GET", path)

    def _request(self, method: str, path: str, body: object = None) -> Any:
        if self._ssl is None:
            context = ssl.create_default_context(cafile=self.authority.path("ca.crt"))
            context.load_cert_chain(self.authority.path("admin.crt"), self.authority.path("admin.key"))
            self._ssl = context
        kind = "application/strategic-merge-patch+json" if body is not None else ""
        return plain_http.ask(self.server + path, method, body, kind, self._ssl)

    def client(self, kubeconfig: Path | None = None) -> clients.SyncClient:
        """A blocking ``kubernetes.client.ApiClient``; close it, or use it in a ``with``."""
        return clients.sync_client(kubeconfig or self.kubeconfig)

    async def aio_client(self, kubeconfig: Path | None = None) -> clients.AioClient:
        """A ``kubernetes.aio.client.ApiClient``: ``async with await cluster.aio_client() as api``."""
        return await clients.aio_client(kubeconfig or self.kubeconfig)

    def audit(self, since: datetime) -> list[Asked]:
        """All requests that arrived since then (``audit.now()``) and were answered, by time."""
        return self._audit.since(since)

    # -- other users

    def user_kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Log in as ``user`` by certificate; it may do what RBAC grants it, at first nothing."""
        name = f"user-{len(list(self.authority.folder.glob('user-*.crt')))}"
        self.authority.make(name, user, groups)
        return self.authority.kubeconfig_of_certificate(self.folder / f"{name}.kubeconfig", self.server, name)

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Log in as an existing service account, with a token of one day."""
        with self.client() as api:
            token = clients.token_of(api, namespace, name)
        path = self.folder / f"account-{namespace}-{name}.kubeconfig"
        return self.authority.kubeconfig_of_token(path, self.server, token)

    # -- nodes

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def first_process(self, name: str) -> int:
        """The process that is number 1 inside the node, by its number outside."""
        leader = self._record.processes[name].pid
        return int(Path(f"/proc/{leader}/task/{leader}/children").read_text().split()[0])

    def exec_in_node(self, name: str, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine in the node's namespaces. Raises CalledProcessError."""
        enter = [str(need("nsenter")), "-t", str(self.first_process(name))]
        enter += ["-m", "-n", "-p", "-u", "-i", "--", *map(str, argv)]
        return subprocess.run(enter, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)

    def _load_into(self, name: str, archive: Path) -> None:
        # From outside: the node's own /run is seen through its first process.
        deadline_s = time.monotonic() + START_TIMEOUT_S
        socket = Path(f"/proc/{self.first_process(name)}/root{SOCKET}")
        while not socket.exists():
            if time.monotonic() > deadline_s:
                raise ClusterFailed(f"containerd of {name} does not listen")
            time.sleep(POLL_S)
        ctr = [str(need("ctr")), "-a", str(socket), "-n", "k8s.io", "images", "import", str(archive)]
        done = subprocess.run(ctr, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterFailed(f"{name} does not take {archive}: {done.stderr}")

    def load_images(self, archive: Path) -> None:
        """Give all nodes the images of an archive that ``images.write_images`` made."""
        for name in self._nodes:
            self._load_into(name, archive)

    def stop_node(self, name: str) -> None:
        """A power cut: everything in the node is killed. Returns when it is gone."""
        self._kill(name)
        network.part_node(self.id, self._nodes[name].number)
        cgroups.remove(self._nodes[name].cgroup)

    def start_node(self, name: str) -> None:
        """Boot a stopped node and wait until it is Ready; containerd's and the kubelet's disks are as
        they were, so pods start again."""
        last = self._ready_condition(name).get("lastHeartbeatTime", "")
        self._boot(self._nodes[name])
        self._wait_node_ready(name, after=last)

    def _kill(self, name: str) -> None:
        process: ProcessId = self._record.processes[name]
        if not kill_session(process):
            raise ClusterFailed(f"{name} outlived its SIGKILL")
        child = self._children.pop(name, None)
        if child is not None:
            child.wait()
        del self._record.processes[name]
        self._record.save()

    def down(self) -> None:
        """Remove everything. Safe to call again, and from any process."""
        with locked():
            teardown.remove(self._record)
        for child in self._children.values():
            child.wait()
        self._children.clear()
