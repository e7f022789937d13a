"""The bootstrap server over real HTTP: the reference's routes, and where we answer differently."""

import asyncio
import json

import aiohttp
import pytest
import structlog

from encodepool_worker.errors import ConfigError
from encodepool_worker.frontend import bootstrap
from encodepool_worker.frontend.bootstrap import RouteTable, bootstrap_app
from encodepool_worker.frontend.http import HttpServer
from encodepool_worker.wire.bootstrap import (
    RankRegistration,
    decode_address,
    decode_sizes,
    encode_registration,
)

SIZES = "/route?engine_rank=-1&target_dp_group=-1"


def with_server(story, n_ranks=1, incarnation=3):
    async def run():
        table = RouteTable(n_ranks, incarnation)
        server = HttpServer(bootstrap_app(table), "127.0.0.1", 0, "bootstrap")
        port = await server.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                await story(http, table)
        finally:
            await server.stop()

    asyncio.run(run())


async def ask(http, method, path, **options):
    async with http.request(method, path, **options) as answer:
        return answer.status, await answer.read()


def rank(number=0, world=1, incarnation=3, port=5000, **facts):
    return encode_registration(
        RankRegistration(number, "10.0.0.5", port, world_size=world, incarnation=incarnation, **facts)
    )


def test_a_rank_registers_and_is_found():
    async def story(http, table):
        assert await ask(http, "GET", "/health") == (200, b"OK")

        status, body = await ask(http, "GET", SIZES)
        assert status == 200
        assert json.loads(body) == {"prefill_tp_size": None, "prefill_dp_size": None, "prefill_pp_size": 1}
        assert (await ask(http, "GET", "/route?engine_rank=0&target_dp_group=0"))[0] == 404

        assert await ask(http, "PUT", "/route", data=rank()) == (200, b"OK")
        assert table.complete

        sizes = decode_sizes((await ask(http, "GET", SIZES))[1])
        assert (sizes.tp, sizes.dp, sizes.pp) == (1, 1, 1)
        address = decode_address((await ask(http, "GET", "/route?engine_rank=0&target_dp_group=0"))[1])
        assert (address.host, address.port) == ("10.0.0.5", 5000)

    with_server(story)


def test_sizes_are_told_only_when_every_rank_is_there():
    async def story(http, table):
        assert (await ask(http, "PUT", "/route", data=rank(1, 2, port=5001)))[0] == 200
        assert decode_sizes((await ask(http, "GET", SIZES))[1]).tp is None
        assert (table.n_routed, table.complete) == (1, False)

        assert (await ask(http, "PUT", "/route", data=rank(0, 2)))[0] == 200
        assert decode_sizes((await ask(http, "GET", SIZES))[1]).tp == 2
        address = decode_address((await ask(http, "GET", "/route?engine_rank=1&target_dp_group=0"))[1])
        assert address.port == 5001

    with_server(story, n_ranks=2)


def test_a_rank_that_registers_again_replaces_its_address():
    async def story(http, table):
        for port in (5000, 6000):
            await ask(http, "PUT", "/route", data=rank(port=port))
        address = decode_address((await ask(http, "GET", "/route?engine_rank=0&target_dp_group=0"))[1])
        assert (address.port, table.n_routed) == (6000, 1)

    with_server(story)


@pytest.mark.parametrize(
    "registration",
    [rank(incarnation=2), rank(incarnation=None), rank(world=2), rank(world=2, dp_size=2)],
    ids=["earlier incarnation", "no incarnation", "other size", "data parallel"],
)
def test_a_rank_that_is_not_of_this_incarnation_is_turned_away(registration):
    async def story(http, table):
        assert (await ask(http, "PUT", "/route", data=registration))[0] == 409
        assert table.n_routed == 0

    with_server(story)


def test_another_role_is_accepted_and_not_listed_as_the_reference_does():
    async def story(http, table):
        assert await ask(http, "PUT", "/route", data=rank(role="Decode")) == (200, b"OK")
        assert table.n_routed == 0

    with_server(story)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/route", None, 400),
        ("GET", "/route?engine_rank=0", None, 400),
        ("GET", "/route?target_dp_group=0", None, 400),
        ("GET", "/route?engine_rank=-1&target_dp_group=0", None, 400),
        ("GET", "/route?engine_rank=x&target_dp_group=0", None, 400),
        ("GET", "/route?engine_rank=0&target_dp_group=7", None, 404),
        ("PUT", "/route", b"", 400),
        ("PUT", "/route", b"{", 400),
        ("PUT", "/route", b"[]", 400),
        ("PUT", "/route", b'{"role": "Prefill"}', 400),
        ("PUT", "/route", b"[" * 60_000, 400),
        ("PUT", "/route", b" " * 70_000, 413),
        ("POST", "/route", b"{}", 405),
        ("DELETE", "/route", None, 405),
        ("PUT", "/health", b"", 405),
        ("GET", "/", None, 404),
    ],
)
def test_nonsense_gets_a_client_error_and_changes_nothing(method, path, body, status):
    async def story(http, table):
        await ask(http, "PUT", "/route", data=rank())
        assert (await ask(http, method, path, data=body))[0] == status
        assert (table.n_routed, (await ask(http, "GET", SIZES))[0]) == (1, 200)

    with_server(story)


def test_a_connection_that_sends_nothing_is_no_harm():
    """The gateway does this at registration."""

    async def story(http, table):
        reader, writer = await asyncio.open_connection("127.0.0.1", http._base_url.port)
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""
        assert (await ask(http, "GET", "/health"))[0] == 200

    with_server(story)


def test_requests_that_are_no_http_are_answered_and_fill_no_log():
    async def story(http, table):
        port = http._base_url.port
        for _ in range(200):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/9.9\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.0 400")
            writer.close()
            await writer.wait_closed()
        assert (await ask(http, "PUT", "/route", data=rank()))[0] == 200

    with structlog.testing.capture_logs() as lines:
        with_server(story)
    assert 10 <= len(lines) < 50
    assert {line["event"] for line in lines} == {"an HTTP request cannot be read", "rank registered"}
    assert not any("exc_info" in line for line in lines)


def test_a_port_in_use_is_an_error_at_start():
    async def story():
        first = HttpServer(bootstrap_app(RouteTable(1, 0)), "127.0.0.1", 0, "bootstrap")
        port = await first.start()
        second = HttpServer(bootstrap_app(RouteTable(1, 0)), "127.0.0.1", port, "bootstrap")
        with pytest.raises(ConfigError, match=f"bootstrap: cannot listen on 127.0.0.1 port {port}"):
            await second.start()
        await first.stop()

    asyncio.run(story())


def test_only_this_machine_registers(monkeypatch):
    """Receivers keep the address they are told: a stranger's would take their frames for good."""

    async def story(http, table):
        assert (await ask(http, "PUT", "/route", data=rank()))[0] == 200
        monkeypatch.setattr(bootstrap, "is_own_address", lambda address: address[0] != "127.0.0.1")
        refused = (403, b"ranks register from the machine they run on")
        assert await ask(http, "PUT", "/route", data=rank(port=6666)) == refused
        status, body = await ask(http, "GET", "/route?engine_rank=0&target_dp_group=0")
        assert (status, decode_address(body).port) == (200, 5000)

    with_server(story)


@pytest.mark.parametrize(
    ("address", "own"),
    [
        (("127.0.0.1", 5), True),
        (("127.8.0.1", 5), True),
        (("192.0.2.1", 5), False),
        (("2001:db8::1", 5, 0, 0), False),
    ],
)
def test_an_address_of_this_machine_is_told_from_others(address, own):
    assert bootstrap.is_own_address(address) is own
