"""Where the ranks of a group meet: this rank's device, network interface and place among them."""

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

import torch

from ..settings import Settings
from ..towers.parallel import TensorParallel, join

SIOCGIFADDR = 0x8915
IPV6_ADDRESSES = Path("/proc/net/if_inet6")

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Which interface a library listens on; without them, the one that the machine's name leads to."""


def meet(settings: Settings, device: torch.device) -> tuple[torch.device, TensorParallel]:
    """Wait for the other ranks. The ranks of one pod have a GPU each, in order.

    Raises ConfigError, or GroupLost when a rank does not come.
    """
    if device.type == "cuda":
        device = torch.device("cuda", settings.rank % settings.pod_ranks)
        torch.cuda.set_device(device)
    interface = interface_of(settings.host)
    if interface is not None:
        for variable, form in INTERFACE_VARIABLES.items():
            os.environ.setdefault(variable, form.format(interface))
    host = settings.host if settings.rank == 0 else settings.dist_init_host or settings.host
    parallel = join(
        settings.rank,
        settings.tensor_parallel_size,
        host,
        settings.dist_init_port,
        device,
        word=f"pool {settings.pool!r} group {settings.group} start {settings.incarnation}",
    )
    return device, parallel


def interface_of(host: str) -> str | None:
    """The name of the interface with this address; None where that cannot be said."""
    try:
        wanted = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        return _interface_of_ipv6(wanted.packed.hex())
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
        if answer[20:24] == wanted.packed:
            return name
    return None


def _interface_of_ipv6(wanted: str) -> str | None:
    try:
        lines = IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.startswith(wanted)), None)
