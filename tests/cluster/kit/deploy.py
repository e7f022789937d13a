"""The operator and an example pool on a kept cluster: real helm, real pods, this Python environment."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.kit.build import Say, say_on_stderr
from tests.cluster.kit.clients import SyncClient, sync_client
from tests.cluster.kit.cluster import ClusterFailed
from tests.cluster.kit.images import HOST
from tests.cluster.kit.pods import CHECKOUT, Manifest, host_volumes
from tests.cluster.kit.programs import need

RELEASE = "encodepool"
NAMESPACE = "encodepool-system"
EXAMPLE = CHECKOUT / "examples" / "tiny-cluster.yaml"
OPERATOR_S = 120.0
POOL_S = 420.0
"""Longer than the example's startupDeadlineSeconds."""

POLL_S = 0.5


def operator_values() -> Manifest:
    """Of the chart: its pods run from this machine's Python environment."""
    repository, _, tag = HOST.partition(":")
    volumes, mounts = host_volumes()
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "workerImage": {"repository": repository, "tag": tag},
        "extraVolumes": volumes,
        "extraVolumeMounts": mounts,
    }


def example_pool() -> Manifest:
    """``examples/tiny-cluster.yaml``, whose containers run from this machine's Python environment."""
    pool: Manifest = yaml.safe_load(EXAMPLE.read_text())
    volumes, mounts = host_volumes()
    pool["spec"]["image"] = HOST
    template = pool["spec"]["podTemplate"]["spec"]
    template["volumes"] = volumes
    template["containers"] = [{"name": "encode", "volumeMounts": mounts}]
    for container in template["initContainers"]:
        container["image"] = HOST
        container["volumeMounts"] += mounts
    return pool


def install_operator(kubeconfig: Path, folder: Path, say: Say = say_on_stderr) -> None:
    """Install the chart, or bring what is installed up to this checkout; returns when its pods are Ready."""
    file = folder / "operator-values.yaml"
    file.write_text(yaml.safe_dump(operator_values()))
    chart = CHECKOUT / "charts" / "encodepool"
    where = ("--namespace", NAMESPACE, "--create-namespace", "--values", file)
    _run(["helm", "upgrade", "--install", RELEASE, chart, *where], kubeconfig, folder, say)
    _wait(kubeconfig, _operator_state, "the operator", OPERATOR_S, say)


def apply_example(kubeconfig: Path, folder: Path, say: Say = say_on_stderr) -> None:
    """Apply the example pool to the namespace default; returns when it is complete and Available."""
    file = _example_file(folder)
    file.write_text(yaml.safe_dump(example_pool(), sort_keys=False))
    _run(["kubectl", "apply", "--server-side", "-f", file], kubeconfig, folder, say)
    _wait(kubeconfig, _pool_state, "the example pool", POOL_S, say)


def _example_file(folder: Path) -> Path:
    """The example as it was applied, which is not as it stands in ``examples/``."""
    return folder / "example-pool.yaml"


def _run(argv: Sequence[str | Path], kubeconfig: Path, folder: Path, say: Say) -> None:
    say(" ".join(map(str, argv)))
    done = subprocess.run(
        [need(str(argv[0])), *argv[1:]],
        env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "KUBECONFIG": str(kubeconfig)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterFailed(f"{argv[0]}: {done.stderr.strip()}")


def _wait(
    kubeconfig: Path, state: Callable[[SyncClient], tuple[bool, str]], what: str, limit_s: float, say: Say
) -> None:
    """Until ``state`` is good; every other thing it says is told once."""
    began_s, told = time.monotonic(), ""
    with sync_client(kubeconfig) as api:
        while True:
            good, text = state(api)
            passed_s = time.monotonic() - began_s
            if text != told:
                say(f"{what}, {passed_s:.0f} s: {text}")
                told = text
            if good:
                return
            if passed_s > limit_s:
                raise ClusterFailed(f"{what} is not ready after {limit_s:.0f} s: {text}")
            time.sleep(POLL_S)


def _operator_state(api: SyncClient) -> tuple[bool, str]:
    from kubernetes import client

    core, apps = client.CoreV1Api(api), client.AppsV1Api(api)
    (deployment,) = apps.list_namespaced_deployment(NAMESPACE).items
    wanted, ready = deployment.spec.replicas, deployment.status.ready_replicas or 0
    current = deployment.status.observed_generation == deployment.metadata.generation
    updated = (deployment.status.updated_replicas or 0) == wanted and current
    pods = core.list_namespaced_pod(NAMESPACE).items
    waits = sorted({text for pod in pods for text in _waits(pod)})
    return ready == wanted and updated, "; ".join([f"{ready} of {wanted} pods are ready", *waits])


def _waits(pod: Any) -> Iterator[str]:
    """What keeps the pod's containers from running, and is not just a matter of time."""
    for one in pod.status.container_statuses or ():
        waiting = one.state.waiting
        if waiting is not None and waiting.reason not in ("ContainerCreating", "PodInitializing"):
            yield f"{pod.metadata.name}: {waiting.reason} {waiting.message or ''}".strip()


def _pool_state(api: SyncClient) -> tuple[bool, str]:
    from kubernetes import client

    pool = example_pool()
    group, _, version = pool["apiVersion"].partition("/")
    name = pool["metadata"]["name"]
    custom: Any = client.CustomObjectsApi(api)
    found = custom.get_namespaced_custom_object(group, version, "default", "encodepools", name)
    status: Mapping[str, Any] = found.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    if status.get("observedGeneration") != found["metadata"]["generation"] or not conditions:
        return False, "the operator has not seen it yet"
    held = all(conditions[kind]["status"] == "True" for kind in ("Available", "Ready"))
    groups = [": ".join(filter(None, _words_of(one))) for one in status.get("groups") or ()]
    return held, "; ".join([conditions["Available"]["message"], *groups])


def _words_of(group: Mapping[str, Any]) -> tuple[str, str]:
    """What it is, and why; nothing for a group that is ready and not yet listed."""
    return f"group {group['index']} {group['phase']}", group["reason"]


def next_steps(kubeconfig: Path, folder: Path, also: str) -> list[str]:
    """Lines for a shell: what makes the cluster usable, then what can be done with it."""
    lines = [f"export KUBECONFIG={kubeconfig}"]
    if not also:
        return lines
    known = os.environ.get("PATH", "").split(os.pathsep)
    folders = [Path(sys.prefix) / "bin", *(need(name).parent for name in ("helm", "kubectl"))]
    more = list(dict.fromkeys(str(folder) for folder in folders if str(folder) not in known))
    if more:
        lines += [f"export PATH={':'.join(more)}:$PATH"]
    if also != "example":
        return [*lines, f"kubectl get pods --namespace {NAMESPACE}"]
    return [
        *lines,
        "kubectl get epool",
        "encodepool status tiny",
        "encodepool status tiny -o smg",
        "encodepool encode examples/images/shapes.png --pool tiny --heatmap heat.png",
        f"encodepool plan -f {_example_file(folder)}  # the example as it runs here",
        "kubectl scale epool tiny --replicas=3",
    ]
