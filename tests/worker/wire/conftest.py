"""Property tests without a clock: two slow cores must not fail them."""

from hypothesis import settings

settings.register_profile("wire", deadline=None, database=None)
settings.load_profile("wire")
