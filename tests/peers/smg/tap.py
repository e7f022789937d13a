"""A gRPC pass-through: the gateway talks to the tap, the tap to the worker, and keeps what Encode carried."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from smg_grpc_proto.generated import tokenspeed_encoder_pb2

ENCODE = "/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode"
MAX_MESSAGE = 256 << 20
TIMEOUT_S = 60.0

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
]


class Tap(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Stands before the worker at ``netloc``; ``requests`` are the Encode requests, room -> request."""

    def __init__(self, netloc: str) -> None:
        self.requests: dict[int, Any] = {}
        self._channel = grpc.insecure_channel(netloc, options=OPTIONS)
        self._server = grpc.server(ThreadPoolExecutor(8), handlers=[self], options=OPTIONS)
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: Any) -> Any:
        """Every method that takes one message and gives one; the gateway needs no other."""
        method: str = details.method
        if method.endswith("/SubscribeKvEvents"):
            return None
        return grpc.unary_unary_rpc_method_handler(self._forward(method))

    def _forward(self, method: str) -> Callable[[bytes, Any], bytes]:
        call = self._channel.unary_unary(method)

        def forward(message: bytes, context: Any) -> bytes:
            if method == ENCODE:
                request = tokenspeed_encoder_pb2.EncodeRequest.FromString(message)
                for item in request.items:
                    self.requests[item.bootstrap_room] = request
            try:
                answer: bytes = call(message, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            return answer

        return forward

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait(5)
        self._channel.close()
