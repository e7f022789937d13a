"""The two Services of a pool, both headless: an address of a worker is always its pod's."""

from typing import Any

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import EncodePool

from . import common

GRPC_PORT = 50051
BOOTSTRAP_PORT = 8998
"""Only names for clients that want a number: EndpointSlices carry each pod's own ports."""


def peers(pool: EncodePool) -> dict[str, Any]:
    """Names for the pods of a group, from their creation on: ranks meet before they are ready."""
    return _headless(pool, names.peers_service(pool.metadata.name), {}, publishNotReadyAddresses=True)


def encode(pool: EncodePool) -> dict[str, Any]:
    """Routable leaders for gateways that read EndpointSlices, gRPC first: some take the first port.

    Slices inherit the Service's labels, so the label of the role is on it. Every start has its own
    ports, so the targetPort is a name.
    """
    ports = [
        {
            "name": "grpc",
            "port": GRPC_PORT,
            "protocol": "TCP",
            "targetPort": "grpc",
            "appProtocol": "kubernetes.io/h2c",
        },
        {"name": "bootstrap", "port": BOOTSTRAP_PORT, "protocol": "TCP", "targetPort": "bootstrap"},
    ]
    service = _headless(
        pool, names.encode_service(pool.metadata.name), {labels.ROUTABLE: "true"}, ports=ports
    )
    service["metadata"]["labels"] |= {labels.ROLE: "encode"}
    return service


def _headless(pool: EncodePool, name: str, selector: dict[str, str], **spec: Any) -> dict[str, Any]:
    meta, family = pool.metadata, pool.spec.network.ip_family
    if family:
        spec |= {"ipFamilyPolicy": "SingleStack", "ipFamilies": [family]}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": common.metadata(meta, name),
        "spec": {"clusterIP": "None", "selector": {labels.POOL: meta.name} | selector} | spec,
    }
