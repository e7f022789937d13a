"""The exception tree: the family says who is to blame.

``WireError``       a peer sent nonsense
``RequestRefused``  a request cannot be served; carries the field that says why
``ConfigError``     whoever wrote the configuration has to change it
``TransportError``  bytes could not be moved
``TowerError``      the vision tower could not encode an item
``GroupLost``       the ranks of a group can no longer compute together
``ImageError``      an image file cannot be used
``ClientError``     an image could not be encoded by a pool: unreachable, refused, failed, late
``RoomBug``         our own fault: an answer that the state machine rules out
"""

from collections.abc import Sequence


class WorkerError(Exception):
    """Base of every error this package raises on purpose."""


class WireError(WorkerError):
    """A peer sent a value outside its range. Names the field, the value and the requirement."""

    def __init__(self, field: str, value: object, requirement: str) -> None:
        super().__init__(f"{field}: {value!r} is not {requirement}")
        self.field = field


class RequestRefused(WorkerError):
    """An Encode request cannot be served. ``field`` is the request's field at fault.

    ``room`` is set when it could be read all the same: its receivers have to be told.
    """

    def __init__(self, field: str, reason: str, room: int | None = None) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.room = room


class ConfigError(WorkerError):
    """The configuration cannot work; all problems at once, each saying what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class TowerError(WorkerError):
    """The tower failed on a batch or an item."""


class GroupLost(WorkerError):
    """A collective of the group failed: only new processes can work together again."""


class ImageError(WorkerError):
    """An image file cannot be read, or its size or shape cannot be used."""


class ClientError(WorkerError):
    """The client's side of an Encode: the message names the endpoint and says what to do."""


class TransportError(WorkerError):
    """Bytes could not be moved. ``may_land_late``: the engine may still write after this error."""

    may_land_late = False


class RegistrationFailed(TransportError):
    """Memory could not be registered with an engine."""


class WriteRefused(TransportError):
    """The write failed at once; nothing of it can land any more."""


class WriteTimedOut(TransportError):
    """The write did not end in time; its bytes may still land.

    ``released``: the engine reads the source no more (it has closed its connection), only what
    it had already sent may still arrive at the peer.
    """

    may_land_late = True

    def __init__(self, message: str, *, released: bool = False) -> None:
        super().__init__(message)
        self.released = released


class WriteTorn(TransportError):
    """A slice failed at once while others of the same write were under way and may still land."""

    may_land_late = True


class RoomBug(WorkerError):
    """An answer came in a state that rules it out. Carries the room's story."""

    def __init__(self, room: int, state: str, event: str, story: Sequence[str]) -> None:
        lines = "\n  ".join(story)
        super().__init__(f"room {room}: {event} in {state}; story:\n  {lines}")
        self.room = room
        self.story = tuple(story)
