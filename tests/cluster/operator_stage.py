"""The operator as a process on this machine, pools for it, and a stand-in for the kubelet.

On a control plane without nodes pods stay Pending. ``StandIn`` does of a kubelet what the operator can
see: it gives a pod an address, writes that its container runs, is started and is Ready, and confirms its
end. Nothing runs: what a worker does is for the tests with nodes.
"""

import copy
import itertools
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from tests.cluster.kit.audit import now
from tests.cluster.kit.pods import CHECKOUT
from tests.cluster.kit.waiting import wait_for

GROUP, VERSION, PLURAL = "encodepool.dev", "v1alpha1", "encodepools"
Object = dict[str, Any]

SPEC: Object = {
    "replicas": 2,
    "model": {"path": "/models/tiny"},
    "image": "localhost/host:1",
    "accelerator": {"perRank": 0},
    "transfer": {"backend": "tcp"},
    # Nobody serves here, so nobody has to finish anything.
    "drain": {"timeoutSeconds": 0, "settleSeconds": 0},
}


def now_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class StandIn:
    """Plays a node and its kubelet for the pods of pools in one namespace, as long as it runs.

    It binds pods to a node that takes no others, makes them Ready, and lets those go that are to end.
    ``held`` names pods that it does not make Ready; while ``paused`` it does nothing but keep the node.
    """

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._node = f"stand-in-{namespace}"
        self._ended = threading.Event()
        self._addresses = itertools.count(1)
        self._beat_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.held: set[str] = set()
        self.paused = False
        self.error: Exception | None = None

    @contextmanager
    def running(self) -> Iterator["StandIn"]:
        taint = {"key": "stand-in", "effect": "NoSchedule"}
        self._core.create_node({"metadata": {"name": self._node}, "spec": {"taints": [taint]}})
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join(10)
            self._core.delete_node(self._node)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._ended.wait(0.2):
                self._keep_node()
                if not self.paused:
                    self._turn()
        except Exception as error:  # noqa: BLE001 - told by running(), in the test's own thread
            self.error = error

    def _keep_node(self) -> None:
        if time.monotonic() < self._beat_s + 5:
            return
        self._beat_s = time.monotonic()
        ready = {"type": "Ready", "status": "True", "reason": "StandIn", "message": ""}
        times = {"lastHeartbeatTime": now_text(), "lastTransitionTime": now_text()}
        self._core.patch_node_status(self._node, {"status": {"conditions": [ready | times]}})

    def _turn(self) -> None:
        pods = self._core.list_namespaced_pod(
            self._namespace, label_selector="encodepool.dev/pool", resource_version="0"
        ).items
        for pod in pods:
            name, uid = pod.metadata.name, pod.metadata.uid
            if pod.metadata.deletion_timestamp is not None:
                self._let(lambda name=name, uid=uid: self._end(name, uid))
            elif not pod.spec.node_name:
                self._let(lambda name=name, uid=uid: self._bind(name, uid))
            elif not pod.status.pod_ip and name not in self.held:
                self.write(name, uid)

    def _let(self, request: Callable[[], object]) -> None:
        """A pod that is gone or another by now is passed over."""
        try:
            request()
        except ApiException as error:
            if error.status not in (404, 409, 422):
                raise

    def _bind(self, name: str, uid: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": self._node}
        body = {"metadata": {"name": name, "uid": uid}, "target": target}
        self._core.create_namespaced_binding(self._namespace, body, _preload_content=False)

    def _end(self, name: str, uid: str) -> None:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        self._core.delete_namespaced_pod(name, self._namespace, body=body)

    def restart(self, pod: Object) -> None:
        """Say that the container ended and was started in place: the pod keeps its address."""
        self.write(pod["metadata"]["name"], pod["metadata"]["uid"], pod["status"]["podIP"], restarts=1)

    def write(self, name: str, uid: str, address: str = "", *, restarts: int = 0) -> None:
        """Say that the pod runs and is Ready; without an address it is given one."""
        if not address:
            number = next(self._addresses)
            address = f"10.200.{number // 250}.{number % 250 + 1}"
        condition = {"status": "True", "lastTransitionTime": now_text()}
        container: Object = {
            "name": "encode",
            "image": "i",
            "imageID": "i",
            "ready": True,
            "started": True,
            "restartCount": restarts,
            "state": {"running": {"startedAt": now_text()}},
        }
        if restarts:
            ended = {"exitCode": 137, "reason": "Error", "message": "it was killed", "finishedAt": now_text()}
            container["lastState"] = {"terminated": ended}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": kind, **condition} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [container],
        }
        body = {"metadata": {"uid": uid}, "status": status}
        self._let(lambda: self._core.patch_namespaced_pod_status(name, self._namespace, body))


class OperatorProcess:
    """``encodepool-operator run`` with a kubeconfig of its own. ``stop`` says how it ended."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def wait_line(self, text: str, timeout_s: float = 40.0) -> None:
        def there() -> bool:
            assert self._process.poll() is None, self.log()
            return text in self.log()

        wait_for(there, timeout_s, f"{text!r} in the operator's log")

    def log(self) -> str:
        return self._log.read_text()

    @property
    def port(self) -> int:
        """Of /livez, /readyz and /metrics."""
        self.wait_line("port=")
        return int(self.log().partition("port=")[2].split()[0])

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        """End it as Kubernetes does; its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


def start_operator(
    spawn: Callable[..., subprocess.Popen[bytes]],
    program: Callable[[str], Path],
    kubeconfig: Path,
    log: Path,
    *flags: str,
) -> OperatorProcess:
    argv = [program("encodepool-operator"), "run", "--listen", "127.0.0.1:0", *flags]
    return OperatorProcess(spawn(argv, log, env={"KUBECONFIG": str(kubeconfig)}), log)


class Pools:
    """Pools and their children in one namespace, as JSON."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self.custom = client.CustomObjectsApi(api)
        self.core = client.CoreV1Api(api)
        self.apps = client.AppsV1Api(api)
        self.policy = client.PolicyV1Api(api)
        self.discovery = client.DiscoveryV1Api(api)

    # Pools

    def create(self, name: str, **spec: Any) -> Object:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "EncodePool",
            "metadata": {"name": name},
            "spec": {**copy.deepcopy(SPEC), **spec},
        }
        return self.custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, body)

    def get(self, name: str) -> Object:
        return self.custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)

    def patch(self, name: str, **spec: Any) -> Object:
        return self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, name, {"spec": spec}
        )

    def scale(self, name: str, replicas: int) -> None:
        self.custom.patch_namespaced_custom_object_scale(
            GROUP, VERSION, self.namespace, PLURAL, name, {"spec": {"replicas": replicas}}
        )

    def delete(self, name: str) -> None:
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)

    def status(self, name: str) -> Object:
        return self.get(name).get("status") or {}

    def condition(self, name: str, kind: str) -> Object:
        found = (one for one in self.status(name).get("conditions", ()) if one["type"] == kind)
        return next(found, {"status": "", "reason": "", "message": ""})

    def wait_ready(self, name: str, timeout_s: float = 40.0) -> None:
        """Complete, for the spec as it is now."""

        def ready() -> bool:
            pool = self.get(name)
            status = pool.get("status") or {}
            current = status.get("observedGeneration") == pool["metadata"]["generation"]
            return current and self.condition(name, "Ready")["status"] == "True"

        try:
            wait_for(ready, timeout_s, f"pool {name} being ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(self.status(name), indent=1)}") from error

    # Children

    def _items(self, answer: Any) -> list[Object]:
        return json.loads(answer.data)["items"]

    def pods(self, pool: str) -> list[Object]:
        """Not those that are ending."""
        found = self.core.list_namespaced_pod(
            self.namespace, label_selector=f"{GROUP}/pool={pool}", _preload_content=False
        )
        return [pod for pod in self._items(found) if "deletionTimestamp" not in pod["metadata"]]

    def groups(self, pool: str) -> dict[str, Object]:
        """StatefulSets by name."""
        found = self.apps.list_namespaced_stateful_set(
            self.namespace, label_selector=f"{GROUP}/pool={pool}", _preload_content=False
        )
        return {item["metadata"]["name"]: item for item in self._items(found)}

    def children(self, pool: str) -> list[str]:
        """Kind and name of everything that bears the pool's label."""
        lists: dict[str, Callable[..., Any]] = {
            "StatefulSet": self.apps.list_namespaced_stateful_set,
            "ControllerRevision": self.apps.list_namespaced_controller_revision,
            "Service": self.core.list_namespaced_service,
            "ConfigMap": self.core.list_namespaced_config_map,
            "Pod": self.core.list_namespaced_pod,
            "PodDisruptionBudget": self.policy.list_namespaced_pod_disruption_budget,
            "EndpointSlice": self.discovery.list_namespaced_endpoint_slice,
        }
        out = []
        for kind, ask in lists.items():
            selector = f"{GROUP}/pool={pool}"
            found = self._items(ask(self.namespace, label_selector=selector, _preload_content=False))
            out += [f"{kind}/{item['metadata']['name']}" for item in found]
        return sorted(out)

    def documents(self, pool: str) -> dict[str, str]:
        found = self.core.read_namespaced_config_map(
            f"{pool}-endpoints", self.namespace, _preload_content=False
        )
        return json.loads(found.data).get("data") or {}

    def workers(self, pool: str) -> list[Object]:
        """The gateway's manifest."""
        return json.loads(self.documents(pool)["workers.json"])["workers"]

    def events(self, pool: str) -> list[tuple[str, str]]:
        """(reason, message), oldest first."""
        found = self.core.list_namespaced_event(
            self.namespace, field_selector=f"involvedObject.name={pool}", _preload_content=False
        )
        items = sorted(self._items(found), key=lambda item: int(item["metadata"]["resourceVersion"]))
        return [(item["reason"], item["message"]) for item in items]

    def routable(self, pool: str) -> list[Object]:
        return [pod for pod in self.pods(pool) if labels_of(pod).get(f"{GROUP}/routable") == "true"]


def labels_of(obj: Mapping[str, Any]) -> Mapping[str, str]:
    return obj["metadata"].get("labels") or {}


def annotations_of(obj: Mapping[str, Any]) -> Mapping[str, str]:
    return obj["metadata"].get("annotations") or {}


def admin_kubeconfig(cluster: Any, user: str) -> Path:
    """Somebody who may do everything and whose requests are told from others' in the audit log."""
    return cluster.user_kubeconfig(user, ["system:masters"])


def wait_at_rest(cluster: Any, user: str) -> None:
    """Until this operator has written nothing between two renewals of its Lease: what it holds back, it
    holds back for a second, and renewals are two seconds apart."""
    since = now()

    def at_rest() -> bool:
        wrote = [
            asked.resource
            for asked in cluster.audit(since)
            if asked.user == user and asked.writes and asked.resource != "events" and not asked.dry_run
        ]
        return ("leases", "leases") in itertools.pairwise(wrote)

    wait_for(at_rest, 60, f"{user} having nothing to write")


def apply_definition(api: ApiClient) -> None:
    """The CRD of this checkout, as ``kubectl apply -f crds/`` has it; returns once it is served."""
    documents = yaml.safe_load_all((CHECKOUT / "crds" / "encodepools.yaml").read_text())
    extensions = client.ApiextensionsV1Api(api)
    for document in documents:
        try:
            extensions.create_custom_resource_definition(document)
        except ApiException as error:
            if error.status != 409:
                raise
    custom = client.CustomObjectsApi(api)

    def served() -> bool:
        try:
            custom.list_cluster_custom_object(GROUP, VERSION, PLURAL)
        except ApiException:
            return False
        return True

    wait_for(served, what="the CRD being served")
