"""The frontend of a pod without rank 0: its probes hold until its ranks have ended."""

import asyncio
import threading
import time

import aiohttp
import zmq.asyncio

from encodepool_worker.frontend.follower import FollowerFrontend
from encodepool_worker.settings import Settings
from encodepool_worker.wire import intake

GROUP = {"tensor_parallel_size": 2, "ranks_per_pod": 1, "pod_index": 1, "dist_init_port": 1}


def state(turn_s):
    return [intake.encode_back([intake.State(turn_s=turn_s, routed=True, queue_items=0, queue_cost=0)])]


def test_a_frontend_that_was_held_up_waits_for_reports_that_are_on_their_way(tmp_path, bare_model):
    """It used to take its own delay for the rank's silence, and was withdrawn for good."""
    context = zmq.Context()
    rank = context.socket(zmq.PUSH)
    rank.bind(f"ipc://{tmp_path / intake.back_socket(1)}")
    frontend = FollowerFrontend(
        Settings(model=str(bare_model), host="127.0.0.1", run_dir=str(tmp_path), **GROUP)
    )
    [own] = frontend._ranks
    try:
        rank.send_multipart(state(time.monotonic()))
        assert own._socket.poll(10_000)
        assert frontend.ready().good
        rank.send_multipart(state(time.monotonic() - 60))
        assert own._socket.poll(10_000)
        later = threading.Timer(0.03, lambda: rank.send_multipart(state(time.monotonic())))
        later.start()
        assert frontend.ready().good, frontend.ready().reason
        later.join()
    finally:
        own.close()
        frontend._context.term()
        rank.close(linger=0)
        context.term()


def test_a_pod_that_drains_is_alive_and_not_ready_until_its_ranks_have_ended(tmp_path, bare_model):
    """Its probes used to end at once, and whoever minds them killed it in the middle of the drain."""
    asyncio.run(drain_one(tmp_path, bare_model))


async def drain_one(run_dir, model):
    context = zmq.asyncio.Context()
    rank = context.socket(zmq.PUSH)
    rank.bind(f"ipc://{run_dir / intake.back_socket(1)}")

    async def report():
        while True:
            await rank.send_multipart(state(time.monotonic()))
            await asyncio.sleep(0.1)

    frontend = FollowerFrontend(Settings(model=str(model), host="127.0.0.1", run_dir=str(run_dir), **GROUP))
    port, stop = await frontend.start(), asyncio.Event()
    reporting, running = asyncio.create_task(report()), asyncio.create_task(frontend.run(stop))
    try:
        async with aiohttp.ClientSession() as http:

            async def probe(path):
                async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status

            async with asyncio.timeout(20):
                while await probe("/readyz") != 200:
                    await asyncio.sleep(0.05)
                stop.set()
                while await probe("/readyz") != 503:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.6)
            assert await probe("/livez") == 200
            assert not running.done()
        reporting.cancel()
        await rank.send(intake.encode_back([intake.Drained()]))
        await asyncio.wait_for(running, 4)  # less than it takes to find the rank silent
    finally:
        reporting.cancel()
        rank.close(linger=0)
        context.term()
