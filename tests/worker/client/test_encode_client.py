"""An Encode caller against an encode side in this process, over the tcp engine."""

import json
import threading

import grpc
import numpy as np
import pytest

from encodepool_worker.client.encode import ClientOptions, EncodeClient, Encoded
from encodepool_worker.client.endpoints import (
    Endpoint,
    explicit_endpoint,
    in_order_of_choice,
    read_endpoints,
    ready_endpoints,
    split_url,
)
from encodepool_worker.client.facts import facts_from_server
from encodepool_worker.errors import ClientError, ImageError


@pytest.fixture
def open_client():
    clients = []

    def make(source, **options):
        options.setdefault("receive_bytes", 16 << 20)
        options.setdefault("timeout_s", 10.0)
        made = ClientOptions(**options)
        if isinstance(source, tuple):
            clients.append(EncodeClient.to_endpoint(*source, made))
        else:
            clients.append(EncodeClient.from_list(source, made))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def by_hand(side):
    return (side.url, *side.bootstrap)


def test_an_image_goes_out_and_its_rows_come_back(open_side, open_client, pictures):
    for dtype in ("float32", "bfloat16"):
        side = open_side(dtype=dtype)
        [path] = pictures((200, 100))

        done = open_client(by_hand(side)).encode(path)

        request = side.requests[0]
        item = request.mm_inputs.items[0]
        assert (len(request.items), len(request.mm_inputs.items)) == (1, 1)
        assert item.encoder_input.dtype == dtype
        assert list(item.encoder_input.shape) == [6 * 12, 1536]
        assert len(item.encoder_input.inline) == 6 * 12 * 1536 * (4 if dtype == "float32" else 2)
        grid = np.frombuffer(item.model_specific_tensors["image_grid_thw"].inline, np.int64)
        assert grid.tolist() == [1, 6, 12]
        assert item.placeholders[0].length == 18
        rows = side.rows_of(item.encoder_input.inline, 18)
        assert np.array_equal(done.main, rows[:, :8])
        assert np.array_equal(done.deepstack, rows[:, 8:])
        assert (done.n_tokens, done.nbytes, done.dtype) == (18, rows.nbytes, dtype)
        assert done.main_float32.dtype == np.float32
        assert done.main_float32.std() > 0.5
        assert 0 < done.encode_s < done.total_s


def test_a_tensor_parallel_group_is_received_by_as_many_ranks(open_side, open_client, pictures):
    side = open_side(tp=2)
    [path] = pictures((160, 160))
    rows = {}
    for ranks in (0, 4):
        done = open_client(by_hand(side), receiving_ranks=ranks).encode(path)
        rows[ranks] = np.concatenate([done.main, done.deepstack], axis=1)
        assert len(side.infos(done.room, 0)) == len(side.infos(done.room, 1)) == max(1, ranks // 2)

    assert np.array_equal(rows[0], rows[4])
    assert np.array_equal(rows[0], side.rows_of(side.requests[0].mm_inputs.items[0].encoder_input.inline, 25))


def test_many_images_are_under_way_at_once(open_side, open_client, pictures):
    side = open_side()
    gate = threading.Barrier(3, timeout=10)

    def ship(side, rank, room, info):
        def later():
            gate.wait()
            side.write(rank, room, info)
            side.say(rank, info, room, 5)

        threading.Thread(target=later).start()

    side.on_ship = ship
    paths = pictures((64, 64), (96, 64), (64, 128))

    outcomes = dict(open_client(by_hand(side), concurrency=3).encode_all(paths))

    assert sorted(outcomes) == [0, 1, 2]
    assert [outcomes[index].path for index in range(3)] == [str(path) for path in paths]


def test_an_image_beyond_the_message_limit_is_refused_before_anything_is_sent(
    side, open_client, pictures, monkeypatch
):
    [path] = pictures((96, 64))
    monkeypatch.setattr("encodepool_worker.client.encode.MAX_MESSAGE_BYTES", 24 * 1536 * 4 - 1)

    with pytest.raises(ImageError, match=r"96x64 pixels are 147,456 bytes in float32.*have 147,455"):
        open_client(by_hand(side)).encode(path)

    assert (side.requests, side.frames) == ([], [])


def test_a_request_too_large_for_a_worker_is_not_taken_for_a_full_one(side, open_client, pictures):
    [path] = pictures((64, 64))
    side.on_encode = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT: Received message larger than max (403 vs. 268)",
    )

    with pytest.raises(ClientError, match=r"takes no request of this size .*scale the image down") as failed:
        open_client(by_hand(side)).encode(path)

    assert "full" not in str(failed.value)


def test_another_transfer_backend_than_the_workers_is_refused_before_sending(side, open_client, pictures):
    [path] = pictures((64, 64))

    with pytest.raises(ClientError, match="transfer backend tcp, not mooncake"):
        open_client(by_hand(side), transfer_backend="mooncake").encode(path)

    assert (side.requests, side.frames) == ([], [])


def test_the_same_image_goes_to_the_same_endpoint(open_side, open_client, endpoints_file, pictures):
    sides = {group: open_side() for group in "abc"}
    listing = endpoints_file(*(side.entry(group) for group, side in sides.items()))
    paths = pictures(*[(64 + 32 * index, 64) for index in range(12)])
    client = open_client(listing)
    first = [client.encode(path).endpoint.group for path in paths]

    assert [client.encode(path).endpoint.group for path in paths] == first
    assert len(set(first)) > 1

    gone = first[0]
    endpoints_file(*(side.entry(group) for group, side in sides.items() if group != gone))
    after = [client.encode(path).endpoint.group for path in paths]
    assert [b for a, b in zip(first, after, strict=True) if a != gone] == [a for a in first if a != gone]
    assert gone not in after


def test_another_endpoint_is_asked_when_the_first_takes_nothing(
    open_side, open_client, endpoints_file, pictures
):
    full, other = open_side(), open_side()
    full.on_encode = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    # By its content each picture has an endpoint that comes first: of 16, some have the full one.
    paths = pictures(*[(64 + 32 * index, 64) for index in range(16)])
    client = open_client(
        endpoints_file(
            full.entry("full"),
            other.entry("other"),
            {**other.entry("dead"), "grpcPort": 1, "id": "dead"},
        )
    )

    outcomes = [outcome for _, outcome in client.encode_all(paths)]

    assert all(isinstance(outcome, Encoded) for outcome in outcomes), outcomes
    assert {outcome.endpoint.group for outcome in outcomes} == {"other"}
    assert full.requests
    assert len(other.requests) == 16


def test_what_went_wrong_is_one_sentence(open_side, open_client, endpoints_file, pictures, tmp_path):
    side = open_side()
    [path] = pictures((64, 64))

    def fails(source, **options):
        with pytest.raises(ClientError) as caught:
            open_client(source, **options).encode(path)
        return str(caught.value)

    assert "is the pool up?" in fails(("grpc://127.0.0.1:1", "127.0.0.1", 1))
    side.on_encode = (grpc.StatusCode.INVALID_ARGUMENT, "image_grid_thw: odd")
    assert fails(by_hand(side)).endswith("refuses the image: image_grid_thw: odd")
    side.on_encode = (grpc.StatusCode.INTERNAL, "oops")
    assert fails(by_hand(side)).endswith("failed Encode: INTERNAL oops")
    side.on_encode = None
    side.on_ship = lambda side, rank, room, info: side.say(rank, info, room, 0)
    assert "its log says why" in fails(by_hand(side))
    side.on_ship = lambda *_: None
    assert "no verdict within" in fails(by_hand(side), timeout_s=0.3)
    side.registered = False
    assert "no encode rank has registered" in fails(by_hand(side))
    assert "is full" not in fails(endpoints_file({**side.entry(), "ready": False, "reason": "starting"}))
    assert "no ready endpoint (group 0: starting)" in fails(
        endpoints_file({**side.entry(), "ready": False, "reason": "starting"})
    )
    assert "lists no endpoint" in fails(endpoints_file())
    assert "does not exist: is the pool up" in fails(tmp_path / "absent.json")
    with pytest.raises(ImageError, match="does not exist"):
        open_client(by_hand(open_side())).encode(tmp_path / "absent.png")


def test_a_failed_image_does_not_stop_the_others(side, open_client, pictures, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    paths = [*pictures((64, 64)), tmp_path / "text.png", *pictures((96, 96))]

    outcomes = dict(open_client(by_hand(side)).encode_all(paths))

    assert [type(outcomes[index]).__name__ for index in range(3)] == ["Encoded", "ImageError", "Encoded"]


def test_a_worker_that_tells_nothing_needs_the_model_folder(open_side, open_client, pictures, tmp_path):
    """A TokenSpeed encode worker says its dtype and no more."""
    side = open_side(tells=False, hidden=8, levels=1, dtype="bfloat16")
    [path] = pictures((64, 64))
    vision = {"out_hidden_size": 8, "hidden_size": 4, "num_heads": 2, "depth": 2}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_vl", "vision_config": {**vision, "deepstack_visual_indexes": [1]}})
    )

    with pytest.raises(ClientError, match="--model"):
        open_client(by_hand(side)).encode(path)
    with pytest.raises(ClientError, match="--transfer-backend"):
        open_client(by_hand(side), model_dir=str(tmp_path)).encode(path)
    done = open_client(by_hand(side), model_dir=str(tmp_path), transfer_backend="tcp").encode(path)

    assert (done.main.shape, done.deepstack.shape, done.dtype) == ((64, 8), (64, 8), "bfloat16")


def test_a_closed_client_says_so(side, open_client, pictures):
    client = open_client(by_hand(side))
    [path] = pictures((64, 64))
    client.encode(path)
    client.close()

    with pytest.raises(ClientError, match="closed"):
        client.encode(path)


def test_endpoints_that_make_no_sense_are_named(endpoints_file, side, tmp_path):
    for change, message in [
        ({"grpcPort": 0}, r"endpoints\[0\]\.grpcPort is 0"),
        ({"bootstrapPort": "8998"}, r"bootstrapPort is '8998'"),
        ({"host": ""}, r"host is ''"),
    ]:
        with pytest.raises(ClientError, match=message):
            read_endpoints(endpoints_file(side.entry(**change)))
    for text, message in [("{", "as JSON"), ("[]", "not an EncodeEndpointList"), ("{}", "not an")]:
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ClientError, match=message):
            read_endpoints(tmp_path / "other.json")


def test_a_group_that_is_not_ready_needs_no_address(endpoints_file, side):
    starting = side.entry(ready=False, host="", bootstrapHost="", grpcPort=0, bootstrapPort=0)
    listed = read_endpoints(endpoints_file(starting, side.entry()))
    assert [endpoint.ready for endpoint in listed] == [False, True]
    assert ready_endpoints(listed, "the list") == listed[1:]


def test_addresses_are_understood_with_and_without_brackets():
    assert split_url("grpc://[::1]:50051") == ("::1", 50051)
    assert split_url("worker-0.pool:80") == ("worker-0.pool", 80)
    assert explicit_endpoint("grpc://[::1]:5", "", 6).target == "[::1]:5"
    assert explicit_endpoint("grpc://[::1]:5", "", 6).bootstrap == ("::1", 6)
    for wrong in ("grpc://", "grpc://host", "grpc://host:0", "grpc://host:99999", "http://host:1/x"):
        with pytest.raises(ClientError, match="grpc://HOST:PORT"):
            split_url(wrong)


def test_the_order_of_choice_spreads_and_moves_little():
    endpoints = [Endpoint(str(i), f"10.0.0.{i}", 50051, f"10.0.0.{i}", 8998) for i in range(5)]
    keys = [bytes([n]) * 32 for n in range(200)]
    first = [in_order_of_choice(endpoints, key)[0] for key in keys]

    shares = [first.count(endpoint) for endpoint in endpoints]
    assert min(shares) > 15
    fewer = [in_order_of_choice(endpoints[1:], key)[0] for key in keys]
    assert all(a is b for a, b in zip(first, fewer, strict=True) if a is not endpoints[0])


@pytest.mark.parametrize(
    "change", [{"family": "llava"}, {"dtype": "int8"}, {"levels": "x"}, {"patch_size": 0}, {"image_std": [1]}]
)
def test_a_worker_that_reports_nonsense_is_refused(change):
    told = {
        "family": "qwen3_vl",
        "hidden": 8.0,
        "levels": 3.0,
        "dtype": "bfloat16",
        "patch_size": 16.0,
        "temporal_patch_size": 2.0,
        "merge_size": 2.0,
    }
    facts = facts_from_server(told, "", "worker")
    assert (facts.spec.patch_width, facts.spec.levels, facts.pixel_dtype) == (1536, 3, "bfloat16")
    assert (facts.images.min_pixels, facts.images.image_mean) == (65536, (0.5, 0.5, 0.5))
    assert facts_from_server({"encodepool": told}, "", "worker") == facts
    assert facts_from_server({}, "", "worker") is None

    with pytest.raises(ClientError, match="worker reports"):
        facts_from_server({**told, **change}, "", "worker")
