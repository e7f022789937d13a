"""What must survive the controller: ``state.json``.

A group's entry stands for a StatefulSet, a pod's for one supervisor process; the record of a group
is kept as the same annotations that a cluster has. Written before what it describes can happen, so
a controller that starts after a crash finds every process there is.
"""

from pathlib import Path

import msgspec

from encodepool_operator.core.snapshot import Publication, RevisionRecord

from .errors import LocalError
from .processes import ProcessId
from .statedir import read_text, write_atomic

VERSION = 1


class Exited(msgspec.Struct, frozen=True):
    """How a process ended; ``exit_code`` is 128 + n for signal n, None if it was not our child."""

    at: float
    exit_code: int | None
    reason: str
    message: str


class PodState(msgspec.Struct):
    """One supervisor process, from its order to its last trace; pod ``index`` of its group.

    ``process`` is None until it was launched; ``devices`` are the accelerators it holds,
    ``temp_dir`` its temporary folder. ``dead`` says which probe gave it up.
    """

    name: str
    uid: str
    incarnation: int
    index: int = 0
    process: ProcessId | None = None
    devices: list[str] = []
    temp_dir: str = ""
    launched_at: float | None = None
    started: bool = False
    ready: bool = False
    ready_changed_at: float | None = None
    dead: str = ""
    exited: Exited | None = None
    terminating_since: float | None = None
    grace_s: float = 0.0
    waiting: str = ""
    publication: Publication | None = None


class GroupState(msgspec.Struct):
    """One group: pods asked for, its record as annotations, the pods that are still there."""

    replicas: int
    generation: int
    annotations: dict[str, str]
    pods: list[PodState] = []


class PoolState(msgspec.Struct):
    """One pool of this machine."""

    version: int = VERSION
    revisions: list[RevisionRecord] = []
    groups: dict[int, GroupState] = {}

    def pods(self) -> list[PodState]:
        return [pod for group in self.groups.values() for pod in group.pods]


def load_state(path: Path) -> PoolState:
    """The state of a directory, empty for a new one. Raises LocalError if it cannot be read."""
    text = read_text(path)
    if text is None:
        return PoolState()
    try:
        state = msgspec.json.decode(text, type=PoolState)
    except msgspec.MsgspecError as error:
        raise LocalError(f"{path} cannot be read ({error}); end its processes and delete it") from error
    if state.version != VERSION:
        raise LocalError(
            f"{path} was written by another version ({state.version}); take the pool down with it"
        )
    return state


def save_state(path: Path, state: PoolState, before: str = "") -> str:
    """Replace the file unless it says ``before`` already; returns what it says now.

    What it says is true even after a crash of the machine.
    """
    text = msgspec.json.format(msgspec.json.encode(state), indent=1).decode() + "\n"
    if text != before:
        write_atomic(path, text, durable=True)
    return text
