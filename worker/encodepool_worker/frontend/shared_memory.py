"""Pixels that a gateway on this host left in shared memory.

They are copied into a buffer of our own before the call is answered: the gateway unlinks its
segment right after the answer. Never mapped: a segment that its owner truncates would kill the
process with SIGBUS. Nothing is unlinked here, because no segment is ours; the gateway made them.
"""

import os
import stat
from pathlib import Path

from ..errors import RequestRefused

SHM_FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_CHUNK_BYTES = 64 * 1024 * 1024


def read_segment(
    name: str, offset: int, nbytes: int, *, field: str, room: int | None, folder: Path = SHM_FOLDER
) -> bytearray:
    """``nbytes`` at ``offset`` of a segment. Raises RequestRefused before anything is allocated.

    Only a regular file of this user, not a link, large enough, and directly in ``folder``.
    """

    def refuse(reason: str) -> RequestRefused:
        return RequestRefused(field, reason, room)

    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise refuse(f"the name {name[:64]!r} is not that of a segment")
    try:
        # O_NONBLOCK: opening a FIFO of that name must not block.
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refuse(f"{name[:64]!r} cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise refuse(f"{name[:64]!r} is not a segment")
        if facts.st_uid != os.geteuid():
            raise refuse(f"{name[:64]!r} belongs to user {facts.st_uid}, this worker is {os.geteuid()}")
        if offset + nbytes > facts.st_size:
            raise refuse(f"{name[:64]!r} holds {facts.st_size} bytes, {nbytes} at {offset} were announced")
        return _read(fd, offset, nbytes, refuse(f"{name[:64]!r} shrank while it was read"))
    finally:
        os.close(fd)


def namespace_id() -> str:
    """``<boot id>:<device of /dev/shm>``: equal where a gateway sees the same segments; "" if unknown."""
    try:
        return f"{BOOT_ID.read_text().strip()}:{os.stat(SHM_FOLDER).st_dev}"
    except OSError:
        return ""


def _read(fd: int, offset: int, nbytes: int, shrank: RequestRefused) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    done = 0
    while done < nbytes:
        read = os.preadv(fd, [view[done : done + _CHUNK_BYTES]], offset + done)
        if read == 0:
            raise shrank
        done += read
    return data
