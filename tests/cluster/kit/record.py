"""What is known on disk about each cluster of this machine, so that it can be removed for sure.

Everything of one cluster lies in one folder, ``<base>/<id>``, and everything it makes outside of
it (bridge, routes, cgroups) carries the id in its name. The record names each process before that
process runs. Whoever finds a record whose owner is dead can therefore remove all of it, whatever
moment the owner died at.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from encodepool_operator.local.processes import ProcessId, boot_id, is_running

RECORD = "cluster.json"
HIDDEN_IN_NODES = ("/run", "/var/run", "/var/lib", "/var/log")
"""A node has its own of these, so nothing of ours that it must see may lie below them."""


@dataclass(slots=True)
class Record:
    """``owner`` is the process the cluster belongs to; None: it stays until it is taken down.

    ``slot`` chooses the addresses, see ``network``. ``boot``: after another boot of the machine
    only files can be left.
    """

    id: str
    folder: Path
    slot: int
    owner: ProcessId | None
    boot: str
    nodes: int = 0
    processes: dict[str, ProcessId] = field(default_factory=dict)
    """Name to process. The name of a node stands for the first process of that node."""

    def save(self) -> None:
        fresh = self.folder / f".{RECORD}"
        fresh.write_bytes(msgspec.json.encode(self, enc_hook=str))
        fresh.replace(self.folder / RECORD)

    @property
    def abandoned(self) -> bool:
        """Nobody will take it down any more."""
        if self.boot != boot_id():
            return True
        return self.owner is not None and not is_running(self.owner)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"


def base_folder() -> Path:
    """``$ENCODEPOOL_CLUSTERS`` or a folder of this user below /tmp, made when it does not exist.

    Not TMPDIR: the clusters of all runs of a user must see each other to share out the addresses.
    """
    named = os.environ.get("ENCODEPOOL_CLUSTERS")
    base = Path(named).resolve() if named else Path(f"/tmp/encodepool-clusters-{os.getuid()}")
    if any(base.is_relative_to(hidden) for hidden in HIDDEN_IN_NODES):
        raise ValueError(f"ENCODEPOOL_CLUSTERS={base} would be hidden in a node; choose another folder")
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = base.lstat()
    if base.is_symlink() or stat.st_uid != os.getuid():
        raise PermissionError(f"{base} belongs to somebody else")
    return base


@contextmanager
def locked() -> Iterator[Path]:
    """The base folder, while no other process makes, finds or removes clusters."""
    base = base_folder()
    with (base / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield base


def records(base: Path) -> list[Record]:
    """All clusters on record, oldest first. Call it under the lock.

    A folder without a readable record was left by a process that died before it started anything.
    """
    found = []
    for folder in base.iterdir():
        if not folder.is_dir():
            continue
        try:
            text = (folder / RECORD).read_bytes()
            found.append((folder.stat().st_mtime_ns, msgspec.json.decode(text, type=Record, dec_hook=_path)))
        except (FileNotFoundError, msgspec.DecodeError):
            shutil.rmtree(folder)
    return [record for _, record in sorted(found, key=lambda pair: pair[0])]


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind} in a record")


def new_record(base: Path, slot: int, owner: ProcessId | None, nodes: int) -> Record:
    """Make the folder of a cluster and write its first record. Call it under the lock."""
    # 10 characters: the name of a network interface has 15, and "n1" is appended.
    identity = f"ep{secrets.token_hex(4)}"
    record = Record(identity, base / identity, slot, owner, boot_id(), nodes)
    record.folder.mkdir(mode=0o700)
    record.save()
    return record
