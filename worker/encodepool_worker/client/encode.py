"""Encode image files with a pool: prepare, choose an endpoint, announce memory, call, receive."""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ClientError, ImageError, WorkerError
from ..towers.spec import ImageSpec
from ..transport.choose import make_engine
from ..types import MAX_MESSAGE_BYTES, Grid, Modality
from ..wire.encode import build_encode
from .endpoints import (
    Endpoint,
    EndpointUnavailable,
    explicit_endpoint,
    in_order_of_choice,
    read_endpoints,
    ready_endpoints,
)
from .facts import ModelFacts, facts_from_folder, facts_from_server
from .numbers import STORED, from_float32, to_float32
from .preprocess import Prepared, prepare_image
from .receiver import Announced, PrefillRank, Rows, local_host_towards, shard_of
from .routes import encode_tp_size
from .rpc import EncodeStub

T = TypeVar("T")

ASK_S = 10.0
"""For a worker to say what it is."""

ROOM_LIMIT = 2**63 - 1
"""Rooms are drawn as a gateway draws them: uniformly from [0, 2**63 - 1)."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """``transfer_backend`` and ``model_dir`` are needed only where the worker does not tell.

    ``host`` is this machine's address as the workers see it (default: that of the route there).
    ``receiving_ranks`` makes the client receive like a tensor-parallel prefill of that size, each
    rank its share of the rows (default: as many as the encode group has).
    """

    transfer_backend: str = ""
    model_dir: str = ""
    host: str = ""
    timeout_s: float = 60.0
    receive_bytes: int = 1 << 30
    concurrency: int = 4
    receiving_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """One image's rows: main ``[tokens, hidden]``, deepstack ``[tokens, levels * hidden]`` or None.

    In ``dtype``; bfloat16 as uint16 bits. ``grid`` counts patches; ``shown`` is the picture as it
    was cut into them. ``encode_s`` runs from the announcement to the verdict, ``total_s`` from
    opening the file.
    """

    path: str
    endpoint: Endpoint
    room: int
    dtype: str
    main: npt.NDArray[Any]
    deepstack: npt.NDArray[Any] | None
    grid: Grid
    merge_size: int
    shown: npt.NDArray[np.uint8]
    encode_s: float
    total_s: float

    @property
    def n_tokens(self) -> int:
        return int(self.main.shape[0])

    @property
    def nbytes(self) -> int:
        return self.main.nbytes + (0 if self.deepstack is None else self.deepstack.nbytes)

    @property
    def main_float32(self) -> npt.NDArray[np.float32]:
        return to_float32(self.main, self.dtype)

    @property
    def deepstack_float32(self) -> npt.NDArray[np.float32] | None:
        return None if self.deepstack is None else to_float32(self.deepstack, self.dtype)


@dataclass(frozen=True, slots=True)
class _Worker:
    """An endpoint that has been spoken to."""

    stub: EncodeStub
    facts: ModelFacts
    encode_tp: int


@dataclass(slots=True)
class _State:
    """What a client holds open, all under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    stubs: dict[str, EncodeStub] = field(default_factory=dict)
    workers: dict[Hashable, _Worker] = field(default_factory=dict)
    ranks: dict[tuple[str, str, int], list[PrefillRank]] = field(default_factory=dict)


class EncodeClient:
    """Sends images to a pool's encode workers and receives their rows. Safe from several threads.

    ``source`` is asked for the endpoints before each image, so that a changing list is followed;
    ``source_name`` is what messages call it. Close it after use, or use it in a ``with`` block.
    """

    def __init__(
        self, source: Callable[[], Sequence[Endpoint]], source_name: str, options: ClientOptions | None = None
    ) -> None:
        self.options = options or ClientOptions()
        self._source = source
        self._source_name = source_name
        self._state = _State()

    @classmethod
    def from_list(cls, path: str | Path, options: ClientOptions | None = None) -> "EncodeClient":
        """A client of the pool whose ``endpoints.json`` this is."""
        return cls(lambda: read_endpoints(path), str(path), options)

    @classmethod
    def to_endpoint(
        cls, url: str, bootstrap_host: str, bootstrap_port: int, options: ClientOptions | None = None
    ) -> "EncodeClient":
        """A client of one worker, named by hand."""
        endpoint = explicit_endpoint(url, bootstrap_host, bootstrap_port)
        return cls(lambda: [endpoint], url, options)

    def encode(self, path: str | Path) -> Encoded:
        """One image's rows, from the first endpoint in its order of choice that takes it.

        Raises ImageError, ClientError.
        """
        began_s = time.monotonic()
        candidates = ready_endpoints(self._source(), self._source_name)
        # How images are prepared is the same in the whole pool: whichever worker answers can tell.
        images = self._first_that_answers(candidates, lambda endpoint: self._worker(endpoint).facts.images)
        prepared = prepare_image(path, images)
        content = _content_hash(prepared)

        def encode_at(endpoint: Endpoint) -> Encoded:
            return self._encode_at(endpoint, str(path), prepared, images, content, began_s)

        return self._first_that_answers(in_order_of_choice(candidates, content), encode_at)

    def encode_all(self, paths: Iterable[str | Path]) -> Iterator[tuple[int, Encoded | WorkerError]]:
        """All images, some at once; (position, result or error) in the order in which they are done."""
        todo = iter(enumerate(paths))
        with ThreadPoolExecutor(self.options.concurrency, thread_name_prefix="encode") as pool:
            running: dict[Future[Encoded], int] = {}
            while True:
                while len(running) < self.options.concurrency and (item := next(todo, None)) is not None:
                    running[pool.submit(self.encode, item[1])] = item[0]
                if not running:
                    return
                try:
                    finished = wait(running, return_when=FIRST_COMPLETED).done
                except KeyboardInterrupt:
                    self.close()  # what is under way ends at once
                    raise
                for done in finished:
                    index = running.pop(done)
                    try:
                        outcome: Encoded | WorkerError = done.result()
                    except WorkerError as failed:
                        outcome = failed
                    yield index, outcome

    def close(self) -> None:
        """End all connections; what is under way fails with a ClientError. Idempotent."""
        with self._state.lock:
            self._state.closed = True
            stubs, ranks = list(self._state.stubs.values()), list(self._state.ranks.values())
            self._state.stubs.clear()
            self._state.ranks.clear()
        with ExitStack() as cleanup:
            for stub in stubs:
                cleanup.callback(stub.close)
            for group in ranks:
                for rank in group:
                    cleanup.callback(rank.close)

    def __enter__(self) -> "EncodeClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _first_that_answers(self, endpoints: Sequence[Endpoint], ask: Callable[[Endpoint], T]) -> T:
        """``ask``'s answer from the first endpoint that is there. Raises ClientError."""
        refusals: list[str] = []
        for endpoint in endpoints:
            try:
                return ask(endpoint)
            except EndpointUnavailable as unavailable:
                refusals.append(str(unavailable))
                self._forget(endpoint)
            except ClientError:
                self._forget(endpoint)
                raise
        raise ClientError("; ".join(refusals))

    def _encode_at(
        self,
        endpoint: Endpoint,
        path: str,
        prepared: Prepared,
        images: ImageSpec,
        content: bytes,
        began_s: float,
    ) -> Encoded:
        worker = self._worker(endpoint)
        facts = worker.facts
        if facts.images != images:
            raise ClientError(
                f"{worker.stub.label} wants its images prepared otherwise than another worker of "
                f"{self._source_name}: do they run the same model?"
            )
        _check_size(path, prepared, facts.pixel_dtype)
        address = endpoint.bootstrap
        layout = facts.spec.layout(facts.spec.token_count(prepared.grid))
        ranks = self._ranks(endpoint, worker)
        room = secrets.randbelow(ROOM_LIMIT)
        request = build_encode(
            request_id=f"encode-{secrets.token_hex(16)}",
            room=room,
            modality=Modality.IMAGE,
            pixel_dtype=facts.pixel_dtype,
            pixel_shape=(prepared.grid.patches, facts.spec.patch_width),
            pixels=from_float32(prepared.pixels, facts.pixel_dtype).tobytes(),
            grids=(prepared.grid,),
            n_tokens=layout.n_tokens,
            placeholder_token_id=facts.spec.image_token_id,
            content_hash=content,
        )
        announced_s = time.monotonic()
        deadline_s = announced_s + self.options.timeout_s
        with ExitStack() as cleanup:
            offers: list[tuple[PrefillRank, Announced]] = []
            for rank in ranks:
                shard = shard_of(layout.n_tokens, rank.rank, rank.tp_size)
                offer = rank.announce(address, room, layout, shard, self.options.timeout_s)
                cleanup.callback(rank.give_up, offer)  # no effect once its verdict has been taken
                offers.append((rank, offer))
            worker.stub.encode(request, max(0.001, deadline_s - time.monotonic()))
            parts = [rank.wait(offer, max(0.0, deadline_s - time.monotonic())) for rank, offer in offers]
        done_s = time.monotonic()
        rows = _joined(parts)
        return Encoded(
            path=path,
            endpoint=endpoint,
            room=room,
            dtype=layout.dtype,
            main=rows.main,
            deepstack=rows.deepstack,
            grid=prepared.grid,
            merge_size=facts.spec.merge_size,
            shown=prepared.shown,
            encode_s=done_s - announced_s,
            total_s=done_s - began_s,
        )

    def _worker(self, endpoint: Endpoint) -> _Worker:
        """The worker there, asked about itself the first time. Raises EndpointUnavailable, ClientError."""
        with self._state.lock:
            self._check_open()
            known = self._state.workers.get(endpoint.key)
            if known is not None:
                return known
            stub = self._state.stubs.get(endpoint.target)
            if stub is None:
                stub = EncodeStub(endpoint.target, f"encode worker {endpoint.label}")
                self._state.stubs[endpoint.target] = stub
        answers = stub.ask(min(ASK_S, self.options.timeout_s))
        facts = facts_from_server(answers.scheduler_info, answers.encoder_dtype, stub.label)
        if facts is None:
            if not self.options.model_dir:
                raise ClientError(
                    f"{stub.label} does not tell the shape of its tower: name the model's folder with --model"
                )
            facts = facts_from_folder(self.options.model_dir, answers.encoder_dtype)
        wanted, told = self.options.transfer_backend, facts.transfer_backend
        if wanted and told and wanted != told:
            raise ClientError(
                f"{stub.label} sends its rows with transfer backend {told}, not {wanted}: "
                f"leave --transfer-backend out, or name {told}"
            )
        worker = _Worker(stub, facts, encode_tp_size(endpoint.bootstrap))
        with self._state.lock:
            self._state.workers[endpoint.key] = worker
        return worker

    def _forget(self, endpoint: Endpoint) -> None:
        """Ask again next time: another worker may answer there by then."""
        with self._state.lock:
            self._state.workers.pop(endpoint.key, None)

    def _ranks(self, endpoint: Endpoint, worker: _Worker) -> list[PrefillRank]:
        backend = self.options.transfer_backend or worker.facts.transfer_backend
        if not backend:
            raise ClientError(
                f"{worker.stub.label} does not tell its transfer backend: name it with --transfer-backend"
            )
        host = self.options.host or local_host_towards(*endpoint.bootstrap)
        tp_size = self.options.receiving_ranks or worker.encode_tp
        with self._state.lock:
            self._check_open()
            ranks = self._state.ranks.setdefault((host, backend, tp_size), [])
            while len(ranks) < tp_size:
                ranks.append(
                    PrefillRank(
                        make_engine(backend, host, protocol=worker.facts.transfer_protocol),
                        host,
                        rank=len(ranks),
                        tp_size=tp_size,
                        arena_bytes=max(1, self.options.receive_bytes // tp_size),
                    )
                )
            return list(ranks)

    def _check_open(self) -> None:
        if self._state.closed:
            raise ClientError("the client is closed")


def _check_size(path: str, prepared: Prepared, dtype: str) -> None:
    """Raises ImageError for pixels that no worker's message limit allows."""
    nbytes = prepared.pixels.size * STORED[dtype].itemsize
    if nbytes > MAX_MESSAGE_BYTES:
        height, width = prepared.shown.shape[:2]
        raise ImageError(
            f"{path} is too large: its {width}x{height} pixels are {nbytes:,} bytes in {dtype}, and a "
            f"request may have {MAX_MESSAGE_BYTES:,}; scale the image down"
        )


def _content_hash(prepared: Prepared) -> bytes:
    """32 bytes that are the same whenever the same pixels are sent."""
    grid = prepared.grid
    digest = hashlib.blake2b(f"{grid.t}x{grid.h}x{grid.w}".encode(), digest_size=32)
    digest.update(prepared.pixels.data)
    return digest.digest()


def _joined(parts: Sequence[Rows]) -> Rows:
    """The ranks' shares, in rank order, as one item."""
    if len(parts) == 1:
        return parts[0]
    deepstack = [part.deepstack for part in parts if part.deepstack is not None]
    return Rows(
        np.concatenate([part.main for part in parts]), np.concatenate(deepstack) if deepstack else None
    )
