"""The reference's real encode side and receivers, each in a process of its own, as benchmarks ask for them.

    python -m benchmarks.reference encode|prefill|loop|gateway|sink '{"arena_bytes": 1048576, ...}'

``encode`` is a real manager with real senders, ``prefill`` real receivers. ``loop`` is the reference's own
encode loop with its worker, scheduler, executor, cache and manager, around a tower that computes nothing;
``gateway`` hands it items as the reference's frontend does; ``sink`` takes them from there and does nothing
more. What only a GPU can do is absent: see
``tests.peers.tokenspeed.stubs``.

The first line out says that it is up. Each line in is [method, parameters], each line out its answer.
Ends with the process that started it.
"""

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.no_tower import MERGE, spec_of
from benchmarks.peer import HOST
from tests.peers.tokenspeed import stubs

PR_SET_PDEATHSIG = 1
PATIENCE_S = 60.0
KEY = bytes(16)
CACHE_BYTES = 256 << 20
"""As large as the store of the rank it is measured against."""


def plain(group: Any) -> Any:
    """Its manager without what the tests' fixture looks on with, which costs it time."""
    [manager] = group.managers
    del manager.update_status
    return manager


class Encode:
    """Rows that lie ready in registered memory, and a sender for each room."""

    def __init__(self, arena_bytes: int) -> None:
        from tests.peers.tokenspeed.encode import EncodeGroup
        from tokenspeed.runtime.epd.mooncake.sender import MooncakeEmbeddingSender

        self._sender = MooncakeEmbeddingSender
        self._group = EncodeGroup(1, arena_bytes)
        self._group.arena.memory[:] = 1  # every page is there before anything is timed
        self._manager = plain(self._group)
        self.facts = {"address": self._group.address}

    def park(self, rooms: Sequence[int], n_tokens: int, hidden: int) -> None:
        """Queue the same float32 rows for each room; its receiver has not spoken yet."""
        for room in rooms:
            sender = self._sender(self._manager, self._group.address, room)
            sender.send(
                src_embedding_ptr=self._group.arena.address,
                n_tokens=n_tokens,
                hidden=hidden,
                dtype="torch.float32",
                nbytes=n_tokens * hidden * 4,
            )


class Prefill:
    """One rank of receivers."""

    def __init__(self, arena_bytes: int) -> None:
        from tests.peers.tokenspeed.prefill import PrefillRank
        from tokenspeed.runtime.epd.mooncake.receiver import MooncakeEmbeddingReceiver

        self._receiver = MooncakeEmbeddingReceiver
        self._rank = PrefillRank(1, 0, arena_bytes)
        self._rank.arena.memory[:] = 1
        self.facts: dict[str, Any] = {}

    def receive(self, address: str, rooms: Sequence[int], n_tokens: int, hidden: int) -> list[float]:
        """Ask for all rooms at once. Seconds from first frame to last Success, then those of each room."""
        nbytes = n_tokens * hidden * 4
        receivers = [self._receiver(self._rank.manager, address, room) for room in rooms]
        asked_s: list[float] = []
        for index, receiver in enumerate(receivers):
            asked_s.append(time.monotonic())
            receiver.pre_alloc(
                dst_embedding_ptr=self._rank.arena.address + index * nbytes,
                n_tokens=n_tokens,
                hidden=hidden,
                dtype="torch.float32",
                span=n_tokens,
            )
        ended_s: list[float] = []
        for room, receiver in zip(rooms, receivers, strict=True):
            verdict = self._rank.verdicts.wait(room, PATIENCE_S)
            if verdict["status"] != "Success":
                raise RuntimeError(f"room {room}: {verdict}")
            ended_s.append(verdict["at"])
            receiver.clear()
            self._rank.verdicts.forget(room)
        return [
            max(ended_s) - asked_s[0],
            *(end - start for start, end in zip(asked_s, ended_s, strict=True)),
        ]


class NoTowerModel:
    """A model whose encoder hands out rows that it has had all along, in the shape the executor asks for."""

    num_deepstack_embeddings = 0

    def __init__(self, hidden: int, max_rows: int) -> None:
        import torch

        self._rows = torch.ones(max_rows, hidden)

    def get_multimodal_encoder_specs(self) -> dict[Any, Any]:
        from tokenspeed.runtime.multimodal.inputs import Modality

        return {Modality.IMAGE: SimpleNamespace(fn=self._encode)}

    def _encode(self, items: Sequence[Any]) -> Any:
        return self._rows[: sum(len(item.feature) for item in items) // MERGE**2]


class NoEngine:
    """In the place of Mooncake: a write is done at once and moves nothing."""

    def register(self, ptr: int, nbytes: int) -> int:
        return 0

    def batch_transfer_sync(self, *_write: object) -> int:
        return 0


class Loop:
    """The reference's encode loop, given a worker whose tower computes nothing.

    Its own assembly cannot run here, for it builds a model on a CUDA device; everything that it would
    put together besides the model is what is put together here.
    """

    def __init__(self, endpoint: str, transport: str, hidden: int, max_rows: int) -> None:
        from tests.peers.tokenspeed.encode import EncodeGroup
        from tokenspeed.runtime.cache.embedding_cache import EmbeddingCache
        from tokenspeed.runtime.epd.encode_executor import DisaggEncodeExecutor
        from tokenspeed.runtime.epd.encode_scheduler import EncodeScheduler
        from tokenspeed.runtime.epd.encode_worker import EncodeWorker

        self._endpoint = endpoint
        manager = plain(EncodeGroup(1, 4096))
        if transport == "none":
            manager.engine = NoEngine()
        executor = DisaggEncodeExecutor(
            manager, NoTowerModel(hidden, max_rows), device="cpu", ring_bytes=max(4096, max_rows * hidden * 4)
        )
        self._worker = EncodeWorker(executor, EncodeScheduler(8192, 160), EmbeddingCache(CACHE_BYTES))
        self._port = manager.rank_port

    def run(self, answers: "Answers") -> None:
        """For ever."""
        from tokenspeed.runtime.epd import encode_loop

        model = SimpleNamespace(context_len=8192)
        encode_loop._build_encode_worker = lambda *_: (self._worker, model, None)
        encode_loop.mark_jit_compile_serving = lambda: None  # counts GPU kernels, of which there are none
        attn = SimpleNamespace(tp_rank=0, rank=0, tp_size=1, tp_group=[0])
        settings = SimpleNamespace(
            mapping=SimpleNamespace(attn=attn),
            attn_tp_size=1,
            max_num_seqs=160,
            chunked_prefill_size=8192,
        )
        ports = SimpleNamespace(scheduler_input_ipc_name=self._endpoint)
        pipe = SimpleNamespace(send=lambda _: answers.say({"port": self._port}))
        encode_loop.run_encode_loop(settings, ports, pipe, 0, 0)


class Gateway:
    """Hands items to the loop over its own channel; drives it as ``benchmarks.loop_overhead`` drives ours."""

    def __init__(self, endpoint: str, hidden: int) -> None:
        import zmq
        from benchmarks.rank import Rooms
        from tokenspeed.runtime.engine.io_struct import IpcSender
        from tokenspeed.runtime.epd.encode_worker import EncodeRequest
        from tokenspeed.runtime.multimodal.inputs import Modality, MultimodalDataItem
        from tokenspeed.runtime.utils import get_zmq_socket

        class Driver(Rooms):
            def __init__(self) -> None:
                super().__init__(spec_of(hidden))
                self._sender = IpcSender(get_zmq_socket(self._context, zmq.PUSH, endpoint, True))

            def connect(self, port: int) -> None:
                self._control.connect(f"tcp://{HOST}:{port}")

            def submit(self, room: int, key: bytes, pixels: Any, grid: tuple[int, int, int]) -> int:
                item = MultimodalDataItem(
                    modality=Modality.IMAGE,
                    hash=int.from_bytes(key[:8], "little") >> 1,
                    offsets=[(0, len(pixels) // MERGE**2 - 1)],
                    feature=pixels,
                )
                request = EncodeRequest(
                    request_id=f"request-{room}",
                    bootstrap_host=HOST,
                    bootstrap_port=1,
                    bootstrap_room=room,
                    items=[item],
                )
                self._sender.send_pyobj(request)
                return 0

        self._driver = Driver()
        self._cpu = Cpu()
        self.facts: dict[str, Any] = {}

    def connect(self, port: int) -> None:
        self._driver.connect(port)

    def us_per_item(self, n_tokens: int, batch: int) -> float:
        from benchmarks.loop_overhead import us_per_item

        return us_per_item(self._driver, n_tokens, batch, self._pixels(n_tokens))

    def hit_us(self, n_tokens: int, session: str, ptr: int, round_s: float) -> float:
        """Median of a hit: from the hand-over to the receiver's Success."""
        from benchmarks.cache_hit import hit
        from benchmarks.rank import NoPeer

        pixels, key = self._pixels(n_tokens), n_tokens.to_bytes(16, "little")
        peer = NoPeer(session, ptr)
        hit(self._driver, peer, key, pixels)  # the first is the one that fills the cache
        times: list[float] = []
        while sum(times) < round_s:
            times.append(hit(self._driver, peer, key, pixels))
        return 1e6 * statistics.median(times)

    def send(self, shape: Sequence[int], count: int) -> float:
        """So many items with pixels of that shape; CPU seconds of this process since the last call."""
        import torch

        pixels = torch.ones(*shape, dtype=torch.bfloat16)
        for _ in range(count):
            self._driver.submit(1, KEY, pixels, (1, 2, 2))
        return self._cpu.spent_s()

    def _pixels(self, n_tokens: int) -> Any:
        import torch

        return torch.from_numpy(self._driver.pixels(n_tokens).view("int16")).view(torch.bfloat16)


class Sink:
    """The loop's end of the channel."""

    def __init__(self, endpoint: str) -> None:
        import tokenspeed.runtime.epd.encode_loop  # noqa: F401 - the receiver knows the requests there are by now
        import zmq
        from tokenspeed.runtime.engine.io_struct import IpcReceiver
        from tokenspeed.runtime.utils import get_zmq_socket

        self._receiver = IpcReceiver(get_zmq_socket(zmq.Context(2), zmq.PULL, endpoint, False))
        self._cpu = Cpu()
        self.facts: dict[str, Any] = {}

    def take(self, count: int) -> float:
        """So many items; CPU seconds of this process since the last call."""
        for _ in range(count):
            assert self._receiver.recv_pyobj().items[0].feature.nbytes
        return self._cpu.spent_s()


class Cpu:
    """The processor time of this process."""

    def __init__(self) -> None:
        self._before_s = time.process_time()

    def spent_s(self) -> float:
        """Since the last call."""
        before_s, self._before_s = self._before_s, time.process_time()
        return self._before_s - before_s


KINDS = {"encode": Encode, "prefill": Prefill, "gateway": Gateway, "sink": Sink}


class Answers:
    """Standard output, kept for answers: whatever a library prints goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, value: object) -> None:
        print(json.dumps(value), file=self._out, flush=True)


def main(kind: str, parameters: str) -> None:
    # The loop reads no standard input, and may be stopped when its caller ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    answers = Answers()
    given = json.loads(parameters)
    stubs.install(HOST)
    import torch

    torch.set_num_threads(1)
    if kind == "loop":
        Loop(**given).run(answers)
    host = KINDS[kind](**given)
    answers.say(host.facts)
    for line in sys.stdin:
        method, wanted = json.loads(line)
        answers.say(getattr(host, method)(**wanted))
    os._exit(0)  # the reference's and Mooncake's threads never end by themselves


if __name__ == "__main__":
    main(*sys.argv[1:])
