"""The planner: pure functions from a snapshot of one pool to the actions it needs next."""
