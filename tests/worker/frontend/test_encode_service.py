"""Encode from the gateway's side: accepted, or refused by name with the room's receivers told."""

import asyncio
import os
import time
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_encoder_pb2 as encoder_pb2

from encodepool_worker.frontend.shared_memory import SHM_FOLDER
from encodepool_worker.types import Modality, RefusalKind
from encodepool_worker.wire import intake

PIXEL_BYTES = 16 * 1536 * 4


def item_of(request):
    return request.mm_inputs.items[0]


def test_an_item_reaches_the_loop_as_it_was_sent(world, encode_request):
    async def story():
        async with world() as w:
            pixels = os.urandom(PIXEL_BYTES)
            answer = await w.encoder.Encode(encode_request(room=2**62, pixels=pixels))
            assert answer.accepted

            [(submit, payloads)] = w.rank0.received
            assert (submit.request_id, submit.index, submit.room) == ("encode-1", 0, 2**62)
            assert submit.modality is Modality.IMAGE
            assert submit.grids == ((1, 4, 4),)
            assert (submit.n_tokens, submit.cost) == (4, 4)
            assert (submit.pixel_dtype, submit.pixel_shape) == ("float32", (16, 1536))
            assert submit.deadline_s is None
            assert payloads[0] == pixels
            names = {tensor.name for tensor in submit.tensors}
            assert names == {"image_grid_thw", "patches_per_image"}
            assert await w.metric('encodepool_requests_total{outcome="accepted"}') == 1

    asyncio.run(story())


def test_the_key_follows_the_content_and_not_the_request(world, encode_request):
    async def story():
        async with world() as w:
            pixels = os.urandom(PIXEL_BYTES)
            same = [encode_request(room, pixels=pixels, request_id=f"encode-{room}") for room in (1, 2)]
            item_of(same[1]).content_hash = os.urandom(32)
            item_of(same[1]).placeholders[0].offset = 900
            other_grid = encode_request(3, h=2, w=8, pixels=pixels)
            other_pixels = encode_request(4, pixels=os.urandom(PIXEL_BYTES))
            for request in (*same, other_grid, other_pixels):
                await w.encoder.Encode(request)
            keys = [submit.key for submit in w.rank0.of(intake.Submit)]
            assert keys[0] == keys[1]
            assert len(set(keys)) == 3

    asyncio.run(story())


def test_the_calls_deadline_goes_with_the_item(world, encode_request):
    async def story():
        async with world() as w:
            await w.encoder.Encode(encode_request(), timeout=20)
            [submit] = w.rank0.of(intake.Submit)
            assert 15 < submit.deadline_s - time.monotonic() <= 20

    asyncio.run(story())


def refuse_shape(item):
    item.encoder_input.shape[:] = [15, 1536]


def refuse_length(item):
    item.encoder_input.inline = item.encoder_input.inline[:-4]


def refuse_dtype(item):
    item.encoder_input.dtype = "int8"


def refuse_grid(item):
    item.model_specific_tensors["image_grid_thw"].inline = b"".join(
        value.to_bytes(8, "little") for value in (1, 3, 4)
    )


def refuse_negative_grid(item):
    item.model_specific_tensors["image_grid_thw"].inline = b"\xff" * 24


def refuse_no_grid(item):
    del item.model_specific_tensors["image_grid_thw"]


def refuse_placeholders(item):
    item.placeholders[0].length = 5


def refuse_no_placeholders(item):
    del item.placeholders[:]


def refuse_audio(item):
    item.modality = common_pb2.AUDIO


def refuse_remote(item):
    item.encoder_input.remote.CopyFrom(common_pb2.RemoteTensorHandle(transport="nixl", nbytes=PIXEL_BYTES))


def refuse_path(item):
    item.encoder_input.shm.CopyFrom(common_pb2.ShmHandle(name="../etc/passwd", nbytes=PIXEL_BYTES))


def refuse_absent_segment(item):
    item.encoder_input.shm.CopyFrom(common_pb2.ShmHandle(name="encodepool-test-absent", nbytes=PIXEL_BYTES))


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (refuse_shape, "encoder_input"),
        (refuse_length, "encoder_input"),
        (refuse_dtype, "encoder_input.dtype"),
        (refuse_grid, "image_grid_thw"),
        (refuse_negative_grid, "image_grid_thw"),
        (refuse_no_grid, "image_grid_thw"),
        (refuse_placeholders, "placeholders"),
        (refuse_no_placeholders, "placeholders"),
        (refuse_audio, "modality"),
        (refuse_remote, "remote"),
        (refuse_path, "encoder_input.shm"),
        (refuse_absent_segment, "encoder_input.shm"),
    ],
)
def test_a_bad_item_is_refused_by_its_field_and_its_receivers_are_told(world, encode_request, spoil, field):
    async def story():
        async with world() as w:
            request = encode_request(room=99)
            spoil(item_of(request))
            code, text = await w.refusal(request)
            assert code == "INVALID_ARGUMENT"
            assert field in text.split(": ")[0]

            await w.until(lambda: w.rank0.refused_rooms == [99], "the Refuse message", timeout_s=1)
            assert w.rank0.of(intake.Submit) == []
            assert w.frontend.account.held_bytes == 0

            await w.encoder.Encode(encode_request())  # the next one is served
            _, metrics = await w.probe("/metrics")
            assert "encodepool_requests_refused_total{field=" in metrics

    asyncio.run(story())


@pytest.mark.parametrize(
    ("rooms", "field"), [([], "items"), ([1, 2], "items"), ([-1], "bootstrap_room"), ([2**63 - 1], "")]
)
def test_a_request_without_one_room_in_range_is_refused(world, encode_request, rooms, field):
    async def story():
        async with world() as w:
            request = encode_request()
            del request.items[:]
            request.items.extend(encoder_pb2.EncodeItemAssignment(bootstrap_room=room) for room in rooms)
            if not field:
                assert (await w.encoder.Encode(request)).accepted
                return
            code, text = await w.refusal(request)
            assert code == "INVALID_ARGUMENT"
            assert field in text.split(": ")[0]
            assert w.rank0.of(intake.Submit) == []

    asyncio.run(story())


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x05ab", b""])
def test_bytes_that_are_no_request_are_refused(world, body):
    async def story():
        async with world() as w:
            raw = w.channel.unary_unary("/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await raw(body)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert w.frontend.account.held_bytes == 0

    asyncio.run(story())


def test_a_call_that_ends_without_a_message_is_refused(world):
    async def story():
        async with world() as w:
            call = w.channel.stream_unary("/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode")()
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert w.frontend.account.held_bytes == 0

    asyncio.run(story())


def test_pixels_in_shared_memory_are_copied_before_the_answer_and_never_unlinked(world, encode_request):
    async def story():
        async with world() as w:
            pixels = os.urandom(PIXEL_BYTES)
            path = SHM_FOLDER / f"encodepool-test-{os.getpid()}-pixels"
            path.write_bytes(b"head" + pixels)
            try:
                request = encode_request(pixels=b"")
                handle = common_pb2.ShmHandle(
                    name=path.name, offset=4, nbytes=PIXEL_BYTES, owner_id=f"smg:{os.getpid()}"
                )
                item_of(request).encoder_input.shm.CopyFrom(handle)
                await w.encoder.Encode(request)
                assert path.exists()
            finally:
                path.unlink()
            inline = encode_request(room=8, pixels=pixels)
            await w.encoder.Encode(inline)
            (first, first_payloads), (second, second_payloads) = w.rank0.received
            assert first_payloads[0] == pixels == second_payloads[0]
            assert first.key == second.key

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (RefusalKind.INVALID, "INVALID_ARGUMENT"),
        (RefusalKind.FULL, "RESOURCE_EXHAUSTED"),
        (RefusalKind.DRAINING, "UNAVAILABLE"),
    ],
)
def test_what_the_loop_refuses_is_told_to_the_gateway_and_not_back_to_the_loop(
    world, encode_request, kind, code
):
    """The room may be another's, which a refusal must not touch."""

    async def story():
        async with world() as w:
            w.rank0.policy = lambda message: (
                [
                    intake.Refused(seq=message.seq, kind=kind, field="bootstrap_room", reason="so it is"),
                    intake.Credit(seq=message.seq),
                ]
                if isinstance(message, intake.Submit)
                else [intake.Drained()]
            )
            assert await w.refusal(encode_request()) == (code, "bootstrap_room: so it is")
            assert w.rank0.refused_rooms == []
            await w.until(lambda: w.frontend.account.held_bytes == 0)

    asyncio.run(story())


def test_before_it_is_ready_a_worker_refuses_and_tells_the_receivers(world, encode_request):
    async def story():
        async with world(ready=False) as w:
            code, text = await w.refusal(encode_request(5))
            assert (code, "takes no work" in text) == ("UNAVAILABLE", True)
            await w.until(lambda: w.rank0.refused_rooms == [5], timeout_s=1)
            await w.become_ready()
            assert (await w.encoder.Encode(encode_request(6))).accepted

    asyncio.run(story())


def silent(message):
    """A loop that answers nothing but the drain."""
    return [intake.Drained()] if isinstance(message, intake.Drain) else []


async def given_up(w, request):
    """A call that is cancelled after its item was handed over and before the loop has answered."""
    before = len(w.rank0.of(intake.Submit))
    call = w.encoder.Encode(request)
    await w.until(lambda: len(w.rank0.of(intake.Submit)) > before, "the submission")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    async def counted():
        return await w.metric('encodepool_requests_total{outcome="cancelled"}')

    await w.until(counted, "the cancellation")
    return w.rank0.of(intake.Submit)[-1]


async def answer(w, submit, **facts):
    """The loop takes the item and gives its credit back."""
    await w.rank0.send(intake.Admitted(seq=submit.seq, **facts), intake.Credit(seq=submit.seq))


def aborted_rooms(w):
    return [message.room for message in w.rank0.of(intake.Abort)]


def test_a_loop_that_does_not_answer_in_time_ends_the_call_and_the_item_is_withdrawn(world, encode_request):
    """UNAVAILABLE was answered, so nothing may be left that works for this call."""

    async def story():
        async with world() as w:
            w.frontend._encode.answer_s = 0.2
            w.rank0.policy = silent
            code, text = await w.refusal(encode_request(room=9))
            assert (code, text) == ("UNAVAILABLE", "the encode loop did not answer within 0.2 s")
            assert w.frontend.account.queued_items == 1, "the loop has the pixels"
            assert aborted_rooms(w) == w.rank0.refused_rooms == []

            await answer(w, w.rank0.of(intake.Submit)[0])
            await w.until(lambda: aborted_rooms(w) == [9], "the withdrawal")
            assert w.frontend.account.held_bytes == 0

    asyncio.run(story())


def test_a_call_given_up_after_the_hand_over_is_withdrawn_once_the_loop_has_it(world, encode_request):
    async def story():
        async with world() as w:
            w.rank0.policy = silent
            submit = await given_up(w, encode_request(room=9))
            assert aborted_rooms(w) == []
            await answer(w, submit)
            await w.until(lambda: aborted_rooms(w) == [9], "the withdrawal")
            assert w.frontend.account.held_bytes == 0
            assert w.rank0.refused_rooms == []

    asyncio.run(story())


def test_a_call_given_up_does_not_take_the_room_from_an_equal_call(world, encode_request):
    """Two equal calls for one room; whichever of them is given up, the other was answered OK."""

    async def story():
        async with world() as w:
            for first_stays in (True, False):
                room = 10 + first_stays
                w.rank0.policy = silent
                if first_stays:
                    stays = asyncio.ensure_future(w.encoder.Encode(encode_request(room)))
                    await w.until(lambda: w.rank0.of(intake.Submit), "the submission")
                    await given_up(w, encode_request(room))
                else:
                    await given_up(w, encode_request(room))
                    n = len(w.rank0.of(intake.Submit))
                    stays = asyncio.ensure_future(w.encoder.Encode(encode_request(room)))
                    await w.until(lambda n=n: len(w.rank0.of(intake.Submit)) > n, "the submission")
                for repeated, submit in enumerate(w.rank0.of(intake.Submit)[-2:]):
                    await answer(w, submit, repeated=bool(repeated))
                assert (await stays).accepted
                await w.until(lambda: w.frontend.account.held_bytes == 0)
            assert aborted_rooms(w) == []

    asyncio.run(story())


def test_a_call_given_up_for_a_room_that_was_taken_before_changes_nothing(world, encode_request):
    async def story():
        async with world() as w:
            assert (await w.encoder.Encode(encode_request(room=9))).accepted
            w.rank0.policy = silent
            submit = await given_up(w, encode_request(room=9))
            await answer(w, submit, repeated=True)
            await w.until(lambda: w.frontend.account.held_bytes == 0)
            assert len(w.frontend._encode._withdrawals) == 0
            assert aborted_rooms(w) == []

    asyncio.run(story())


def test_a_call_given_up_that_the_loop_refuses_aborts_nothing(world, encode_request):
    async def story():
        async with world() as w:
            w.rank0.policy = silent
            submit = await given_up(w, encode_request(room=9))
            refused = intake.Refused(
                seq=submit.seq, kind=RefusalKind.INVALID, field="bootstrap_room", reason="room 9 is in use"
            )
            await w.rank0.send(refused, intake.Credit(seq=submit.seq))
            await w.until(lambda: w.frontend.account.held_bytes == 0)
            assert len(w.frontend._encode._withdrawals) == 0
            assert aborted_rooms(w) == []

    asyncio.run(story())


class Gated:
    """Content keys that wait to be told: holds a request between parsing and the hand-over."""

    def __init__(self, keys, release):
        self.keys, self.release, self.entered = keys, release, False

    def of(self, *facts):
        self.entered = True
        assert self.release.wait(10)
        return self.keys.of(*facts)


def test_a_gateway_that_gives_up_before_the_hand_over_submits_nothing(world, encode_request):
    import threading

    async def story():
        async with world() as w:
            service = w.frontend._encode
            service.keys = gated = Gated(service.keys, threading.Event())
            call = w.encoder.Encode(encode_request(12))
            await w.until(lambda: gated.entered, "the request in its thread")
            call.cancel()

            async def counted():
                return await w.metric('encodepool_requests_total{outcome="cancelled"}') == 1

            await w.until(counted, "the cancellation")
            # A thread still reads the bytes, so they are still charged.
            assert w.frontend.account.reading_bytes > 0
            gated.release.set()
            await w.until(lambda: w.frontend.account.held_bytes == 0, "the bytes given back")
            await w.until(lambda: w.rank0.refused_rooms == [12], "the receivers told")
            assert w.rank0.of(intake.Submit) == []

    asyncio.run(story())


def test_calls_come_in_while_a_message_waits_to_be_looked_at(world, encode_request):
    """Its read has ended, and must not be hurried for the sake of those who wait for its place."""
    import threading

    async def story():
        async with world(max_pixel_mib=96) as w:
            service, gate = w.frontend._encode, w.frontend._gate
            service.keys = gated = Gated(service.keys, threading.Event())
            calls = []
            for room in (1, 2):  # both threads of the intake
                gated.entered = False
                calls.append(w.encoder.Encode(encode_request(room)))
                await w.until(lambda: gated.entered, "the request in its thread")
            channels = [w.connect(), w.connect()]
            for room, channel in enumerate(channels, 3):
                encode = channel.unary_unary("/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode")
                calls.append(encode(encode_request(room).SerializeToString()))
                if room == 3:
                    await w.until(
                        lambda: len(service._running) == 3, "a message that no thread has looked at"
                    )
            await w.until(lambda: gate.waiting == 1, "a call behind it")
            gated.release.set()
            await asyncio.gather(*calls)
            assert {submit.room for submit in w.rank0.of(intake.Submit)} == {1, 2, 3, 4}
            await w.until(lambda: w.frontend.account.held_bytes == 0, "every place given back")
            await asyncio.gather(*(channel.close() for channel in channels))

    asyncio.run(story())


def test_a_bug_in_one_request_ends_only_that_request(world, encode_request):
    class Broken:
        def of(self, *facts):
            raise ZeroDivisionError("broken")

    async def story():
        async with world() as w:
            service = w.frontend._encode
            keys, service.keys = service.keys, Broken()
            code, text = await w.refusal(encode_request(13))
            assert (code, text) == ("INTERNAL", "ZeroDivisionError: broken")
            assert w.frontend.account.held_bytes == 0
            service.keys = keys
            assert (await w.encoder.Encode(encode_request(14))).accepted

    asyncio.run(story())


def test_no_segment_is_left_behind():
    assert [path.name for path in Path("/dev/shm").glob("encodepool-*")] == []
