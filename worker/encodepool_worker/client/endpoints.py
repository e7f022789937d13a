"""Where encode workers are: the published list, or one endpoint named by hand."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ClientError

LIST_KIND = "EncodeEndpointList"


class EndpointUnavailable(ClientError):
    """This endpoint took nothing of the request: another one may be asked."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One group of a pool: where its Encode is called and where its bootstrap server is asked."""

    id: str
    grpc_host: str
    grpc_port: int
    bootstrap_host: str
    bootstrap_port: int
    group: str = ""
    ready: bool = True
    reason: str = ""

    @property
    def target(self) -> str:
        """The address as gRPC wants it."""
        return join_host_port(self.grpc_host, self.grpc_port)

    @property
    def bootstrap(self) -> tuple[str, int]:
        """(host, port) of its bootstrap server."""
        return (self.bootstrap_host, self.bootstrap_port)

    @property
    def key(self) -> tuple[str, str, tuple[str, int]]:
        """What makes it another worker when it changes; readiness does not."""
        return (self.id, self.target, self.bootstrap)

    @property
    def label(self) -> str:
        """What a person calls it."""
        return self.group or self.target


def explicit_endpoint(url: str, bootstrap_host: str, bootstrap_port: int) -> Endpoint:
    """``grpc://HOST:PORT`` and its bootstrap server. Raises ClientError."""
    host, port = split_url(url)
    return Endpoint(url, host, port, bootstrap_host or host, bootstrap_port)


def read_endpoints(path: str | Path) -> list[Endpoint]:
    """The endpoints of an ``endpoints.json``, ready ones and others. Raises ClientError."""
    where = Path(path)
    try:
        listing = json.loads(where.read_text(encoding="utf-8"))
    except FileNotFoundError as missing:
        raise ClientError(
            f"{where} does not exist: is the pool up, and is this its endpoints.json?"
        ) from missing
    except (OSError, ValueError) as bad:
        raise ClientError(f"{where} cannot be read as JSON: {bad}") from bad
    if not isinstance(listing, dict) or listing.get("kind") != LIST_KIND:
        raise ClientError(f"{where} is not an {LIST_KIND}: name the pool's endpoints.json")
    entries = listing.get("endpoints")
    if not isinstance(entries, list):
        raise ClientError(f"{where} has no list of endpoints")
    return [_endpoint(entry, f"{where}: endpoints[{index}]") for index, entry in enumerate(entries)]


def ready_endpoints(endpoints: Sequence[Endpoint], source: str) -> list[Endpoint]:
    """Those that take requests. Raises ClientError that says why none does."""
    ready = [endpoint for endpoint in endpoints if endpoint.ready]
    if ready:
        return ready
    if not endpoints:
        raise ClientError(f"{source} lists no endpoint: wait until the pool has a group, see its status")
    reasons = "; ".join(f"group {e.label}: {e.reason or 'not ready'}" for e in endpoints)
    raise ClientError(f"{source} lists no ready endpoint ({reasons}): wait, or see the group's log")


def in_order_of_choice(endpoints: Sequence[Endpoint], content: bytes) -> list[Endpoint]:
    """The endpoints from the first choice for this content to the last.

    Rendezvous hashing: the same content goes to the same endpoint, whose store may hold its rows
    already, and when an endpoint goes or comes only its own share moves.
    """

    def weight(endpoint: Endpoint) -> bytes:
        return hashlib.blake2b(endpoint.target.encode(), key=content[:64], digest_size=16).digest()

    return sorted(endpoints, key=weight, reverse=True)


def join_host_port(host: str, port: int) -> str:
    """``HOST:PORT``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_url(url: str) -> tuple[str, int]:
    """(host, port) of ``grpc://HOST:PORT``, brackets removed. Raises ClientError."""
    rest = url.removeprefix("grpc://")
    host, colon, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in rest:
        raise ClientError(f"{url!r} is not an endpoint: write grpc://HOST:PORT")
    return host, int(port)


def _endpoint(entry: Any, where: str) -> Endpoint:
    if not isinstance(entry, dict):
        raise ClientError(f"{where} is not an object")

    # A group that is not ready may have no address (yet); only its reason is of use.
    ready = entry.get("ready") is True

    def text(name: str) -> str:
        value = entry.get(name)
        if not ready and value in (None, ""):
            return ""
        if not isinstance(value, str) or not value:
            raise ClientError(f"{where}.{name} is {value!r}, must be a non-empty string")
        return value

    def port(name: str) -> int:
        value = entry.get(name)
        if not ready and value in (None, 0):
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
            raise ClientError(f"{where}.{name} is {value!r}, must be a port")
        return value

    return Endpoint(
        id=text("id"),
        grpc_host=text("host"),
        grpc_port=port("grpcPort"),
        bootstrap_host=text("bootstrapHost"),
        bootstrap_port=port("bootstrapPort"),
        group=str(entry.get("group", "")),
        ready=ready,
        reason=str(entry.get("reason") or ""),
    )
