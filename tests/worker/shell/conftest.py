"""Helpers of the shell's tests: a tower of whole numbers, and a rank with everything around it."""

import http.server
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq

from encodepool_worker.errors import GroupLost, TowerError
from encodepool_worker.settings import Settings
from encodepool_worker.shell.follower import Follower
from encodepool_worker.shell.rank import Rank, engine_maker
from encodepool_worker.shell.tiers import plan_tiers
from encodepool_worker.towers.base import TowerItem, VisionTower
from encodepool_worker.transport.tcp_faults import Fault
from encodepool_worker.types import Grid, Modality, Receiver, TowerSpec
from encodepool_worker.wire import intake
from encodepool_worker.wire.bootstrap import decode_registration
from encodepool_worker.wire.control import decode_status, encode_transfer_info

POISON = 1000.0
"""A first pixel of this value makes the tower fail on the whole batch."""

NOT_FINITE = 2000.0
"""A first pixel of this value makes rows that are not finite."""

DISASTER = 3000.0
"""A first pixel of this value makes the tower raise what no tower should."""

SPEC = TowerSpec(
    family="whole_numbers",
    hidden=8,
    levels=2,
    dtype="float32",
    patch_width=6,
    patch_size=1,
    temporal_patch_size=2,
    merge_size=2,
    image_token_id=None,
    video_token_id=None,
)


class WholeNumberTower(VisionTower):
    """Rows of small whole numbers, so that batching cannot change a bit; with a gate to hold it."""

    def __init__(self) -> None:
        self.spec = SPEC
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        generator = torch.Generator().manual_seed(7)
        self._weights = torch.randint(-3, 4, (SPEC.patch_width, self.row_width), generator=generator).float()

    @property
    def row_width(self) -> int:
        return (1 + SPEC.levels) * SPEC.hidden

    def encode(self, items, *, batch=0):
        assert self.gate.wait(30)
        self.batches.append(len(items))
        return torch.cat([self.rows(item.pixels) for item in items])

    def rows(self, pixels):
        """``[tokens, row_width]`` of one item's pixels."""
        first = pixels[0, 0].item()
        if first == POISON:
            raise TowerError("a poisoned pixel")
        if first == DISASTER:
            raise ZeroDivisionError("not a tower's error")
        merged = pixels.float().reshape(-1, SPEC.merge_size**2, SPEC.patch_width).sum(1)
        rows = merged @ self._weights
        if first == NOT_FINITE:
            rows[-1, -1] = float("nan")
        return rows

    def halves(self, pixels):
        """(main, deepstack) bytes of one item's rows, as a receiver gets them."""
        rows = self.rows(pixels)
        return tuple(
            half.contiguous().numpy().tobytes() for half in (rows[:, : SPEC.hidden], rows[:, SPEC.hidden :])
        )

    def warm_up(self) -> None:
        self.encode([TowerItem(torch.zeros(4, SPEC.patch_width), (Grid(1, 2, 2),))])


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tower():
    return WholeNumberTower()


@pytest.fixture
def make_pixels():
    """``make_pixels(seed, grid, first=None)``: ``[patches, patch_width]`` of whole numbers."""

    def make(seed, grid, first=None):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 8, (grid.patches, SPEC.patch_width), generator=generator).float()
        if first is not None:
            pixels[0, 0] = first
        return pixels

    return make


@pytest.fixture
def wait_until():
    """``wait_until(condition, seconds, what)``: the condition's first true value, or a failure."""

    def wait(condition, seconds=10.0, what=""):
        until_s = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > until_s:
                pytest.fail(f"not within {seconds} s: {what or condition}")
            time.sleep(0.01)

    return wait


@pytest.fixture
def short_dir():
    """A folder directly below the temporary one: a socket's path has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="ep-test-"))
    yield path
    shutil.rmtree(path)


# --- a whole rank

GRID = Grid(1, 8, 8)
N_TOKENS = SPEC.token_count(GRID)
HIDDEN, LEVELS = SPEC.hidden, SPEC.levels


class RouteTable(http.server.BaseHTTPRequestHandler):
    """The part of a bootstrap server that a rank talks to."""

    def do_PUT(self):
        registration = decode_registration(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.ranks[registration.rank] = registration
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Prefill:
    """One receiving rank: memory registered with an engine of its own, and a status socket."""

    def __init__(self, rig, n_tokens=N_TOKENS):
        self.rig = rig
        self.main = torch.full((n_tokens * HIDDEN * 4,), 0xAA, dtype=torch.uint8)
        self.deepstack = torch.full((n_tokens * HIDDEN * LEVELS * 4,), 0xAA, dtype=torch.uint8)
        self.engine = rig.make_engine()
        for buffer in (self.main, self.deepstack):
            self.engine.register(buffer.data_ptr(), buffer.numel())
        self.status = rig.context.socket(zmq.PULL)
        self.status_port = self.status.bind_to_random_port("tcp://127.0.0.1")

    def announce(self, room, *, row_start=0, n_rows=N_TOKENS, fanout=1, span=N_TOKENS, rank=0):
        receiver = Receiver(
            session=self.engine.session,
            host="127.0.0.1",
            status_port=self.status_port,
            main_ptr=self.main.data_ptr(),
            deepstack_ptr=self.deepstack.data_ptr(),
            n_rows=n_rows,
            hidden=HIDDEN,
            dtype="torch.float32",
            has_deepstack=True,
            fanout=fanout,
            row_start=row_start,
            span=span,
        )
        self.rank = rank
        self.rig.controls[rank].send_multipart(encode_transfer_info(room, receiver))
        return self

    def freeze_with_a_write(self):
        """Take the next write's bytes, then stop as a process does before they have landed."""
        self.engine.faults.plan(Fault.LATE)
        self.rig.wait_until(lambda: self.engine.faults.held, what="the write has been received")
        self.engine.faults.freeze()

    def verdict(self, seconds=10):
        """(room, status) of the next status frame."""
        assert self.status.poll(seconds * 1000), "no status frame came"
        room, status, rank = decode_status(self.status.recv_multipart())
        assert rank == self.rank
        return room, status

    def received(self):
        return bytes(self.main.numpy().tobytes()), bytes(self.deepstack.numpy().tobytes())

    def close(self):
        self.status.close(linger=0)
        self.engine.close()


class FollowerThread(threading.Thread):
    """A follower until its end; ``lost`` is what it raised."""

    def __init__(self, follower):
        super().__init__(daemon=True)
        self.follower = follower
        self.lost = None
        self.start()

    def run(self):
        try:
            self.follower.run()
        except GroupLost as lost:
            self.lost = str(lost)
        self.follower.close()


class Rig:
    """One rank with its loop running, the frontend's end of its sockets, and prefill ranks."""

    def __init__(
        self,
        run_dir,
        tower,
        make_pixels,
        wait_until,
        tiers=None,
        follower_tower=None,
        stale=None,
        via=lambda address: address,
        **settings,
    ):
        self.tower = tower
        self.make_pixels = make_pixels
        self.wait_until = wait_until
        self.server = http.server.HTTPServer(("127.0.0.1", 0), RouteTable)
        self.server.ranks = {}
        self.server_thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.server_thread.start()
        known = {
            "model": "whole-numbers",
            "run_dir": str(run_dir),
            "bootstrap_port": self.server.server_port,
            "transfer_backend": "tcp",
            "store_device_mib": 1,
            "max_items_per_batch": 8,
        }
        self.settings = Settings(**(known | settings))
        self.make_engine = engine_maker(self.settings)
        self.crashes = []
        self.via = via
        self.routed = threading.Event()
        self.tiers = tiers or plan_tiers(self.settings, torch.device("cpu"))
        self.rank = Rank(
            self.settings,
            tower,
            self.make_engine,
            tiers=self.tiers,
            crash=self.crash,
            on_routed=self.routed.set,
        )
        self.loop_thread = threading.Thread(target=self.rank.loop.run, daemon=True)
        self.loop_thread.start()
        self.followers = []
        if stale is not None:
            self.follow(1, **stale).join(10)
        for number in range(1, self.settings.tensor_parallel_size):
            self.follow(number, follower_tower)
        assert self.routed.wait(10)

        self.context = zmq.Context()
        self.intake = self.context.socket(zmq.PUSH)
        self.intake.connect(f"ipc://{run_dir}/intake.ipc")
        self.back = self.context.socket(zmq.PULL)
        self.back.connect(f"ipc://{run_dir}/back.ipc")
        self.controls = {}
        for rank, registration in self.server.ranks.items():
            self.controls[rank] = self.context.socket(zmq.PUSH)
            self.controls[rank].connect(f"tcp://{registration.host}:{registration.port}")
        self.prefills = []
        self.heard = []
        self.coming = deque()
        self.left_behind = 0
        self.next_seq = 1

    def follow(self, number, tower=None, **changes):
        """Another rank of the group, with a copy of the tower, in a thread."""
        follower = Follower(
            replace(self.settings, rank=number, **changes),
            tower or self.tower,
            self.make_engine,
            parallel=None,
            tiers=self.tiers,
            address=self.via(self.rank.server.address),
            token=self.rank.server.token,
            crash=self.crashes.append,
            on_welcome=lambda: None,
        )
        thread = FollowerThread(follower)
        self.followers.append(thread)
        return thread

    def crash(self, reason):
        """What the process does when one of rank 0's threads cannot go on."""
        self.crashes.append(reason)
        self.rank.loop.lose(reason)

    def prefill(self, **options):
        self.prefills.append(Prefill(self, **options))
        return self.prefills[-1]

    @property
    def pipeline(self):
        return self.rank.pipeline

    def submit(self, room, content, first=None, grid=GRID, **changes):
        """Submit an item whose pixels are made from ``content``; returns (seq, pixels)."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        pixels = self.make_pixels(content, grid, first)
        n_tokens = grid.patches // 4
        fields = {
            "seq": seq,
            "request_id": f"request-{room}",
            "index": 0,
            "room": room,
            "modality": Modality.IMAGE,
            "key": bytes([content]) * 16,
            "grids": ((grid.t, grid.h, grid.w),),
            "n_tokens": n_tokens,
            "cost": n_tokens,
            "deadline_s": None,
            "pixel_dtype": "float32",
            "pixel_shape": tuple(pixels.shape),
        }
        self.tell(intake.Submit(**(fields | changes)), pixels.numpy().tobytes())
        return seq, pixels

    def tell(self, message, *payloads):
        self.intake.send_multipart(intake.encode(message, *payloads))

    def hear(self, wanted, seconds=10):
        """The next message to the frontend that ``wanted`` accepts; all are kept in ``heard``."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if not self.coming and self.back.poll(50):
                self.coming += intake.decode_back(self.back.recv_multipart())
            while self.coming:
                message = self.coming.popleft()
                self.heard.append(message)
                if wanted(message):
                    return message
        pytest.fail(f"not heard within {seconds} s; heard {self.heard[-5:]}")

    def hear_state(self, wanted, seconds=10):
        return self.hear(lambda message: isinstance(message, intake.State) and wanted(message), seconds)

    def counter(self, sample):
        return self.rank.metrics.snapshot().get(sample, 0)

    def finish(self, seconds=10):
        """Drain what is left and end every thread, as the process does."""
        if self.loop_thread.is_alive():
            self.tower.gate.set()
            self.tell(intake.Drain(deadline_s=time.monotonic()))
            self.loop_thread.join(seconds)
        assert not self.loop_thread.is_alive(), "the loop did not end"
        self.rank.close()
        for follower in self.followers:
            follower.join(seconds)
            assert not follower.is_alive()
        for prefill in self.prefills:
            prefill.close()
        for socket in (self.intake, self.back, *self.controls.values()):
            socket.close(linger=0)
        self.context.term()
        self.server.shutdown()
        self.server_thread.join()
        self.server.server_close()
        assert self.crashes == []
        assert len(self.rank.pixels) == self.left_behind, "pixels were left behind"


def names_in_shm():
    return set(os.listdir("/dev/shm"))


@pytest.fixture
def open_rig(short_dir, tower, make_pixels, wait_until):
    before_shm, before_threads = names_in_shm(), set(threading.enumerate())
    rigs = []

    def open_it(**settings):
        rigs.append(Rig(short_dir, tower, make_pixels, wait_until, **settings))
        return rigs[-1]

    yield open_it
    for rig in rigs:
        rig.finish()
    wait_until(lambda: set(threading.enumerate()) <= before_threads, what=str(threading.enumerate()))
    assert names_in_shm() <= before_shm


@pytest.fixture
def rig(open_rig):
    return open_rig()
