"""The command lines."""

from .init_process import end_on_sigterm

# Before anything else is imported, which takes a while.
end_on_sigterm()
