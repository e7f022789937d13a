"""The bootstrap server: prefill workers ask here which ranks there are and where they listen.

Routes and bodies are the reference's (``wire/bootstrap.py``). Where it answers 500 to a question
that makes no sense, this one answers 400 or 404; receivers treat every status but 200 alike.

Sizes are told only when every rank has registered. A receiver keeps a complete answer for ever and
does not keep an incomplete one, so an early answer would cost it its room, a late one only this try.
"""

import socket
from typing import Any

from aiohttp import web

from ..errors import WireError
from ..logs import LimitedLog, get_logger
from ..wire.bootstrap import (
    DATA_SOURCE_ROLE,
    HEALTH_PATH,
    MAX_BODY_BYTES,
    OK_TEXT,
    ROUTE_PATH,
    ParallelSizes,
    RankAddress,
    RankRegistration,
    decode_query,
    decode_registration,
    encode_address,
    encode_sizes,
)


class RouteTable:
    """Where the ranks of this incarnation listen. A rank that registers again replaces itself."""

    def __init__(self, n_ranks: int, incarnation: int) -> None:
        self.n_ranks = n_ranks
        self.incarnation = incarnation
        self._ranks: dict[tuple[int, int], RankAddress] = {}

    @property
    def n_routed(self) -> int:
        return len(self._ranks)

    @property
    def complete(self) -> bool:
        return self.n_routed == self.n_ranks

    def register(self, registration: RankRegistration) -> str:
        """Empty, or why this is no rank of ours. Another role than a data source is not kept."""
        if registration.incarnation != self.incarnation:
            return f"incarnation {registration.incarnation} registers with incarnation {self.incarnation}"
        if (registration.world_size, registration.dp_size) != (self.n_ranks, 1):
            return (
                f"a rank of world size {registration.world_size} and dp size {registration.dp_size} "
                f"registers with a group of {self.n_ranks} and 1"
            )
        if registration.role == DATA_SOURCE_ROLE:
            key = (registration.dp_group, registration.rank_in_group)
            self._ranks[key] = RankAddress(registration.host, registration.port)
        return ""

    def sizes(self) -> ParallelSizes:
        return ParallelSizes(self.n_ranks, 1) if self.complete else ParallelSizes()

    def address(self, dp_group: int, rank: int) -> RankAddress | None:
        return self._ranks.get((dp_group, rank))


def bootstrap_app(table: RouteTable) -> web.Application:
    """The HTTP application over one route table."""

    refusals = LimitedLog(per_s=1, burst=10)

    async def health(_request: web.Request) -> web.Response:
        return web.Response(text=OK_TEXT)

    async def route(request: web.Request) -> web.Response:
        if request.method == "PUT":
            return await put(request)
        if request.method == "GET":
            return get(request)
        return web.Response(status=405, text="Method not allowed", headers={"Allow": "GET, PUT"})

    async def put(request: web.Request) -> web.Response:
        try:
            registration = decode_registration(await request.read())
        except WireError as error:
            return web.Response(status=400, text=str(error))
        if not _from_this_machine(request):
            refusals.warning("registration refused", peer=request.remote, problem="from another machine")
            return web.Response(status=403, text="ranks register from the machine they run on")
        problem = table.register(registration)
        if problem:
            refusals.warning("registration refused", peer=request.remote, problem=problem)
            return web.Response(status=409, text=problem)
        get_logger().info(
            "rank registered", rank=registration.rank, host=registration.host, port=registration.port
        )
        return web.Response(text=OK_TEXT)

    def get(request: web.Request) -> web.Response:
        try:
            query = decode_query(request.query)
        except WireError as error:
            return web.Response(status=400, text=str(error))
        if query.wants_sizes:
            return _json(encode_sizes(table.sizes()))
        address = table.address(query.dp_group, query.rank)
        if address is None:
            return web.Response(status=404, text=f"no rank {query.rank} in group {query.dp_group}")
        return _json(encode_address(address))

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get(HEALTH_PATH, health)
    app.router.add_route("*", ROUTE_PATH, route)
    return app


def _from_this_machine(request: web.Request) -> bool:
    """Receivers ask once and keep the answer: whoever could register from elsewhere, even once,
    could have the frames of all of them."""
    peer = request.transport.get_extra_info("peername") if request.transport else None
    return peer is not None and is_own_address(peer)


def is_own_address(address: tuple[Any, ...]) -> bool:
    """Whether (host, port, ...) is an address of this machine: only such a one can be bound."""
    host, _, *scope = address
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0, *scope))
    except OSError:
        return False
    return True


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
