"""The operator process: watch, cache, plan, act. Decisions are made in ``core``."""
