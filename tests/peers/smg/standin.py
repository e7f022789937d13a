"""As much of any worker as the gateway needs to take it into its list. Nothing is encoded."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from smg_grpc_proto.generated import (
    common_pb2,
    tokenspeed_encoder_pb2,
    tokenspeed_encoder_pb2_grpc,
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
)

OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 256 << 20)]


class _Scheduler(tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerServicer):  # type: ignore[misc]
    def __init__(self, model: str, dtype: str) -> None:
        self._model, self._dtype = model, dtype

    def HealthCheck(self, request: Any, context: Any) -> Any:
        return tokenspeed_scheduler_pb2.HealthCheckResponse(healthy=True)

    def GetModelInfo(self, request: Any, context: Any) -> Any:
        return tokenspeed_scheduler_pb2.GetModelInfoResponse(
            served_model_name=self._model,
            supports_vision=True,
            supports_multimodal=True,
            supported_modalities=[common_pb2.IMAGE],
            multimodal_encoder_dtype=self._dtype,
        )

    def GetLoads(self, request: Any, context: Any) -> Any:
        return tokenspeed_scheduler_pb2.GetLoadsResponse(
            dp_rank_count=1, loads=[tokenspeed_scheduler_pb2.SchedulerLoad()]
        )


class _Encoder(tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Encode(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return tokenspeed_encoder_pb2.EncodeResponse(accepted=True)


class StandIn:
    """Answers at every one of ``addresses`` ("10.0.0.5:10001", "[::1]:10001") under the model's name.

    ``requests`` are the Encode requests that came, whichever address they came to.
    """

    def __init__(self, addresses: Iterable[str], model: str, dtype: str = "float32") -> None:
        self._server = grpc.server(ThreadPoolExecutor(8), options=OPTIONS)
        tokenspeed_scheduler_pb2_grpc.add_TokenSpeedSchedulerServicer_to_server(
            _Scheduler(model, dtype), self._server
        )
        self._encoder = _Encoder()
        tokenspeed_encoder_pb2_grpc.add_TokenSpeedEncoderServicer_to_server(self._encoder, self._server)
        for address in addresses:
            self._server.add_insecure_port(address)
        self._server.start()

    @property
    def requests(self) -> list[Any]:
        return self._encoder.requests

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait(5)
