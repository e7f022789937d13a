"""What this machine must offer before a cluster can be started on it."""

import os
import sys
from pathlib import Path

from tests.cluster.kit.programs import ProgramMissing, missing_packages, missing_programs

CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Bits of the kernel's capability masks: making bridges, and making mounts and namespaces."""


class NodesImpossible(RuntimeError):
    """This process may not make nodes; the message says what it lacks."""


def refuse_unless_possible(*, nodes: bool) -> None:
    """Raises NodesImpossible or ProgramMissing, with what to do about it."""
    if not sys.platform.startswith("linux"):
        raise NodesImpossible("a test cluster needs Linux")
    if nodes:
        if os.geteuid() != 0:
            raise NodesImpossible("nodes need root")
        lacking = [name for name, bit in CAPABILITIES.items() if not _capabilities() >> bit & 1]
        if lacking:
            raise NodesImpossible(f"nodes need {' and '.join(lacking)}, which this process does not have")
    missing = [program.name for program in missing_programs(nodes=nodes)] + missing_packages(nodes=nodes)
    if missing:
        raise ProgramMissing(f"missing: {', '.join(missing)}; run `make cluster-programs`")


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
