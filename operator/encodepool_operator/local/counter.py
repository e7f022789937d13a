"""The incarnation counter of a user: one number for all local pools of this user on this machine.

The ports of a start follow from its incarnation (``core/ports.py``), so two state directories that
draw from one counter, with one offset, never share an address before the range has been walked.
The file is ``$XDG_STATE_HOME/encodepool/incarnations.json`` (``~/.local/state`` by default). It
must outlive the pools: prefill workers remember an address for as long as they live.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import LocalError
from .statedir import check_writable, read_text, write_atomic


def user_state_dir(environ: Mapping[str, str]) -> Path:
    """The folder of this user's state (XDG base directories)."""
    home = environ.get("XDG_STATE_HOME", "")
    # The specification: a relative path is to be ignored.
    if not os.path.isabs(home):
        home = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return Path(home) / "encodepool"


@dataclass(frozen=True, slots=True)
class Counter:
    """``uid`` seeds the port offset and is the same for all pools of the user; ``last`` was used."""

    uid: str
    last: int


class UserCounter:
    """The counter's file. Every change is made under a lock and is on disk before it is used."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "incarnations.json"

    def read(self) -> Counter:
        """The counter, made on first use. Raises LocalError if the file cannot be read."""
        text = read_text(self.path)
        if text is not None:
            return self._decode(text)
        return self._update(lambda counter: counter)

    def check(self) -> None:
        """Raises LocalError if the counter cannot be read, or could not be moved on."""
        self._update(lambda counter: counter)

    def reserve(self, last: int, *, seen: int) -> bool:
        """Move the counter to ``last`` if it still is ``seen``; False if another pool was faster."""
        result = False

        def change(counter: Counter) -> Counter:
            nonlocal result
            result = counter.last == seen and last > seen
            return Counter(counter.uid, last) if result else counter

        self._update(change)
        return result

    def _update(self, change: Callable[[Counter], Counter]) -> Counter:
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_writable(folder)
            fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalError(
                f"cannot write {folder} ({error.strerror}); set XDG_STATE_HOME to a folder of yours"
            ) from error
        try:
            # Held for one read and one write, so waiting is bounded by other pools' disks.
            fcntl.flock(fd, fcntl.LOCK_EX)
            text = read_text(self.path)
            before = self._decode(text) if text is not None else None
            after = change(before or Counter(str(uuid.uuid4()), 0))
            if after != before:
                write_atomic(
                    self.path, json.dumps({"uid": after.uid, "last": after.last}) + "\n", durable=True
                )
            return after
        finally:
            os.close(fd)

    def _decode(self, text: str) -> Counter:
        try:
            value = json.loads(text)
            uid, last = value["uid"], value["last"]
        except (ValueError, KeyError, TypeError):
            uid, last = None, None
        if not isinstance(uid, str) or not uid or not isinstance(last, int) or last < 0:
            raise LocalError(f"{self.path} is damaged; end all local pools, then delete it")
        return Counter(uid, last)
