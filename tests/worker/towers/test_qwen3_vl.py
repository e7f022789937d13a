"""The Qwen3-VL tower against plain transformers, value by value."""

import pytest
import torch

from encodepool_worker.errors import TowerError
from encodepool_worker.towers.base import TowerItem, finite_rows
from encodepool_worker.towers.load import load_tower
from encodepool_worker.types import Grid

GRIDS = [Grid(1, 16, 16), Grid(1, 8, 20), Grid(2, 4, 6), Grid(1, 2, 2)]


@pytest.fixture(scope="module")
def tower(qwen3_dir):
    return load_tower(qwen3_dir)


def test_rows_are_main_then_each_level(tower, qwen3_dir, plain, pixels_of, close):
    for grid in GRIDS:
        pixels = pixels_of(tower.spec, grid)
        main, levels = plain(qwen3_dir, torch.float32, pixels, [grid])

        rows = tower.encode([TowerItem(pixels, (grid,))])

        assert rows.shape == (tower.spec.token_count(grid), tower.row_width)
        assert len(levels) == tower.spec.levels == 3
        for place, wanted in enumerate([main, *levels]):
            hidden = tower.spec.hidden
            close(rows[:, place * hidden : (place + 1) * hidden], wanted)


def test_bfloat16_rows_equal_plain_bfloat16(qwen3_dir, plain, pixels_of, close):
    tower = load_tower(qwen3_dir, dtype="bfloat16")
    pixels = pixels_of(tower.spec, GRIDS[0])
    main, levels = plain(qwen3_dir, torch.bfloat16, pixels, GRIDS[:1])

    rows = tower.encode([TowerItem(pixels, (GRIDS[0],))])

    assert rows.dtype is torch.bfloat16
    close(rows, torch.cat([main, *levels], dim=-1))


def test_an_item_has_the_same_rows_in_any_company(tower, pixels_of):
    items = [TowerItem(pixels_of(tower.spec, grid, seed=i), (grid,)) for i, grid in enumerate(GRIDS)]

    together = tower.encode(items)

    alone = torch.cat([tower.encode([item]) for item in items])
    assert torch.equal(together, alone)
    assert torch.equal(tower.encode(items[::-1])[-64:], together[:64])


def test_an_item_of_several_grids_is_one_pass(tower, qwen3_dir, plain, pixels_of, close):
    pixels = pixels_of(tower.spec, *GRIDS)
    main, levels = plain(qwen3_dir, torch.float32, pixels, GRIDS)

    rows = tower.encode([TowerItem(pixels, tuple(GRIDS))])

    close(rows, torch.cat([main, *levels], dim=-1))


def test_the_moe_model_has_the_same_tower(qwen3_dir, pixels_of):
    """qwen3_vl_moe is served by the same adapter, so its vision class must compute the same."""
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    tower = load_tower(qwen3_dir)
    config = {k: v for k, v in tower.module.config.to_dict().items() if k != "model_type"}
    other = Qwen3VLMoeVisionModel(Qwen3VLMoeVisionConfig(**config)).eval()
    other.load_state_dict(tower.module.state_dict())
    pixels = pixels_of(tower.spec, GRIDS[1])

    with torch.inference_mode():
        out = other(pixels, grid_thw=torch.tensor([[1, 8, 20]]))

    rows = torch.cat([out.pooler_output, *out.deepstack_features], dim=-1)
    assert torch.equal(tower.encode([TowerItem(pixels, (GRIDS[1],))]), rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: TowerItem(p[:-1], (Grid(1, 4, 4),)), "pixels are"),
        (lambda p: TowerItem(p[:, :-1], (Grid(1, 4, 4),)), "pixels are"),
        (lambda p: TowerItem(p, ()), "0 grids"),
        (lambda p: TowerItem(p, (Grid(1, 1, 16),)), "1x1x16"),
        (lambda p: TowerItem(p, (Grid(-1, -4, 4),)), "-1x-4x4"),
        (lambda p: TowerItem(p.to(torch.int64), (Grid(1, 4, 4),)), "floating point"),
    ],
)
def test_pixels_that_do_not_fit_the_grid_are_an_error(tower, pixels_of, change, message):
    pixels = pixels_of(tower.spec, Grid(1, 4, 4))
    assert tower.encode([TowerItem(pixels, (Grid(1, 4, 4),))]).shape[0] == 4

    with pytest.raises(TowerError, match=message):
        tower.encode([change(pixels)])


def test_no_item_is_an_error(tower):
    with pytest.raises(TowerError, match="at least one"):
        tower.encode([])


def test_a_bad_pixel_spoils_its_own_item_only(tower, pixels_of):
    good, bad = Grid(1, 4, 4), Grid(1, 4, 8)
    spoilt = pixels_of(tower.spec, bad)
    spoilt[3, 5] = float("nan")

    rows = tower.encode(
        [
            TowerItem(pixels_of(tower.spec, good), (good,)),
            TowerItem(spoilt, (bad,)),
            TowerItem(pixels_of(tower.spec, good, seed=1), (good,)),
        ]
    )

    assert finite_rows(rows, [4, 8, 4]) == [True, False, True]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_non_finite_value_is_seen(value, dtype):
    rows = torch.ones(5, 8, dtype=dtype)
    rows[4, 7] = value

    assert finite_rows(rows, [4, 1]) == [True, False]
    assert finite_rows(rows, [0, 4, 1]) == [True, True, False]


def test_warm_up_reports_broken_weights(qwen3_dir):
    tower = load_tower(qwen3_dir)
    tower.warm_up()

    next(tower.module.parameters()).data.fill_(float("nan"))

    with pytest.raises(TowerError, match="weights"):
        tower.warm_up()
