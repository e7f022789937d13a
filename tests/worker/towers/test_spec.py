"""What is read of config.json and preprocessor_config.json, and how wrong ones are named."""

import json
import subprocess
import sys

import pytest

from encodepool_worker.errors import ConfigError
from encodepool_worker.towers.spec import read_image_spec, read_tower_spec
from encodepool_worker.types import Grid

NESTED = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "text_config": {"model_type": "qwen3_vl_text", "dtype": "bfloat16"},
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_size": 1152,
        "in_channels": 3,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
"""As Qwen3-VL is published: the language model's fields in text_config."""

FLAT = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "in_chans": 3,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}
"""As Qwen2.5-VL is published: the language model's fields at the top."""


@pytest.fixture
def folder(tmp_path):
    """A model folder with the given config.json, vision fields replaced or (None) removed."""

    def make(config, vision=None, **top):
        made = {**json.loads(json.dumps(config)), **top}
        for name, value in (vision or {}).items():
            if value is None:
                made["vision_config"].pop(name)
            else:
                made["vision_config"][name] = value
        (tmp_path / "config.json").write_text(json.dumps(made))
        return tmp_path

    return make


def test_nested_layout(folder):
    spec = read_tower_spec(folder(NESTED))

    assert (spec.family, spec.hidden, spec.levels, spec.dtype) == ("qwen3_vl", 4096, 3, "bfloat16")
    assert (spec.patch_width, spec.patch_size, spec.merge_size) == (1536, 16, 2)
    assert (spec.image_token_id, spec.video_token_id) == (151655, 151656)
    assert spec.token_count(Grid(2, 16, 16)) == 128
    assert spec.layout(10).nbytes == 10 * 4096 * 4 * 2


def test_flat_layout(folder):
    spec = read_tower_spec(folder(FLAT))

    assert (spec.family, spec.hidden, spec.levels, spec.dtype) == ("qwen2_5_vl", 3584, 0, "bfloat16")
    assert (spec.patch_width, spec.patch_size, spec.video_token_id) == (1176, 14, None)


def test_dtype_is_the_checkpoints_unless_one_is_asked_for(folder):
    assert read_tower_spec(folder(NESTED), "float16").dtype == "float16"
    assert read_tower_spec(folder(NESTED, dtype="float32")).dtype == "float32"
    assert read_tower_spec(folder(FLAT, torch_dtype="torch.float16")).dtype == "float16"
    assert read_tower_spec(folder({**FLAT, "torch_dtype": None})).dtype == "float32"


@pytest.mark.parametrize(
    ("vision", "top", "message"),
    [
        ({}, {"model_type": "llava"}, "model_type is 'llava'; towers exist for"),
        ({}, {"model_type": None}, "model_type is None"),
        ({}, {"vision_config": None}, "no vision_config"),
        ({"out_hidden_size": None}, {}, "vision_config.out_hidden_size is missing"),
        ({"num_heads": 0}, {}, "num_heads is 0, must be an integer > 0"),
        ({"depth": "27"}, {}, "depth is '27'"),
        ({"num_heads": 7}, {}, "hidden_size 1152 is not a multiple of num_heads 7"),
        ({"deepstack_visual_indexes": [8, 99]}, {}, r"layers in \[0, 27\)"),
        ({"deepstack_visual_indexes": [8, 8]}, {}, "repeats a layer"),
        ({}, {"dtype": "int8"}, "dtype 'int8' is not one of"),
    ],
)
def test_a_wrong_config_is_named(folder, vision, top, message):
    with pytest.raises(ConfigError, match=message):
        read_tower_spec(folder(NESTED, vision, **top))


def test_all_problems_are_named_at_once(folder):
    with pytest.raises(ConfigError) as caught:
        read_tower_spec(folder(NESTED, {"out_hidden_size": None, "num_heads": -1}))

    assert len(caught.value.problems) == 2


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_tower_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_tower_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_tower_spec(tmp_path)


def test_image_spec_takes_either_name_of_the_area_bounds(folder):
    made = folder(NESTED)
    named = made / "preprocessor_config.json"

    assert read_image_spec(made).min_pixels == 65536  # no file: as published

    named.write_text(json.dumps({"size": {"shortest_edge": 4096, "longest_edge": 8192}}))
    assert (read_image_spec(made).min_pixels, read_image_spec(made).max_pixels) == (4096, 8192)

    named.write_text(json.dumps({"min_pixels": 1024, "max_pixels": 2048, "image_mean": [0, 0.25, 1]}))
    spec = read_image_spec(made)
    assert (spec.min_pixels, spec.max_pixels, spec.image_mean) == (1024, 2048, (0.0, 0.25, 1.0))
    assert (spec.image_std, spec.factor) == ((0.5, 0.5, 0.5), 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"patch_size": 14}, "patch_size is 14, the tower's is 16"),
        ({"min_pixels": -1}, "min_pixels is -1"),
        ({"min_pixels": 10, "max_pixels": 5}, "max_pixels"),
        ({"image_std": [1, 1]}, "image_std"),
        ({"image_std": [1, 1, 0]}, "image_std"),
    ],
)
def test_a_wrong_preprocessor_config_is_named(folder, content, message):
    made = folder(NESTED)
    (made / "preprocessor_config.json").write_text(json.dumps(content))

    with pytest.raises(ConfigError, match=message):
        read_image_spec(made)


def test_reading_a_spec_needs_no_torch():
    """The frontend reads specs; importing torch would cost it a second and 200 MB."""
    code = "import sys, encodepool_worker.towers.spec; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
