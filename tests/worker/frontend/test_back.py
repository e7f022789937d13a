"""The link to rank 0: nothing blocks, nothing is lost while the loop is behind, nothing is mixed up."""

import asyncio

import pytest
import zmq
import zmq.asyncio

from encodepool_worker.frontend import back
from encodepool_worker.frontend.admission import NotServing
from encodepool_worker.frontend.back import LoopLink, monotonic_deadline
from encodepool_worker.types import Modality, RefusalKind
from encodepool_worker.wire import intake


def submission(seq, room=7):
    return intake.Submit(
        seq=seq,
        request_id="encode-1",
        index=0,
        room=room,
        modality=Modality.IMAGE,
        key=bytes(16),
        grids=((1, 2, 2),),
        n_tokens=1,
        cost=1,
        deadline_s=None,
        pixel_dtype="float32",
        pixel_shape=(4, 2),
    )


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def link_story(tmp_path):
    """Runs ``story(link, messages, bind)``; ``bind()`` opens the loop's ends: (intake, back)."""

    def run(story):
        async def main():
            messages = []
            link = LoopLink(tmp_path, messages.append)
            sockets = []

            def bind():
                context = zmq.asyncio.Context.instance()
                for kind, name in ((zmq.PULL, intake.INTAKE_SOCKET), (zmq.PUSH, intake.BACK_SOCKET)):
                    sockets.append(context.socket(kind))
                    sockets[-1].bind(f"ipc://{tmp_path / name}")
                return sockets

            try:
                await story(link, messages, bind)
            finally:
                link.close()
                for socket in sockets:
                    socket.close(linger=0)

        asyncio.run(main())

    return run


def test_what_is_sent_before_the_loop_is_there_arrives_when_it_comes(link_story):
    async def story(link, _messages, bind):
        link.refuse(7, "early")
        answer = link.submit(submission(link.next_seq()), bytes(32))
        pull, push = bind()
        first, _ = intake.decode(await pull.recv_multipart())
        second, payloads = intake.decode(await pull.recv_multipart())
        assert first == intake.Refuse(room=7, reason="early")
        assert [bytes(payload) for payload in payloads] == [bytes(32)]
        await push.send(intake.encode_back([intake.Admitted(seq=second.seq)]))
        assert await answer == intake.Admitted(seq=second.seq)

    link_story(story)


def test_a_loop_that_takes_nothing_more_refuses_submissions_and_gets_refusals_later(link_story, monkeypatch):
    monkeypatch.setattr(back, "SEND_BACKLOG", 4)

    async def story(link, _messages, bind):
        for room in range(6):
            link.refuse(room, "full")
        with pytest.raises(NotServing, match="takes no more messages"):
            link.submit(submission(link.next_seq()), bytes(32))
        assert link.dropped == 0
        pull, push = bind()
        got = []
        while len(got) < 6:
            message, _ = intake.decode(await asyncio.wait_for(pull.recv_multipart(), 5))
            got.append(message.room)
            await push.send(intake.encode_back([intake.Drained()]))
        assert got == list(range(6))

    link_story(story)


def test_refusals_that_cannot_be_kept_are_counted(link_story, monkeypatch):
    monkeypatch.setattr(back, "SEND_BACKLOG", 2)

    async def story(link, _messages, _bind):
        for room in range(7):
            link.refuse(room, "full")
        assert link.dropped == 3

    link_story(story)


def test_answers_find_their_submission_in_any_order_and_late_ones_are_ignored(link_story):
    async def story(link, messages, bind):
        pull, push = bind()
        seqs = [link.next_seq() for _ in range(3)]
        answers = [link.submit(submission(seq), bytes(32)) for seq in seqs]
        for _ in seqs:
            await pull.recv_multipart()
        answers[1].cancel()
        refused = intake.Refused(seq=seqs[2], kind=RefusalKind.INVALID, field="f", reason="r")
        for message in (
            refused,
            intake.Admitted(seq=seqs[1]),
            intake.Admitted(seq=12),
            intake.Admitted(seq=seqs[0]),
            intake.Credit(seq=seqs[0]),
        ):
            await push.send(intake.encode_back([message]))
        assert await answers[2] == refused
        assert await answers[0] == intake.Admitted(seq=seqs[0])
        await until(lambda: messages == [intake.Credit(seq=seqs[0])])

    link_story(story)


def test_a_message_that_cannot_be_read_or_goes_the_wrong_way_is_dropped(link_story):
    async def story(_link, messages, bind):
        _pull, push = bind()
        await push.send_multipart([b"nonsense"])
        await push.send(intake.encode_back([intake.Drain(deadline_s=1.0)]))
        await push.send(intake.encode_back([intake.Drained()]))
        await until(lambda: messages == [intake.Drained()])

    link_story(story)


def test_more_messages_than_are_read_at_once_all_arrive(link_story, monkeypatch):
    monkeypatch.setattr(back, "READ_AT_ONCE", 3)

    async def story(_link, messages, bind):
        _pull, push = bind()
        for seq in range(100):
            await push.send(intake.encode_back([intake.Credit(seq=seq)]))
        await until(lambda: [message.seq for message in messages] == list(range(100)))

    link_story(story)


def test_a_call_without_a_deadline_has_none():
    assert monotonic_deadline(None, 5.0) is None
    assert monotonic_deadline(float("inf"), 5.0) is None
    assert monotonic_deadline(9.2e18, 5.0) is None
    assert monotonic_deadline(2.5, 5.0) == 7.5
    assert monotonic_deadline(-1.0, 5.0) == 5.0
