"""Command lines of the control plane: etcd, API server, controllers, scheduler."""

import json
from pathlib import Path

from tests.cluster.kit.certificates import Authority
from tests.cluster.kit.network import (
    API_PORT,
    CONTROLLER_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    SCHEDULER_PORT,
    Addresses,
)
from tests.cluster.kit.programs import need

DOMAIN = "cluster.local"
ISSUER = f"https://kubernetes.default.svc.{DOMAIN}"
NODE_GRACE = "20s"
"""How long a node may be silent before it is NotReady."""

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # Who asked for what, and how it ended; the begin of a watch, as its end may be far away.
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
AUDIT_LOG_MIB = "4000"
"""No rotation within the life of a cluster: the reader of the log knows one file."""

API_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


class ControlPlane:
    """Where the control plane of one cluster keeps its files and what it is reached at.

    With nodes the API server listens on the bridge, as pods must reach it and a loopback address is
    not legal in an EndpointSlice. Without nodes everything listens on loopback.
    """

    def __init__(self, folder: Path, addresses: Addresses, authority: Authority, nodes: int) -> None:
        self._folder = folder
        self._addresses = addresses
        self._authority = authority
        self._nodes = nodes
        self._api_address = addresses.machine if nodes else addresses.loopback
        self.server = f"https://{self._api_address}:{API_PORT}"
        self.etcd = f"http://{addresses.loopback}:{ETCD_PORT}"
        self.audit_log = folder / "log" / "audit.log"

    def make_certificates(self) -> None:
        authority = self._authority
        authority.make_root()
        authority.make_root("front-proxy-ca")
        names = ["127.0.0.1", self._api_address, self._addresses.api_service, *API_NAMES]
        names.append(f"kubernetes.default.svc.{DOMAIN}")
        authority.make("apiserver", "kube-apiserver", hosts=names)
        authority.make("front-proxy-client", "front-proxy-client", root="front-proxy-ca")
        authority.make("kubelet-client", "kube-apiserver-kubelet-client", ["system:masters"])
        authority.make("admin", "admin", ["system:masters"])
        authority.make("kube-controller-manager", "system:kube-controller-manager")
        authority.make("kube-scheduler", "system:kube-scheduler")
        authority.make_token_key()
        for name in ("kube-controller-manager", "kube-scheduler"):
            authority.kubeconfig_of_certificate(self._folder / f"{name}.kubeconfig", self.server, name)
        authority.kubeconfig_of_certificate(self._folder / "kubeconfig", self.server, "admin")

    def etcd_argv(self) -> list[str]:
        peer = f"http://{self._addresses.loopback}:{ETCD_PEER_PORT}"
        return [
            str(need("etcd")),
            "--name=etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={self.etcd}",
            f"--advertise-client-urls={self.etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=etcd={peer}",
            # Nobody needs this data after a crash of the machine.
            "--unsafe-no-fsync",
        ]

    def api_server_argv(self) -> list[str]:
        policy = self._folder / "audit-policy.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        file = self._authority.path
        return [
            str(need("kube-apiserver")),
            f"--etcd-servers={self.etcd}",
            f"--bind-address={self._api_address}",
            f"--secure-port={API_PORT}",
            f"--advertise-address={self._api_address}",
            *([] if self._nodes else ["--endpoint-reconciler-type=none"]),
            f"--cert-dir={self._authority.folder}",
            f"--tls-cert-file={file('apiserver.crt')}",
            f"--tls-private-key-file={file('apiserver.key')}",
            f"--client-ca-file={file('ca.crt')}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={file('tokens.pub')}",
            f"--service-account-signing-key-file={file('tokens.key')}",
            f"--service-cluster-ip-range={self._addresses.services}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-certificate-authority={file('ca.crt')}",
            f"--kubelet-client-certificate={file('kubelet-client.crt')}",
            f"--kubelet-client-key={file('kubelet-client.key')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={file('front-proxy-ca.crt')}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={file('front-proxy-client.crt')}",
            f"--proxy-client-key-file={file('front-proxy-client.key')}",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
            f"--audit-log-maxsize={AUDIT_LOG_MIB}",
            # Written before the request is over, so that a reader misses none that has ended.
            "--audit-log-mode=blocking",
        ]

    def controllers_argv(self) -> list[str]:
        file = self._authority.path
        return [
            str(need("kube-controller-manager")),
            *self._logins("kube-controller-manager"),
            f"--secure-port={CONTROLLER_PORT}",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={file('tokens.key')}",
            f"--root-ca-file={file('ca.crt')}",
            f"--cluster-signing-cert-file={file('ca.crt')}",
            f"--cluster-signing-key-file={file('ca.key')}",
            f"--service-cluster-ip-range={self._addresses.services}",
            "--allocate-node-cidrs=false",
            f"--node-monitor-grace-period={NODE_GRACE}",
        ]

    def scheduler_argv(self) -> list[str]:
        return [
            str(need("kube-scheduler")),
            *self._logins("kube-scheduler"),
            f"--secure-port={SCHEDULER_PORT}",
        ]

    def _logins(self, name: str) -> list[str]:
        kubeconfig = self._folder / f"{name}.kubeconfig"
        return [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={self._addresses.loopback}",
            f"--cert-dir={self._authority.folder}",
            "--leader-elect=false",
            # The default of 20 requests a second makes the controllers start 4 s later.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ]
