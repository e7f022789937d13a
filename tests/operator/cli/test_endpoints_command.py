"""``encodepool endpoints merge`` and ``follow`` on files: what is written, when, and how they end."""

import json
import os
import signal
import threading

import pytest

from encodepool_operator.cli.main import main

PREFILL = {"id": "p", "url": "grpc://10.0.0.1:1", "worker_type": "prefill", "bootstrap_port": 2}


def worker(number):
    return {
        "id": f"local/x/{number}-1",
        "url": f"grpc://127.0.0.1:{20000 + number}",
        "worker_type": "encode",
        "bootstrap_port": 30000 + number,
        "model_id": "m",
    }


def text(*workers):
    return json.dumps({"version": 1, "workers": list(workers)})


def put(path, content):
    """As pools write it: whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(fresh, path)
    return path


def ids(path):
    """Every read must find a whole file."""
    return [one["id"].removeprefix("local/x/") for one in json.loads(path.read_text())["workers"]]


def test_merge_joins_files_and_state_directories(tmp_path, capsys):
    listed = put(tmp_path / "a.json", text(worker(1)))
    put(tmp_path / "pool" / "endpoints" / "workers.json", text(worker(2)))
    base = put(tmp_path / "base.json", text(PREFILL, worker(9)))
    argv = ["endpoints", "merge", str(listed), str(tmp_path / "pool"), "--with", str(base)]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert [one["id"] for one in json.loads(shown.out)["workers"]] == ["p", "local/x/1-1", "local/x/2-1"]
    assert shown.err.startswith("note: 1 encode workers of the manifest are left out")

    out = tmp_path / "out.json"
    assert main([*argv, "-o", str(out)]) == 0
    assert ids(out) == ["p", "1-1", "2-1"]
    # What was merged can be merged into again, in place.
    before = out.read_text()
    assert main([*argv[:-1], str(out), "-o", str(out)]) == 0
    assert out.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "base.json", "out.json", "pool"]


def test_merge_writes_nothing_where_anything_is_wrong(tmp_path, capsys):
    good = put(tmp_path / "good.json", text(worker(1)))
    bad = put(tmp_path / "bad.json", text(worker(2) | {"url": "http://x", "model_id": ""}))
    out = put(tmp_path / "out.json", "as it was")
    assert main(["endpoints", "merge", str(good), str(bad), "-o", str(out)]) == 2
    shown = capsys.readouterr().err
    assert f"{bad}: workers[0]: model_id must be a text" in shown
    assert "url must be grpc://HOST:PORT" in shown
    assert main(["endpoints", "merge", str(good), str(good), "-o", str(out)]) == 2
    assert "is also that of a worker of" in capsys.readouterr().err
    assert main(["endpoints", "merge", str(good), "--with", str(tmp_path / "none"), "-o", str(out)]) == 2
    assert main(["endpoints", "merge", str(good), "-o", str(tmp_path / "no" / "out")]) == 1
    assert "cannot write" in capsys.readouterr().err
    assert out.read_text() == "as it was"


def test_merge_writes_over_no_list_that_a_pool_keeps_or_that_it_reads(tmp_path, capsys):
    pool, listed = tmp_path / "pool", put(tmp_path / "a.json", text(worker(1)))
    own = put(pool / "endpoints" / "workers.json", text(worker(2)))
    put(pool / "pool.yaml", "")
    put(pool / "lock", "")
    (tmp_path / "link.json").symlink_to(own)
    for lists, out in (
        ([pool], own),
        ([own], own),
        ([listed], pool / "endpoints" / "endpoints.json"),  # of a pool that is not even merged
        ([listed, pool], listed),
        ([pool], tmp_path / "link.json"),
        ([listed], pool / "lock"),
    ):
        assert main(["endpoints", "merge", *map(str, lists), "-o", str(out)]) == 2
        assert "or of a pool's own: choose another place" in capsys.readouterr().err
    assert (ids(own), ids(listed)) == (["2-1"], ["1-1"])
    assert sorted(path.name for path in (pool / "endpoints").iterdir()) == ["workers.json"]
    beside = tmp_path / "endpoints" / "workers.json"  # a folder of that name, and no pool
    beside.parent.mkdir()
    assert main(["endpoints", "merge", str(listed), "-o", str(beside)]) == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["merge"], "LISTS"),
        (["follow", "-o", "x"], "name at least one --pool or --state-dir"),
        (["follow", "--state-dir", "d", "--with", "x", "-o", "./x"], "name the same file"),
        (["follow", "--state-dir", "d", "-o", "d/endpoints/workers.json"], "choose another place"),
        (["follow", "--state-dir", "d"], "--out"),
    ],
)
def test_wrong_usage_ends_with_2(argv, says, capsys):
    assert main(["endpoints", *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.fixture
def follow(spawn, program, tmp_path):
    """``follow(*argv)``: the running command; its log is in ``tmp_path/log``."""

    def start(*argv):
        return spawn([program("encodepool"), "endpoints", "follow", *argv], tmp_path / "log")

    return start


def test_a_file_follows_two_pools_and_a_manifest(follow, tmp_path, wait_for):
    lists = [tmp_path / name / "endpoints" / "workers.json" for name in ("one", "two")]
    base = put(tmp_path / "base.json", text(PREFILL))
    out, health = tmp_path / "run" / "workers.json", tmp_path / "run" / "health"
    out.parent.mkdir()
    log = tmp_path / "log"
    put(lists[0], text(worker(1)))
    process = follow(
        *("--state-dir", tmp_path / "one", "--state-dir", tmp_path / "two"),
        *("--with", base, "--out", out, "--health-file", health),
    )
    wait_for(lambda: "two: is not there" in log.read_text(), 30, "what it waits for")
    assert not out.exists()
    put(lists[1], text(worker(2)))
    wait_for(health.exists, 10, "the health file")
    assert ids(out) == ["p", "1-1", "2-1"]

    # It changes while it is read: a reader sees one state or another, never half of one.
    ended, seen = threading.Event(), set()

    def read():
        while not ended.is_set():
            seen.add(tuple(ids(out)))

    reader = threading.Thread(target=read)
    reader.start()
    for count in (3, 4, 5):
        put(lists[0], text(worker(1), *(worker(n) for n in range(3, count + 1))))
        wait_for(lambda count=count: f"{count}-1" in ids(out), 10, "the new group")
    put(base, text(PREFILL, PREFILL | {"id": "q", "url": "grpc://10.0.0.2:1"}))
    wait_for(lambda: "q" in ids(out), 10, "the new prefill worker")
    ended.set()
    reader.join(10)
    assert tuple(ids(out)) == ("p", "q", "1-1", "3-1", "4-1", "5-1", "2-1")
    assert all(one[0] == "p" and one[-1] == "2-1" for one in seen)

    # A list that is broken changes nothing, and is told; so does what somebody does to the file.
    before = out.read_text()
    put(lists[1], text(worker(2))[:-1])
    wait_for(lambda: not health.exists(), 10, "no health")
    assert "not JSON" in log.read_text()
    out.write_text("{")
    wait_for(lambda: out.read_text() == before, 10, "the file as it was")
    put(out, b"\xff{")
    wait_for(lambda: out.read_bytes() == before.encode(), 10, "the file as it was, which was not even text")
    put(lists[1], text(worker(7)))
    wait_for(lambda: "7-1" in ids(out) and health.exists(), 10, "the mended list")

    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not health.exists()
    assert ids(out)[-1] == "7-1"
    assert sorted(path.name for path in out.parent.iterdir()) == ["workers.json"]


def test_a_file_that_cannot_be_written_ends_it_at_once(follow, tmp_path):
    put(tmp_path / "one" / "endpoints" / "workers.json", text(worker(1)))
    process = follow("--state-dir", tmp_path / "one", "--out", tmp_path / "none" / "workers.json")
    assert process.wait(30) == 1
    log = (tmp_path / "log").read_text()
    assert "cannot write" in log
    assert "Traceback" not in log


def test_interrupted_it_ends_with_130(follow, tmp_path, wait_for):
    process = follow("--state-dir", tmp_path / "one", "--out", tmp_path / "workers.json")
    log = tmp_path / "log"
    wait_for(lambda: "is not there" in log.read_text(), 30, "the first look")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert "Traceback" not in log.read_text()
