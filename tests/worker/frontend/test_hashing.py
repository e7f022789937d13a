"""Equal names mean equal rows: whatever the rows depend on changes the name, nothing else does."""

from dataclasses import replace

import pytest

from encodepool_worker.frontend.hashing import ContentKeys, TensorBytes
from encodepool_worker.types import Grid, Modality, TowerSpec

SPEC = TowerSpec("qwen3_vl", 256, 3, "float32", 1536, 16, 2, 2, 151655, 151656)
FACTS = {"model": "m", "revision": "r", "spec": SPEC, "preprocessing": '{"mean": 0.5}'}
KEYS = ContentKeys(**FACTS)

PIXELS = TensorBytes("encoder_input", "float32", (16, 1536), bytes(range(256)) * 384)
GRID = TensorBytes("image_grid_thw", "int64", (1, 3), bytes(24))
COUNT = TensorBytes("patches_per_image", "int64", (1,), bytes(8))
ITEM = {"modality": Modality.IMAGE, "grids": (Grid(1, 4, 4),), "pixels": PIXELS, "side": (GRID, COUNT)}


def test_the_name_of_a_content_is_16_bytes_and_the_same_every_time():
    assert len(KEYS.of(**ITEM)) == 16
    assert KEYS.of(**ITEM) == ContentKeys(**FACTS).of(**ITEM)


def test_neither_the_order_of_side_tensors_nor_the_kind_of_buffer_matters():
    view = replace(PIXELS, payload=memoryview(bytearray(PIXELS.payload)))
    assert KEYS.of(**ITEM) == KEYS.of(**(ITEM | {"side": (COUNT, GRID), "pixels": view}))


@pytest.mark.parametrize(
    "change",
    [
        {"modality": Modality.VIDEO},
        {"grids": (Grid(1, 2, 8),)},
        {"grids": (Grid(1, 4, 4), Grid(1, 4, 4))},
        {"pixels": replace(PIXELS, dtype="bfloat16")},
        {"pixels": replace(PIXELS, shape=(32, 768))},
        {"pixels": replace(PIXELS, payload=b"\1" + PIXELS.payload[1:])},
        {"pixels": replace(PIXELS, payload=PIXELS.payload[:-1] + b"\1")},
        {"side": (GRID,)},
        {"side": (replace(GRID, payload=b"\1" + bytes(23)), COUNT)},
        {"side": (replace(GRID, name="video_grid_thw"), COUNT)},
        {"side": (replace(GRID, dtype="uint32", shape=(2, 3)), COUNT)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_same_bytes_under_another_description_have_another_name(change):
    assert KEYS.of(**(ITEM | change)) != KEYS.of(**ITEM)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "s"},
        {"preprocessing": "{}"},
        {"spec": replace(SPEC, dtype="bfloat16")},
        {"spec": replace(SPEC, levels=0)},
        {"model": "mr", "revision": ""},
    ],
    ids=str,
)
def test_another_model_gives_other_names(change):
    assert ContentKeys(**(FACTS | change)).of(**ITEM) != KEYS.of(**ITEM)


def test_the_same_bytes_in_a_row_cut_elsewhere_have_another_name():
    whole = replace(GRID, name="x", dtype="int64")
    shifted = replace(GRID, name="xi", dtype="nt64")
    assert KEYS.of(**(ITEM | {"side": (whole,)})) != KEYS.of(**(ITEM | {"side": (shifted,)}))
