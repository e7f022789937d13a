"""What a bootstrap server answers: how many encode ranks there are, and where each listens."""

import http.client
import urllib.error
import urllib.request

from ..errors import ClientError, WireError
from ..wire import bootstrap
from .endpoints import EndpointUnavailable, join_host_port

TIMEOUT_S = 5.0

_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def encode_tp_size(address: tuple[str, int]) -> int:
    """Ranks of the encode group behind a bootstrap server. Raises EndpointUnavailable, ClientError."""
    base = _base(address)
    try:
        sizes = bootstrap.decode_sizes(_get(base, bootstrap.RouteQuery()))
    except WireError as bad:
        raise _foreign(base, bad) from bad
    if sizes.tp is None or sizes.dp is None:
        raise EndpointUnavailable(f"no encode rank has registered at {base} yet: wait until it is ready")
    if sizes.dp != 1:
        raise ClientError(f"{base} speaks for {sizes.dp} data-parallel groups; one is supported")
    return sizes.tp


def control_address(address: tuple[str, int], rank: int) -> str:
    """``HOST:PORT`` at which an encode rank takes control frames. Raises EndpointUnavailable, ClientError."""
    base = _base(address)
    try:
        found = bootstrap.decode_address(_get(base, bootstrap.RouteQuery(rank, 0)))
    except WireError as bad:
        raise _foreign(base, bad) from bad
    return join_host_port(found.host, found.port)


def _base(address: tuple[str, int]) -> str:
    return f"http://{join_host_port(*address)}"


def _get(base: str, query: bootstrap.RouteQuery) -> bytes:
    try:
        with _HTTP.open(base + query.target, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(bootstrap.MAX_BODY_BYTES + 1)
            return body
    except urllib.error.HTTPError as refused:
        refused.close()
        raise EndpointUnavailable(
            f"{base} has no encode rank {query.rank} (HTTP {refused.code}): wait until all have registered"
        ) from refused
    except http.client.HTTPException as strange:
        raise ClientError(
            f"{base} is not the bootstrap server of an encode worker: what answers is not HTTP"
        ) from strange
    except (OSError, ValueError) as failed:
        reason = getattr(failed, "reason", failed)
        raise EndpointUnavailable(
            f"the bootstrap server {base} cannot be reached ({reason}): is the pool up?"
        ) from failed


def _foreign(base: str, bad: WireError) -> ClientError:
    return ClientError(f"{base} is not the bootstrap server of an encode worker: {bad}")
