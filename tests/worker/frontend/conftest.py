"""A frontend with a real gRPC client before it and a stand-in for rank 0 behind its sockets."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import zmq.asyncio
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_encoder_pb2 as encoder_pb2
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc as encoder_grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as scheduler_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as scheduler_grpc

from encodepool_worker.frontend.app import Frontend
from encodepool_worker.frontend.model import read_model
from encodepool_worker.settings import Settings
from encodepool_worker.wire import intake
from encodepool_worker.wire.bootstrap import RankRegistration, encode_registration

CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "text_config": {"vocab_size": 1000, "max_position_embeddings": 4096, "dtype": "float32"},
    "vision_config": {
        "model_type": "qwen3_vl",
        "hidden_size": 64,
        "out_hidden_size": 256,
        "num_heads": 4,
        "depth": 4,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "deepstack_visual_indexes": [0, 1, 2],
    },
}
PREPROCESSOR = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
PATCH_WIDTH = 1536


class Rank0:
    """The other end of the sockets: keeps what it was sent, answers by ``policy``, reports ``facts``.

    ``policy(message)`` gives the messages to send back; the default admits and returns the credit.
    """

    def __init__(self, run_dir: Path, receive_backlog: int = 1000) -> None:
        context = zmq.asyncio.Context.instance()
        self._intake = context.socket(zmq.PULL)
        self._intake.setsockopt(zmq.RCVHWM, receive_backlog)
        self._intake.bind(f"ipc://{run_dir / intake.INTAKE_SOCKET}")
        self._back = context.socket(zmq.PUSH)
        self._back.bind(f"ipc://{run_dir / intake.BACK_SOCKET}")
        self.received: list[tuple[intake.Message, list[bytes]]] = []
        self.policy: Callable[[intake.Message], list[intake.Message]] = self.admit_and_credit
        self.facts: dict[str, Any] = {"routed": True}
        self.facts |= {"queue_items": 0, "queue_cost": 0}
        self.silent = False
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._report())]

    @staticmethod
    def admit_and_credit(message: intake.Message) -> list[intake.Message]:
        if isinstance(message, intake.Submit):
            return [
                intake.Admitted(seq=message.seq),
                intake.Credit(seq=message.seq),
            ]
        return [intake.Drained()] if isinstance(message, intake.Drain) else []

    @staticmethod
    def admit(message: intake.Message) -> list[intake.Message]:
        """Admits and keeps the pixels."""
        if isinstance(message, intake.Submit):
            return [intake.Admitted(seq=message.seq)]
        return [intake.Drained()] if isinstance(message, intake.Drain) else []

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message, _ in self.received if isinstance(message, kind)]

    @property
    def refused_rooms(self) -> list[int]:
        return [message.room for message in self.of(intake.Refuse)]

    async def send(self, *messages: intake.Message) -> None:
        if messages:
            await self._back.send(intake.encode_back(messages))

    async def report(self, **facts: Any) -> None:
        self.facts |= facts
        await self.send(intake.State(turn_s=time.monotonic(), **self.facts))

    async def _receive(self) -> None:
        while True:
            message, payloads = intake.decode(await self._intake.recv_multipart())
            self.received.append((message, [bytes(payload) for payload in payloads]))
            await self.send(*self.policy(message))

    async def _report(self) -> None:
        while True:
            if not self.silent:
                await self.report()
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._intake.close(linger=0)
        self._back.close(linger=0)


class World:
    """One running frontend with ``rank0`` behind it, and ``encoder`` and ``scheduler`` stubs before it."""

    def __init__(self, frontend: Frontend, rank0: Rank0, ports: Any, http: aiohttp.ClientSession) -> None:
        self.frontend = frontend
        self.rank0 = rank0
        self.ports = ports
        self._http = http
        self.stop = asyncio.Event()
        self.running = asyncio.create_task(frontend.run(self.stop))
        self.channel = self.connect()
        self.encoder = encoder_grpc.TokenSpeedEncoderStub(self.channel)
        self.scheduler = scheduler_grpc.TokenSpeedSchedulerStub(self.channel)

    def connect(self) -> grpc.aio.Channel:
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.ports.grpc}", options=options)

    async def register(self) -> None:
        body = encode_registration(RankRegistration(0, "127.0.0.1", 5000, incarnation=0))
        async with self._http.put(f"http://127.0.0.1:{self.ports.bootstrap}/route", data=body) as answer:
            assert answer.status == 200

    async def probe(self, path: str) -> tuple[int, str]:
        async with self._http.get(f"http://127.0.0.1:{self.ports.metrics}{path}") as answer:
            return answer.status, await answer.text()

    async def metric(self, sample: str) -> float | None:
        _, text = await self.probe("/metrics")
        found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == sample]
        return float(found[0]) if found else None

    async def until(
        self, condition: Callable[[], Any], what: str = "the condition", timeout_s: float = 10
    ) -> Any:
        """The first true value of ``condition()`` (which may be a coroutine function)."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            value = condition()
            value = await value if asyncio.iscoroutine(value) else value
            if value:
                return value
            assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s} s"
            await asyncio.sleep(0.01)

    async def become_ready(self) -> None:
        await self.register()

        async def ready() -> bool:
            return (await self.probe("/readyz"))[0] == 200

        await self.until(ready, "readiness")

    async def refusal(self, request: Any, timeout: float | None = None) -> tuple[str, str]:
        """Code and text of a call that must fail."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.encoder.Encode(request, timeout=timeout)
        return error.value.code().name, error.value.details()


def tensor(shape: tuple[int, ...], dtype: str, payload: bytes | None = None, **more: Any) -> Any:
    if payload is not None:
        more["inline"] = payload
    return scheduler_pb2.TensorData(shape=shape, dtype=dtype, **more)


@pytest.fixture(scope="session")
def clock() -> Callable[[], float]:
    """Monotonic seconds."""
    return time.monotonic


@pytest.fixture(scope="session")
def encode_request() -> Callable[..., Any]:
    """``encode_request(room, h, w)``: what the gateway sends for an image of ``h * w`` patches."""

    def build(
        room: int = 7, h: int = 4, w: int = 4, request_id: str = "encode-1", pixels: bytes | None = None
    ) -> Any:
        n = h * w
        pixels = bytes(4 * n * PATCH_WIDTH) if pixels is None else pixels
        grid = b"".join(value.to_bytes(8, "little") for value in (1, h, w))
        item = scheduler_pb2.MultimodalItem(
            modality=common_pb2.IMAGE,
            content_hash=bytes(32),
            encoder_input=tensor((n, PATCH_WIDTH), "float32", pixels),
            model_specific_tensors={
                "image_grid_thw": tensor((1, 3), "int64", grid),
                "patches_per_image": tensor((1,), "int64", n.to_bytes(8, "little")),
            },
            placeholders=[scheduler_pb2.PlaceholderRange(offset=7, length=n // 4)],
            placeholder_token_id=151655,
        )
        return encoder_pb2.EncodeRequest(
            request_id=request_id,
            mm_inputs=scheduler_pb2.MultimodalInputs(items=[item]),
            items=[encoder_pb2.EncodeItemAssignment(bootstrap_room=room)],
        )

    return build


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder as far as the frontend looks at it."""
    folder = tmp_path_factory.mktemp("model") / "tiny-qwen3-vl"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


@pytest.fixture(scope="session")
def rank0_at() -> Callable[..., Any]:
    """``async with rank0_at(run_dir, bootstrap_port, metrics_port)``: stands in for a frontend process.

    Waits until that frontend is ready.
    """

    @asynccontextmanager
    async def serve(run_dir: Path, bootstrap_port: int, metrics_port: int) -> AsyncIterator[Rank0]:
        rank0 = Rank0(run_dir)
        body = encode_registration(RankRegistration(0, "127.0.0.1", 5000, incarnation=0))
        deadline_s = time.monotonic() + 30
        try:
            async with aiohttp.ClientSession() as http:
                while True:
                    try:
                        await http.put(f"http://127.0.0.1:{bootstrap_port}/route", data=body)
                        async with http.get(f"http://127.0.0.1:{metrics_port}/readyz") as answer:
                            if answer.status == 200:
                                break
                    except aiohttp.ClientConnectorError:
                        pass
                    assert time.monotonic() < deadline_s, "the frontend did not become ready in 30 s"
                    await asyncio.sleep(0.05)
            yield rank0
        finally:
            await rank0.close()

    return serve


@pytest.fixture
def world(bare_model: Path, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Any]:
    """``async with world(max_pixel_mib=...) as w``: a frontend in this process, made ready first."""

    @asynccontextmanager
    async def open_world(*, ready: bool = True, **flags: Any) -> AsyncIterator[World]:
        known = {"model": str(bare_model), "grpc_port": 0, "metrics_port": 0, "run_dir": str(tmp_path)}
        settings = Settings(**(known | {"bootstrap_port": free_port(), "drain_seconds": 5.0} | flags))
        frontend = Frontend(settings, read_model(settings))
        ports = await frontend.start()
        rank0 = Rank0(tmp_path)
        async with aiohttp.ClientSession() as http:
            w = World(frontend, rank0, ports, http)
            try:
                if ready:
                    await w.become_ready()
                yield w
            finally:
                w.stop.set()
                await asyncio.wait_for(w.running, 20)
                await w.channel.close()
                await rank0.close()

    return open_world
