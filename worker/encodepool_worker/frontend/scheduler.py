"""``TokenSpeedScheduler``: the calls by which a gateway recognises and watches a worker.

Only what an encode worker can answer is registered; the gateway tolerates UNIMPLEMENTED for the
rest. ``GetLoads`` fails while the loop hangs: that is how a gateway notices within seconds.
"""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc
from google.protobuf import struct_pb2
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb2

from ..settings import Settings
from .admission import Account
from .health import Health, Report
from .model import ModelFacts
from .shared_memory import namespace_id

SERVICE = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"

VERSION = version("encodepool")

_INT32_MAX = 2**31 - 1


@dataclass(slots=True, kw_only=True)
class SchedulerService:
    """``ready`` judges readiness, ``alive`` the loop; both as the probes do."""

    settings: Settings
    model: ModelFacts
    account: Account
    health: Health
    ready: Callable[[], Report]
    alive: Callable[[], Report]
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(default_factory=time.monotonic)

    def handler(self) -> Any:
        """The service, for ``add_generic_rpc_handlers``."""
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "HealthCheck": unary(
                self.health_check,
                pb2.HealthCheckRequest.FromString,
                pb2.HealthCheckResponse.SerializeToString,
            ),
            "GetModelInfo": unary(
                self.get_model_info,
                pb2.GetModelInfoRequest.FromString,
                pb2.GetModelInfoResponse.SerializeToString,
            ),
            "GetServerInfo": unary(
                self.get_server_info,
                pb2.GetServerInfoRequest.FromString,
                pb2.GetServerInfoResponse.SerializeToString,
            ),
            "GetLoads": unary(
                self.get_loads, pb2.GetLoadsRequest.FromString, pb2.GetLoadsResponse.SerializeToString
            ),
            # A foreign request may be long and is not looked at: it stays bytes.
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, response_serializer=pb2.GenerateResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def health_check(self, _request: object, _context: object) -> pb2.HealthCheckResponse:
        report = self.ready()
        return pb2.HealthCheckResponse(healthy=report.good, message=report.reason or "ready")

    async def get_model_info(self, _request: object, _context: object) -> pb2.GetModelInfoResponse:
        model = self.model
        length = model.number("max_position_embeddings")
        return pb2.GetModelInfoResponse(
            model_path=model.name,
            tokenizer_path=model.name,
            served_model_name=model.served_name,
            model_type=str(model.config.get("model_type", "")),
            architectures=model.architectures,
            max_context_length=length,
            max_req_input_len=length,
            vocab_size=model.number("vocab_size"),
            pad_token_id=model.number("pad_token_id"),
            bos_token_id=model.number("bos_token_id"),
            weight_version=model.revision,
            supports_vision=True,
            supports_multimodal=True,
            supported_modalities=[common_pb2.IMAGE, common_pb2.VIDEO],
            model_dtype=model.spec.dtype,
            multimodal_encoder_dtype=model.spec.dtype,
        )

    async def get_server_info(self, _request: object, _context: object) -> pb2.GetServerInfoResponse:
        queued = self.account.queued_items
        answer = pb2.GetServerInfoResponse(
            server_args=_struct(
                {
                    "disaggregation_mode": "encode",
                    "disaggregation_bootstrap_port": self.settings.bootstrap_port,
                    "tensor_parallel_size": self.settings.tensor_parallel_size,
                    "served_model_name": self.model.served_name,
                }
            ),
            scheduler_info=_struct(self.scheduler_info()),
            active_requests=_int32(queued),
            is_paused=self.health.draining,
            uptime_seconds=self.clock() - self.started_s,
            max_total_num_tokens=_int32(self.settings.max_queue_tokens),
            tokenspeed_version=f"encodepool {VERSION}",
        )
        answer.start_time.FromDatetime(datetime.fromtimestamp(time.time() - answer.uptime_seconds, UTC))
        return answer

    def scheduler_info(self) -> dict[str, Any]:
        """What a client must know to send pixels here and to receive rows; numbers are plain JSON."""
        spec = self.model.spec
        info: dict[str, Any] = {
            "family": spec.family,
            "hidden": spec.hidden,
            "levels": spec.levels,
            "dtype": spec.dtype,
            "patch_width": spec.patch_width,
            "patch_size": spec.patch_size,
            "temporal_patch_size": spec.temporal_patch_size,
            "merge_size": spec.merge_size,
            "transfer_backend": self.settings.transfer_backend,
            "transfer_protocol": self.settings.transfer_protocol,
            "incarnation": self.settings.incarnation,
        }
        namespace = namespace_id()
        if namespace:
            info["shm_namespace_id"] = namespace
        if self.model.image is not None:
            info["min_pixels"] = self.model.image.min_pixels
            info["max_pixels"] = self.model.image.max_pixels
        return info

    async def get_loads(self, _request: object, context: Any) -> pb2.GetLoadsResponse:
        alive = self.alive()
        if not alive.good:
            await context.abort(grpc.StatusCode.UNAVAILABLE, alive.reason)
        account, state = self.account, self.health.state
        waiting = state.queue_items if state else 0
        running = max(0, account.queued_items - waiting)
        usage = min(1.0, account.queued_tokens / self.settings.max_queue_tokens)
        rate = (state.tokens_per_s if state else None) or 0.0
        load = pb2.SchedulerLoad(
            num_running_reqs=_int32(running),
            num_waiting_reqs=_int32(waiting),
            num_total_reqs=_int32(running + waiting),
            num_used_tokens=_int32(account.queued_tokens),
            max_total_num_tokens=_int32(self.settings.max_queue_tokens),
            max_running_requests=_int32(self.settings.max_items_per_batch),
            num_waiting_uncached_tokens=_int32(account.queued_tokens),
            token_usage=usage,
            active_token_usage=usage,
            gen_throughput=rate,
            utilization=usage,
            queues=pb2.QueueMetrics(waiting=_int32(waiting)),
        )
        return pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=VERSION,
            dp_rank_count=1,
            loads=[load],
            aggregate=pb2.AggregateMetrics(
                total_running_reqs=_int32(running),
                total_waiting_reqs=_int32(waiting),
                total_reqs=_int32(running + waiting),
                avg_token_usage=usage,
                avg_throughput=rate,
                avg_utilization=usage,
            ),
        )

    async def generate(self, _request: bytes, context: Any) -> AsyncIterator[pb2.GenerateResponse]:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            "this is an encode worker: it turns images into embeddings and generates no text; "
            "send Generate to a prefill or decode worker",
        )
        yield pb2.GenerateResponse()


def _struct(values: dict[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(values)
    return struct


def _int32(value: int) -> int:
    return min(value, _INT32_MAX)
