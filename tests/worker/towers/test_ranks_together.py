"""Several ranks compute one tower: the same rows as one, and together through every failure."""

import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.worker.towers.ranks import DEADLINE_S, Rank, Ranks, made_items

from encodepool_worker.errors import ConfigError, GroupLost
from encodepool_worker.towers.load import load_tower
from encodepool_worker.towers.parallel import TensorParallel, _find_leader, _listen, _open_store, join

SIZES = {"four": 4, "two": 2, "to_kill": 2, "to_freeze": 2}
SILENCE_S = 2.0
"""How long a rank of the group ``to_freeze`` may keep the others waiting."""

ITEMS = [[[(1, 16, 16)], 1], [[(1, 8, 20)], 2], [[(2, 4, 6), (1, 2, 2)], 3]]
SMALL = [[[(1, 4, 6)], 1], [[(1, 2, 2)], 2]]
LAYERS = 4
UNEVEN = 250
"""Of an MLP's middle: four ranks get 62, 63, 62 and 63."""

QWEN3_STEPS = [
    "patch_embed",
    *(
        f"blocks.{layer}.{part}"
        for layer in range(LAYERS)
        for part in ("attn", "attn.proj", "mlp", "mlp.linear_fc2")
    ),
    "deepstack_merger_list.1",
    "merger",
]
"""Every place between two sums of a forward pass, and the ends."""


@pytest.fixture(scope="module")
def models(qwen3_dir, qwen25_dir, tmp_path_factory):
    """How to load a tower, by name."""

    def uneven(folder):
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["intermediate_size"] = UNEVEN
        made = tmp_path_factory.mktemp("uneven")
        (made / "config.json").write_text(json.dumps(config))
        return str(made)

    made_up = {"load_format": "dummy", "seed": 7}
    return {
        "qwen3": {"folder": str(qwen3_dir)},
        "qwen2.5": {"folder": str(qwen25_dir)},
        "qwen3 made up": {"folder": uneven(qwen3_dir), **made_up},
        "qwen2.5 made up": {"folder": uneven(qwen25_dir), **made_up},
        "qwen3 bfloat16": {"folder": str(qwen3_dir), "dtype": "bfloat16"},
    }


@pytest.fixture(scope="module")
def worlds(fork, free_port, models, tmp_path_factory):
    """Groups of ranks by name, joined."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        listener.listen(64)
        listener.settimeout(DEADLINE_S)
        argv = [sys.executable, "-m", "tests.worker.towers.ranks", folder / "s", sum(SIZES.values())]
        program = fork(argv, folder / "log", env={"GLOO_SOCKET_IFNAME": "lo"})
        ranks = [Rank(listener.accept()[0]) for _ in range(sum(SIZES.values()))]
    free = iter(ranks)
    made = {}
    for name, size in SIZES.items():
        made[name] = Ranks([next(free) for _ in range(size)])
        port = free_port()
        timeout_s = SILENCE_S if name == "to_freeze" else DEADLINE_S
        order = {"do": "join", "size": size, "port": port, "collective_timeout_s": timeout_s}
        answers = made[name].each([{**order, "rank": rank} for rank in range(size)])
        assert answers == [{}] * size
    yield SimpleNamespace(**made)
    for rank in ranks:
        rank.close()
    program.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def load(worlds, models):
    """``load(world, model)``: on all ranks, once; what they say of it."""
    answers = {}

    def once(world, model):
        if (world, model) not in answers:
            answers[world, model] = getattr(worlds, world).all(do="load", name=model, **models[model])
            assert errors(answers[world, model]) == [None] * SIZES[world]
        return answers[world, model]

    return once


@pytest.fixture
def rows_of(worlds, load, tmp_path):
    """Rows of items from a group: all its ranks have the same."""

    def rows(world, model, items, batch=0):
        load(world, model)
        ranks = getattr(worlds, world)
        files = [str(tmp_path / f"{rank}.rows") for rank in range(len(ranks.ranks))]
        order = {"do": "encode", "name": model, "items": items, "batch": batch}
        answers = ranks.each([{**order, "out": file} for file in files])
        assert answers == [{}] * len(files)
        first, *others = [load_file(file)["rows"] for file in files]
        assert all(torch.equal(first, other) for other in others)
        return first

    return rows


@pytest.fixture(scope="module")
def alone(models):
    """One rank's tower, in this process."""
    towers = {}

    def tower(model):
        if model not in towers:
            how = dict(models[model])
            towers[model] = load_tower(how.pop("folder"), **how)
        return towers[model]

    return tower


def errors(answers):
    return [answer.get("error") for answer in answers]


@pytest.mark.parametrize("world", ["four", "two"])
@pytest.mark.parametrize("model", ["qwen3", "qwen2.5", "qwen3 made up", "qwen2.5 made up"])
def test_rows_equal_one_ranks(rows_of, alone, world, model):
    wanted = alone(model).encode(made_items(alone(model).spec, ITEMS))

    rows = rows_of(world, model, ITEMS)

    assert rows.shape == wanted.shape
    assert rows.dtype is torch.float32
    torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("world", ["four", "two"])
@pytest.mark.parametrize("model", ["qwen3", "qwen2.5"])
def test_rows_equal_plain_transformers(rows_of, alone, plain, models, world, model):
    for item, made in zip(ITEMS, made_items(alone(model).spec, ITEMS), strict=True):
        main, levels = plain(models[model]["folder"], torch.float32, made.pixels, made.grids)

        rows = rows_of(world, model, [item])

        torch.testing.assert_close(rows, torch.cat([main, *levels], dim=-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", ["qwen3", "qwen2.5"])
def test_order_and_company_of_an_item_make_no_difference(rows_of, alone, model):
    together = rows_of("four", model, ITEMS)

    counts = [item.pixels.shape[0] // 4 for item in made_items(alone(model).spec, ITEMS)]
    one_by_one = [rows_of("four", model, [item]) for item in ITEMS]
    assert torch.equal(together, torch.cat(one_by_one))
    backwards = rows_of("four", model, ITEMS[::-1])
    assert torch.equal(together, torch.cat(torch.split(backwards, counts[::-1])[::-1]))


def test_sums_of_bfloat16_towers_are_close(rows_of, alone):
    wanted = alone("qwen3 bfloat16").encode(made_items(alone("qwen3 bfloat16").spec, ITEMS))

    rows = rows_of("four", "qwen3 bfloat16", ITEMS)

    assert rows.dtype is torch.bfloat16
    # Eight bits of mantissa, rounded once more for each sum.
    assert (rows.float() - wanted.float()).abs().mean() < 0.01 * wanted.float().abs().mean()


def test_a_rank_reads_and_holds_its_part_only(load, alone):
    for world, size in (("four", 4), ("two", 2)):
        for model in ("qwen3", "qwen2.5"):
            whole = sum(p.numel() for p in alone(model).module.parameters())
            layers = sum(
                p.numel()
                for name, p in alone(model).module.named_parameters()
                if name.startswith("blocks.") and "norm" not in name and not name.endswith(".proj.bias")
            )
            for answer in load(world, model):
                most = whole - layers * (size - 1) / size + 4096  # biases that are added to the sums
                assert answer["n_values"] <= most
                # The header, and whatever else a process reads as it goes along.
                assert answer["bytes_read"] <= 4 * answer["n_values"] + 200_000


@pytest.mark.parametrize("world", ["four", "two"])
def test_a_rank_that_fails_anywhere_fails_the_batch_on_all_and_nothing_else(worlds, rows_of, tmp_path, world):
    """It used to leave the others inside a sum that it never joined."""
    ranks = getattr(worlds, world)
    size = len(ranks.ranks)
    wanted = rows_of(world, "qwen3", SMALL)
    order = {"do": "encode", "name": "qwen3", "items": SMALL, "out": str(tmp_path / "nothing")}

    for number, step in enumerate(QWEN3_STEPS):
        bad, kind = number % size, ("runtime", "memory", "other")[number % 3]
        orders = [order] * size
        orders[bad] = {**order, "raise_at": step, "kind": kind}

        answers = ranks.each(orders)

        for place, answer in enumerate(answers):
            if place != bad:
                assert answer["error"] == "TowerError", (step, answer)
                assert answer["text"] == f"the batch was not finished: rank {bad} failed"
        assert "made by the test" in answers[bad]["text"]
        assert torch.equal(rows_of(world, "qwen3", SMALL), wanted), step


def test_ranks_may_fail_at_different_places_of_one_batch(worlds, rows_of, tmp_path):
    wanted = rows_of("four", "qwen2.5", SMALL)
    order = {"do": "encode", "name": "qwen2.5", "items": SMALL, "out": str(tmp_path / "nothing")}
    places = ["blocks.0.attn", "blocks.3.mlp.down_proj", "merger", ""]

    answers = worlds.four.each([{**order, "raise_at": place, "kind": "runtime"} for place in places])

    assert errors(answers) == ["TowerError"] * 4
    assert answers[3]["text"] == "the batch was not finished: rank 0 failed"
    assert torch.equal(rows_of("four", "qwen2.5", SMALL), wanted)


def test_a_rank_that_cannot_take_part_says_so_instead(worlds, rows_of, tmp_path):
    order = {"do": "encode", "name": "qwen3", "items": SMALL, "out": str(tmp_path / "nothing")}

    answers = worlds.four.each([order, order, {"do": "agree", "ok": False}, order])

    assert answers[2] == {"agreed": False}
    for place in (0, 1, 3):
        assert answers[place]["text"] == "the batch was not begun: rank 2 failed"
    rows_of("four", "qwen3", SMALL)
    assert worlds.four.all(do="agree", ok=True) == [{"agreed": True}] * 4


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 8},
        {"items": SMALL[:1]},
        {"items": [[[(1, 4, 6)], 1], [[(1, 2, 4)], 2]]},
        {"items": []},
        {"items": [[[(1, 3, 2)], 1]]},
    ],
    ids=["number", "fewer", "larger", "none", "impossible"],
)
def test_ranks_with_different_batches_do_not_begin(worlds, rows_of, tmp_path, other):
    order = {"do": "encode", "name": "qwen3", "items": SMALL, "batch": 7, "out": str(tmp_path / "nothing")}

    answers = worlds.two.each([order, {**order, **other}])

    assert errors(answers) == ["TowerError"] * 2
    assert answers[0]["text"].startswith("the batch was not begun: ")
    rows_of("two", "qwen3", SMALL)


def test_warm_up_is_a_batch_of_all_ranks(worlds):
    assert worlds.four.all(do="warm_up", name="qwen3") == [{}] * 4


def test_a_rank_killed_in_a_batch_ends_the_group(worlds, load, tmp_path):
    load("to_kill", "qwen3")
    order = {"do": "encode", "name": "qwen3", "items": SMALL, "out": str(tmp_path / "nothing")}

    answers = worlds.to_kill.each([{**order, "raise_at": "blocks.2.mlp", "kind": "kill"}, order])

    assert errors(answers) == ["gone", "GroupLost"]


def test_a_rank_frozen_in_a_batch_ends_the_group_in_time(worlds, load, tmp_path):
    load("to_freeze", "qwen3")
    victim, other = worlds.to_freeze.ranks
    order = {"do": "encode", "name": "qwen3", "items": SMALL, "out": str(tmp_path / "nothing")}
    victim.tell(**order, raise_at="blocks.2.attn.proj", kind="stop")
    began_s = time.monotonic()

    other.tell(**order)

    assert errors([other.answer()]) == ["GroupLost"]
    assert time.monotonic() - began_s < SILENCE_S + 10
    os.kill(victim.pid, signal.SIGKILL)


def test_sizes_that_do_not_divide_the_heads_are_refused(qwen3_dir):
    parallel = TensorParallel(0, 3, dist.HashStore(), torch.device("cpu"))

    with pytest.raises(ConfigError, match="size is 3, but the tower has 4 heads: choose one of 1, 2, 4"):
        load_tower(qwen3_dir, parallel=parallel)


def test_an_address_that_is_taken_or_not_ours_is_named(free_port):
    cpu = torch.device("cpu")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="choose another dist_init_port"):
            join(0, 2, "127.0.0.1", other.getsockname()[1], cpu)
    with pytest.raises(ConfigError, match=r"cannot meet at 192\.0\.2\.1"):
        join(0, 2, "192.0.2.1", free_port(), cpu)
    with pytest.raises(ConfigError, match="rank must be in"):
        join(2, 2, "127.0.0.1", free_port(), cpu)


def test_a_rank_that_does_not_come_is_missed(free_port):
    with pytest.raises(GroupLost):
        join(0, 2, "127.0.0.1", free_port(), torch.device("cpu"), join_timeout_s=0.5)


def store_of(port, word):
    """Where the ranks of a start meet, without its rank 0."""
    store = _open_store("127.0.0.1", port, 2, 30.0, _listen("127.0.0.1", port, 2))
    store.set("word", word)
    return store


def test_a_rank_of_another_start_is_sent_away_before_it_is_one_of_the_group(free_port):
    port, cpu = free_port(), torch.device("cpu")
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(join, 0, 2, "127.0.0.1", port, cpu, word="start 5", join_timeout_s=3)
        with pytest.raises(ConfigError, match="another start of the group: start 4, rank 0 is start 5"):
            join(1, 2, "127.0.0.1", port, cpu, word="start 4", join_timeout_s=30, word_patience_s=0)
        with pytest.raises(GroupLost, match=r"^rank 1 did not come within 3 s$"):
            leader.result(30)


def test_a_rank_that_meets_the_start_before_its_own_waits_for_the_right_one(free_port):
    port = free_port()
    before = store_of(port, "start 4")
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(_find_leader, 1, "127.0.0.1", port, 2, "start 5", 60.0, 60.0)
        time.sleep(0.5)
        assert not follower.done()
        del before
        now = store_of(port, "start 5")
        assert follower.result(30).get("word") == b"start 5"
        del now
