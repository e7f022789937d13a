"""Which rooms were made for calls that nobody waits for any more.

A call that its caller gave up, or that we answered with an error, must leave no work behind: its
room is aborted once the loop says that it made one. Not so where the room also belongs to another
call: a caller may repeat itself, and one of its two calls may be given up.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Calls:
    """The calls of one room between their hand-over and the loop's answer."""

    under_way: int = 0
    wanted: bool = False
    made: bool = False


class Withdrawals:
    """By room, for the calls that the loop has not answered: as many as there is credit for."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Calls] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def handed_over(self, room: int) -> None:
        """A call of this room is the loop's to answer."""
        self._rooms.setdefault(room, _Calls()).under_way += 1

    def answered(self, room: int, *, made: bool, wanted: bool) -> bool:
        """The loop has answered one. True: abort the room.

        ``made``: the loop took the item and the room is new. ``wanted``: the caller is still there
        and hears that its item was taken. Decided with the last call under way, because the loop
        answers in order and only then is it clear that none of them is wanted.
        """
        calls = self._rooms[room]
        calls.under_way -= 1
        calls.made |= made
        calls.wanted |= wanted
        if calls.under_way:
            return False
        del self._rooms[room]
        return calls.made and not calls.wanted
