"""What a child owes its supervisor, over real pipes."""

import os
import threading

import pytest

from encodepool_worker.child import MAX_LAST_WORDS_BYTES, Child


@pytest.fixture
def pipe():
    ends = []

    def open_it():
        read_fd, write_fd = os.pipe()
        ends.extend([read_fd, write_fd])
        return read_fd, write_fd

    yield open_it
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            pass


def fill(fd):
    os.set_blocking(fd, False)
    while True:
        try:
            os.write(fd, bytes(4096))
        except BlockingIOError:
            return


def test_the_heartbeat_says_starting_then_ready(pipe):
    read_fd, write_fd = pipe()
    child = Child(-1, write_fd)
    child.start()
    assert os.read(read_fd, 1) == b"s"
    child.ready()
    assert os.read(read_fd, 1) == b"r"
    assert os.read(read_fd, 1) == b"r"
    child.last_words("enough")
    assert b"xenough" in os.read(read_fd, 100)


def test_nothing_follows_the_last_words(pipe):
    read_fd, write_fd = pipe()
    child = Child(-1, write_fd)
    child.start()
    child.last_words("y" * 3 * MAX_LAST_WORDS_BYTES)
    child.ready()
    os.set_blocking(read_fd, False)
    text = os.read(read_fd, 4 * MAX_LAST_WORDS_BYTES)
    assert text.endswith(b"x" + b"y" * MAX_LAST_WORDS_BYTES)


def test_the_end_of_the_lifeline_is_the_end_of_the_child(pipe):
    read_fd, write_fd = pipe()
    left, codes = threading.Event(), []
    child = Child(read_fd, -1, leave=lambda code: (codes.append(code), left.set()))
    child.start()
    assert not left.wait(0.1)
    os.close(write_fd)
    assert left.wait(5)
    assert codes == [1]


def test_a_supervisor_that_does_not_read_or_is_gone_does_not_stop_the_child(pipe):
    read_fd, write_fd = pipe()
    fill(write_fd)
    child = Child(-1, write_fd)
    child.start()
    child.ready()
    os.close(read_fd)
    child.last_words("gone")


def test_without_pipes_nothing_is_owed():
    child = Child(-1, -1)
    child.start()
    child.ready()
    child.last_words("nobody hears this")
