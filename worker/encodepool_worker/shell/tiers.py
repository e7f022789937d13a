"""Where the store lies: the one place where its settings become tiers of memory."""

from dataclasses import dataclass

import torch

from ..logs import get_logger
from ..settings import Settings
from ..transport.choose import reads_device_memory


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier to allocate. ``name`` is its label in the metrics; ``pinned``: a GPU copies to it."""

    name: str
    nbytes: int
    device: torch.device
    pinned: bool = False


def plan_tiers(settings: Settings, device: torch.device) -> tuple[TierPlan, ...]:
    """One tier or two for a tower on ``device``.

    On a GPU, ``store_device_mib`` are its own memory, and ``store_host_mib`` the second tier behind
    it. Where there is no device memory to send from, one tier on the host has both sizes: on a
    CPU, with an engine that cannot read a GPU's memory, or when none of it is to be used.
    """
    on_gpu = device.type == "cuda"
    total = settings.store_device_bytes + settings.store_host_bytes
    host = torch.device("cpu")
    why = None
    if not on_gpu:
        why = "the tower runs on the CPU"
    elif not reads_device_memory(settings.transfer_backend):
        why = f"the {settings.transfer_backend} engine here cannot read the GPU's memory"
    if why is None and settings.store_device_bytes:
        tiers = [TierPlan("device", settings.store_device_bytes, device)]
        if settings.store_host_bytes:
            tiers.append(TierPlan("host", settings.store_host_bytes, host, pinned=True))
        return tuple(tiers)
    if why is not None and (on_gpu or settings.store_host_bytes):
        get_logger().info(
            "the store is one tier of host memory: both sizes are added",
            why=why,
            store_device_mib=settings.store_device_mib,
            store_host_mib=settings.store_host_mib,
        )
    return (TierPlan("host", total, host, pinned=on_gpu),)
