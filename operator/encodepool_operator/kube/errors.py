"""How requests to the API server fail."""


class KubeError(Exception):
    """Base. The message is one line for people."""


class NotLeading(Exception):
    """The Lease is not ours (any more): nothing may be written, and nobody need try again."""

    def __init__(self) -> None:
        super().__init__("the Lease is not held any more")


class LoginError(KubeError):
    """There are no usable credentials; the message says where they were looked for."""


class Unreachable(KubeError):
    """No answer came: connection refused or lost, or too slow. Whether a write was done is unknown."""


class ApiError(KubeError):
    """The server answered with an error.

    ``code`` is the HTTP status, ``reason`` Kubernetes' word for it ("NotFound", "Conflict"),
    ``retry_after_s`` what the server asked for, if it did.
    """

    def __init__(self, code: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code} {reason}: {message}" if reason else f"{code}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def gone(self) -> bool:
        """The object is not there (any more)."""
        return self.code in (404, 410)

    @property
    def changed(self) -> bool:
        """A precondition failed, or the object is another one now: look again."""
        return self.code == 409 or (self.code == 422 and "metadata.uid" in self.message)

    @property
    def transient(self) -> bool:
        return self.code == 429 or self.code >= 500
