"""Stories of a local pool: the real command and controller, real processes, stand-in workers."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from encodepool_operator.core.endpoints import WORKER_KEYS
from encodepool_operator.local.counter import UserCounter, user_state_dir


def addresses(entry):
    return entry["url"], entry["bootstrapPort"]


def test_up_lists_every_group_and_down_leaves_nothing(pool):
    done = pool.up()

    assert "is ready" in done.stdout
    listed = pool.listed()
    assert sorted(listed) == [0, 1]
    for group, entry in listed.items():
        assert entry["id"] == f"default/pool/{group}-{entry['incarnation']}"
        assert entry["url"] == f"grpc://127.0.0.1:{entry['grpcPort']}"
        assert (entry["host"], entry["bootstrapHost"]) == ("127.0.0.1", "127.0.0.1")
        assert (entry["draining"], entry["reason"]) == (False, "")
    files = {path.name: path.read_text() for path in (pool.dir / "endpoints").iterdir()}
    assert sorted(files) == ["endpoints.json", "smg-args", "smg-workers.json", "workers.json"]
    workers = json.loads(files["workers.json"])["workers"]
    assert [set(worker) for worker in workers] == [set(WORKER_KEYS)] * 2
    assert {worker["model_id"] for worker in workers} == {"model"}
    assert files["smg-args"].split() == [
        word for g in (0, 1) for word in ("--encode", listed[g]["url"], str(listed[g]["bootstrapPort"]))
    ]

    rows = pool.report()["groups"]
    assert [(row["group"], row["phase"], row["restarts"]) for row in rows] == [
        (0, "Ready", 0),
        (1, "Ready", 0),
    ]
    table = pool.run("status").stdout
    assert table.splitlines()[0].split() == [
        "GROUP",
        "PHASE",
        "REVISION",
        "INCARNATION",
        "URL",
        "BOOTSTRAP",
        "RESTARTS",
        "REASON",
    ]
    assert listed[1]["url"] in table.splitlines()[2]
    assert pool.run("status", "-o", "smg").stdout == files["smg-args"]

    pids = [*pool.pids().values(), *pool.pids("frontend").values(), pool.controller()]
    assert len(pids) == 5
    assert set(pids) == set(pool.processes())
    for group in (0, 1):
        incarnation = listed[group]["incarnation"]
        for role in ("supervisor", "frontend"):
            assert (pool.dir / "log" / f"{group}.{incarnation}.{role}.log").exists()

    temp_dirs = [Path(pool.environment(pid)["TMPDIR"]) for pid in pool.pids().values()]
    assert all(folder.is_dir() for folder in temp_dirs)

    pool.run("down")
    assert pool.processes() == {}
    assert not any(folder.exists() for folder in temp_dirs)
    assert pool.listed() == {}
    assert pool.endpoints() == []
    assert json.loads((pool.dir / "processes.json").read_text()) == []
    pool.run("down")


def test_a_killed_group_is_unlisted_at_once_and_comes_back_elsewhere(standing):
    pool = standing
    before, pids = pool.listed(), pool.pids()

    os.kill(pids[0], signal.SIGKILL)
    killed_s = time.monotonic()
    pool.wait(lambda: 0 not in pool.listed(), "the withdrawal")
    assert time.monotonic() - killed_s < 1.0

    pool.wait(lambda: 0 in pool.listed(), "the return")
    after = pool.listed()
    assert not set(addresses(after[0])) & {part for entry in before.values() for part in addresses(entry)}
    assert after[1] == before[1]
    assert pool.pids()[1] == pids[1]
    assert pool.report()["groups"][0]["restarts"] > 0


@pytest.mark.parametrize("role", ["frontend", "supervisor"])
def test_a_frozen_group_is_unlisted_within_ten_seconds(standing, role):
    pool = standing
    before, frozen = pool.listed(), pool.pids(role)[1]

    os.kill(frozen, signal.SIGSTOP)
    frozen_s = time.monotonic()
    pool.wait(lambda: 1 not in pool.listed(), "the withdrawal")
    assert time.monotonic() - frozen_s < 10.0
    assert 0 in pool.listed()

    pool.wait(lambda: 1 in pool.listed(), "the return", timeout_s=30)
    assert pool.listed()[1]["url"] != before[1]["url"]
    assert frozen not in pool.processes()
    assert pool.listed()[0] == before[0]
    assert "liveness probe failed 3 times" in pool.run_log()


def test_two_state_directories_never_share_an_address(make_pool):
    one, two = make_pool(), make_pool()
    one.up()
    seen = {addresses(entry) for entry in one.listed().values()}

    two.up()
    other = {addresses(entry) for entry in two.listed().values()}
    assert len(seen | other) == 4
    one.run("down")
    one.up()
    again = {addresses(entry) for entry in one.listed().values()}
    assert len(seen | other | again) == 6


def test_a_port_that_somebody_holds_is_passed_over(pool):
    """Another user's pool, which draws from another counter, may be anywhere in the range."""
    pool.up(replicas=1)
    first = pool.listed()[0]["grpcPort"]
    held = []
    for slot in range(1, 4):
        holder = socket.create_server(("127.0.0.1", first + 4 * slot))
        held.append(holder)
    try:
        pool.up(replicas=2)
        assert pool.listed()[1]["grpcPort"] == first + 16
    finally:
        for holder in held:
            holder.close()


def test_a_change_that_does_not_reach_the_workers_moves_nothing(pool):
    pool.up()
    pids = pool.pids()
    pool.up(replicas=3, rollout={"maxUnavailable": 1})
    assert pool.pids().items() > pids.items()
    pool.up(replicas=1)
    assert pool.pids() == {0: pids[0]}


def test_a_bad_manifest_is_refused_with_field_paths_and_changes_nothing(standing):
    pool = standing
    pids = pool.pids()
    pool.write(replicas=-1, batching={"maxTokenPerBatch": 1})
    done = pool.run("up", code=2)
    assert "spec.replicas: must be between 0 and 500, is -1" in done.stderr
    assert "spec.batching.maxTokenPerBatch: unknown field; did you mean maxTokensPerBatch?" in done.stderr
    assert "Traceback" not in done.stderr
    assert pool.pids() == pids
    pool.write(replicas=2, batching={})


def test_what_this_machine_cannot_do_is_refused_before_anything_starts(pool):
    pool.write(accelerator={"perRank": 16}, replicas=64)
    assert "spec.accelerator.perRank: 64 groups need 1024 GPUs" in pool.run("up", code=2).stderr
    pool.write(accelerator={"perRank": 0}, model={"path": "nowhere"})
    assert "spec.model.path: there is no folder" in pool.run("up", code=2).stderr
    assert pool.processes() == {}


def test_a_group_that_keeps_crashing_is_reported_with_its_last_log_lines(pool):
    pool.tell("crash.1", "rank 0: the checkpoint has no vision tower")
    pool.write()
    done = pool.run("up", code=1)
    assert "group 1 does not start" in done.stderr
    assert "the checkpoint has no vision tower" in done.stderr
    assert "supervisor of group 1" in done.stderr

    row = pool.report()["groups"][1]
    assert (row["phase"], row["restarts"]) == ("Backoff", 2)
    pool.wait(lambda: sorted(pool.listed()) == [0], "the other group")
    starts = list((pool.dir / "log").glob("1.*.supervisor.log"))
    assert len(starts) == 2
    assert sorted(pool.pids()) == [0]


def test_after_a_repair_the_same_command_brings_the_pool_up(pool):
    pool.tell("crash", "no luck")
    pool.write(restart={"backoff": {"baseSeconds": 1, "maxSeconds": 1}})
    pool.run("up", code=1)
    (pool.control / "crash").unlink()
    pool.run("up")
    assert sorted(pool.listed()) == [0, 1]


def test_a_group_that_is_not_ready_is_not_listed(pool):
    unready = pool.tell("unready.0")
    pool.write()
    up = pool.start("up")
    pool.wait(lambda: (pool.dir / "endpoints" / "endpoints.json").exists() and 1 in pool.listed(), "group 1")
    assert 0 not in pool.listed()
    assert next(entry["reason"] for entry in pool.endpoints() if entry["group"] == 0)

    # Whoever stops waiting does not stop the pool.
    up.send_signal(signal.SIGINT)
    assert "the pool goes on" in pool.finish(up, code=130).stderr
    unready.unlink()
    pool.wait(lambda: sorted(pool.listed()) == [0, 1], "group 0")


def test_a_new_controller_takes_over_what_the_killed_one_left(standing):
    """A controller that dies must not take the pool with it, nor lose sight of it."""
    pool = standing
    before, pids = pool.listed(), pool.pids()
    os.kill(pool.controller(), signal.SIGKILL)
    pool.wait(lambda: len(pool.processes()) == 4, "the controller's end")
    assert pool.listed() == before

    pool.run("up")
    assert pool.pids() == pids
    assert pool.listed() == before

    os.kill(pids[0], signal.SIGKILL)
    pool.wait(lambda: 0 not in pool.listed(), "the withdrawal")
    pool.wait(lambda: 0 in pool.listed(), "the return")


def test_what_died_while_nobody_looked_is_replaced(standing):
    pool = standing
    before, pids = pool.listed(), pool.pids()
    os.kill(pool.controller(), signal.SIGKILL)
    pool.wait(lambda: len(pool.processes()) == 4, "the controller's end")
    os.kill(pids[1], signal.SIGKILL)
    pool.wait(lambda: len(pool.processes()) == 2, "the end of group 1")

    pool.run("up")
    after = pool.listed()
    assert after[0] == before[0]
    assert after[1]["url"] != before[1]["url"]


def test_down_works_without_a_controller(pool):
    pool.up()
    os.kill(pool.controller(), signal.SIGKILL)
    pool.wait(lambda: len(pool.processes()) == 4, "the controller's end")
    pool.run("down")
    assert pool.processes() == {}
    assert pool.listed() == {}


def test_down_lets_workers_finish_and_takes_them_off_the_list_first(pool):
    work = pool.tell("drain")
    pool.up()
    down = pool.start("down")
    pool.wait(lambda: pool.listed() == {}, "the withdrawal")
    assert len(pool.pids()) == 2
    assert down.poll() is None
    work.unlink()
    pool.finish(down)
    assert "killing" not in pool.run_log()


def test_a_second_sigterm_does_without_the_drain(pool):
    pool.tell("deaf")
    pool.up(replicas=1)
    down = pool.start("down")
    pool.wait(lambda: "its pods are ending" in (pool.dir / "status.json").read_text(), "the drain")
    assert down.poll() is None
    os.kill(pool.controller(), signal.SIGTERM)
    pool.finish(down)
    assert pool.processes() == {}


def test_down_of_a_pool_whose_manifest_was_spoiled_ends_it_all_the_same(pool):
    pool.up()
    os.kill(pool.controller(), signal.SIGKILL)
    pool.wait(lambda: len(pool.processes()) == 4, "the controller's end")
    (pool.dir / "pool.yaml").write_text("nonsense")
    assert "without a drain" in pool.run("down").stderr
    assert pool.processes() == {}
    assert pool.listed() == {}
    assert pool.endpoints() == []


def test_a_running_pool_outlives_a_spoiled_manifest(standing):
    pool = standing
    pids = pool.pids()
    (pool.dir / "pool.yaml").write_text("nonsense")
    pool.wait(lambda: pool.report()["problem"], "the complaint")
    assert "must hold one EncodePool" in pool.report()["problem"]
    assert pool.pids() == pids
    pool.run("up")
    assert pool.report()["problem"] == ""
    assert pool.pids() == pids


def test_a_turn_that_fails_is_told_and_done_again(standing):
    """A full disk ended the controller and left the workers unwatched."""
    pool = standing
    workers = pool.dir / "endpoints" / "workers.json"
    workers.unlink()
    workers.mkdir()
    killed = pool.pids()[0]
    os.kill(killed, signal.SIGKILL)
    pool.wait(lambda: pool.report()["problem"], "the complaint")
    assert "IsADirectoryError" in pool.run("status").stdout
    workers.rmdir()
    pool.wait(lambda: not pool.report()["problem"], "the recovery")
    pool.wait(lambda: sorted(pool.listed()) == [0, 1], "the return")
    assert pool.pids()[0] != killed


def test_a_group_whose_record_was_spoiled_is_started_anew(standing):
    pool = standing
    before, pids = pool.listed(), pool.pids()
    os.kill(pool.controller(), signal.SIGKILL)
    pool.wait(lambda: len(pool.processes()) == 4, "the controller's end")
    state = json.loads((pool.dir / "state.json").read_text())
    state["groups"]["0"]["annotations"] = {}
    (pool.dir / "state.json").write_text(json.dumps(state))

    pool.run("up")
    after = pool.listed()
    assert after[1] == before[1]
    assert after[0]["url"] != before[0]["url"]
    assert pids[0] not in pool.processes()


def test_a_pool_whose_directory_is_deleted_ends(pool):
    """A test folder removed under a running pool left its workers to nobody."""
    pool.up(replicas=1)
    shutil.rmtree(pool.dir)
    pool.wait(lambda: not pool.processes(), "the end")


def test_every_group_gets_devices_of_its_own_and_waits_while_none_is_free(pool):
    pool.env["CUDA_VISIBLE_DEVICES"] = "4,6"
    pool.up(accelerator={"perRank": 1})
    devices = {group: pool.environment(pid)["CUDA_VISIBLE_DEVICES"] for group, pid in pool.pids().items()}
    assert devices == {0: "4", 1: "6"}

    # A surge needs a third device: the rollout waits, nobody loses anything.
    pool.write(batching={"maxTokensPerBatch": 4096}, rollout={"maxUnavailable": 0, "maxSurge": 1})
    pool.start("up")
    waiting = pool.wait(
        lambda: next((row for row in pool.report()["groups"] if "GPU" in row["reason"]), None), "the wait"
    )
    assert "Unschedulable: needs 1 GPU, 0 of 2 are free" in waiting["reason"]
    assert sorted(pool.listed()) == [0, 1]
    pool.write(rollout={"maxUnavailable": 1, "maxSurge": 0})
    pool.run("up")
    devices = {group: pool.environment(pid)["CUDA_VISIBLE_DEVICES"] for group, pid in pool.pids().items()}
    assert sorted(devices.values()) == ["4", "6"]


def test_withdrawn_groups_settle_before_they_are_stopped(pool):
    pool.up(drain={"settleSeconds": 2, "timeoutSeconds": 5})
    down = pool.start("down")
    pool.wait(lambda: pool.listed() == {}, "the withdrawal")
    withdrawn_s = time.monotonic()
    pool.wait(lambda: not pool.pids(), "the end")
    assert time.monotonic() - withdrawn_s > 1.5
    pool.finish(down)


def test_the_pool_of_a_directory_cannot_become_another(standing):
    pool = standing
    pool.manifest.write_text(pool.manifest.read_text().replace("name: pool", "name: other"))
    assert "give each pool its own --state-dir" in pool.run("up", code=2).stderr
    pool.write(tensorParallelSize=2)
    assert "spec.tensorParallelSize: cannot be changed" in pool.run("up", code=2).stderr
    pool.write(tensorParallelSize=1)


def test_a_second_controller_leaves_the_directory_alone(standing):
    pool = standing
    assert f"in use by process {pool.controller()}" in pool.run("run", code=1).stderr
    assert sorted(pool.listed()) == [0, 1]


def test_a_pool_at_rest_writes_nothing(standing):
    pool = standing
    files = [path for path in pool.dir.rglob("*") if path.is_file()]

    def seen():
        return {path: (path.stat().st_mtime_ns, path.read_text()) for path in files}

    before = seen()
    # Another pool of the user starts a group.
    counter = UserCounter(user_state_dir(pool.env))
    seen_last = counter.read().last
    assert counter.reserve(seen_last + 1, seen=seen_last)
    # Longer than every probe period, and than the longest wait between two looks.
    end_s = time.monotonic() + 32
    pool.wait(lambda: time.monotonic() > end_s, "some time", timeout_s=40)
    after = seen()
    for path in before:
        assert after[path][1] == before[path][1], path
        assert after[path] == before[path], path
