"""One budget over all connections: what is not yet read stays with the gateways."""

import asyncio
import json
import re
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb2

from encodepool_worker.frontend.admission import MIB
from encodepool_worker.wire import intake

ENCODE = "/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode"


def silent_calls(channel, n):
    """Calls that are opened and then send nothing."""
    return [channel.stream_unary(ENCODE)() for _ in range(n)]


def test_clients_go_on_while_sixteen_silent_calls_stand(world, encode_request, clock):
    """Silent calls of new connections share one place; whoever comes new gets it within its patience."""

    async def story():
        async with world(max_pixel_mib=96) as w:
            gate, account = w.frontend._gate, w.frontend.account
            gate.hurried_s = 60.0  # nobody is hurried at first
            assert (await w.encoder.Encode(encode_request(1))).accepted  # its connection is known now
            channels = [w.connect() for _ in range(5)]
            silent = [call for channel in channels[:4] for call in silent_calls(channel, 4)]
            await w.until(lambda: gate.waiting + account.readers == 16, "the silent calls")
            assert account.readers == 1

            began_s = clock()
            for room in range(2, 22):
                assert (await w.encoder.Encode(encode_request(room))).accepted
            known_s = clock() - began_s
            assert len((await w.scheduler.GetLoads(pb2.GetLoadsRequest())).loads) == 1
            assert (await w.probe("/readyz"))[0] == 200
            assert (gate.waiting, account.readers) == (15, 1), "all of them still stand"

            gate.hurried_s = 1.0
            began_s = clock()
            newcomer = channels[4].unary_unary(ENCODE)
            await newcomer(encode_request(30).SerializeToString())
            new_s = clock() - began_s
            print(
                f"20 calls of a known connection took {known_s:.3f} s, the first of a new one {new_s:.3f} s"
            )
            ended = sum(call.done() for call in silent)
            assert ended < 8, "one patience, not one for each silent call"

            for call in silent:
                call.cancel()
            await w.until(lambda: account.held_bytes == 0, "the places given back")
            await asyncio.gather(*(channel.close() for channel in channels))

    asyncio.run(story())


def test_a_known_connection_that_goes_silent_leaves_a_place_to_the_others(world, encode_request):
    async def story():
        async with world(max_pixel_mib=96) as w:
            other = w.connect()
            encode = other.unary_unary(ENCODE)
            for room, call in ((1, w.encoder.Encode), (2, lambda r: encode(r.SerializeToString()))):
                await call(encode_request(room))
            w.frontend._gate.hurried_s = 60.0  # so that nobody owes a place to another's end
            silent = silent_calls(w.channel, 8)
            await w.until(lambda: w.frontend._gate.waiting == 7, "the silent calls")
            for room in range(3, 13):
                await asyncio.wait_for(encode(encode_request(room).SerializeToString()), 10)
            assert w.frontend._gate.waiting == 7, "they still stand"
            for call in silent:
                call.cancel()
            await w.until(lambda: w.frontend.account.held_bytes == 0)
            await other.close()

    asyncio.run(story())


def test_a_message_that_does_not_arrive_in_time_gives_its_place_back(world, encode_request):
    async def story():
        async with world(max_pixel_mib=96) as w:
            w.frontend._encode.read_s = 0.3
            [silent] = silent_calls(w.channel, 1)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await silent
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert error.value.details() == "the message did not arrive within 0.3 s"
            await w.until(lambda: w.frontend.account.held_bytes == 0)

            w.frontend._encode.read_s = 30.0
            w.frontend._gate.hurried_s = 0.2
            for call in (silent := silent_calls(w.channel, 2)):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                if call is silent[0]:
                    assert "within 0.2 s, and others wait" in error.value.details()
                    call = silent[1]
                    break
            call.cancel()
            assert (await w.encoder.Encode(encode_request())).accepted

    asyncio.run(story())


def test_a_call_whose_deadline_passes_while_it_waits_is_forgotten(world, encode_request):
    async def story():
        async with world(max_pixel_mib=96) as w:
            silent = silent_calls(w.channel, 2)
            await w.until(lambda: w.frontend._gate.waiting == 1)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await w.encoder.Encode(encode_request(), timeout=0.3)
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await w.until(lambda: w.frontend._gate.waiting == 1)
            for call in silent:
                call.cancel()
            await w.until(lambda: w.frontend.account.held_bytes == 0)
            assert w.rank0.received == []

    asyncio.run(story())


def test_a_gateway_that_dies_in_the_middle_of_a_message_gives_its_room_back(world):
    async def story():
        async with world(max_pixel_mib=96) as w:
            channel = w.connect()
            silent = channel.stream_unary(ENCODE)()
            await w.until(lambda: w.frontend.account.readers == 1)
            await channel.close()
            assert silent.done()
            await w.until(lambda: w.frontend.account.held_bytes == 0, "the room given back")

    asyncio.run(story())


def test_a_message_above_the_limit_is_refused_and_gives_its_room_back(world, encode_request):
    async def story():
        async with world(max_pixel_mib=3) as w:
            assert w.frontend.account.limits.message_bytes == MIB
            code, text = await w.refusal(encode_request(h=16, w=12))
            assert (code, "larger than max" in text) == ("RESOURCE_EXHAUSTED", True)
            await w.until(lambda: w.frontend.account.held_bytes == 0, "the room given back")
            assert (await w.encoder.Encode(encode_request(h=8, w=8))).accepted

    asyncio.run(story())


def test_a_full_queue_of_pixels_refuses_at_once_and_recovers_with_the_credits(world, encode_request):
    """The loop keeps 384 KiB items until 1 MiB is full; what follows is told, not left waiting."""

    async def story():
        async with world(max_pixel_mib=3) as w:
            w.rank0.policy = w.rank0.admit
            for room in (1, 2):
                await w.encoder.Encode(encode_request(room, h=8, w=8))
            code, text = await w.refusal(encode_request(3, h=8, w=8))
            assert (code, "bytes of pixels are waiting for the tower" in text) == ("RESOURCE_EXHAUSTED", True)
            await w.until(lambda: w.rank0.refused_rooms == [3], "the receivers told")

            for submit in w.rank0.of(intake.Submit):
                await w.rank0.send(intake.Credit(seq=submit.seq))
            await w.until(lambda: w.frontend.account.held_bytes == 0, "the credits")
            assert (await w.encoder.Encode(encode_request(4, h=8, w=8))).accepted

    asyncio.run(story())


GATEWAY = """
import asyncio, collections, json, sys
import grpc

async def main(target, path, calls):
    body = open(path, "rb").read()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    channels = [grpc.aio.insecure_channel(target, options=options) for _ in range(4)]
    method = "/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode"

    async def call(channel):
        try:
            await channel.unary_unary(method)(body)
            return "OK"
        except grpc.aio.AioRpcError as error:
            return error.code().name

    codes = await asyncio.gather(*(call(channels[n % 4]) for n in range(calls)))
    print(json.dumps(collections.Counter(codes)))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""
"""A program: ``calls`` Encode calls at once over four connections; prints how they ended."""


def peak_mib(pid):
    """Most memory the process ever had resident."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def test_memory_is_bounded_over_two_gateways_of_four_connections_each(
    encode_request, bare_model, tmp_path, spawn, free_port, rank0_at
):
    """Two times 48 calls of 6 MiB: 576 MiB are offered, the budget is 32 MiB, and that is held.

    The rest of the allowance is two copies of the one message that gRPC's Python layer hands over,
    64 KiB for each unread call, and what the allocator keeps. A fresh process: its memory is measured.
    """
    port, metrics, bootstrap = free_port(), free_port(), free_port()
    budget_mib, message_mib, calls = 32, 6, 48
    flags = {
        "model": bare_model,
        "grpc-port": port,
        "bootstrap-port": bootstrap,
        "metrics-port": metrics,
        "run-dir": tmp_path,
        "max-pixel-mib": budget_mib,
    }
    argv = [part for name, value in flags.items() for part in (f"--{name}", value)]
    process = spawn([sys.executable, "-m", "encodepool_worker.frontend", *argv], tmp_path / "log")
    body = tmp_path / "message"
    body.write_bytes(encode_request(h=8, w=message_mib * MIB // (1536 * 4) // 8).SerializeToString())

    async def story():
        async with rank0_at(tmp_path, bootstrap, metrics):
            before_mib = peak_mib(process.pid)
            logs = [tmp_path / f"gateway-{n}" for n in range(2)]
            argv = [sys.executable, "-c", GATEWAY, f"127.0.0.1:{port}", body, calls]
            for gateway in [spawn(argv, log) for log in logs]:
                assert await asyncio.to_thread(gateway.wait, 60) == 0
            ends = sum((Counter(json.loads(log.read_text())) for log in logs), Counter())
            return before_mib, peak_mib(process.pid), ends

    before_mib, after_mib, ends = asyncio.run(story())
    assert before_mib < 120, "the frontend itself is small"
    assert ends["OK"] > 0
    assert set(ends) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert ends.total() == 2 * calls
    grown_mib = after_mib - before_mib
    print(f"{before_mib:.0f} MiB at first, at most {grown_mib:.0f} MiB more; {dict(ends)}")
    assert grown_mib < budget_mib + 2 * message_mib + 2 * calls / 16 + 40
