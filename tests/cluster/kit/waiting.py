"""Waiting for what a cluster does in its own time, and saying what was there instead."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tests.cluster.kit.clients import SyncClient
from tests.cluster.kit.pods import has_ended, is_ready

if TYPE_CHECKING:
    from kubernetes.client import V1Pod

POLL_S = 0.2
TIMEOUT_S = 30.0
Found = TypeVar("Found")


def wait_for(
    condition: Callable[[], Found], timeout_s: float = TIMEOUT_S, what: str = "the condition"
) -> Found:
    """The first true value of ``condition``. Raises AssertionError after ``timeout_s``.

    It asks five times a second, as each question is a request to the API server.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s} s"
        time.sleep(POLL_S)
    return found


async def wait_for_async(
    condition: Callable[[], Awaitable[Found]], timeout_s: float = TIMEOUT_S, what: str = "the condition"
) -> Found:
    """``wait_for`` in a coroutine."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := await condition()):
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s} s"
        await asyncio.sleep(POLL_S)
    return found


def wait_pod_ready(api: SyncClient, namespace: str, name: str, timeout_s: float = TIMEOUT_S) -> "V1Pod":
    """The pod once it is Ready; the error tells what the namespace looks like if it does not become so."""
    return wait_pod(api, namespace, name, is_ready, "Ready", timeout_s)


def wait_pod_ended(api: SyncClient, namespace: str, name: str, timeout_s: float = TIMEOUT_S) -> "V1Pod":
    """The pod once all its containers have ended, well or badly."""
    return wait_pod(api, namespace, name, has_ended, "over", timeout_s)


def wait_pod(
    api: SyncClient,
    namespace: str,
    name: str,
    good: Callable[["V1Pod"], bool],
    what: str,
    timeout_s: float = TIMEOUT_S,
) -> "V1Pod":
    """The pod once it is ``good``; ``what`` that means is said in the error."""
    from kubernetes import client

    core = client.CoreV1Api(api)
    deadline_s = time.monotonic() + timeout_s
    while True:
        # A list, as a pod that a controller has yet to make is no error.
        found = core.list_namespaced_pod(namespace, field_selector=f"metadata.name={name}").items
        if found and good(found[0]):
            return found[0]
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{name} is not {what} after {timeout_s} s\n{explain(api, namespace)}")
        time.sleep(POLL_S)


def explain(api: SyncClient, namespace: str) -> str:
    """Pods and events of the namespace, a line each, for the message of a failed test."""
    from kubernetes import client

    core = client.CoreV1Api(api)
    lines = []
    pods: list[Any] = core.list_namespaced_pod(namespace).items  # All their fields may be None.
    for pod in pods:
        states = [
            f"{one.name}: {one.state.to_str() if one.state else ''}".replace("\n", " ")
            for one in pod.status.container_statuses or []
        ]
        lines.append(f"pod {pod.metadata.name} {pod.status.phase} on {pod.spec.node_name} {states}")
    for event in core.list_namespaced_event(namespace).items:
        about = event.involved_object
        lines.append(f"event {about.kind}/{about.name} {event.reason}: {event.message}")
    return "\n".join(lines)


def run_in_pod(api: SyncClient, namespace: str, name: str, argv: list[str]) -> str:
    """What a command prints in the pod's first container. Raises AssertionError if it fails."""
    from kubernetes import client
    from kubernetes.stream import stream

    core = client.CoreV1Api(api)
    options = {"stdin": False, "stdout": True, "stderr": True, "tty": False, "_preload_content": False}
    session: Any = stream(core.connect_get_namespaced_pod_exec, name, namespace, command=argv, **options)
    try:
        session.run_forever(timeout=TIMEOUT_S)
        out, err = session.read_stdout() or "", session.read_stderr() or ""
        assert session.returncode == 0, f"{argv} in {name}: exit {session.returncode}: {out}{err}"
        return str(out)
    finally:
        session.close()
        # The other side closes first, and then close() leaves the socket open.
        session.sock.shutdown()
