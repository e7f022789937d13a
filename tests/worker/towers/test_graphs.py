"""Passes by token budget: on a CPU the same padded memory and the same attention, only not recorded."""

import pytest
import torch

from encodepool_worker.errors import TowerError
from encodepool_worker.towers.base import TowerItem, finite_rows
from encodepool_worker.towers.graphs import BUDGETS, MAX_SEGMENTS, PAD_SEGMENT, Pass, pack, pad_bounds
from encodepool_worker.towers.load import graphs_problem, load_tower
from encodepool_worker.types import Grid

SMALL_BUDGETS = (8, 32, 128)
GRIDS = [(Grid(1, 16, 16),), (Grid(1, 10, 26),), (Grid(2, 4, 6), Grid(1, 2, 2)), (Grid(1, 4, 8),)]


@pytest.fixture(scope="module", params=["qwen3_dir", "qwen25_dir"])
def towers(request):
    """The same tower twice: as ever, and by budgets."""
    folder = request.getfixturevalue(request.param)
    plain, by_budget = load_tower(folder), load_tower(folder)
    by_budget.use_graphs(SMALL_BUDGETS)
    by_budget.warm_up()
    return plain, by_budget


@pytest.fixture
def items_of(pixels_of):
    def make(spec, grids):
        return [TowerItem(pixels_of(spec, *item, seed=place), item) for place, item in enumerate(grids)]

    return make


def test_rows_are_those_of_the_plain_pass(towers, items_of):
    plain, by_budget = towers
    items = items_of(plain.spec, GRIDS)

    for batch in (items, items[::-1], items[:1], items[3:], items):
        rows = by_budget.encode(batch)

        torch.testing.assert_close(rows, plain.encode(batch), atol=1e-5, rtol=0)


def test_what_the_last_batch_left_reaches_nobody(towers, items_of):
    """Buffers are used again: a batch after a larger or a spoilt one must not see it."""
    plain, by_budget = towers
    items = items_of(plain.spec, [(Grid(1, 16, 30),), (Grid(1, 4, 6),)])
    wanted = plain.encode(items[1:])
    spoilt = TowerItem(torch.full_like(items[0].pixels, float("nan")), items[0].grids)

    assert finite_rows(by_budget.encode([spoilt]), [120]) == [False]

    torch.testing.assert_close(by_budget.encode(items[1:]), wanted, atol=1e-5, rtol=0)
    assert finite_rows(by_budget.encode([items[1], spoilt]), [6, 120]) == [True, False]


def test_what_fits_no_budget_runs_as_ever(towers, items_of):
    plain, by_budget = towers
    video = (Grid(MAX_SEGMENTS + 1, 2, 2),)
    items = items_of(plain.spec, [(Grid(1, 8, 8),), (Grid(1, 24, 24),), video])

    rows = by_budget.encode(items)

    torch.testing.assert_close(rows, plain.encode(items), atol=1e-5, rtol=0)


def test_items_are_packed_in_their_order_as_many_as_fit():
    assert pack([100, 4000, 90, 7, 9000, 64], [1] * 6) == [
        Pass(0, 1, 128),
        Pass(1, 3, 4096),
        Pass(3, 4, 64),
        Pass(4, 5, None),
        Pass(5, 6, 64),
    ]
    assert pack([1] * 3, [MAX_SEGMENTS, 1, MAX_SEGMENTS + 1]) == [
        Pass(0, 1, 64),
        Pass(1, 2, 64),
        Pass(2, 3, None),
    ]
    assert pack([10] * 200, [1] * 200) == [Pass(0, 128, 2048), Pass(128, 200, 1024)]
    assert pack([], []) == []


def test_padding_is_covered_by_segments_of_its_own():
    assert pad_bounds(4, 14, 4, 7, 2).tolist() == [4, 4, 8, 12, 14, 14, 14]
    assert pad_bounds(8, 8, 4, 4, 2).tolist() == [8, 8, 8, 8]
    with pytest.raises(TowerError, match="do not fit"):
        pad_bounds(0, 100, 4, 7, 2)


def test_the_largest_budget_has_room_for_its_bounds_however_it_is_filled():
    patches = BUDGETS[-1] * 4
    length = MAX_SEGMENTS + patches // PAD_SEGMENT + 1

    for used in (4, 2000, patches - 4, patches):
        bounds = pad_bounds(used, patches, PAD_SEGMENT, length, MAX_SEGMENTS + 1)
        assert bounds[-1] == patches
        assert (bounds.diff() >= 0).all()


def test_where_graphs_cannot_be_used_the_reason_is_said(qwen3_dir):
    gpu, two_ranks = torch.device("cuda"), type("Ranks", (), {"size": 2})()

    assert graphs_problem(torch.device("cpu"), torch.bfloat16, None) == "the device is cpu"
    assert graphs_problem(gpu, torch.bfloat16, two_ranks) == "there are 2 ranks"
    assert "float32" in graphs_problem(gpu, torch.float32, None)
    assert graphs_problem(gpu, torch.bfloat16, None) is None
    assert load_tower(qwen3_dir, device="cpu", graphs=True).graphs == "the device is cpu"
    assert load_tower(qwen3_dir, device="cpu").graphs == "off"
