"""The example with the SMG gateway on the nodes: its manifests, its page, and its pods."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client import ApiClient
from tests.cluster.kit.deploy import operator_values
from tests.cluster.kit.images import HOST
from tests.cluster.kit.pods import CHECKOUT, host_volumes, program_folder
from tests.cluster.kit.programs import need
from tests.cluster.node_stage import with_models_of
from tests.peers.smg.gateway import COLOURS
from tests.peers.tokenspeed.remote import without_proxies

Object = dict[str, Any]

EXAMPLE = CHECKOUT / "examples" / "epd-smg"
NAMESPACE, POOL, MODEL = "epd", "eyes", "tiny-qwen3-vl"
FOLDERS = ("cluster", "cluster-file")
TIMEOUT_S = 500
LOOK_S = 0.2


def fitted(document: Object, model: Path) -> Object:
    """A manifest of the example whose containers run from this machine's Python environment.

    The checkpoint comes from a folder of the nodes, so that no pod has to make its own.
    """
    if document["kind"] == "EncodePool":
        volumes, mounts = host_volumes()
        spec = document["spec"]
        spec["image"] = HOST
        spec["podTemplate"]["spec"] |= {
            "volumes": volumes,
            "containers": [{"name": "encode", "volumeMounts": mounts}],
        }
        return with_models_of(document, model.parent, model.name)
    if document["kind"] != "Deployment":
        return document
    volumes, mounts = host_volumes()
    pod = document["spec"]["template"]["spec"]
    pod.pop("initContainers")
    for volume in pod["volumes"]:
        if volume["name"] == "models":
            del volume["emptyDir"]
            volume["hostPath"] = {"path": str(model)}
    pod["volumes"] += volumes
    for container in pod["containers"]:
        # The image's working directory is the checkout, where the stand-ins are.
        container |= {"image": HOST, "imagePullPolicy": "Never", "workingDir": str(CHECKOUT)}
        for mount in container["volumeMounts"]:
            if mount["name"] == "models":
                mount["mountPath"] = _model_of(container)
        container["volumeMounts"] += mounts
    return document


def _model_of(container: Object) -> str:
    """The folder of the checkpoint that a container is told of."""
    flags = dict(word.partition("=")[::2] for word in container["args"])
    return str(flags.get("--model") or flags["--model-path"])


def copy_example(folder: Path, model: Path) -> None:
    for name in FOLDERS:
        (folder / name).mkdir()
        for file in (EXAMPLE / name).iterdir():
            documents = [fitted(one, model) for one in yaml.safe_load_all(file.read_text())]
            (folder / name / file.name).write_text(yaml.safe_dump_all(documents))


@dataclass
class Page:
    """Runs scripts of the page for the administrator of a cluster."""

    kubeconfig: Path
    folder: Path
    port: int
    output: list[str] = field(default_factory=list)

    def run(self, script: str) -> str:
        """One script, with the fitted manifests and a free port; what it said."""
        values = self.folder / "values.yaml"
        values.write_text(yaml.safe_dump(operator_values()))
        images = "--set image.repository=REGISTRY/operator --set workerImage.repository=REGISTRY/worker"
        for place, ours in (
            (images, f"--values {values}"),
            *((f"examples/epd-smg/{name}/", f"{self.folder}/{name}/") for name in FOLDERS),
            *((f"{port}:30000", f"{self.port}:30000") for port in (30000, 30001)),
            *((f"127.0.0.1:{port}", f"127.0.0.1:{self.port}") for port in (30000, 30001)),
        ):
            script = script.replace(place, ours)
        assert "REGISTRY" not in script, script
        programs = [program_folder(), *(need(name).parent for name in ("helm", "kubectl"))]
        path = ":".join([*map(str, programs), os.environ["PATH"]])
        env = without_proxies(os.environ) | {"PATH": path, "KUBECONFIG": str(self.kubeconfig)}
        # What a script leaves in the background holds its output open and would hide why it failed.
        with tempfile.TemporaryFile("w+") as output:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail"],
                cwd=CHECKOUT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                shell.communicate(script, timeout=TIMEOUT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
                output.seek(0)
                said = output.read()
                assert shell.returncode == 0, f"{script}\n{said}"
        return said


def received(api: ApiClient) -> list[Object]:
    """What prefill says of every image it was asked to receive."""
    core = client.CoreV1Api(api)
    [pod] = core.list_namespaced_pod(NAMESPACE, label_selector="epd-role=prefill").items
    log = core.read_namespaced_pod_log(pod.metadata.name, NAMESPACE, _preload_content=False).data.decode()
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def log_of(api: ApiClient, app: str) -> str:
    """What a gateway says."""
    core = client.CoreV1Api(api)
    [pod] = core.list_namespaced_pod(NAMESPACE, label_selector=f"app={app}").items
    answer = core.read_namespaced_pod_log(
        pod.metadata.name, NAMESPACE, container="smg", _preload_content=False
    )
    return COLOURS.sub("", answer.data.decode())


def address_of(api: ApiClient, app: str) -> str:
    """The address of the gateway's pod, which this machine reaches directly."""
    [pod] = client.CoreV1Api(api).list_namespaced_pod(NAMESPACE, label_selector=f"app={app}").items
    return str(pod.status.pod_ip)


@dataclass
class Unlabelled:
    """When each pod of the pool lost its label (monotonic), by its bootstrap address: ``at``.

    It is when the label was last looked for and found, so never later than the loss.
    """

    api: ApiClient
    at: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator["Unlabelled"]:
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(ended,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join(10)

    def _run(self, ended: threading.Event) -> None:
        core = client.CoreV1Api(self.api)
        before: set[str] = set()
        looked_at = time.monotonic()
        while not ended.wait(LOOK_S):
            looks_at = time.monotonic()
            found = core.list_namespaced_pod(NAMESPACE, label_selector="encodepool.dev/routable=true").items
            now = {
                f"{pod.status.pod_ip}:{pod.metadata.annotations['sglang.ai/bootstrap-port']}" for pod in found
            }
            self.at |= dict.fromkeys(before - now, looked_at)
            before, looked_at = now, looks_at
