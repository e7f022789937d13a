"""How long the tower takes, learnt from its last batches. Arithmetic, no clock."""

MEMORY = 0.8
"""What a batch still weighs when the next one is in: about five batches count."""

TIE = 0.01
"""Share of the weight that draws the time of an empty batch to 0, so that batches of one size are taken
to cost in proportion to their tokens: a larger one is then not thought to be for nothing."""

REACH = 2
"""So many times as large as those seen a batch may be for its time to be told from theirs."""

FADING = 0.98
"""How the size of the largest batch seen fades with each that is smaller."""


class Pace:
    """Seconds of a batch as ``base + slope * tokens``, a weighted least squares fit; neither is negative."""

    def __init__(self) -> None:
        self._n = self._t = self._tt = self._s = self._ts = 0.0
        self._fit: tuple[float, float] | None = None
        self._largest = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """A batch of so many tokens took so long."""
        self._largest = max(float(tokens), FADING * self._largest)
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
        """Of a batch; None while nothing has been learnt of such large ones."""
        if self._fit is None or tokens > REACH * self._largest:
            return None
        base, slope = self._fit
        return base + slope * tokens

    def tokens_per_s(self, tokens: int) -> float | None:
        """In batches of so many tokens, or of the largest of which anything has been learnt."""
        known = min(tokens, int(REACH * self._largest))
        seconds = self.batch_s(known)
        return known / seconds if seconds else None
