"""An own certificate authority for each cluster, and the kubeconfigs of its users."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.kit.network import run

DAYS = "30"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", DAYS)


class Authority:
    """Keys and certificates in ``folder``, which only the user may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / name

    def make_root(self, name: str = "ca") -> None:
        """A self-signed certificate that signs others."""
        usage = "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"
        run("openssl", "req", "-x509", *KEY, "-subj", f"/CN={name}", "-addext", usage, *self._out(name))

    def make(
        self,
        name: str,
        user: str,
        groups: Sequence[str] = (),
        hosts: Sequence[str] = (),
        root: str = "ca",
    ) -> None:
        """A certificate for ``user`` in ``groups``, valid as a server under the names ``hosts``."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            "extendedKeyUsage=serverAuth,clientAuth",
        ]
        if hosts:
            kinds = (("IP:" if host[0].isdigit() else "DNS:") + host for host in hosts)
            extensions.append("subjectAltName=" + ",".join(kinds))
        signer = ("-CA", self.path(f"{root}.crt"), "-CAkey", self.path(f"{root}.key"))
        added = [part for extension in extensions for part in ("-addext", extension)]
        run("openssl", "req", "-x509", *KEY, "-subj", subject, *signer, *added, *self._out(name))

    def make_token_key(self) -> None:
        """The key pair that service account tokens are signed and checked with."""
        run("openssl", "genrsa", "-out", self.path("tokens.key"), 2048)
        run("openssl", "rsa", "-in", self.path("tokens.key"), "-pubout", "-out", self.path("tokens.pub"))

    def _out(self, name: str) -> tuple[str | Path, ...]:
        return "-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.crt")

    def kubeconfig_of_certificate(self, path: Path, server: str, name: str) -> Path:
        """Log in with the certificate ``name``. Clients read the files, so none of them makes copies."""
        user = {"client-certificate": f"{self.path(name)}.crt", "client-key": f"{self.path(name)}.key"}
        return self._write_kubeconfig(path, server, user)

    def kubeconfig_of_token(self, path: Path, server: str, token: str) -> Path:
        return self._write_kubeconfig(path, server, {"token": token})

    def _write_kubeconfig(self, path: Path, server: str, user: dict[str, str]) -> Path:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": server, "certificate-authority": str(self.path("ca.crt"))},
                }
            ],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file, indent=1)
        return path
