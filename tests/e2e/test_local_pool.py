"""``encodepool local`` with real workers: what is published serves, and survives a lost group."""

import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import psutil
import pytest
import yaml
from PIL import Image
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc
from tests.e2e.gateway import SHM, image_request
from tests.e2e.pooling import LocalPool
from tests.e2e.pooling import manifest as pool_manifest
from tests.e2e.receiving import HIDDEN, LEVELS, Receivers
from tests.e2e.running import CHANNEL_OPTIONS

pytestmark = pytest.mark.real

UNLISTED_S = 10
"""From a failure to a list without the group; the contract's bound."""


@pytest.fixture(scope="module")
def pool(program, tiny_model, shared_prefill, tmp_path_factory):
    """Two groups, taken down whatever happens."""
    folder = tmp_path_factory.mktemp("vision")
    manifest = folder / "pool.yaml"
    manifest.write_text(yaml.safe_dump(pool_manifest("vision", tiny_model, replicas=2)))
    pool = LocalPool(program("encodepool"), manifest, folder / "state")
    yield pool.up()
    pool.run("down")


@pytest.fixture
def send(shared_prefill, new_room, new_picture, direct):
    """``send(entry)``: one image through a listed worker; seconds from the frame to its arrival."""
    channels = {}

    def one(entry):
        address = urlsplit(entry["url"])
        channel = channels.setdefault(
            entry["url"], grpc.insecure_channel(address.netloc, options=CHANNEL_OPTIONS)
        )
        receivers = Receivers(shared_prefill, f"{address.hostname}:{entry['bootstrap_port']}")
        room, picture = new_room(), new_picture()
        encoder = tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(channel)
        assert encoder.Encode(image_request(room, picture), timeout=20).accepted
        asked_at = receivers.ask(room, picture)
        verdict = receivers.verdict(room)
        assert verdict["status"] == "Success", verdict
        assert receivers.digest(room) == direct(picture).digest
        receivers.forget(room)
        return verdict["at"] - asked_at

    yield one
    for channel in channels.values():
        channel.close()


def test_every_listed_worker_serves(pool, send, tiny_model):
    listed = pool.listed()
    assert len(listed) == 2
    for entry in listed.values():
        assert entry["worker_type"] == "encode"
        assert entry["model_id"] == tiny_model.name
        send(entry)
    assert {entry["url"] for entry in pool.endpoints().values() if entry["ready"]} == set(listed)


def test_image_files_come_back_as_the_tower_makes_them(pool, program, tiny_model, tmp_path):
    """`encodepool encode` through the pool against `encodepool-worker rows`, byte for byte."""
    images = [tmp_path / "wide.png", tmp_path / "tall.png"]
    for path, size in zip(images, [(500, 200), (224, 320)], strict=True):
        noise = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    commands = {
        "pool": [
            program("encodepool"), "encode", "--endpoints", pool.state_dir / "endpoints" / "endpoints.json"
        ],
        "tower": [program("encodepool-worker"), "rows", "--model", tiny_model],
    }  # fmt: skip
    arrays = {}
    for name, command in commands.items():
        out = tmp_path / f"{name}.npz"
        done = subprocess.run(
            [*command, "--out", out, *images],
            # Sums in a matrix product depend on the number of threads; each group here has one core.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        with np.load(out) as rows:
            arrays[name] = {key: rows[key] for key in rows}

    assert set(arrays["pool"]) == {"wide.main", "wide.deepstack", "tall.main", "tall.deepstack"}
    for key, rows in arrays["tower"].items():
        assert rows.shape[1] == (HIDDEN if key.endswith("main") else LEVELS * HIDDEN)
        assert arrays["pool"][key].dtype == rows.dtype
        assert arrays["pool"][key].tobytes() == rows.tobytes(), key


def test_every_process_is_known_and_names_the_state_directory(pool):
    processes = pool.processes()
    roles = sorted((entry["group"], entry["role"]) for entry in processes)
    assert roles == [(g, role) for g in (0, 1) for role in ("frontend", "rank", "supervisor")]
    for entry in processes:
        assert str(pool.state_dir) in " ".join(psutil.Process(entry["pid"]).cmdline())


def test_a_lost_group_leaves_the_list_and_returns_under_another_address(
    pool, send, wait_for, clock, record_property
):
    """Requests to the other group notice nothing, from the loss to the return."""
    before = pool.endpoints()
    victim, survivor = before[0], before[1]
    survivor_entry = pool.listed()[survivor["url"]]
    calm_s = max(send(survivor_entry) for _ in range(3))
    pid = pool.pid(0, "supervisor", victim["incarnation"])
    members = [psutil.Process(p["pid"]) for p in pool.processes() if p["group"] == 0]
    psutil.Process(pid).kill()
    lost_at = clock()

    wait_for(lambda: victim["url"] not in pool.listed(), UNLISTED_S, "the lost group to be unlisted")
    unlisted_s = clock() - lost_at
    print(f"unlisted after {unlisted_s:.2f} s")
    record_property("unlisted_after_s", round(unlisted_s, 2))
    assert unlisted_s < 3, "a death is seen at once: no probe has to fail first"
    _, alive = psutil.wait_procs(members, timeout=5)
    assert alive == [], "the group dies as a whole"

    delays = []
    while len(listed := pool.listed()) < 2:
        assert survivor["url"] in listed
        delays.append(send(survivor_entry))
        assert clock() - lost_at < 90, "the group did not come back"
    print(
        f"back after {clock() - lost_at:.1f} s; {len(delays)} rooms to the other group meanwhile, "
        f"slowest {max(delays):.3f} s (before: {calm_s:.3f} s)"
    )

    # workers.json is replaced before endpoints.json.
    after = wait_for(lambda: pool.ready(group=0, after=victim["incarnation"]))
    assert after["url"] != victim["url"]
    assert after["bootstrapPort"] != victim["bootstrapPort"]
    assert pool.endpoints()[1] == survivor
    send(pool.listed()[after["url"]])


def test_a_frozen_process_is_unlisted_in_time(pool, wait_for, clock, record_property):
    victim = pool.endpoints()[0]
    pid = wait_for(lambda: pool.pid(group=0, role="rank", incarnation=victim["incarnation"]))
    psutil.Process(pid).suspend()
    frozen_at = clock()
    wait_for(lambda: victim["url"] not in pool.listed(), UNLISTED_S, "the frozen group to be unlisted")
    print(f"unlisted after {clock() - frozen_at:.1f} s")
    record_property("unlisted_after_s", round(clock() - frozen_at, 1))

    # It does not come back by itself: what comes back is a new start.
    entry = wait_for(lambda: pool.ready(group=0, after=victim["incarnation"]), 90, "the group to return")
    assert entry["url"] != victim["url"]
    assert not psutil.pid_exists(pid)


def test_up_again_with_more_replicas_keeps_those_that_run(pool, send):
    before = pool.endpoints()
    pool.edit(replicas=3)
    pool.up()

    after = pool.endpoints()
    assert {group: after[group] for group in before} == before
    assert after[2]["ready"]
    send(pool.listed()[after[2]["url"]])


def runs(process):
    """Not gone, and not waiting for a parent that reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_down_leaves_nothing_behind(pool):
    processes = [psutil.Process(entry["pid"]) for entry in pool.processes()]
    ours = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(pool.state_dir) in (process.info["cmdline"] or [])
    ]
    pool.down()

    assert [process for process in processes + ours if runs(process)] == []
    assert pool.listed() == {}
    assert not [path for path in Path(SHM).iterdir() if path.name.startswith("encodepool")]
    assert pool.run("status").returncode in (0, 1)
