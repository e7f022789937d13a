"""What a gateway asks a worker besides Encode, and what it is told when the loop hangs."""

import asyncio
import time

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec import structs
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb2

from encodepool_worker.frontend.shared_memory import namespace_id

SERVICES = ("", "tokenspeed.grpc.encoder.TokenSpeedEncoder", "tokenspeed.grpc.scheduler.TokenSpeedScheduler")


def test_model_info_names_the_served_model_and_the_towers_dtype(world):
    async def story():
        async with world() as w:
            info = await w.scheduler.GetModelInfo(pb2.GetModelInfoRequest())
            assert info.served_model_name == "tiny-qwen3-vl"
            assert info.multimodal_encoder_dtype == "float32"
            assert info.model_type == "qwen3_vl"
            assert list(info.architectures) == ["Qwen3VLForConditionalGeneration"]
            assert info.supports_vision
            assert info.supports_multimodal
            assert list(info.supported_modalities) == [common_pb2.IMAGE, common_pb2.VIDEO]
            assert (info.vocab_size, info.max_context_length) == (1000, 4096)

    asyncio.run(story())


def test_flags_change_name_and_dtype(world):
    async def story():
        async with world(served_model_name="qwen", dtype="bfloat16") as w:
            info = await w.scheduler.GetModelInfo(pb2.GetModelInfoRequest())
            assert (info.served_model_name, info.multimodal_encoder_dtype) == ("qwen", "bfloat16")

    asyncio.run(story())


def test_server_info_has_what_a_client_needs(world):
    async def story():
        async with world(transfer_backend="tcp") as w:
            answer = await w.scheduler.GetServerInfo(pb2.GetServerInfoRequest())
            info = json_format.MessageToDict(answer.scheduler_info)
            assert info == {
                "shm_namespace_id": namespace_id(),
                "family": "qwen3_vl",
                "hidden": 256,
                "levels": 3,
                "dtype": "float32",
                "patch_width": 1536,
                "patch_size": 16,
                "temporal_patch_size": 2,
                "merge_size": 2,
                "transfer_backend": "tcp",
                "transfer_protocol": "tcp",
                "incarnation": 0,
                "min_pixels": 65536,
                "max_pixels": 16777216,
            }
            assert json_format.MessageToDict(answer.server_args)["disaggregation_mode"] == "encode"
            assert abs(answer.start_time.seconds - time.time()) < 60

    asyncio.run(story())


def test_loads_follow_the_credit_and_the_loops_report(world, encode_request):
    async def story():
        async with world(max_queue_tokens=8192) as w:
            w.rank0.policy = w.rank0.admit
            await w.rank0.report(queue_items=1, queue_cost=4, tokens_per_s=100.0)
            for room in (1, 2):
                await w.encoder.Encode(encode_request(room))
            answer = await w.scheduler.GetLoads(pb2.GetLoadsRequest())
            load = answer.loads[0]
            assert (load.num_waiting_reqs, load.num_running_reqs, load.num_total_reqs) == (1, 1, 2)
            assert load.num_used_tokens == 8
            assert load.token_usage == pytest.approx(8 / 8192)
            assert load.gen_throughput == 100.0
            assert answer.dp_rank_count == 1

    asyncio.run(story())


def test_generate_is_refused_with_a_sentence(world):
    async def story():
        async with world() as w:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in w.scheduler.Generate(pb2.GenerateRequest(request_id="x")):
                    pass
            assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "send Generate to a prefill or decode worker" in error.value.details()

    asyncio.run(story())


def test_what_an_encode_worker_has_not_is_unimplemented(world):
    async def story():
        async with world() as w:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in w.scheduler.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
                    pass
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
            foreign = sglang_scheduler_pb2_grpc.SglangSchedulerStub(w.channel)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await foreign.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest())
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(story())


def test_health_follows_readiness_in_both_services(world):
    async def story():
        async with world(ready=False) as w:
            health = health_pb2_grpc.HealthStub(w.channel)

            async def statuses():
                found = [
                    (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                    for name in SERVICES
                ]
                return {health_pb2.HealthCheckResponse.ServingStatus.Name(status) for status in found}

            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[1]))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await statuses() == {"NOT_SERVING"}
            answer = await w.scheduler.HealthCheck(pb2.HealthCheckRequest())
            assert not answer.healthy

            await w.become_ready()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert await statuses() == {"SERVING"}
            assert (await w.scheduler.HealthCheck(pb2.HealthCheckRequest())).healthy

            with pytest.raises(grpc.aio.AioRpcError) as error:
                await health.Check(health_pb2.HealthCheckRequest(service="other"))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            watch.cancel()

    asyncio.run(story())


def test_reflection_lists_the_services(world):
    async def story():
        async with world() as w:
            stub = reflection_pb2_grpc.ServerReflectionStub(w.channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = {service.name for service in (await call.read()).list_services_response.service}
            await call.done_writing()
            assert set(SERVICES[1:]) | {"grpc.health.v1.Health"} <= listed

    asyncio.run(story())


def test_a_withdrawn_worker_waits_for_no_report_before_it_answers(world, monkeypatch):
    async def story():
        async with world() as w:
            waits = []
            monkeypatch.setattr(w.frontend._link, "wait", waits.append)
            w.rank0.silent = True
            await asyncio.sleep(0.2)  # the last report is in
            w.frontend.health.state = structs.replace(w.frontend.health.state, turn_s=0.0)
            assert not w.frontend.ready().good
            assert waits
            waits.clear()
            assert not w.frontend.ready().good
            assert not w.frontend.alive().good
            assert waits == []

    asyncio.run(story())


def test_a_hung_loop_fails_loads_health_and_both_probes(world):
    """The gateway's load poll is what takes a hung worker out within seconds."""

    async def story():
        async with world() as w:
            w.rank0.silent = True
            await w.until(lambda: not w.frontend.alive().good, "the loop being late")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await w.scheduler.GetLoads(pb2.GetLoadsRequest())
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the loop's last turn was" in error.value.details()
            assert not (await w.scheduler.HealthCheck(pb2.HealthCheckRequest())).healthy
            assert (await w.probe("/livez"))[0] == 503
            assert (await w.probe("/readyz"))[0] == 503

            w.rank0.silent = False
            await w.until(lambda: w.frontend.alive().good, "the loop being back")
            assert (await w.probe("/livez")) == (200, "ok")
            assert (await w.probe("/readyz"))[0] == 503
            assert await w.metric("encodepool_ready") == 0.0

    asyncio.run(story())
