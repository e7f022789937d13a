"""Probes as the kubelet makes them: one success is enough to start, three failures in a row count."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from encodepool_operator.local.ports import HOST, taken
from encodepool_operator.local.probes import Prober, ProbeState, http_ok

PERIOD_S = 0.02


@dataclass
class Target:
    """A server whose answers can be changed; ``None`` never answers."""

    port: int
    answers: dict[str, bytes | None]
    asked: list[str] = field(default_factory=list)

    def count(self, path: str) -> int:
        return self.asked.count(path)


@contextlib.asynccontextmanager
async def target(**answers: bytes | None) -> AsyncIterator[Target]:
    held: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        path = (await reader.readline()).split()[1].decode().strip("/")
        made.asked.append(path)
        if (reply := made.answers[path]) is not None:
            writer.write(reply)
            writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    made = Target(server.sockets[0].getsockname()[1], dict(answers))
    try:
        yield made
    finally:
        server.close()
        for writer in held:
            writer.close()


OK = b"HTTP/1.1 200 OK\r\n\r\n"
NO = b"HTTP/1.1 503 No\r\n\r\n"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("reply", "good"),
    [
        (OK, True),
        (b"HTTP/1.0 302 Found\r\n\r\n", True),
        (NO, False),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", False),
        (b"SSH-2.0 200 OK\r\n", False),
        (b"HTTP/1.1\r\n", False),
        (b"x" * 100_000, False),
        (b"", False),
        (None, False),
    ],
)
def test_only_a_good_status_in_time_is_a_success(reply, good):
    async def story() -> bool:
        async with target(livez=reply) as server:
            return await http_ok(HOST, server.port, "/livez", timeout_s=0.3)

    assert asyncio.run(story()) is good


def test_a_closed_port_is_a_failure(free_port):
    assert asyncio.run(http_ok(HOST, free_port(), "/livez")) is False


def run_story(story: Callable[[Target, ProbeState, asyncio.Task[None]], object], **answers: bytes | None):
    """Run ``story(server, state, probing)`` beside a prober of a process that was just started."""

    async def both() -> None:
        async with target(**answers) as server:
            state = ProbeState()
            prober = Prober(HOST, server.port, state, lambda: None, startup_left_s=60, period_s=PERIOD_S)
            probing = asyncio.create_task(prober.run())
            await story(server, state, probing)
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    asyncio.run(both())


def test_readiness_is_not_asked_before_the_start_is_done():
    async def story(server, state, _probing):
        await until(lambda: server.count("livez") > 3)
        assert (state.started, state.ready, server.count("readyz")) == (False, False, 0)
        server.answers["livez"] = OK
        await until(lambda: state.ready)
        assert state.started

    run_story(story, livez=NO, readyz=OK)


def test_three_failures_in_a_row_take_readiness_and_one_success_brings_it_back():
    async def story(server, state, _probing):
        await until(lambda: state.ready)
        for failures in (1, 2):
            seen = server.count("readyz")
            server.answers["readyz"] = NO
            await until(lambda n=seen + failures: server.count("readyz") >= n)
            server.answers["readyz"] = OK
            seen = server.count("readyz")
            await until(lambda n=seen + 2: server.count("readyz") >= n)
            assert state.ready
        server.answers["readyz"] = NO
        await until(lambda: not state.ready)
        assert not state.dead
        server.answers["readyz"] = OK
        await until(lambda: state.ready)

    run_story(story, livez=OK, readyz=OK)


def test_a_worker_that_stops_answering_is_given_up_and_not_ready():
    async def story(server, state, probing):
        await until(lambda: state.ready)
        server.answers.update(livez=NO, readyz=NO)
        await asyncio.wait_for(probing, 10)
        assert state.dead.startswith("liveness")
        assert not state.ready

    run_story(story, livez=OK, readyz=OK)


def test_a_start_that_takes_too_long_is_given_up():
    async def story() -> ProbeState:
        async with target(livez=NO) as server:
            state = ProbeState()
            prober = Prober(HOST, server.port, state, lambda: None, startup_left_s=0.1, period_s=PERIOD_S)
            await asyncio.wait_for(prober.run(), 10)
            return state

    state = asyncio.run(story())
    assert "startupDeadlineSeconds" in state.dead
    assert not state.started


def test_a_port_that_somebody_listens_on_is_taken():
    async def story() -> None:
        async with target(livez=OK) as server:
            assert taken([server.port]) == {server.port}
        assert taken([server.port]) == frozenset()

    asyncio.run(story())
