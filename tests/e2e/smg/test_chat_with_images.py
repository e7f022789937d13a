"""An OpenAI chat request with images goes through the real gateway, and the right rows reach prefill."""

from collections import Counter
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from tests.e2e.running import http
from tests.e2e.smg.chain import Pixels, bootstrap_of, prepared, rows_of
from tests.peers.smg.gateway import picture
from tests.peers.smg.tap import Tap

from encodepool_operator.core.consumer import QUICK
from encodepool_worker.towers.spec import read_image_spec

pytestmark = pytest.mark.real

REPLY = "a picture"


@pytest.fixture
def arrived(chain, wait_for):
    """``arrived(since, n)``: the records of n images, each of them received."""

    def check(since, n):
        wait_for(lambda: chain.count() >= since + n, 20, f"{n} images at prefill")
        records = chain.records(since)
        assert [record["status"] for record in records] == ["Success"] * n, records
        assert len({record["room"] for record in records}) == n
        return records

    return check


def test_one_image(chain, arrived, new_seeds):
    since, [seed] = chain.count(), new_seeds(1)
    [answer] = chain.send([[seed]], 1)
    assert answer.status == 200, answer.body
    assert answer.text == REPLY
    [record] = arrived(since, 1)
    assert record["bootstrap"] in {bootstrap_of(entry) for entry in chain.pool.endpoints().values()}
    assert rows_of(record) == chain.expected.digest(seed)


def test_four_images_arrive_in_their_order(chain, arrived, new_seeds):
    since, seeds = chain.count(), new_seeds(4)
    [answer] = chain.send([seeds], 1)
    assert answer.status == 200, answer.body
    records = sorted(arrived(since, 4), key=lambda record: record["index"])
    assert [rows_of(record) for record in records] == [chain.expected.digest(seed) for seed in seeds]


def test_an_image_sent_again_is_a_hit_on_the_same_worker(chain, arrived, new_seeds, wait_for):
    """The gateway hashes an image's content to a worker; there its rows are in the store."""

    def hits():
        """Group -> items served from its store."""
        out = {}
        for group, url in chain.pool.metrics().items():
            lines = http(url)[1].splitlines()
            out[group] = sum(
                float(line.split()[-1]) for line in lines if line.startswith("encodepool_hits_total")
            )
        return out

    since, [seed] = chain.count(), new_seeds(1)
    before = hits()
    for _ in range(6):
        [answer] = chain.send([[seed]], 1)
        assert answer.status == 200, answer.body
    records = arrived(since, 6)
    [bootstrap] = {record["bootstrap"] for record in records}
    assert {rows_of(record) for record in records} == {chain.expected.digest(seed)}

    [group] = [g for g, entry in chain.pool.endpoints().items() if bootstrap_of(entry) == bootstrap]
    wait_for(lambda: hits()[group] - before[group] == 5, what="five hits on that worker")
    assert {g: n for g, n in hits().items() if g != group} == {g: n for g, n in before.items() if g != group}


def test_two_hundred_requests_at_once_over_two_groups_lose_nothing(chain, arrived, new_seeds):
    since, seeds = chain.count(), new_seeds(50)
    requests = [[seed] for seed in 4 * seeds]
    answers = chain.send(requests, concurrency=16)
    assert [answer for answer in answers if answer.status != 200] == []
    records = arrived(since, 200)

    due = Counter(chain.expected.digest(seed) for [seed] in requests)
    assert Counter(rows_of(record) for record in records) == due
    share = Counter(record["bootstrap"] for record in records)
    assert set(share) == {bootstrap_of(entry) for entry in chain.pool.endpoints().values()}
    took = sorted(answer.seconds for answer in answers)
    print(f"200 requests, 16 at once: {took[100]:.3f} s median, {took[-1]:.3f} s longest; {dict(share)}")


def test_the_rows_are_the_towers_of_the_pixels_that_the_gateway_sent(
    chain, arrived, start_gateway, language, tower, tiny_model
):
    """Seen on the wire between them; also for pictures that the gateway scales."""
    pictures = [picture(7001)]
    for width, height in [(300, 200), (500, 700), (224, 224)]:
        noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        pictures.append(BytesIO())
        Image.fromarray(noise).save(pictures[-1], "PNG")
        pictures[-1] = pictures[-1].getvalue()
    prefill, decode = language.call("workers")
    entry = next(iter(chain.pool.listed().values()))
    since = chain.count()
    with Tap(entry["url"].removeprefix("grpc://")) as tap:
        gateway = start_gateway(
            "--encode", tap.url, str(entry["bootstrap_port"]),
            "--prefill", prefill["url"], str(prefill["bootstrap_port"]),
            "--decode", decode["url"], *QUICK.split(),
        )  # fmt: skip
        gateway.wait_workers({(tap.url, entry["bootstrap_port"])})
        answer = gateway.chat(pictures)
        gateway.stop()
        assert answer.status == 200, answer.body
        records = sorted(arrived(since, 4), key=lambda record: record["index"])
        sent = {record["room"]: tap.requests[record["room"]] for record in records}

    for record in records:
        item = sent[record["room"]].mm_inputs.items[0]
        _, h, w = np.frombuffer(item.model_specific_tensors["image_grid_thw"].inline, np.int64)
        assert item.encoder_input.dtype == "float32"
        pixels = np.frombuffer(item.encoder_input.inline, np.float32).reshape(h * w, -1)
        assert rows_of(record) == tuple(tower(Pixels(int(h), int(w), pixels.copy())).digest.values())
        if record["index"] == 0:
            ours = prepared(pictures[0], read_image_spec(tiny_model))
            assert (ours.h, ours.w) == (h, w)
            assert ours.float32.tobytes() == pixels.tobytes(), "this is how the other tests know the pixels"
