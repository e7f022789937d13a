"""Removes clusters: one by its record, or all whose owners have died."""

import shutil

from tests.cluster.kit import cgroups, network
from tests.cluster.kit.record import Record, locked, records

from encodepool_operator.local.processes import boot_id, kill_session

KILL_TIMEOUT_S = 30.0


def remove(record: Record) -> None:
    """End the cluster's processes and remove everything it made. May be called again and again.

    Nothing is asked to end in order: all of it is thrown away. Raises TimeoutError when a process
    outlives its SIGKILL or a cgroup stays in use; the record then stays, and so does the rest.
    """
    if record.boot == boot_id():
        # Nodes first: their daemons would complain to a dead API server in the meantime.
        names = sorted(record.processes, key=lambda name: not name.startswith("node-"))
        for name in names:
            if not kill_session(record.processes[name], KILL_TIMEOUT_S):
                raise TimeoutError(f"{name} of {record.id} outlived its SIGKILL by {KILL_TIMEOUT_S} s")
        if record.nodes:
            network.remove_bridge(record.id)
            cgroups.remove(record.id)
    if record.folder.exists():
        shutil.rmtree(record.folder)


def sweep() -> list[str]:
    """Remove all clusters whose owner is dead; their ids."""
    with locked() as base:
        abandoned = [record for record in records(base) if record.abandoned]
        for record in abandoned:
            remove(record)
    return [record.id for record in abandoned]
