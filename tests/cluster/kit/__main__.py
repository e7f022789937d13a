"""`python -m tests.cluster.kit build | up | down | status`: a test cluster for a developer.

`up` starts the cluster that the node tests use; it stays until `down`. The kubeconfig is at one
path whatever cluster is up, so it need not be exported again. `up --with example` puts the operator
and the example pool on it, also when the cluster is up already.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tests.cluster.kit import deploy, teardown
from tests.cluster.kit.build import get_missing, say_on_stderr
from tests.cluster.kit.cluster import Cluster, ClusterFailed
from tests.cluster.kit.network import NoFreeSlot
from tests.cluster.kit.programs import CLIENTS, ProgramMissing
from tests.cluster.kit.record import Record, base_folder, locked, records
from tests.cluster.kit.requirements import NodesImpossible, refuse_unless_possible

from encodepool_operator.local.processes import is_running


def link_to_kubeconfig() -> Path:
    return base_folder() / "kubeconfig"


def kept_clusters() -> list[Record]:
    with locked() as base:
        return [record for record in records(base) if record.owner is None and not record.abandoned]


def build(nodes: bool) -> int:
    if nodes and os.geteuid() != 0:
        say_on_stderr("nodes need root: only the programs of the control plane, and the clients")
        nodes = False
    get_missing(nodes=nodes, also=tuple(program.name for program in CLIENTS))
    return 0


def up(nodes: int, also: str) -> int:
    """``also``: "operator" and "example" are put on it, the second with the first; "" is neither."""
    if also:
        refuse_unless_possible(nodes=True)
        get_missing(nodes=True, also=("helm", "kubectl"))
    kept = kept_clusters()
    if kept:
        say_on_stderr(f"{kept[0].id} is up already ({len(kept[0].processes)} processes)")
    else:
        if nodes:
            try:
                refuse_unless_possible(nodes=True)
            except NodesImpossible as error:
                say_on_stderr(f"{error}: starting the control plane alone")
                nodes = 0
            except ProgramMissing:
                pass
        get_missing(nodes=bool(nodes))
        started = time.monotonic()
        cluster = Cluster.start(nodes=nodes, kept=True)
        link = link_to_kubeconfig()
        link.unlink(missing_ok=True)
        link.symlink_to(cluster.kubeconfig)
        say_on_stderr(f"{cluster.id} is up with {nodes} nodes in {time.monotonic() - started:.1f} s")
        say_on_stderr(f"logs: {cluster.folder / 'log'}; `make cluster-down` removes it")
    kubeconfig, folder = link_to_kubeconfig(), kept_clusters()[0].folder
    if also:
        deploy.install_operator(kubeconfig, folder)
        if also == "example":
            deploy.apply_example(kubeconfig, folder)
        say_on_stderr("ready; now, for instance:")
    print("\n".join(deploy.next_steps(kubeconfig, folder, also)))
    return 0


def down() -> int:
    """Remove the kept clusters and those whose owners have died; others belong to running tests."""
    for record in kept_clusters():
        started = time.monotonic()
        with locked():
            teardown.remove(record)
        say_on_stderr(f"{record.id} is down after {time.monotonic() - started:.1f} s")
    for identity in teardown.sweep():
        say_on_stderr(f"{identity} was left behind; removed")
    link_to_kubeconfig().unlink(missing_ok=True)
    return 0


def status() -> int:
    with locked() as base:
        found = records(base)
    rows = [
        {
            "id": record.id,
            "owner": record.owner.pid if record.owner else None,
            "abandoned": record.abandoned,
            "kubeconfig": str(record.kubeconfig),
            "processes": {name: is_running(process) for name, process in record.processes.items()},
        }
        for record in found
    ]
    print(json.dumps(rows, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build and install the programs that are missing")
    building.add_argument("--control-plane-only", action="store_true")
    starting = commands.add_parser("up", help="start a cluster that stays")
    starting.add_argument("--nodes", type=int, default=2)
    starting.add_argument(
        "--with",
        dest="also",
        default="",
        choices=["operator", "example"],
        help="install the chart; `example` also applies the pool of examples/tiny-cluster.yaml",
    )
    commands.add_parser("down", help="remove it, and what dead tests left")
    commands.add_parser("status", help="all clusters on record, as JSON")
    chosen = parser.parse_args()
    try:
        if chosen.command == "build":
            return build(not chosen.control_plane_only)
        if chosen.command == "up":
            return up(chosen.nodes, chosen.also)
        return down() if chosen.command == "down" else status()
    except (ProgramMissing, NodesImpossible, NoFreeSlot, ClusterFailed, TimeoutError) as error:
        say_on_stderr(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
