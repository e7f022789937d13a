"""Pixel rows equal those of transformers' processor, and files that cannot be used are named."""

import numpy as np
import pytest
from PIL import Image

from encodepool_worker.client import preprocess
from encodepool_worker.client.numbers import from_float32, to_float32
from encodepool_worker.client.preprocess import prepare_image, scaled_size
from encodepool_worker.errors import ImageError
from encodepool_worker.towers.spec import ImageSpec
from encodepool_worker.types import Grid

QWEN3 = ImageSpec(16, 2, 2, 65536, 16777216, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
QWEN25 = ImageSpec(14, 2, 2, 3136, 100352, (0.481, 0.457, 0.408), (0.268, 0.261, 0.275))


@pytest.mark.parametrize("spec", [QWEN3, QWEN25], ids=["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("size", [(256, 256), (224, 224), (640, 480), (37, 900), (1, 1), (500, 333)])
def test_rows_equal_those_of_transformers(tmp_path, spec, size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    width, height = size
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))
    picture.save(tmp_path / "image.png")
    processor = Qwen2VLImageProcessorPil(
        patch_size=spec.patch_size,
        temporal_patch_size=spec.temporal_patch_size,
        merge_size=spec.merge_size,
        size={"shortest_edge": spec.min_pixels, "longest_edge": spec.max_pixels},
        image_mean=list(spec.image_mean),
        image_std=list(spec.image_std),
    )
    wanted = processor(images=[picture], return_tensors="np")

    prepared = prepare_image(tmp_path / "image.png", spec)

    assert [prepared.grid.t, prepared.grid.h, prepared.grid.w] == wanted["image_grid_thw"][0].tolist()
    assert prepared.pixels.dtype == np.float32
    assert np.array_equal(prepared.pixels, wanted["pixel_values"])
    assert prepared.shown.shape == (
        prepared.grid.h * spec.patch_size,
        prepared.grid.w * spec.patch_size,
        3,
    )


def test_patches_come_in_the_order_in_which_they_are_merged(tmp_path):
    """Each patch has one colour here; the four of a token are neighbours in the picture."""
    numbers = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16)
    picture = np.repeat(np.repeat(numbers, 16, axis=0), 16, axis=1)
    Image.fromarray(np.stack([picture] * 3, axis=-1)).save(tmp_path / "image.png")

    prepared = prepare_image(tmp_path / "image.png", QWEN3)

    assert prepared.grid == Grid(1, 16, 16)
    colours = np.rint((prepared.pixels[:, 0] * 0.5 + 0.5) * 255).astype(int)
    assert colours[:8].tolist() == [0, 1, 16, 17, 2, 3, 18, 19]
    assert colours[32:36].tolist() == [32, 33, 48, 49]


def test_any_kind_of_picture_becomes_rgb_and_upright(tmp_path):
    for name, picture in [
        ("grey.png", Image.new("L", (64, 64), 128)),
        ("palette.png", Image.new("P", (64, 64), 3)),
        ("alpha.png", Image.new("RGBA", (64, 64), (10, 20, 30, 40))),
        ("photo.jpg", Image.new("RGB", (64, 64), "red")),
        ("cmyk.jpg", Image.new("CMYK", (64, 64))),
    ]:
        picture.save(tmp_path / name)
        assert prepare_image(tmp_path / name, QWEN3).grid == Grid(1, 16, 16)
    turned = Image.new("RGB", (640, 320), "white")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert prepare_image(tmp_path / "turned.jpg", QWEN3).grid == Grid(1, 40, 20)


def test_unusable_files_are_named(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(tmp_path / "whole.png")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:3000])
    (tmp_path / "empty.png").write_bytes(b"")
    Image.new("RGB", (1000, 4)).save(tmp_path / "thin.png")
    for name, message in [
        ("absent.png", "does not exist"),
        ("text.png", "not an image"),
        ("empty.png", "not an image"),
        ("cut.png", "cannot be read"),
        (".", "cannot be read"),
        ("thin.png", "1000x4: one side may be at most 200 times the other"),
    ]:
        with pytest.raises(ImageError, match=message) as caught:
            prepare_image(tmp_path / name, QWEN3)
        assert str(tmp_path) in str(caught.value)


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    """A picture of 900 million pixels takes 1 MB as a file and 2.7 GB in memory."""
    Image.new("1", (30_000, 30_000)).save(tmp_path / "bomb.png")
    decoded = []
    monkeypatch.setattr(preprocess.ImageOps, "exif_transpose", lambda *a: decoded.append(a))

    with pytest.raises(ImageError, match=r"30000x30000|decompression bomb"):
        prepare_image(tmp_path / "bomb.png", QWEN3)

    assert decoded == []


def test_scaling_keeps_the_area_within_bounds():
    for height in (1, 7, 100, 1000, 6000):
        for width in (height, height * 3, height * 199):
            tall, wide = scaled_size(height, width, QWEN3)
            assert tall % 32 == wide % 32 == 0
            assert QWEN3.min_pixels <= tall * wide <= QWEN3.max_pixels


def test_bfloat16_bits_are_rounded_as_torch_rounds():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    values[:4] = [1.00390625, 1.01171875, -1.00390625, 0.0]  # halfway between two bfloat16
    wanted = torch.from_numpy(values).to(torch.bfloat16)

    bits = from_float32(values, "bfloat16")

    assert np.array_equal(bits, wanted.view(torch.uint16).numpy())
    assert np.array_equal(to_float32(bits, "bfloat16"), wanted.float().numpy())
    assert np.array_equal(from_float32(values, "float16"), values.astype(np.float16))
