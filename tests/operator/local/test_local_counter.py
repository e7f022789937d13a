"""One counter for all local pools of a user: two pools never get the same incarnation."""

import subprocess
import sys

import pytest

from encodepool_operator.local.counter import UserCounter, user_state_dir
from encodepool_operator.local.errors import LocalError


def test_a_new_counter_starts_at_zero_and_keeps_its_uid(tmp_path):
    first = UserCounter(tmp_path / "state").read()
    assert first.last == 0
    assert first.uid
    assert UserCounter(tmp_path / "state").read() == first


def test_a_reservation_holds_only_for_who_saw_the_newest_number(tmp_path):
    one, two = UserCounter(tmp_path), UserCounter(tmp_path)
    assert one.reserve(3, seen=0)
    assert not two.reserve(2, seen=0)
    assert not two.reserve(3, seen=3)
    assert two.read().last == 3
    assert two.reserve(4, seen=3)


def test_many_processes_never_get_the_same_number(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from encodepool_operator.local.counter import UserCounter\n"
        "counter, mine = UserCounter(Path(sys.argv[1])), []\n"
        "while len(mine) < 20:\n"
        "    seen = counter.read().last\n"
        "    if counter.reserve(seen + 1, seen=seen):\n"
        "        mine.append(seen + 1)\n"
        "print(*mine)\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    got = [int(word) for process in running for word in process.communicate(timeout=60)[0].split()]
    assert sorted(got) == list(range(1, 61))


def test_a_damaged_file_is_reported_and_left_alone(tmp_path):
    path = tmp_path / "incarnations.json"
    path.write_text("{}")
    with pytest.raises(LocalError, match="damaged"):
        UserCounter(tmp_path).read()
    assert path.read_text() == "{}"


def test_the_folder_follows_the_base_directory_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_state_dir({"XDG_STATE_HOME": "/state"}).as_posix() == "/state/encodepool"
    for environ in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert user_state_dir(environ) == tmp_path / ".local/state/encodepool"
