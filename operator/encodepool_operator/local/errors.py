"""What can go wrong in local mode and is somebody's to mend; the command prints it in one line."""


class LocalError(Exception):
    """Base: the message says what to do. ``details`` are further lines to show (log lines)."""

    def __init__(self, message: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.details = details


class ManifestError(LocalError):
    """The manifest cannot be used: wrong usage, not a failure of the pool."""
