"""How a group becomes a process: its command line and its environment."""

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from encodepool_operator.api.labels import ENV_PREFIX
from encodepool_operator.api.types import Spec
from encodepool_operator.core.record import PortBlock
from encodepool_operator.core.render import engine

from .errors import LocalError
from .ports import HOST, host_of
from .statedir import StateDir

WORKER, SERVE = engine.COMMAND

WORKER_NEEDS = ("torch", "grpc", "zmq")
"""Of the worker's extra; its script is there without them. Mooncake is not: a pool may use tcp."""

ADVICE = "pip install 'encodepool[worker]'"


def _installed_worker() -> list[str]:
    """The worker of this installation, else the one on PATH. Raises LocalError."""
    beside = Path(sys.executable).parent / WORKER
    if os.access(beside, os.X_OK):
        missing = [name for name in WORKER_NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            raise LocalError(f"{WORKER} needs {', '.join(missing)}, not installed here; run: {ADVICE}")
        return [str(beside), SERVE]
    found = shutil.which(WORKER)
    if found is None:
        raise LocalError(f"{WORKER} is not installed; run: {ADVICE}")
    return [found, SERVE]


def worker_argv(worker: str) -> Sequence[str]:
    """A command line as arguments; "" stands for the installed worker. Raises LocalError."""
    return shlex.split(worker) or _installed_worker()


def worker_flags(
    spec: Spec, *, pool: str, group: int, incarnation: int, pod: int, ports: PortBlock, state_dir: StateDir
) -> list[str]:
    """Flags of ``encodepool-worker serve`` for one pod of one start of one group, spec.args last."""
    settings: dict[str, object] = {
        **engine.worker_flags(spec, device="cpu" if spec.accelerator.per_rank == 0 else "auto"),
        "host": host_of(pod),
        "bootstrap-port": ports.bootstrap,
        "grpc-port": ports.grpc,
        "dist-init-port": ports.dist_init,
        "metrics-port": ports.metrics,
        "pool": pool,
        "group": group,
        "incarnation": incarnation,
        "state-dir": state_dir.root,
        "termination-log": state_dir.termination_file(group, incarnation, pod),
    }
    if spec.pods_per_group > 1:
        settings |= {"ranks-per-pod": spec.ranks_per_pod, "pod-index": pod, "dist-init-host": HOST}
    flags = []
    for name, value in settings.items():
        flags += [f"--{name}", str(value)]
    return [*flags, *spec.args]


def worker_environment(
    spec: Spec, environ: Mapping[str, str], *, devices: Sequence[str], cpus: int, temp_dir: Path
) -> dict[str, str]:
    """The user's environment without our variables, then ours, then the manifest's.

    ``devices`` are the accelerators of this pod, none for the CPU; ``cpus`` the share of one rank in
    the cores.
    """
    # Settings come from the manifest alone: a revision must say all that its workers do.
    env = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    env["GLOO_SOCKET_IFNAME"] = "lo"
    # Groups share the machine: each computes on its share instead of all on all cores.
    env["OMP_NUM_THREADS"] = str(max(1, cpus))
    env["TMPDIR"] = str(temp_dir)
    for variable in spec.env:
        if "value" in variable:
            env[str(variable["name"])] = str(variable["value"])
    return env


def visible_devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs of this machine as ``CUDA_VISIBLE_DEVICES`` names them; the variable itself is obeyed."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip())
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(sorted((number for number in numbers if number.isdigit()), key=int))
