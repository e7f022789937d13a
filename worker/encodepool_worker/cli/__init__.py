"""The ``encodepool-worker`` program."""

from ..init_process import end_on_sigterm

# Here, as click and what else a command needs takes a while to import.
end_on_sigterm()
