"""First process of a node: makes the node's own mounts and network, then runs its daemons.

    node_init.py SPEC.json

It runs in new mount, network, process, host name and IPC namespaces, which end with it: killing
it removes all that happens inside, pods included. It imports nothing but the standard library,
as it must start within the machine's plain interpreter. ``node.py`` writes the specification.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OWN_FOLDERS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log")
"""Names compiled into the kubelet, libcni and containerd: each node gets its own behind them."""

SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet wants to find. These settings are the machine's, not the node's, and remain as
they are: the node sees files with the wanted values in their place, so that the kubelet writes none."""

PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
START_TIMEOUT_S = 20.0
RESTART_DELAY_S = 1.0
MAX_RESTARTS = 20


def run(*argv: str) -> None:
    """Raises CalledProcessError; what went wrong is in this process's log."""
    print("+", *argv, flush=True)
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=sys.stdout, stderr=sys.stdout, check=True)


def wait_for_path(path: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not os.path.exists(path):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {path} after {START_TIMEOUT_S} s")
        time.sleep(0.02)


def make_mounts(spec: dict[str, Any]) -> None:
    mount, folder = spec["mount"], Path(spec["folder"])
    run(mount, "--make-rshared", "/")
    run(mount, "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    os.makedirs("/run/var-lib/upper")
    os.makedirs("/run/var-lib/work")
    # Above the machine's /var/lib, so that folders can be made in it.
    layers = "lowerdir=/var/lib,upperdir=/run/var-lib/upper,workdir=/run/var-lib/work"
    run(mount, "-t", "overlay", "-o", layers, "var-lib", "/var/lib")
    for own in OWN_FOLDERS:
        os.makedirs(own, exist_ok=True)
        source = folder / own[1:].replace("/", "-")
        source.mkdir(exist_ok=True)
        run(mount, "--bind", str(source), own)
    for name, value in SYSCTLS.items():
        stand_in = Path("/run/sysctl", name)
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(f"{value}\n")
        run(mount, "--bind", str(stand_in), f"/proc/sys/{name}")


def make_network(spec: dict[str, Any]) -> None:
    ip = spec["ip"]
    run(ip, "link", "set", "lo", "up")
    wait_for_path("/proc/sys/net/ipv4/conf/eth0")
    run(ip, "addr", "add", f"{spec['address']}/24", "dev", "eth0")
    run(ip, "link", "set", "eth0", "up")
    run(ip, "route", "add", "default", "via", spec["machine"])
    for network, address in spec["other_pods"]:
        run(ip, "route", "add", network, "via", address)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for network in PRIVATE_NETWORKS:  # What has no route of its own must not leave the machine.
        run(ip, "route", "add", "unreachable", network, "metric", "4000")
    # Needed although kube-proxy rewrites the address: the kernel looks for a route before that.
    run(ip, "route", "add", spec["services"], "via", spec["machine"])


class Daemons:
    """Runs the node's daemons and starts them again when they end, as a service manager would."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._running: dict[int, str] = {}
        self._env = os.environ | {"PATH": spec["path"]}

    def start(self, name: str) -> None:
        with open(f"{self._spec['log']}/{self._spec['name']}-{name}.log", "ab") as log:
            process = subprocess.Popen(
                self._spec["daemons"][name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        self._running[process.pid] = name

    def watch(self) -> None:
        """Reap whatever ends in this node; returns when a daemon has ended too often."""
        restarts = 0
        while restarts <= MAX_RESTARTS:
            pid, status = os.wait()
            if pid in self._running:
                name = self._running.pop(pid)
                restarts += 1
                print(f"{name} ended with {status}; start number {restarts + 1}", flush=True)
                time.sleep(RESTART_DELAY_S)
                self.start(name)


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    socket.sethostname(spec["name"])
    make_mounts(spec)
    make_network(spec)
    daemons = Daemons(spec)
    daemons.start("containerd")
    wait_for_path("/run/containerd/containerd.sock")
    for name in spec["daemons"]:
        if name != "containerd":
            daemons.start(name)
    daemons.watch()
    return 1


if __name__ == "__main__":
    sys.exit(main())
