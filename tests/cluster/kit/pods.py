"""Pods for tests: a shell, and this machine's Python environment.

Worker and operator pods need gigabytes of Python packages. They are not copied into an image: the
image ``HOST`` is empty, and the pod mounts the machine's /usr, the environment, the Python
installation behind it and this checkout (the packages are installed editable), all read-only and
each at the path it has on the machine.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.kit.images import BUSYBOX, HOST

CHECKOUT = Path(__file__).resolve().parents[3]
NONROOT = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532}
Manifest = dict[str, Any]


def program_folder() -> Path:
    """Where the environment has encodepool-worker and its other commands."""
    return Path(sys.prefix) / "bin"


def host_mounts() -> list[Path]:
    """The folders that this Python environment consists of, none below another, sorted."""
    wanted = {Path("/usr"), CHECKOUT, Path(sys.prefix), Path(sys.base_prefix).resolve()}
    # The interpreter is a chain of links; each of them must lead somewhere in the pod, too.
    link = Path(sys.prefix) / "bin" / "python"
    while link.is_symlink():
        link = Path(os.path.normpath(link.parent / os.readlink(link)))
        wanted.add(link.parent.parent)
    return [path for path in sorted(wanted) if not any(above in wanted for above in path.parents)]


def host_volumes(more: Mapping[str, Path] | None = None) -> tuple[list[Manifest], list[Manifest]]:
    """``volumes`` of a pod and ``volumeMounts`` of its container for the image ``HOST``.

    ``more``: further folders or files of the machine by volume name, read-only at their own path.
    """
    paths = {f"host-{number}": path for number, path in enumerate(host_mounts())} | dict(more or {})
    volumes = [{"name": name, "hostPath": {"path": str(path)}} for name, path in paths.items()]
    mounts = [{"name": name, "mountPath": str(path), "readOnly": True} for name, path in paths.items()]
    return volumes, mounts


def host_template(container: str, more: Mapping[str, Path] | None = None) -> Manifest:
    """A ``podTemplate`` that lets the container of this name run from the image ``HOST``.

    Its commands are found by name: the image's PATH begins with the environment's folder.
    """
    volumes, mounts = host_volumes(more)
    return {"spec": {"volumes": volumes, "containers": [{"name": container, "volumeMounts": mounts}]}}


def pod(name: str, container: Manifest, labels: Mapping[str, str] | None = None, **spec: Any) -> Manifest:
    """A pod with one container; it ends a second after it is told to."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "imagePullPolicy": "Never", **container}],
            **spec,
        },
    }


def busybox_pod(name: str, script: str, **spec: Any) -> Manifest:
    """A pod that runs a shell script."""
    return pod(name, {"image": BUSYBOX, "command": ["sh", "-c", script]}, **spec)


def web_pod(name: str, **spec: Any) -> Manifest:
    """A pod that serves its own name at port 8080."""
    serve = "mkdir -p /www; echo $HOSTNAME >/www/index.html; exec httpd -f -p 8080 -h /www"
    return busybox_pod(name, serve, **spec)


def host_pod(
    name: str, command: Sequence[str], more: Mapping[str, Path] | None = None, **spec: Any
) -> Manifest:
    """A pod that runs a command of this machine's Python environment, as an ordinary user."""
    volumes, mounts = host_volumes(more)
    container = {"image": HOST, "command": list(command), "volumeMounts": mounts, "securityContext": NONROOT}
    return pod(name, container, volumes=volumes, **spec)


def is_ready(found: Any) -> bool:
    """Whether a V1Pod is Ready."""
    return any(one.type == "Ready" and one.status == "True" for one in found.status.conditions or [])


def has_ended(found: Any) -> bool:
    return found.status.phase in ("Succeeded", "Failed")
