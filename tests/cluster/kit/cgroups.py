"""The control groups of a cluster: one folder in each mounted hierarchy, one below it per node."""

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNIFIED = ROOT / "cgroup.controllers"


def _hierarchies() -> list[Path]:
    if UNIFIED.exists():
        return [ROOT]
    if not ROOT.is_dir():
        return []
    return [folder for folder in sorted(ROOT.iterdir()) if (folder / "cgroup.procs").is_file()]


def make(path: str) -> None:
    """Make ``path`` (two names, joined by a slash) in each hierarchy, usable by a kubelet."""
    for hierarchy in _hierarchies():
        current = hierarchy
        for name in path.split("/"):
            parent, current = current, current / name
            if UNIFIED.exists():
                controllers = (parent / "cgroup.controllers").read_text().split()
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
            current.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                # Version 1: a new group has no processors and refuses processes until it gets some.
                setting = current / file
                if not UNIFIED.exists() and setting.exists() and not setting.read_text().strip():
                    setting.write_text((parent / file).read_text())


def remove(path: str, timeout_s: float = 10.0) -> None:
    """Remove ``path`` and all below it. Its processes have been killed; the kernel may lag behind.

    Raises TimeoutError if something still lives in it.
    """
    deadline_s = time.monotonic() + timeout_s
    for hierarchy in _hierarchies():
        top = hierarchy / path
        while top.is_dir():
            for folder, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    pass  # Busy; the loop comes back to it.
            if top.is_dir():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{top} is still in use {timeout_s} s after its processes were killed")
                time.sleep(0.02)
