"""Whether this machine can run a pool: what the manifest and the model's folder tell before anything starts.

The workers find the same out, each start anew; here it is said at once, with the field to change.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from encodepool_operator.api.types import Spec
from encodepool_operator.core.addresses import port_space

from .errors import ManifestError
from .manifest import gpus, needed_devices

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""For which our worker has towers."""

RDMA_DEVICES = Path("/sys/class/infiniband")

FORCE_TCP = "MC_FORCE_TCP"
"""With this variable Mooncake takes TCP whatever protocol it is given."""


def check_fit(
    spec: Spec,
    *,
    devices: Sequence[str],
    environ: Mapping[str, str] | None,
    replaces: bool = False,
    rdma_devices: Path = RDMA_DEVICES,
) -> None:
    """``devices`` are the accelerators of this machine, ``environ`` is what workers will inherit; None
    where that is not known. ``replaces``: groups of ours run, and one would have ended before the new
    model is found wanting; in a first start the worker says so itself, and better.

    Raises ManifestError with every problem and its field path.
    """
    new = spec.model.path if replaces and spec.replicas else ""
    first, *others = [*_model_problems(new), *_problems(spec, devices, environ, rdma_devices), ""]
    if first:
        raise ManifestError(first, tuple(others[:-1]))


def _problems(
    spec: Spec, devices: Sequence[str], environ: Mapping[str, str] | None, rdma_devices: Path
) -> Iterator[str]:
    needed = needed_devices(spec) * spec.pods_per_group * spec.replicas
    if needed > len(devices):
        groups = f"{spec.replicas} groups need" if spec.replicas > 1 else "1 group needs"
        yield (
            f"spec.accelerator.perRank: {groups} {gpus(needed)}, this machine shows "
            f"{len(devices)}; lower spec.replicas, or set perRank to 0 to run on the CPU"
        )
    heads = _heads(Path(spec.model.path)) if spec.model.path else None
    if heads is not None and heads % spec.tensor_parallel_size:
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        yield (
            f"spec.tensorParallelSize: {spec.tensor_parallel_size} ranks cannot share the {heads} heads of "
            f"the model's vision tower evenly; choose one of {fitting}"
        )
    ports = port_space(spec.network, shared_host=True)
    if ports.slots < spec.replicas:
        yield (
            f"spec.network.portRange.size: must be at least {spec.replicas * ports.stride} on one "
            f"machine, is {ports.size}: {ports.stride} ports for each of {spec.replicas} groups"
        )
    if environ is not None and _takes_rdma(spec, environ) and not rdma_devices.is_dir():
        yield (
            f"spec.transfer.protocol: rdma (which mooncake takes if nothing is said), but this machine has "
            f"no RDMA devices ({rdma_devices} is missing); set protocol to tcp"
        )


def _takes_rdma(spec: Spec, environ: Mapping[str, str]) -> bool:
    """Whether workers would; not where that is for the manifest's own flags to say, which come last."""
    if spec.transfer.protocol != "rdma" or not spec.replicas:
        return False
    if any(argument.startswith("--transfer-") for argument in spec.args):
        return False
    set_here = {variable["name"] for variable in spec.env if "value" in variable}
    return FORCE_TCP not in environ and FORCE_TCP not in set_here


def _model_problems(folder: str) -> Iterator[str]:
    """Why our worker would not load the model of ``folder``; a name of the hub ("" here) is not looked up."""
    if not folder:
        return
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"spec.model.path: {file} does not exist; name the folder of a checkpoint, which has one"
    except (OSError, ValueError) as error:
        yield f"spec.model.path: {file} cannot be read as JSON ({error}); copy the checkpoint again"
    else:
        kind = config.get("model_type") if isinstance(config, dict) else None
        if kind not in MODEL_TYPES:
            yield (
                f"spec.model.path: {file} has model_type {kind!r}; choose a model with one of "
                f"{', '.join(MODEL_TYPES)}"
            )
        elif not isinstance(config.get("vision_config"), dict):
            yield f"spec.model.path: {file} has no vision_config; name the folder of the whole model"


def _heads(folder: Path) -> int | None:
    """Heads of the vision tower; None if config.json does not tell."""
    try:
        heads = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vision_config"]["num_heads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return heads if isinstance(heads, int) and heads > 0 else None
