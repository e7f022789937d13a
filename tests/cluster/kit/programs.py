"""The programs of a test cluster: which there are, where they are looked for, what is too old.

A program is taken from ``$KUBEBUILDER_ASSETS``, then from PATH, then from the user's cache, where
``build`` puts what was missing. One that is older than ``minimum`` is passed over.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VERSION = re.compile(rb"v?(\d+)\.(\d+)\.(\d+)")
SBIN = ("/usr/sbin", "/sbin")
"""Not on the PATH of everybody, but where Debian puts runc, iptables and ip."""

CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")
CNI_PLUGINS = ("bridge", "host-local", "loopback")


class ProgramMissing(RuntimeError):
    """Programs that this machine does not have; the message says how to get them."""


@dataclass(frozen=True, slots=True)
class Program:
    """One program built from a Go module; ``tool`` is its folder below ``tools/``.

    ``build_s`` is what a cold build took on two cores, for the progress line. Several programs of
    one module share their packages: the first one pays for the others.
    """

    name: str
    tool: str
    package: str
    minimum: tuple[int, int, int]
    build_s: int
    flags: tuple[str, ...] = ("-ldflags=-s -w",)


KUBE_VERSION = "v1.36.3"
KUBE_MINIMUM = (1, 36, 0)
_KUBE = (f"-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={KUBE_VERSION}",)
# What a build without these flags says of itself has no patch level, and an old Kubernetes version.
_HELM_FLAGS = {
    "internal/version.version": "v3.22.0",
    "pkg/chartutil.k8sVersionMajor": "1",
    "pkg/chartutil.k8sVersionMinor": "36",
    "pkg/lint/rules.k8sVersionMajor": "1",
    "pkg/lint/rules.k8sVersionMinor": "36",
}
_HELM = (
    "-ldflags=-s -w " + " ".join(f"-X helm.sh/helm/v3/{name}={value}" for name, value in _HELM_FLAGS.items()),
)
_CONTAINERD = (
    "-tags=no_btrfs no_devmapper no_zfs osusergo netgo",
    "-ldflags=-s -w -X github.com/containerd/containerd/v2/version.Version=v2.4.2",
)


def _kube(name: str, build_s: int, minimum: tuple[int, int, int] = KUBE_MINIMUM) -> Program:
    return Program(name, "kube", f"k8s.io/kubernetes/cmd/{name}", minimum, build_s, _KUBE)


def _containerd(name: str, build_s: int) -> Program:
    package = f"github.com/containerd/containerd/v2/cmd/{name}"
    return Program(name, "containerd", package, (1, 6, 0), build_s, _CONTAINERD)


CONTROL_PLANE = (
    # Older ones lack RequestWatchProgress, without which streamed lists fail.
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", (3, 5, 13), 70),
    _kube("kube-apiserver", 350),
    _kube("kube-controller-manager", 95),
    _kube("kube-scheduler", 15),
)
NODE = (
    _kube("kubelet", 35),
    _kube("kube-proxy", 15),
    _containerd("containerd", 130),
    _containerd("containerd-shim-runc-v2", 5),
    _containerd("ctr", 10),
    Program("cluster-dns", "dns", ".", (1, 12, 0), 115),
)
# kubectl works against API servers a few versions newer, with a warning.
CLIENTS = (
    _kube("kubectl", 20, (1, 30, 0)),
    Program("helm", "helm", "helm.sh/helm/v3/cmd/helm", (3, 0, 0), 125, _HELM),
)
PROGRAMS = {program.name: program for program in (*CONTROL_PLANE, *NODE, *CLIENTS)}

CONTROL_PLANE_SYSTEM = {"openssl": "openssl"}
"""Programs of the distribution, and the Debian package of each."""

NODE_SYSTEM = {
    "runc": "runc",
    "busybox": "busybox-static",
    "iptables": "iptables",
    "ip": "iproute2",
    "mount": "mount",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "encodepool" / "cluster"


def bin_folder() -> Path:
    return cache_folder() / "bin"


def _path_folders() -> Iterator[str]:
    yield from filter(None, os.environ.get("PATH", "").split(os.pathsep))
    yield from SBIN


def _executables(name: str, folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        path = Path(folder) / name
        if os.access(path, os.X_OK) and path.is_file():
            yield path


def find(name: str) -> Path | None:
    """The program to use, or None if there is none or only too old ones."""
    if name not in PROGRAMS:
        found = _executables(name, list(_path_folders()))
        return next((path for path in found if name != "busybox" or _is_static(path)), None)
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    folders = [*([assets] if assets else []), *_path_folders(), str(bin_folder())]
    minimum = PROGRAMS[name].minimum
    return next((path for path in _executables(name, folders) if version(path) >= minimum), None)


def need(name: str) -> Path:
    """Like ``find``; raises ProgramMissing."""
    path = find(name)
    if path is None:
        raise ProgramMissing(f"{name} is missing: run `make cluster-programs`")
    return path


def find_cni() -> Path | None:
    """The folder with the CNI plugins that a node's pods are connected by."""
    for folder in CNI_FOLDERS:
        if all(os.access(Path(folder) / plugin, os.X_OK) for plugin in CNI_PLUGINS):
            return Path(folder)
    return None


def missing_programs(*, nodes: bool) -> list[Program]:
    wanted = (*CONTROL_PLANE, *NODE) if nodes else CONTROL_PLANE
    return [program for program in wanted if find(program.name) is None]


def missing_packages(*, nodes: bool) -> list[str]:
    """Debian packages that would bring what the distribution should have, sorted."""
    wanted = CONTROL_PLANE_SYSTEM | (NODE_SYSTEM if nodes else {})
    missing = {package for name, package in wanted.items() if find(name) is None}
    if nodes and find_cni() is None:
        missing.add("containernetworking-plugins")
    return sorted(missing)


def version(path: Path) -> tuple[int, int, int]:
    """What the program says of itself; asked once for each file, as starting one takes a while.

    (0, 0, 0) if it says nothing that looks like a version.
    """
    real = path.resolve()
    stat = real.stat()
    key = f"{real} {stat.st_size} {stat.st_mtime_ns}"
    memo_file = cache_folder() / "versions.json"
    try:
        memo = json.loads(memo_file.read_bytes())
    except (OSError, ValueError):
        memo = {}
    if key not in memo:
        memo[key] = _ask_version(real)
        memo_file.parent.mkdir(parents=True, exist_ok=True)
        fresh = memo_file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(memo, indent=1))
        fresh.replace(memo_file)
    major, minor, patch = memo[key]
    return major, minor, patch


def _ask_version(path: Path) -> tuple[int, int, int]:
    for argument in (["--version"], ["-version"], ["version", "--client"], ["version"]):
        answer = subprocess.run(
            [path, *argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        found = VERSION.search(answer.stdout)
        if answer.returncode == 0 and found:
            return int(found[1]), int(found[2]), int(found[3])
    return 0, 0, 0


def _is_static(path: Path) -> bool:
    """A dynamically linked busybox would need the machine's libraries in its image."""
    with path.open("rb") as program:
        return b"/ld-" not in program.read(4096)


def go() -> str | None:
    return shutil.which("go") or next(
        (path for path in ("/usr/local/go/bin/go",) if os.access(path, os.X_OK)), None
    )
