"""How long the tower takes, learnt from its last batches. Arithmetic, no clock."""

MEMORY = 0.8
"""What a batch still weighs when the next one is in: about five batches count."""

TIE = 0.01
"""Share of the weight that draws the time of an empty batch to 0, so that batches of one size are taken
to cost in proportion to their tokens: a larger one is then not thought to be for nothing."""


class Pace:
    """Seconds of a batch as ``base + slope * tokens``, a weighted least squares fit; neither is negative."""

    def __init__(self) -> None:
        self._n = self._t = self._tt = self._s = self._ts = 0.0
        self._fit: tuple[float, float] | None = None

    def learn(self, tokens: int, seconds: float) -> None:
        """A batch of so many tokens took so long."""
        self._n = MEMORY * self._n + 1.0
        self._t = MEMORY * self._t + tokens
        self._tt = MEMORY * self._tt + tokens * tokens
        self._s = MEMORY * self._s + seconds
        self._ts = MEMORY * self._ts + tokens * seconds
        n = self._n * (1.0 + TIE)
        slope = (n * self._ts - self._t * self._s) / (n * self._tt - self._t * self._t)
        base = (self._s - slope * self._t) / n
        if slope < 0.0:
            base, slope = self._s / self._n, 0.0
        elif base < 0.0:
            base, slope = 0.0, self._ts / self._tt
        self._fit = (base, slope)

    def batch_s(self, tokens: int) -> float | None:
        """Of a batch; None while nothing has been learnt."""
        if self._fit is None:
            return None
        base, slope = self._fit
        return base + slope * tokens

    def tokens_per_s(self, tokens: int) -> float | None:
        """In batches of so many tokens."""
        seconds = self.batch_s(tokens)
        return tokens / seconds if seconds else None
