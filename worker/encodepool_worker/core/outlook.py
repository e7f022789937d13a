"""When the tower will be done: with the batch that it is at, and with a line of items behind it."""

import math

from .pace import Pace


class Outlook:
    """Batches hold ``max_tokens`` and ``max_items`` at most. Answers None while nothing is known.

    ``since_s``: when the running batch was handed out; ``expected_s``: how long it should take in all.
    """

    def __init__(self, max_tokens: int, max_items: int) -> None:
        self._max_tokens, self._max_items = max_tokens, max_items
        self._pace = Pace()
        self._running = 0
        self.since_s: float | None = None
        self.expected_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """In full batches."""
        return self._pace.tokens_per_s(self._max_tokens)

    def begin(self, tokens: int, now_s: float) -> None:
        self._running, self.since_s, self.expected_s = tokens, now_s, self.batch_s(tokens)

    def end(self, now_s: float, *, learn: bool) -> None:
        """``learn``: it ran as it should, so its time tells something."""
        if learn and self.since_s is not None:
            self._pace.learn(self._running, now_s - self.since_s)
        self.since_s = self.expected_s = None

    def batch_s(self, tokens: int) -> float | None:
        return self._pace.batch_s(tokens)

    def rest_s(self, now_s: float) -> float | None:
        """Of the running batch."""
        if self.since_s is None:
            return 0.0
        if self.expected_s is None:
            return None
        # One that is late by some time is taken to need as much again.
        return abs(self.since_s + self.expected_s - now_s)

    def place(self, tokens: int, items: int, cost: int) -> tuple[float, float] | None:
        """Seconds until an idle tower begins with an item of ``cost`` tokens behind such a line, and until
        its rows are there.

        Rows are ready with their batch, and one that is not the next will be full by then: a line filled
        up to the last deadline would else be encoded for nothing, each item a batch too late. An item
        larger than a batch runs alone.
        """
        if cost > self._max_tokens:
            line_s, own_s = self._line_s(tokens, items), self.batch_s(cost)
            return None if line_s is None or own_s is None else (line_s, line_s + own_s)
        full, n_batches = self._batches(tokens + cost, items + 1)
        batch_s = self.batch_s(full if n_batches > 1 else tokens + cost)
        return None if batch_s is None else ((n_batches - 1) * batch_s, n_batches * batch_s)

    def _line_s(self, tokens: int, items: int) -> float | None:
        if not items:
            return 0.0
        full, n_batches = self._batches(tokens, items)
        batch_s = self.batch_s(full if n_batches > 1 else tokens)
        return None if batch_s is None else n_batches * batch_s

    def _batches(self, tokens: int, items: int) -> tuple[int, int]:
        """Tokens of a full batch of such items, and how many batches they make."""
        full = max(1, min(self._max_tokens, tokens * self._max_items // items))
        return full, math.ceil(tokens / full)
