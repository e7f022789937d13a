"""Prefill and decode for the gateway: TokenSpeed's real receivers, and canned words instead of a model.

Prefill opens a real receiver for every image that the gateway says an encode worker has, asks for the
rows, and answers when all of them have arrived. Decode answers at once. What the language model would
do with the rows is left out; everything before it is TokenSpeed's own code.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import struct_pb2
from smg_grpc_proto.generated import (
    common_pb2,
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
)
from tokenizers import Tokenizer

from ..tokenspeed.prefill import PrefillHost

THREADS = 64
"""Of each server: more requests than any test has in flight, since each waits in a thread."""

MAX_MESSAGE = 256 << 20
REPLY = "a picture"


class Receiving:
    """Real receivers for many requests at once, and a record of every image.

    ``records`` has one entry an image: ``request_id``, ``room``, ``bootstrap`` (its encode worker),
    ``asked_at`` (monotonic), ``status``, ``seconds``, ``reason``, ``content_hash``, and the digests
    ``main`` and ``deepstack``.
    """

    def __init__(
        self, hidden: int, levels: int, dtype: str, timeout_s: float, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._layout: dict[str, Any] = {"hidden": hidden, "levels": levels, "dtype": dtype}
        self._timeout_s = timeout_s
        self._tell = tell
        self._host = PrefillHost()
        self._host.info()  # builds the one rank before the first request
        # As in TokenSpeed's engine, receivers are opened and closed one at a time.
        self._lock = threading.Lock()
        self.records: list[dict[str, Any]] = []

    def receive(self, request: Any) -> str | None:
        """All images of one Generate request; why it cannot go on, None when every row is here."""
        entries = list(request.encode_bootstrap_info.items)
        if not entries and request.mm_inputs.items:
            record = {"request_id": request.request_id, "bootstrap": None, "asked_at": time.monotonic()}
            self._keep([record | {"status": "Pixels"}])
            return "the pixels came to prefill, which has no vision tower"
        records = [self._ask(request, entry) for entry in entries]
        deadline = time.monotonic() + self._timeout_s
        for record in records:
            if record["status"] == "Asked":
                self._conclude(record, deadline)
        self._keep(records)
        bad = next((record for record in records if record["status"] != "Success"), None)
        return bad and f"room {bad['room']} of {bad['bootstrap']}: {bad['status']} {bad['reason'] or ''}"

    def _keep(self, records: list[dict[str, Any]]) -> None:
        self.records += records
        for record in records:
            self._tell(record)

    def _ask(self, request: Any, entry: Any) -> dict[str, Any]:
        item = request.mm_inputs.items[entry.item_index]
        tokens = sum(place.length for place in item.placeholders)
        bootstrap = f"{entry.bootstrap_host}:{entry.bootstrap_port}"
        record = {
            "request_id": request.request_id,
            "room": entry.bootstrap_room,
            "bootstrap": bootstrap,
            "index": entry.item_index,
            "content_hash": item.content_hash.hex(),
            "asked_at": time.monotonic(),
            "status": "Asked",
            "seconds": 0.0,
            "reason": None,
        }
        with self._lock:
            asked = self._host.ask(bootstrap, entry.bootstrap_room, tokens, **self._layout)
        if asked["refused"] is not None:
            record |= {"status": "Refused", "reason": asked["refused"]}
        return record

    def _conclude(self, record: dict[str, Any], deadline: float) -> None:
        room = record["room"]
        verdict = self._host.verdict(room, max(0.0, deadline - time.monotonic()))
        seconds = (verdict["at"] or time.monotonic()) - record["asked_at"]
        record |= {"status": verdict["status"], "reason": verdict["reason"], "seconds": seconds}
        with self._lock:
            if verdict["status"] == "Success":
                record |= self._host.digest(room)
            self._host.forget(room)


class Scheduler(tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerServicer):  # type: ignore[misc]
    """One role of a TokenSpeed server, as far as the gateway asks for it."""

    def __init__(self, role: str, model: Path, served_name: str, receiving: Receiving | None) -> None:
        self._role, self._model, self._served_name = role, model, served_name
        self._config = json.loads((model / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._vocabulary = tokenizer.get_vocab_size()
        self._end = tokenizer.token_to_id("<|im_end|>")
        self._reply = tokenizer.encode(REPLY, add_special_tokens=False).ids
        self._receiving = receiving

    def HealthCheck(self, request: Any, context: Any) -> Any:
        return tokenspeed_scheduler_pb2.HealthCheckResponse(healthy=True, message=self._role)

    def GetModelInfo(self, request: Any, context: Any) -> Any:
        return tokenspeed_scheduler_pb2.GetModelInfoResponse(
            model_path=str(self._model),
            tokenizer_path=str(self._model),
            served_model_name=self._served_name,
            model_type=self._config["model_type"],
            architectures=self._config["architectures"],
            max_context_length=32768,
            max_req_input_len=32768,
            vocab_size=self._vocabulary,
            eos_token_ids=[self._end],
            supports_vision=True,
            supports_multimodal=True,
            supported_modalities=[common_pb2.IMAGE],
        )

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        arguments = struct_pb2.Struct()
        arguments.update({"disaggregation_mode": self._role, "tensor_parallel_size": 1})
        return tokenspeed_scheduler_pb2.GetServerInfoResponse(
            server_args=arguments, max_total_num_tokens=100_000
        )

    def GetLoads(self, request: Any, context: Any) -> Any:
        load = tokenspeed_scheduler_pb2.SchedulerLoad(max_total_num_tokens=100_000, max_running_requests=256)
        return tokenspeed_scheduler_pb2.GetLoadsResponse(dp_rank_count=1, loads=[load])

    def Abort(self, request: Any, context: Any) -> Any:
        return tokenspeed_scheduler_pb2.AbortResponse(success=True)

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        if self._receiving is not None:
            problem = self._receiving.receive(request)
            if problem is not None:
                # The gateway repeats neither Generate nor Encode after this code.
                context.abort(grpc.StatusCode.ABORTED, problem)
        tokens = self._reply[:1] if self._role == "prefill" else self._reply
        prompt = len(request.tokenized.input_ids)
        if request.stream:
            for count, token in enumerate(tokens, 1):
                chunk = tokenspeed_scheduler_pb2.GenerateStreamChunk(
                    token_ids=[token], prompt_tokens=prompt, completion_tokens=count
                )
                yield tokenspeed_scheduler_pb2.GenerateResponse(request_id=request.request_id, chunk=chunk)
        done = tokenspeed_scheduler_pb2.GenerateComplete(
            output_ids=tokens,
            finish_reason="stop",
            prompt_tokens=prompt,
            completion_tokens=len(tokens),
            matched_token_id=self._end,
        )
        yield tokenspeed_scheduler_pb2.GenerateResponse(request_id=request.request_id, complete=done)


class LanguageHost:
    """Prefill and decode servers in this process, or one of them: role -> port, 0 for any free one.

    ``tell`` is called with the record of each image once it has ended.
    """

    def __init__(
        self,
        model: str,
        served_name: str,
        timeout_s: float = 30.0,
        host: str = "127.0.0.1",
        ports: Mapping[str, int] | None = None,
        tell: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        folder = Path(model)
        config = json.loads((folder / "config.json").read_text())
        vision = config["vision_config"]
        layout = (
            vision["out_hidden_size"],
            len(vision.get("deepstack_visual_indexes", ())),
            f"torch.{config['dtype']}",
        )
        self._servers = []
        self._urls: dict[str, str] = {}
        self._receiving: Receiving | None = None
        for role, port in (ports or {"prefill": 0, "decode": 0}).items():
            receiving = Receiving(*layout, timeout_s, tell) if role == "prefill" else None
            self._receiving = receiving or self._receiving
            server = grpc.server(
                ThreadPoolExecutor(THREADS),
                options=[("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.so_reuseport", 0)],
            )
            tokenspeed_scheduler_pb2_grpc.add_TokenSpeedSchedulerServicer_to_server(
                Scheduler(role, folder, served_name, receiving), server
            )
            # grpcio raises when it cannot bind.
            place = f"[{host}]" if ":" in host else host
            bound = server.add_insecure_port(f"{place}:{port}")
            server.start()
            self._servers.append(server)
            self._urls[role] = f"grpc://{place}:{bound}"

    def workers(self) -> list[dict[str, Any]]:
        """The servers as entries of the gateway's manifest.

        Nobody meets at a KV bootstrap port here, but prefill must name one: its gRPC port accepts the
        connection with which the gateway tries it.
        """
        entries = []
        for role, url in self._urls.items():
            entry: dict[str, Any] = {"id": role, "url": url, "worker_type": role}
            if role == "prefill":
                entry["bootstrap_port"] = int(url.rpartition(":")[2])
            entries.append(entry)
        return entries

    def records(self, since: int = 0) -> list[dict[str, Any]]:
        """What happened to each image from number ``since`` on, in the order in which it ended."""
        return self._receiving.records[since:] if self._receiving is not None else []

    def count(self) -> int:
        return len(self.records())
