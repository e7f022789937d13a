"""The Qwen2.5-VL tower against plain transformers, value by value."""

import torch

from encodepool_worker.towers.base import TowerItem
from encodepool_worker.towers.load import load_tower
from encodepool_worker.types import Grid

GRIDS = [Grid(1, 16, 16), Grid(1, 10, 26), Grid(2, 4, 6)]


def test_rows_equal_plain_transformers(qwen25_dir, plain, pixels_of, close):
    for dtype in ("float32", "bfloat16"):
        tower = load_tower(qwen25_dir, dtype=dtype)
        tower.warm_up()
        for grid in GRIDS:
            pixels = pixels_of(tower.spec, grid)
            main, levels = plain(qwen25_dir, getattr(torch, dtype), pixels, [grid])

            rows = tower.encode([TowerItem(pixels, (grid,))])

            assert levels == []
            close(rows, main)


def test_an_item_has_the_same_rows_in_any_company(qwen25_dir, pixels_of):
    tower = load_tower(qwen25_dir)
    items = [TowerItem(pixels_of(tower.spec, grid, seed=i), (grid,)) for i, grid in enumerate(GRIDS)]

    together = tower.encode(items)

    assert torch.equal(together, torch.cat([tower.encode([item]) for item in items]))


def test_published_names_of_the_vision_fields_are_understood(qwen25_dir):
    """The first release calls in_channels ``in_chans`` and repeats patch_size as ``spatial_patch_size``."""
    import json

    from encodepool_worker.towers.qwen2_5_vl import build

    vision = json.loads((qwen25_dir / "config.json").read_text())["vision_config"]
    vision["in_chans"] = vision.pop("in_channels")
    vision["spatial_patch_size"] = vision.pop("patch_size")

    assert build(vision).config.in_channels == 3
    assert build(vision).config.patch_size == 14
