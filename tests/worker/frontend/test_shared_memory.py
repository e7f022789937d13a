"""Only a segment of our own user, whole and in its place, is read; and it is never unlinked."""

import os
import stat
from pathlib import Path

import pytest

from encodepool_worker.errors import RequestRefused
from encodepool_worker.frontend.shared_memory import SHM_FOLDER, namespace_id, read_segment


def read(name, nbytes, folder, offset=0):
    return read_segment(name, offset, nbytes, field="encoder_input.shm", room=7, folder=folder)


def test_bytes_are_copied_and_the_segment_is_left_alone(tmp_path):
    (tmp_path / "segment").write_bytes(b"0123456789")
    data = read("segment", 4, tmp_path, offset=3)
    (tmp_path / "segment").write_bytes(b"")
    assert data == b"3456"
    assert (tmp_path / "segment").exists()


def test_a_segment_of_the_real_folder_can_be_read():
    name = f"encodepool-test-{os.getpid()}"
    path = SHM_FOLDER / name
    path.write_bytes(b"pixels")
    try:
        assert read(name, 6, SHM_FOLDER) == b"pixels"
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["", ".", "..", "../etc/passwd", "/etc/passwd", "a/b", "a\0b"])
def test_a_name_with_a_path_is_refused(tmp_path, name):
    with pytest.raises(RequestRefused, match="not that of a segment") as refused:
        read(name, 1, tmp_path)
    assert (refused.value.field, refused.value.room) == ("encoder_input.shm", 7)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(RequestRefused, match="cannot be opened"):
        read("link", 6, tmp_path)


def test_a_missing_segment_is_refused(tmp_path):
    with pytest.raises(RequestRefused, match="No such file"):
        read("gone", 1, tmp_path)


def test_a_fifo_is_refused_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RequestRefused, match="is not a segment"):
        read("fifo", 1, tmp_path)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (8, 3), (11, 0), (0, 2**62)])
def test_a_segment_shorter_than_announced_is_refused_before_anything_is_allocated(tmp_path, offset, nbytes):
    (tmp_path / "short").write_bytes(b"0123456789")
    with pytest.raises(RequestRefused, match="holds 10 bytes"):
        read("short", nbytes, tmp_path, offset)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_segment_of_another_user_is_refused(tmp_path):
    (tmp_path / "theirs").write_bytes(b"0123456789")
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(RequestRefused, match="belongs to user 65534"):
        read("theirs", 10, tmp_path)


def test_the_namespace_is_boot_id_and_device():
    boot, device = namespace_id().split(":")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert int(device) == os.stat("/dev/shm").st_dev
    assert stat.S_ISDIR(os.stat("/dev/shm").st_mode)
