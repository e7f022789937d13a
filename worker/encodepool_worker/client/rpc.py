"""The gRPC calls a client makes to an encode worker."""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from smg_grpc_proto.generated import (
    tokenspeed_encoder_pb2_grpc,
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
)

from ..errors import ClientError
from .endpoints import EndpointUnavailable

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # workers are on this machine or in this cluster
    ("grpc.max_send_message_length", -1),
]


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """What a worker says of itself. ``scheduler_info`` is empty where it tells nothing."""

    model: str
    encoder_dtype: str
    scheduler_info: dict[str, Any]


class EncodeStub:
    """One endpoint's calls. Safe from several threads."""

    def __init__(self, target: str, label: str) -> None:
        self.label = label
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._encoder = tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(self._channel)
        self._scheduler = tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(self._channel)

    def ask(self, timeout_s: float) -> ServerAnswers:
        """GetModelInfo and GetServerInfo. Raises EndpointUnavailable, ClientError."""
        try:
            model = self._scheduler.GetModelInfo(
                tokenspeed_scheduler_pb2.GetModelInfoRequest(), timeout=timeout_s
            )
        except grpc.RpcError as failed:
            raise self._error("GetModelInfo", failed) from failed
        info: dict[str, Any] = {}
        try:
            server = self._scheduler.GetServerInfo(
                tokenspeed_scheduler_pb2.GetServerInfoRequest(), timeout=timeout_s
            )
            info = json_format.MessageToDict(server.scheduler_info)
        except grpc.RpcError as failed:
            # Optional in the protocol: a gateway does without it as well.
            if failed.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise self._error("GetServerInfo", failed) from failed
        return ServerAnswers(model.served_model_name, model.multimodal_encoder_dtype, info)

    def encode(self, request: Any, timeout_s: float) -> None:
        """Returns once the worker has taken the item. Raises EndpointUnavailable, ClientError."""
        try:
            response = self._encoder.Encode(request, timeout=timeout_s)
        except grpc.RpcError as failed:
            raise self._error("Encode", failed) from failed
        if not response.accepted:
            raise ClientError(f"{self.label} did not accept the image; its log says why")

    def close(self) -> None:
        self._channel.close()

    def _error(self, call: str, failed: Any) -> ClientError:
        code, details = failed.code(), " ".join(str(failed.details() or "").split())
        if code is grpc.StatusCode.UNAVAILABLE:
            if details.startswith("failed to connect"):
                details = details.rsplit(": ", 1)[-1]  # gRPC names every layer that it went through
            return EndpointUnavailable(
                f"{self.label} cannot be reached for {call} ({details}): is the pool up?"
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
            # gRPC itself: the same code as a full worker, but no other time will do.
            return ClientError(
                f"{self.label} takes no request of this size ({details}): scale the image down"
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return EndpointUnavailable(f"{self.label} is full ({details}): try again, or raise the replicas")
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return ClientError(f"{self.label} refuses the image: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and call != "Encode":
            return EndpointUnavailable(f"{self.label} does not answer {call}: is the pool up?")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ClientError(f"{self.label} did not answer {call} in time: raise --timeout, or see its log")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ClientError(f"{self.label} has no {call}: is it an encode worker?")
        if code is grpc.StatusCode.CANCELLED:
            return ClientError(f"{call} at {self.label} was cancelled")
        return ClientError(f"{self.label} failed {call}: {code.name} {details}")
