"""A pool on this machine, driven by ``encodepool local`` alone, and what it publishes."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

SPEC: dict[str, Any] = {
    "accelerator": {"perRank": 0},
    "store": {"deviceMiB": 128},
    "transfer": {"backend": "mooncake", "protocol": "tcp"},
}


def manifest(name: str, model: Path, **spec: Any) -> dict[str, Any]:
    """A pool for this machine; keyword arguments become keys of ``spec``."""
    return {
        "apiVersion": "encodepool.dev/v1alpha1",
        "kind": "EncodePool",
        "metadata": {"name": name},
        "spec": {"model": {"path": str(model)}, **SPEC, **spec},
    }


@dataclass
class LocalPool:
    command: Path
    manifest: Path
    state_dir: Path

    def run(self, *args: str | Path, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.command, "local", *args, "--state-dir", self.state_dir],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def up(self) -> Self:
        done = self.run("up", "-f", self.manifest)
        assert done.returncode == 0, done.stdout + done.stderr
        return self

    def down(self) -> None:
        done = self.run("down")
        assert done.returncode == 0, done.stdout + done.stderr

    def edit(self, **spec: Any) -> None:
        """Change keys of the manifest's spec; `up` makes it so."""
        document = yaml.safe_load(self.manifest.read_text())
        document["spec"] |= spec
        self.manifest.write_text(yaml.safe_dump(document))

    # --- what is published

    def published(self, name: str) -> str:
        return (self.state_dir / "endpoints" / name).read_text()

    def endpoints(self) -> dict[int, dict[str, Any]]:
        """{group: entry} of endpoints.json, every group whatever its state."""
        document = json.loads(self.published("endpoints.json"))
        return {entry["group"]: entry for entry in document["endpoints"]}

    def listed(self) -> dict[str, dict[str, Any]]:
        """{url: entry} of the gateway's manifest: routable groups only."""
        document = json.loads(self.published("workers.json"))
        assert document["version"] == 1
        return {entry["url"]: entry for entry in document["workers"]}

    def ready(self, group: int, after: int) -> dict[str, Any] | None:
        """The entry of a group once a start later than ``after`` is ready; None until then."""
        entry = self.endpoints()[group]
        return entry if entry["ready"] and entry["incarnation"] > after else None

    # --- its processes

    def processes(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = json.loads((self.state_dir / "processes.json").read_text())
        return entries

    def pid(self, group: int, role: str, incarnation: int) -> int | None:
        """One process of a start, None while it is not in the list."""
        wanted = {"group": group, "role": role, "incarnation": incarnation}
        return next((p["pid"] for p in self.processes() if wanted.items() <= p.items()), None)

    def metrics(self) -> dict[int, str]:
        """Group -> where its metrics are."""
        report = json.loads((self.state_dir / "status.json").read_text())
        return {int(row["group"]): row["metrics"] for row in report["groups"]}
