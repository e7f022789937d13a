"""Tiny checkpoints, made once, and the towers of plain transformers to compare with."""

import pytest
import torch

from encodepool_worker.towers.tiny import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-qwen3-vl", "qwen3_vl", seed=1)


@pytest.fixture(scope="session")
def qwen25_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-qwen2.5-vl", "qwen2_5_vl", seed=1)


@pytest.fixture(scope="session")
def plain():
    """Plain transformers: the whole model of a folder, and its vision tower's rows for one item."""
    from transformers import AutoModelForImageTextToText

    models = {}

    def rows(folder, dtype, pixels, grids):
        key = (folder, dtype)
        if key not in models:
            models[key] = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
        grid_thw = torch.tensor([[grid.t, grid.h, grid.w] for grid in grids])
        with torch.inference_mode():
            out = models[key].model.visual(pixels.to(models[key].dtype), grid_thw=grid_thw)
        return out.pooler_output, list(getattr(out, "deepstack_features", []))

    return rows


@pytest.fixture(scope="session")
def close():
    """``close(rows, wanted)``: ours and plain transformers' rows. Not to the bit: with another layout of the
    same numbers a library may choose another kernel, which one depends on the processor."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}

    def compare(rows, wanted):
        torch.testing.assert_close(rows, wanted, rtol=0, atol=tolerance[rows.dtype])

    return compare


@pytest.fixture
def pixels_of():
    """Seeded pixels for some grids."""

    def make(spec, *grids, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sum(grid.patches for grid in grids), spec.patch_width, generator=generator)

    return make
