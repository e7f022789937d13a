"""Images for pods, made by hand: no registry is within reach, and none is asked for.

All of them are in one archive that ``ctr images import`` takes. The archive is reproducible.
"""

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kit.programs import need

PAUSE = "localhost/pause:1"
"""What holds a pod's namespaces; nodes need it, tests do not."""

BUSYBOX = "localhost/busybox:1"
"""A shell with httpd, wget and nc. Its programs cannot resolve names (a static C library cannot):
use addresses, or its nslookup."""

HOST = "localhost/host:1"
"""Mount points only. With the mounts of ``pods.host_mounts`` it is this machine's Python environment,
whose folder of programs stands first on the PATH."""

PAUSE_SCRIPT = "trap 'exit 0' TERM INT; while :; do sleep 86400 & wait; done"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n"
    "nonroot:x:65532:65532:nonroot:/home/nonroot:/bin/false\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
FOLDERS = ["dev", "etc", "proc", "sys", "root", "run", "tmp", "var", "var/tmp", "opt", "mnt", "home", "usr"]
ANYBODY_WRITES = ("tmp", "var/tmp")


class Layer:
    """Files of an image by their path without a leading slash. All times are 0, all owners root."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        for name in FOLDERS:
            self._add(name, tarfile.DIRTYPE, 0o1777 if name in ANYBODY_WRITES else 0o755)
        for name, text in FILES.items():
            self.file(name, text.encode())

    def folder(self, name: str) -> None:
        self._add(name, tarfile.DIRTYPE, 0o755)

    def link(self, name: str, target: str) -> None:
        self._add(name, tarfile.SYMTYPE, 0o777, target=target)

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        self._add(name, tarfile.REGTYPE, mode, content=content)

    def _add(self, name: str, kind: bytes, mode: int, target: str = "", content: bytes = b"") -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, len(content)
        self._entries[name] = entry, content

    def tar(self) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for name in sorted(self._entries):
                entry, content = self._entries[name]
                archive.addfile(entry, io.BytesIO(content))
        return out.getvalue()


@dataclass(frozen=True, slots=True)
class Image:
    """One layer and what a container of it runs by default; ``reference`` is ``host/name:tag``."""

    reference: str
    layer: bytes
    entrypoint: Sequence[str] = ()
    path: str = SYSTEM_PATH


def write_images(archive: Path, images: Sequence[Image]) -> None:
    """An OCI image layout in a tar; layers that several images share are in it once."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    manifests = []
    for image in images:
        layer = blob(image.layer, "layer.v1.tar")
        config = {
            "architecture": "arm64" if os.uname().machine == "aarch64" else "amd64",
            "os": "linux",
            "config": {"Env": [f"PATH={image.path}"], "Entrypoint": list(image.entrypoint)},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(_json(config), "config.v1+json"),
            "layers": [layer],
        }
        names = {
            "io.containerd.image.name": image.reference,
            "org.opencontainers.image.ref.name": image.reference.rpartition(":")[2],
        }
        manifests.append(blob(_json(manifest), "manifest.v1+json") | {"annotations": names})
    files: Mapping[str, bytes] = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": manifests}),
        **blobs,
    }
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as out:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            out.addfile(entry, io.BytesIO(files[name]))


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def write_standard_images(archive: Path, program_folder: Path) -> None:
    """The three images every node gets; ``program_folder`` is the environment's, for ``HOST``."""
    busybox = _busybox_layer().tar()
    images = [
        Image(PAUSE, busybox, ("/bin/sh", "-c", PAUSE_SCRIPT)),
        Image(BUSYBOX, busybox),
        Image(HOST, _host_layer().tar(), path=f"{program_folder}:{SYSTEM_PATH}"),
    ]
    write_images(archive, images)


def _busybox_layer() -> Layer:
    program, layer = need("busybox"), Layer()
    layer.folder("bin")
    layer.file("bin/busybox", program.read_bytes(), 0o755)
    listing = subprocess.run([program, "--list"], stdout=subprocess.PIPE, text=True, check=True)
    for name in listing.stdout.split():
        if name != "busybox":
            layer.link(f"bin/{name}", "busybox")
    return layer


def _host_layer() -> Layer:
    layer = Layer()
    for name in ("bin", "sbin", "lib", "lib64"):
        layer.link(name, f"usr/{name}")
    return layer
