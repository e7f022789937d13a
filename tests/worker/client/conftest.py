"""An encode side in this process: bootstrap server, control sockets, gRPC, writes over an engine.

Honest unless a test tells it otherwise. Written from the description of the wire, not from the
client, and without the tower: rows are random numbers seeded by the pixels.
"""

import hashlib
import json
import threading
import time
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import grpc
import numpy as np
import pytest
import zmq
from PIL import Image
from smg_grpc_proto.generated import tokenspeed_encoder_pb2 as enc_pb
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc as enc_grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as sch_pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as sch_grpc

from encodepool_worker.transport.tcp import TcpEngine

HOST = "127.0.0.1"
BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}


class EncodeSide:
    """``tp`` encode ranks of a made-up tower. Attributes that start with ``on_`` are faults."""

    def __init__(self, *, hidden=8, levels=2, dtype="float32", tp=1, tells=True):
        self.hidden, self.levels, self.dtype, self.tp, self.tells = hidden, levels, dtype, tp, tells
        self.registered = True
        self.on_encode = None  # (grpc status, details) instead of accepting
        self.on_ship = None  # called with (side, rank, room, info) instead of writing and confirming
        self.requests = []
        self.frames = []
        self.pixel_bytes = {}
        self._infos = {}  # (rank, room) -> {session: info}
        self._lock = threading.RLock()
        self._keep = []
        self._context = zmq.Context()
        self._pulls = [self._context.socket(zmq.PULL) for _ in range(tp)]
        self._ports = [pull.bind_to_random_port(f"tcp://{HOST}") for pull in self._pulls]
        self._status = {}
        self.engines = [TcpEngine(HOST) for _ in range(tp)]
        self._closing = threading.Event()
        self._http = ThreadingHTTPServer((HOST, 0), self._handler())
        self._grpc = grpc.server(futures.ThreadPoolExecutor(4))
        enc_grpc.add_TokenSpeedEncoderServicer_to_server(self._encoder(), self._grpc)
        sch_grpc.add_TokenSpeedSchedulerServicer_to_server(self._scheduler(), self._grpc)
        self.grpc_port = self._grpc.add_insecure_port(f"{HOST}:0")
        self._grpc.start()
        self._threads = [threading.Thread(target=self._http.serve_forever, args=(0.05,))]
        self._threads += [threading.Thread(target=self._listen, args=(rank,)) for rank in range(tp)]
        for thread in self._threads:
            thread.start()

    @property
    def bootstrap(self):
        return (HOST, self._http.server_address[1])

    @property
    def url(self):
        return f"grpc://{HOST}:{self.grpc_port}"

    def entry(self, group="0", **changes):
        """What endpoints.json says of it."""
        return {
            "id": f"ns/pool/{group}-1",
            "group": group,
            "incarnation": 1,
            "url": self.url,
            "host": HOST,
            "grpcPort": self.grpc_port,
            "bootstrapHost": HOST,
            "bootstrapPort": self.bootstrap[1],
            "tensorParallelSize": self.tp,
            "ready": True,
            "draining": False,
            "reason": "",
            "node": "",
            "zone": "",
            **changes,
        }

    def rows_of(self, pixels, n_tokens):
        """Rows [tokens, (1 + levels) * hidden] of some pixel bytes, in numpy's idea of the dtype."""
        seed = int.from_bytes(hashlib.sha256(pixels).digest()[:8], "big")
        values = np.random.default_rng(seed).normal(size=(n_tokens, self.hidden * (1 + self.levels)))
        if self.dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self.dtype)

    def offer(self, room, pixels=b"pixels", n_tokens=10):
        """As if Encode had been called. Returns main and deepstack rows."""
        with self._lock:
            self.pixel_bytes[room] = (pixels, n_tokens)
            for rank in range(self.tp):
                self._ship_if_complete(rank, room)
        rows = self.rows_of(pixels, n_tokens)
        return rows[:, : self.hidden], rows[:, self.hidden :]

    def write(self, rank, room, info):
        """The shard's rows into the receiver's memory."""
        pixels, n_tokens = self.pixel_bytes[room]
        rows = self.rows_of(pixels, n_tokens)
        shard = rows[info["row_start"] : info["row_start"] + info["n_rows"]]
        for part, pointer in ((shard[:, : self.hidden], "main"), (shard[:, self.hidden :], "deepstack")):
            source = np.ascontiguousarray(part)
            if source.nbytes:
                self._keep.append(source)
                self.engines[rank].register(source.ctypes.data, source.nbytes)
                self.engines[rank].write(
                    info["session"], [(source.ctypes.data, info[pointer], source.nbytes)]
                )

    def say(self, rank, info, room, status, as_rank=None):
        """A status frame."""
        shown = rank if as_rank is None else as_rank
        self.send_frames(info, [b"%d" % room, b"%d" % status, b"%d" % shown])

    def send_frames(self, info, frames):
        with self._lock:
            address = f"tcp://{info['host']}:{info['port']}"
            if address not in self._status:
                self._status[address] = self._context.socket(zmq.PUSH)
                self._status[address].connect(address)
            self._status[address].send_multipart(frames)

    def infos(self, room, rank=0):
        with self._lock:
            return list(self._infos.get((rank, room), {}).values())

    def close(self):
        self._closing.set()
        self._grpc.stop(None).wait()
        self._http.shutdown()
        for thread in self._threads:
            thread.join()
        self._http.server_close()
        for socket in [*self._pulls, *self._status.values()]:
            socket.close(0)
        self._context.term()
        for engine in self.engines:
            engine.close()

    def _listen(self, rank):
        while not self._closing.is_set():
            if not self._pulls[rank].poll(50):
                continue
            frames = self._pulls[rank].recv_multipart()
            with self._lock:
                self.frames.append((rank, frames))
                if frames[0] == b"None":
                    assert len(frames) == 6
                    continue
                assert len(frames) == 13
                text = [part.decode("latin-1") for part in frames]
                room = int(text[0])
                info = {
                    "host": text[1],
                    "port": int(text[2]),
                    "session": text[3],
                    "main": int.from_bytes(frames[4], "little"),
                    "deepstack": int.from_bytes(frames[5], "little"),
                    "n_rows": int(text[6]),
                    "hidden": int(text[7]),
                    "dtype": text[8],
                    "has_deepstack": text[9] == "1",
                    "fanout": int(text[10]),
                    "row_start": int(text[11]),
                    "span": int(text[12]),
                }
                self._infos.setdefault((rank, room), {})[info["session"]] = info
                self._ship_if_complete(rank, room)

    def _ship_if_complete(self, rank, room):
        known = self._infos.get((rank, room), {})
        if room not in self.pixel_bytes or not known or len(known) < next(iter(known.values()))["fanout"]:
            return
        for info in known.values():
            if self.on_ship is not None:
                self.on_ship(self, rank, room, info)
                continue
            right = (self.hidden, f"torch.{self.dtype}", self.levels > 0, self.pixel_bytes[room][1])
            if (info["hidden"], info["dtype"], info["has_deepstack"], info["span"]) != right:
                self.say(rank, info, room, 0)
                continue
            self.write(rank, room, info)
            self.say(rank, info, room, 5)

    def _handler(side):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                query = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
                rank = int(query["engine_rank"])
                if rank == -1:
                    size = side.tp if side.registered else None
                    one = 1 if side.registered else None
                    body = {"prefill_tp_size": size, "prefill_dp_size": one, "prefill_pp_size": 1}
                elif rank < side.tp and side.registered:
                    body = {"rank_ip": HOST, "rank_port": side._ports[rank]}
                else:
                    self.send_error(500)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_):
                pass

        return Handler

    def _encoder(side):
        class Encoder(enc_grpc.TokenSpeedEncoderServicer):
            def Encode(self, request, context):
                side.requests.append(request)
                if side.on_encode is not None:
                    context.abort(*side.on_encode)
                item = request.mm_inputs.items[0]
                side.offer(
                    request.items[0].bootstrap_room, item.encoder_input.inline, item.placeholders[0].length
                )
                return enc_pb.EncodeResponse(accepted=True)

        return Encoder()

    def _scheduler(side):
        class Scheduler(sch_grpc.TokenSpeedSchedulerServicer):
            def GetModelInfo(self, request, context):
                return sch_pb.GetModelInfoResponse(
                    served_model_name="tiny", multimodal_encoder_dtype=side.dtype
                )

            def GetServerInfo(self, request, context):
                if not side.tells:
                    context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
                answer = sch_pb.GetServerInfoResponse()
                answer.scheduler_info.update(
                    {
                        "family": "qwen3_vl",
                        "hidden": side.hidden,
                        "levels": side.levels,
                        "dtype": side.dtype,
                        "patch_size": 16,
                        "temporal_patch_size": 2,
                        "merge_size": 2,
                        "transfer_backend": "tcp",
                        "min_pixels": 4096,
                        "max_pixels": 1048576,
                    }
                )
                return answer

        return Scheduler()


@pytest.fixture
def open_side():
    sides = []

    def make(**how):
        sides.append(EncodeSide(**how))
        return sides[-1]

    yield make
    for side in sides:
        side.close()


@pytest.fixture
def side(open_side):
    return open_side()


@pytest.fixture
def until():
    """Wait for a condition; fails after ten seconds."""

    def wait(condition, what="the condition"):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true"
            time.sleep(0.005)

    return wait


@pytest.fixture
def pictures(tmp_path):
    """Some image files of noise, by size."""

    def make(*sizes):
        paths = []
        for index, (width, height) in enumerate(sizes):
            pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
            paths.append(tmp_path / f"image{index}.png")
            Image.fromarray(pixels).save(paths[-1])
        return paths

    return make


@pytest.fixture
def endpoints_file(tmp_path):
    def write(*entries):
        path = tmp_path / "endpoints.json"
        listing = {
            "apiVersion": "encodepool.dev/v1alpha1",
            "kind": "EncodeEndpointList",
            "namespace": "ns",
            "pool": "pool",
            "model": "tiny",
            "endpoints": list(entries),
        }
        path.write_text(json.dumps(listing))
        return path

    return write
