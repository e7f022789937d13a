"""Which tensors are read from a checkpoint, and how a wrong one is named."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from encodepool_worker.errors import ConfigError
from encodepool_worker.towers.base import TowerItem
from encodepool_worker.towers.load import load_tower
from encodepool_worker.towers.spec import read_tower_spec
from encodepool_worker.types import Grid


@pytest.fixture
def copy_of(qwen3_dir, tmp_path):
    """A folder with the tiny model's configuration and the given tensors, by file name."""

    def make(files, index=True):
        (tmp_path / "config.json").write_bytes((qwen3_dir / "config.json").read_bytes())
        for name, tensors in files.items():
            save_file(tensors, tmp_path / name)
        if index:
            weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return make


@pytest.fixture
def tensors(qwen3_dir):
    return load_file(qwen3_dir / "model.safetensors")


@pytest.fixture
def rows_of(pixels_of):
    def rows(folder, **how):
        tower = load_tower(folder, **how)
        return tower.encode([TowerItem(pixels_of(tower.spec, Grid(1, 8, 8)), (Grid(1, 8, 8),))])

    return rows


def test_files_without_vision_tensors_are_not_opened(copy_of, tensors, rows_of, qwen3_dir):
    """A tower of an 8B model must load where its language model would not fit."""
    vision = {name: tensor for name, tensor in tensors.items() if ".visual." in name}
    names = sorted(vision)
    folder = copy_of(
        {
            "model-00001-of-00003.safetensors": {name: vision[name] for name in names[::2]},
            "model-00002-of-00003.safetensors": {name: vision[name] for name in names[1::2]},
            "model-00003-of-00003.safetensors": {n: t for n, t in tensors.items() if n not in vision},
        }
    )
    (folder / "model-00003-of-00003.safetensors").unlink()

    assert torch.equal(rows_of(folder), rows_of(qwen3_dir))


def test_language_tensors_of_a_shared_file_are_not_read(qwen3_dir, rows_of, tmp_path):
    """64 GiB of language model lie in the same file, more than this machine has memory: a hole."""
    huge = 2**36
    (tmp_path / "config.json").write_bytes((qwen3_dir / "config.json").read_bytes())
    whole = (qwen3_dir / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + header_bytes]), whole[8 + header_bytes :]
    header["model.language_model.huge"] = {
        "dtype": "U8",
        "shape": [huge],
        "data_offsets": [len(data), len(data) + huge],
    }
    made = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(made).to_bytes(8, "little") + made + data)
        file.truncate(8 + len(made) + len(data) + huge)

    assert torch.equal(rows_of(tmp_path), rows_of(qwen3_dir))


def test_names_of_the_first_release_are_understood(copy_of, tensors, rows_of, qwen3_dir):
    old = {n.removeprefix("model."): t for n, t in tensors.items() if ".visual." in n}

    assert torch.equal(rows_of(copy_of({"model.safetensors": old}, index=False)), rows_of(qwen3_dir))


def test_weights_are_cast_to_the_dtype_asked_for(copy_of, tensors, rows_of, qwen3_dir):
    half = {n: t.to(torch.bfloat16) for n, t in tensors.items()}

    rows = rows_of(copy_of({"model.safetensors": half}, index=False), dtype="bfloat16")

    assert torch.equal(rows, rows_of(qwen3_dir, dtype="bfloat16"))


def test_missing_unexpected_and_misshapen_tensors_are_named(copy_of, tensors):
    made = dict(tensors)
    made.pop("model.visual.blocks.2.attn.qkv.weight")
    made["model.visual.blocks.9.attn.qkv.weight"] = torch.zeros(2)
    made["model.visual.merger.norm.bias"] = torch.zeros(5)
    made["model.visual.merger.norm.weight"] = torch.ones(128, dtype=torch.int64)

    with pytest.raises(ConfigError) as caught:
        load_tower(copy_of({"model.safetensors": made}, index=False))

    text = str(caught.value)
    assert "1 tensors of the tower are missing: blocks.2.attn.qkv.weight" in text
    assert "1 tensors do not belong to the tower: model.visual.blocks.9.attn.qkv.weight" in text
    assert "model.visual.merger.norm.bias is (5,), the tower wants (128,)" in text
    assert "model.visual.merger.norm.weight is I64" in text


def test_a_tensor_under_both_names_is_named(copy_of, tensors):
    made = {**tensors, "visual.merger.norm.bias": tensors["model.visual.merger.norm.bias"].clone()}

    with pytest.raises(ConfigError, match="twice"):
        load_tower(copy_of({"model.safetensors": made}, index=False))


def test_unusable_files_are_named(copy_of, tensors, tmp_path):
    folder = copy_of({"a.safetensors": tensors})
    os.truncate(folder / "a.safetensors", 5000)
    with pytest.raises(ConfigError, match=r"a\.safetensors is not a sound safetensors file"):
        load_tower(folder)
    (folder / "a.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"a\.safetensors does not exist"):
        load_tower(folder)
    for weight_map, message in [
        ({"model.visual.x": "../../etc/passwd"}, "not a file beside it"),
        ({"lm_head.weight": "a.safetensors"}, "lists no tensor named"),
        (None, "no weight_map"),
    ]:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=message):
            load_tower(folder)


def test_made_up_weights_follow_the_seed(qwen3_dir, rows_of, tmp_path):
    """Only config.json is needed, and the global random state is neither used nor moved."""
    (tmp_path / "config.json").write_bytes((qwen3_dir / "config.json").read_bytes())
    state = torch.random.get_rng_state()

    first = rows_of(tmp_path, load_format="dummy", seed=4)

    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, rows_of(tmp_path, load_format="dummy", seed=4))
    assert not torch.equal(first, rows_of(tmp_path, load_format="dummy", seed=5))
    assert torch.isfinite(first).all()
    assert first.std() > 0.1


def test_a_wrong_wish_is_named(qwen3_dir):
    for wish, message in [
        ({"load_format": "fast"}, "load_format 'fast'"),
        ({"device": "tpu9"}, "device 'tpu9'"),
        ({"dtype": "int8"}, "int8"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_tower(qwen3_dir, **wish)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no usable GPU"):
            load_tower(qwen3_dir, device="cuda")


def test_a_model_that_is_nowhere_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="not a folder"):
        load_tower(str(tmp_path / "absent" / "model"))


def test_configuration_that_the_class_refuses_is_named(qwen3_dir, tmp_path):
    config = json.loads((qwen3_dir / "config.json").read_text())
    config["vision_config"]["num_position_embeddings"] = 575
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_tower_spec(tmp_path).levels == 3

    with pytest.raises(ConfigError, match="must be a square"):
        load_tower(tmp_path, load_format="dummy")
