"""Bodies of the bootstrap server's ``/route``: HTTP and JSON <-> types.

    PUT /route                                      an encode rank registers (RankRegistration)
    GET /route?engine_rank=-1&target_dp_group=-1    the sizes (ParallelSizes)
    GET /route?engine_rank=R&target_dp_group=D      one rank's control address (RankAddress)

The names are TokenSpeed's and say "prefill" where the encode side is meant: its server was
written for prefill and decode. Everything that decodes raises WireError and nothing else.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import WireError

ROUTE_PATH = "/route"
HEALTH_PATH = "/health"
OK_TEXT = "OK"
"""The body of a successful PUT and of GET /health."""

DATA_SOURCE_ROLE = "Prefill"
"""The role that puts a rank into the table: "Prefill" means data source, and encode is one."""

MAX_BODY_BYTES = 64 * 1024

_INTEGER = re.compile(r"-?[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class RankRegistration:
    """What a rank PUTs. ``incarnation`` is ours: absent in the reference, ignored by it."""

    rank: int
    host: str
    port: int
    world_size: int = 1
    dp_size: int = 1
    incarnation: int | None = None
    role: str = DATA_SOURCE_ROLE

    @property
    def dp_group(self) -> int:
        return self.rank // (self.world_size // self.dp_size)

    @property
    def rank_in_group(self) -> int:
        return self.rank % (self.world_size // self.dp_size)


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Answer to the size query: ``tp`` and ``dp`` are None until a rank has registered.

    ``tp`` is the whole world size, whatever its name says.
    """

    tp: int | None = None
    dp: int | None = None
    pp: int = 1


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where a rank listens for control frames."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A GET: the address of one rank of one data-parallel group, or (both -1) the sizes."""

    rank: int = -1
    dp_group: int = -1

    @property
    def wants_sizes(self) -> bool:
        return self.rank == -1 and self.dp_group == -1

    @property
    def target(self) -> str:
        """Path and query string of the request."""
        return f"{ROUTE_PATH}?engine_rank={self.rank}&target_dp_group={self.dp_group}"


def encode_registration(registration: RankRegistration) -> bytes:
    body: dict[str, object] = {
        "role": registration.role,
        "world_size": registration.world_size,
        "dp_size": registration.dp_size,
        "rank_ip": registration.host,
        "rank_port": registration.port,
        "engine_rank": registration.rank,
    }
    if registration.incarnation is not None:
        body["incarnation"] = registration.incarnation
    return json.dumps(body).encode()


def decode_registration(body: bytes) -> RankRegistration:
    """Raises WireError for what the reference would answer 500 to, and for an impossible rank."""
    fields = _object(body)
    role = fields.get("role")
    if not isinstance(role, str):
        raise WireError("role", role, "a string")
    world_size = _integer(fields, "world_size", 1, 1025)
    dp_size = _integer(fields, "dp_size", 1, 1025)
    if world_size % dp_size:
        raise WireError("dp_size", dp_size, f"a divisor of world_size {world_size}")
    incarnation = None
    if fields.get("incarnation") is not None:
        incarnation = _integer(fields, "incarnation", 0, 2**63)
    return RankRegistration(
        rank=_integer(fields, "engine_rank", 0, world_size),
        host=_host(fields, "rank_ip"),
        port=_integer(fields, "rank_port", 1, 65536),
        world_size=world_size,
        dp_size=dp_size,
        incarnation=incarnation,
        role=role,
    )


def encode_sizes(sizes: ParallelSizes) -> bytes:
    body = {"prefill_tp_size": sizes.tp, "prefill_dp_size": sizes.dp, "prefill_pp_size": sizes.pp}
    return json.dumps(body).encode()


def decode_sizes(body: bytes) -> ParallelSizes:
    """``prefill_pp_size`` may be missing: older servers do not send it."""
    fields = _object(body)
    tp = dp = None
    if fields.get("prefill_tp_size") is not None:
        tp = _integer(fields, "prefill_tp_size", 1, 1025)
    if fields.get("prefill_dp_size") is not None:
        dp = _integer(fields, "prefill_dp_size", 1, 1025)
    pp = _integer(fields, "prefill_pp_size", 1, 1025) if "prefill_pp_size" in fields else 1
    return ParallelSizes(tp, dp, pp)


def encode_address(address: RankAddress) -> bytes:
    return json.dumps({"rank_ip": address.host, "rank_port": address.port}).encode()


def decode_address(body: bytes) -> RankAddress:
    fields = _object(body)
    return RankAddress(_host(fields, "rank_ip"), _integer(fields, "rank_port", 1, 65536))


def decode_query(parameters: Mapping[str, str]) -> RouteQuery:
    """A GET's query parameters. The reference answers 500 where only one of them is -1."""
    query = RouteQuery(
        _integer(parameters, "engine_rank", -1, 2**31),
        _integer(parameters, "target_dp_group", -1, 2**31),
    )
    if not query.wants_sizes and min(query.rank, query.dp_group) < 0:
        raise WireError("engine_rank", query.rank, "-1 exactly when target_dp_group is -1")
    return query


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        raise WireError("body", len(body), f"at most {MAX_BODY_BYTES} bytes")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("body", body[:64], "JSON") from None
    if not isinstance(fields, dict):
        raise WireError("body", body[:64], "a JSON object")
    return fields


def _integer(fields: Mapping[str, object], field: str, low: int, limit: int) -> int:
    """An integer, or its decimal string: the reference converts, so peers may send either."""
    value = fields.get(field)
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < limit:
        raise WireError(field, value, f"an integer in [{low}, {limit})")
    return value


def _host(fields: Mapping[str, object], field: str) -> str:
    value = fields.get(field)
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Za-z._:%\[\]-]{1,255}", value):
        raise WireError(field, value, "an address")
    return value
