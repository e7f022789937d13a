"""Intake, back channel, control frames and registration over real sockets; nonsense is survived."""

import http.server
import json
import os
import threading
import time

import msgspec
import pytest
import zmq

from encodepool_worker.core.events import Aborted, Announced, DrainStarted, Refused, Submitted
from encodepool_worker.errors import WorkerError
from encodepool_worker.shell import intake_socket
from encodepool_worker.shell.control_socket import MAX_PART_BYTES, ControlSocket
from encodepool_worker.shell.inbox import Inbox
from encodepool_worker.shell.intake_socket import BackChannel, IntakeSocket
from encodepool_worker.shell.metrics import Metrics
from encodepool_worker.shell.pixels import PixelTable
from encodepool_worker.shell.registration import Registrar
from encodepool_worker.shell.threads import MESSAGES_PER_POLL
from encodepool_worker.types import Grid, Modality, Receiver
from encodepool_worker.wire import intake
from encodepool_worker.wire.bootstrap import RankRegistration, decode_registration
from encodepool_worker.wire.control import Registration, encode_registration, encode_transfer_info

MALFORMED = "encodepool_frames_malformed_total"
GRID = Grid(1, 4, 4)


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def connect(context):
    """``connect(kind, address)``: a socket that is closed before the context ends."""
    sockets = []

    def open_it(kind, address):
        sockets.append(context.socket(kind))
        sockets[-1].connect(address)
        return sockets[-1]

    yield open_it
    for socket in sockets:
        socket.close(linger=0)


class Ears:
    """An inbox with both listening sockets on it."""

    def __init__(self, context, connect, run_dir, spec):
        self.inbox = Inbox(pytest.fail)
        self.pixels = PixelTable()
        self.metrics = Metrics()
        self.intake = IntakeSocket(context, run_dir, spec=spec, pixels=self.pixels, metrics=self.metrics)
        self.control = ControlSocket("127.0.0.1", rank=0, metrics=self.metrics)
        self.inbox.listen(self.intake)
        self.inbox.listen(self.control)
        self.frontend = connect(zmq.PUSH, f"ipc://{run_dir}/intake.ipc")
        self.peer = connect(zmq.PUSH, f"tcp://127.0.0.1:{self.control.port}")

    def take(self, count=1):
        """The next events; what is no event (connections, nonsense) only wakes the loop."""
        events, until_s = [], time.monotonic() + 10
        while len(events) < count and time.monotonic() < until_s:
            events += self.inbox.take(1)
        return events

    def close(self):
        self.intake.close()
        self.control.close()
        self.inbox.close()

    def malformed(self):
        return self.metrics.snapshot().get(MALFORMED, 0)


@pytest.fixture
def ears(context, connect, short_dir, tower):
    ears = Ears(context, connect, short_dir, tower.spec)
    yield ears
    ears.close()


def submit(seq=1, room=7, **changes):
    fields = {
        "seq": seq,
        "request_id": "r",
        "index": 0,
        "room": room,
        "modality": Modality.IMAGE,
        "key": bytes(16),
        "grids": ((GRID.t, GRID.h, GRID.w),),
        "n_tokens": 4,
        "cost": 4,
        "deadline_s": None,
        "pixel_dtype": "float32",
        "pixel_shape": (GRID.patches, 6),
    }
    return intake.Submit(**(fields | changes))


def receiver(session="127.0.0.1:9"):
    return Receiver(session, "127.0.0.1", 9, 0, 0, 4, 8, "torch.float32", True, 1, 0, 4)


def test_a_submission_becomes_an_event_and_its_pixels_are_kept_by_handle(ears, make_pixels):
    pixels = make_pixels(1, GRID)
    ears.frontend.send_multipart(intake.encode(submit(), pixels.numpy().tobytes()))
    (event,) = ears.take()
    assert isinstance(event, Submitted)
    assert (event.seq, event.item.room, event.pixel_bytes) == (1, 7, pixels.numel() * 4)
    assert event.item.layout.nbytes == 4 * 24 * 4
    assert ears.pixels.get(event.pixels).tensor().equal(pixels)
    assert ears.pixels.get(event.pixels).grids == (GRID,)


def test_refusals_aborts_and_the_drain_become_events_in_order(ears):
    for message in (
        intake.Refuse(room=1, reason="too big"),
        intake.Abort(room=2, reason="gone"),
        intake.Drain(deadline_s=5.0),
    ):
        ears.frontend.send_multipart(intake.encode(message))
    assert ears.take(3) == [Refused(1, "too big"), Aborted(2, "gone"), DrainStarted(5.0)]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x80\x04K\x01."],
        [os.urandom(64), b"x"],
        intake.encode(intake.Admitted(seq=1)),
        intake.encode(submit(), bytes(GRID.patches * 24))[:1],
        [*intake.encode(submit(), bytes(GRID.patches * 24))[:1], b"short"],
        [msgspec.msgpack.encode(submit(cost=0)), bytes(GRID.patches * 24)],  # no frontend could send it
    ],
    ids=["empty", "pickle", "noise", "wrong direction", "no pixels", "short pixels", "no cost"],
)
def test_an_intake_message_that_cannot_be_read_is_counted_and_the_next_one_is_served(
    ears, frames, wait_until
):
    ears.frontend.send_multipart(frames)
    ears.frontend.send_multipart(intake.encode(intake.Abort(room=2, reason="gone")))
    assert ears.take() == [Aborted(2, "gone")]
    assert ears.malformed() == 1
    assert len(ears.pixels) == 0


def test_a_receivers_frame_is_an_announcement_and_a_registration_is_nothing(ears):
    ears.peer.send_multipart(encode_registration(Registration("127.0.0.1:9", "127.0.0.1", 9)))
    ears.peer.send_multipart(encode_transfer_info(7, receiver()))
    assert ears.take() == [Announced(7, receiver())]
    assert ears.malformed() == 0


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"None"],
        encode_transfer_info(7, receiver())[:12],
        [b"-1", *encode_transfer_info(7, receiver())[1:]],
        [os.urandom(40)] * 13,
        [b"x"] * 500,
    ],
    ids=["empty", "short registration", "twelve parts", "negative room", "noise", "many parts"],
)
def test_a_control_frame_that_cannot_be_read_is_counted_and_the_next_one_is_served(ears, frames):
    ears.peer.send_multipart(frames)
    ears.peer.send_multipart(encode_transfer_info(7, receiver()))
    assert ears.take() == [Announced(7, receiver())]
    assert ears.malformed() == 1


def test_whoever_sends_a_huge_part_is_cut_off_and_others_are_served(ears, connect):
    bully = connect(zmq.PUSH, f"tcp://127.0.0.1:{ears.control.port}")
    bully.send_multipart([bytes(MAX_PART_BYTES + 1)] * 13)
    ears.peer.send_multipart(encode_transfer_info(7, receiver()))
    assert ears.take() == [Announced(7, receiver())]


def test_more_messages_than_one_turn_takes_all_come(ears):
    """ZMQ's descriptor tells of them once."""
    n_messages = 5 * MESSAGES_PER_POLL
    sender = threading.Thread(
        target=lambda: [
            ears.frontend.send_multipart(intake.encode(intake.Abort(room=room, reason="gone")))
            for room in range(n_messages)
        ]
    )
    sender.start()
    events = ears.take()
    assert len(events) <= MESSAGES_PER_POLL
    events += ears.take(n_messages - len(events))
    sender.join()
    assert events == [Aborted(room, "gone") for room in range(n_messages)]


def test_answers_are_kept_for_a_frontend_that_comes_late_and_states_are_not(context, connect, short_dir):
    back = BackChannel(context, short_dir)
    state = {"turn_s": 1.0, "routed": False}
    back.flush(intake.State(**state, queue_items=0, queue_cost=0))
    back.send(intake.Admitted(seq=1))
    back.flush(intake.State(**state, queue_items=1, queue_cost=0))
    back.send(intake.Credit(seq=1))
    back.flush()
    assert back.has_unsent

    frontend = connect(zmq.PULL, f"ipc://{short_dir}/back.ipc")
    got = []
    while len(got) < 2:
        back.flush()
        if frontend.poll(20):
            got += intake.decode_back(frontend.recv_multipart())
    assert got == [intake.Admitted(seq=1), intake.Credit(seq=1)]
    assert not back.has_unsent
    back.close()


def test_a_frontend_that_never_reads_is_an_error_and_not_a_leak(context, short_dir):
    back = BackChannel(context, short_dir)
    for _ in range(intake_socket.MAX_UNSENT):
        back.send(intake.Drained())
    with pytest.raises(WorkerError, match="unread"):
        back.send(intake.Drained())
    back.close()


class Bootstrap(http.server.BaseHTTPRequestHandler):
    """Answers PUTs with the server's next codes and keeps what was accepted."""

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 200:
            self.server.accepted.append((self.path, body))
        self.send_response(code)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"OK")

    def log_message(self, *_):
        pass


@pytest.fixture
def bootstrap():
    server = http.server.HTTPServer(("127.0.0.1", 0), Bootstrap)
    server.codes, server.accepted = [], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


REGISTRATION = RankRegistration(rank=0, host="127.0.0.1", port=5555, incarnation=3)


def test_a_rank_registers_until_it_is_accepted(bootstrap):
    bootstrap.codes = [503, 500]
    routed = threading.Event()
    registrar = Registrar("127.0.0.1", bootstrap.server_port, REGISTRATION, routed.set, pytest.fail)
    assert routed.wait(10)
    registrar.close()
    ((path, body),) = bootstrap.accepted
    assert path == "/route"
    assert decode_registration(body) == REGISTRATION
    assert json.loads(body)["role"] == "Prefill"


def test_registration_does_not_go_through_a_proxy(bootstrap, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    routed = threading.Event()
    registrar = Registrar("127.0.0.1", bootstrap.server_port, REGISTRATION, routed.set, pytest.fail)
    assert routed.wait(10)
    registrar.close()


def test_a_refused_registration_ends_the_process(bootstrap, wait_until):
    bootstrap.codes = [409]
    crashes = []
    registrar = Registrar("127.0.0.1", bootstrap.server_port, REGISTRATION, pytest.fail, crashes.append)
    (reason,) = wait_until(lambda: crashes)
    assert "refused this rank: 409" in reason
    registrar.close()


def test_a_rank_whose_server_never_comes_can_still_be_ended():
    registrar = Registrar("127.0.0.1", 9, REGISTRATION, pytest.fail, pytest.fail)
    registrar.close()
