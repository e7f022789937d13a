"""The queue in front of the budget: calls wait here unread, in order, until there is room to read."""

import asyncio
from collections import deque

from .admission import Account, NoCredit

MAX_WAITING = 4096
"""Calls that may wait unread: 16 connections of 256 streams."""


class Gate:
    """Hands out the readers' holds of one account, first come, first served. For one event loop."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._waiting: deque[asyncio.Future[int]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> int:
        """A hold for one longest message. Raises NoCredit when too many wait already."""
        if not self._waiting and self.account.may_read():
            return self.account.start_reading()
        if self.waiting >= MAX_WAITING:
            raise NoCredit(f"{MAX_WAITING} calls are waiting to be read")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future in self._waiting:
                self._waiting.remove(future)
            elif not future.cancelled():  # it was let in and cancelled in one turn
                self.account.drop(future.result())
            self.refresh()
            raise

    def refresh(self) -> None:
        """To be called after anything was given back: lets in whoever now fits."""
        while self._waiting and self.account.may_read():
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(self.account.start_reading())
