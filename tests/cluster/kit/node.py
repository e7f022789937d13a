"""Files and command lines of one node: containerd, kubelet, kube-proxy, pod network."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.cluster.kit import node_init
from tests.cluster.kit.certificates import Authority
from tests.cluster.kit.controlplane import DOMAIN
from tests.cluster.kit.images import PAUSE
from tests.cluster.kit.network import Addresses
from tests.cluster.kit.programs import ProgramMissing, find_cni, need

UNSHARE = ("--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
SOCKET = "/run/containerd/containerd.sock"


def node_name(number: int) -> str:
    """Nodes are counted from 1."""
    return f"node-{number}"


class Node:
    """Node ``number`` of the cluster ``identity``; its files lie below the cluster's folder."""

    def __init__(self, identity: str, cluster: Path, addresses: Addresses, number: int, of: int) -> None:
        self.number = number
        self.name = node_name(number)
        self.cgroup = f"{identity}/{self.name}"
        self._cluster = cluster
        self._folder = cluster / self.name
        self._addresses = addresses
        self._of = of

    def prepare(self, authority: Authority, server: str) -> None:
        """Write all files of the node, once."""
        folder, address = self._folder, self._addresses.node(self.number)
        (folder / "cni").mkdir(parents=True)
        authority.make(self.name, f"system:node:{self.name}", ["system:nodes"], [self.name, address])
        authority.kubeconfig_of_certificate(folder / "kubeconfig", server, self.name)
        authority.kubeconfig_of_certificate(folder / "kube-proxy.kubeconfig", server, "kube-proxy")
        (folder / "resolv.conf").write_text(f"nameserver {self._addresses.machine}\n")
        (folder / "cni" / "10-pods.conflist").write_text(json.dumps(self._pod_network(), indent=1))
        (folder / "containerd.toml").write_text(self._containerd_config())
        (folder / "kubelet.json").write_text(json.dumps(self._kubelet_config(authority), indent=1))
        (folder / "node.json").write_text(json.dumps(self._init_spec(), indent=1))

    def argv(self) -> list[str]:
        """The command line that becomes the node."""
        # -I: the first process sees no package but the standard library.
        first = [sys.executable, "-I", node_init.__file__, str(self._folder / "node.json")]
        return [str(need("unshare")), *UNSHARE, *first]

    def _pod_network(self) -> dict[str, Any]:
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": self._addresses.node_pods(self.number)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _containerd_config(self) -> str:
        cni = find_cni()
        if cni is None:
            raise ProgramMissing("the CNI plugins are missing: run `make cluster-programs`")
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc may not lower the value, and each pod
        # fails with "can't get final child's PID from pipe: EOF".
        return f"""version = 2
root = "{self._folder}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{self._folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{need("runc")}"
        SystemdCgroup = false
"""

    def _kubelet_config(self, authority: Authority) -> dict[str, Any]:
        free = dict.fromkeys(("nodefs.available", "nodefs.inodesFree", "imagefs.available"), "1%")
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "address": self._addresses.node(self.number),
            "port": 10250,
            "readOnlyPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority.path("ca.crt"))},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(authority.path(f"{self.name}.crt")),
            "tlsPrivateKeyFile": str(authority.path(f"{self.name}.key")),
            "clusterDomain": DOMAIN,
            "clusterDNS": [self._addresses.machine],
            "resolvConf": str(self._folder / "resolv.conf"),
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "protectKernelDefaults": False,
            # Only a machine that is really full may throw pods out.
            "evictionHard": {"memory.available": "100Mi", **free},
            "imageGCHighThresholdPercent": 100,
            "serializeImagePulls": False,
            "nodeStatusUpdateFrequency": "5s",
            "nodeLeaseDurationSeconds": 20,
            "syncFrequency": "10s",
            "maxPods": 110,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        }

    def _init_spec(self) -> dict[str, Any]:
        folder, containerd = self._folder, need("containerd")
        others = [number for number in range(1, self._of + 1) if number != self.number]
        programs = [containerd.parent, need("runc").parent, need("iptables").parent]
        path = [*map(str, programs), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
        kubelet = [
            str(need("kubelet")),
            f"--config={folder}/kubelet.json",
            f"--kubeconfig={folder}/kubeconfig",
            f"--hostname-override={self.name}",
            f"--node-ip={self._addresses.node(self.number)}",
            f"--node-labels=topology.kubernetes.io/zone=zone-{self.number}",
            "--root-dir=/var/lib/kubelet",
            f"--cert-dir={folder}",
        ]
        kube_proxy = [
            str(need("kube-proxy")),
            f"--kubeconfig={folder}/kube-proxy.kubeconfig",
            f"--hostname-override={self.name}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={self._addresses.pods}",
            # These settings would be the machine's.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ]
        return {
            "name": self.name,
            "folder": str(folder),
            "log": str(self._cluster / "log"),
            "address": self._addresses.node(self.number),
            "machine": self._addresses.machine,
            "services": self._addresses.services,
            "other_pods": [(self._addresses.node_pods(n), self._addresses.node(n)) for n in others],
            "path": os.pathsep.join(path),
            "mount": str(need("mount")),
            "ip": str(need("ip")),
            "daemons": {
                "containerd": [str(containerd), "-c", f"{folder}/containerd.toml"],
                "kubelet": kubelet,
                "kube-proxy": kube_proxy,
            },
        }
