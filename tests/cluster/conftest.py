"""Fixtures of the tests that run on a real cluster.

``cluster`` is a control plane without nodes and needs no root: pods stay Pending, and a test may
play the kubelet by writing their status. ``nodes`` is another cluster, with two nodes, and needs
root. Without root, Go or a program they skip and say why; in CI they fail instead.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client import ApiClient
from tests.cluster.kit import waiting
from tests.cluster.kit.audit import Asked
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.programs import ProgramMissing
from tests.cluster.kit.requirements import NodesImpossible


def _start(nodes: int) -> Cluster:
    try:
        return Cluster.start(nodes=nodes)
    except (NodesImpossible, ProgramMissing) as error:
        message = f"no test cluster: {error}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session", autouse=True)
def no_proxies() -> Iterator[None]:
    """Clusters are on this machine; some clients would ask a proxy of the environment for them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.lower().endswith("_proxy"):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real control plane: etcd, API server, controllers, scheduler; no nodes."""
    started = _start(nodes=0)
    yield started
    started.down()


@pytest.fixture(scope="session")
def nodes() -> Iterator[Cluster]:
    """A real cluster with node-1 and node-2: kubelet, containerd, runc, CNI, kube-proxy, DNS."""
    started = _start(nodes=2)
    yield started
    started.down()


@pytest.fixture(scope="session")
def kube(cluster: Cluster) -> Iterator[ApiClient]:
    """A blocking client of ``cluster``, as the administrator."""
    with cluster.client() as api:
        yield api


@pytest.fixture(scope="session")
def node_kube(nodes: Cluster) -> Iterator[ApiClient]:
    """A blocking client of ``nodes``, as the administrator."""
    with nodes.client() as api:
        yield api


def _namespace(api: ApiClient, test: str) -> Iterator[str]:
    core = client.CoreV1Api(api)
    words = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_").lower())[:40].strip("-")
    name = f"{words}-{secrets.token_hex(3)}"
    core.create_namespace({"metadata": {"name": name}})

    def has_account() -> bool:
        return bool(core.list_namespaced_service_account(name).items)

    waiting.wait_for(has_account, what=f"the service account of {name}")
    yield name
    core.delete_namespace(name)  # Not waited for: the cluster does it while other tests run.


@pytest.fixture
def namespace(kube: ApiClient, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of ``cluster`` for this test alone, in which pods can be created."""
    yield from _namespace(kube, request.node.name)


@pytest.fixture
def node_namespace(node_kube: ApiClient, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of ``nodes`` for this test alone, in which pods can be created."""
    yield from _namespace(node_kube, request.node.name)


@pytest.fixture(scope="session")
def audit(cluster: Cluster) -> Callable[[datetime], list[Asked]]:
    """``audit(since)``: the requests that ``cluster`` has answered, see ``Cluster.audit``."""
    return cluster.audit


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """``wait_for(condition, timeout_s, what)``, asking less often than elsewhere."""
    return waiting.wait_for
