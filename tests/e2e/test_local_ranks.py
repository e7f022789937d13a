"""A local group of two pods: listed once both are ready, lost as a whole, back as another."""

from urllib.parse import urlsplit

import grpc
import psutil
import pytest
import yaml
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc
from tests.e2e.gateway import image_request
from tests.e2e.pooling import LocalPool, manifest
from tests.e2e.receiving import Receivers
from tests.e2e.running import CHANNEL_OPTIONS

pytestmark = pytest.mark.real

RETURN_S = 120


@pytest.fixture
def pool(program, tiny_model, tmp_path):
    path = tmp_path / "pool.yaml"
    spec = {"replicas": 1, "tensorParallelSize": 2, "ranksPerPod": 1}
    path.write_text(yaml.safe_dump(manifest("pair", tiny_model, **spec)))
    made = LocalPool(program("encodepool"), path, tmp_path / "state")
    yield made
    made.down()
    assert made.processes() == []


def send(entry, remote, room, picture):
    """One image through a listed worker to two prefill ranks, half of the rows to each."""
    address = urlsplit(entry["url"])
    receivers = Receivers(remote, f"{address.hostname}:{entry['bootstrap_port']}")
    with grpc.insecure_channel(address.netloc, options=CHANNEL_OPTIONS) as channel:
        encoder = tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(channel)
        assert encoder.Encode(image_request(room, picture), timeout=20).accepted
    receivers.ask(room, picture, tp_size=2, shard=True)
    verdict = receivers.verdict(room, tp_size=2)
    assert verdict["ranks"] == {"0": "Success", "1": "Success"}, verdict
    receivers.forget(room, tp_size=2)


def test_a_group_of_two_pods_serves_is_lost_as_a_whole_and_comes_back(
    pool, shared_prefill, new_room, new_picture, wait_for
):
    pool.up()
    [before] = pool.endpoints().values()
    assert (before["tensorParallelSize"], before["ready"]) == (2, True)
    [entry] = pool.listed().values()
    send(entry, shared_prefill, new_room(), new_picture())

    processes = pool.processes()
    assert sorted((p["role"], p["rank"]) for p in processes if p["role"] == "rank") == [
        ("rank", 0),
        ("rank", 1),
    ]
    assert [p["role"] for p in processes].count("supervisor") == 2
    members = [psutil.Process(p["pid"]) for p in processes]
    psutil.Process(next(p["pid"] for p in processes if p["rank"] == 1)).kill()
    wait_for(lambda: not pool.listed(), 10, "the group to be unlisted")
    _, alive = psutil.wait_procs(members, timeout=20)
    assert alive == [], "the group ends as a whole"

    after = wait_for(lambda: pool.ready(group=0, after=before["incarnation"]), RETURN_S, "the group is back")
    assert after["bootstrapPort"] != before["bootstrapPort"]
    [entry] = pool.listed().values()
    send(entry, shared_prefill, new_room(), new_picture())
