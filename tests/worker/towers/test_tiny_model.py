"""The tiny checkpoint is a whole model, and the commands around it."""

import hashlib
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors import safe_open

from encodepool_worker.cli.main import main
from encodepool_worker.towers.base import TowerItem
from encodepool_worker.towers.load import load_tower
from encodepool_worker.towers.spec import read_tower_spec
from encodepool_worker.towers.tiny import write_tiny_model
from encodepool_worker.types import Grid


@pytest.fixture
def run():
    def invoke(*arguments):
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "square.png"
    pixels = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_the_shape_is_the_published_one(qwen3_dir, qwen25_dir):
    qwen3, qwen25 = read_tower_spec(qwen3_dir), read_tower_spec(qwen25_dir)

    assert (qwen3.patch_size, qwen3.temporal_patch_size, qwen3.merge_size) == (16, 2, 2)
    assert (qwen3.patch_width, qwen3.hidden, qwen3.levels, qwen3.dtype) == (1536, 256, 3, "float32")
    assert (qwen25.patch_size, qwen25.patch_width, qwen25.hidden, qwen25.levels) == (14, 1176, 256, 0)
    for folder in (qwen3_dir, qwen25_dir):
        vision = json.loads((folder / "config.json").read_text())["vision_config"]
        assert vision["num_heads"] >= 4


def test_weights_have_the_published_names(qwen3_dir, qwen25_dir):
    for folder in (qwen3_dir, qwen25_dir):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            names = list(file.keys())
            assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}
        vision = [name for name in names if "visual" in name]
        assert vision
        assert all(name.startswith("model.visual.") for name in vision)
        assert any(name.startswith("model.language_model.layers.") for name in names)


def test_transformers_reads_an_image_with_it(qwen3_dir, qwen25_dir):
    """The whole model runs: chat template, image tokens, tower, language model, next token."""
    from transformers import AutoModel, AutoModelForImageTextToText, AutoTokenizer

    for folder, grid in ((qwen3_dir, Grid(1, 8, 8)), (qwen25_dir, Grid(1, 8, 8))):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        spec = read_tower_spec(folder)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text.count("<|image_pad|>") == 1
        ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * spec.token_count(grid)))["input_ids"]
        assert ids.count(spec.image_token_id) == 16
        assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nwhat is it?\nassistant\n"
        model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)

        with torch.inference_mode():
            out = model.eval()(
                input_ids=torch.tensor([ids]),
                mm_token_type_ids=torch.tensor([[int(token == spec.image_token_id) for token in ids]]),
                pixel_values=torch.ones(grid.patches, spec.patch_width),
                image_grid_thw=torch.tensor([[grid.t, grid.h, grid.w]]),
            )

        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert torch.isfinite(out.logits).all()
    assert AutoModel.from_pretrained(qwen3_dir).visual.config.out_hidden_size == 256


def test_the_same_seed_gives_the_same_bytes(tmp_path, qwen3_dir):
    again = write_tiny_model(tmp_path / "again", "qwen3_vl", seed=1)
    other = write_tiny_model(tmp_path / "other", "qwen3_vl", seed=2)

    def digests(folder):
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}

    assert digests(again) == digests(qwen3_dir)
    assert {n for n in digests(other) if digests(other)[n] != digests(again)[n]} == {"model.safetensors"}


def test_make_tiny_model_writes_into_a_new_folder_only(run, tmp_path):
    folder = tmp_path / "new" / "model"

    made = run("make-tiny-model", folder, "--family", "qwen2_5_vl", "--seed", "3")
    again = run("make-tiny-model", folder)

    assert made.exit_code == 0, made.output
    assert read_tower_spec(folder).family == "qwen2_5_vl"
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == f"error: {folder} is not empty: name a new folder, or empty this one\n"
    assert run("make-tiny-model", folder, "--family", "llava").exit_code == 2


@pytest.mark.parametrize("existed", [False, True])
def test_an_interrupted_make_tiny_model_leaves_nothing(run, tmp_path, monkeypatch, existed):
    folder = tmp_path / "model"
    if existed:
        folder.mkdir()

    def interrupt(*_):
        assert list(tmp_path.rglob("tokenizer.json"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("encodepool_worker.towers.tiny._write_weights", interrupt)
        assert run("make-tiny-model", folder).exit_code == 130

    assert list(tmp_path.rglob("*")) == ([folder] if existed else [])
    assert run("make-tiny-model", folder).exit_code == 0
    assert list(tmp_path.iterdir()) == [folder]
    assert read_tower_spec(folder).family == "qwen3_vl"
    assert not list(folder.glob(".*"))


def test_rows_writes_what_the_tower_returns(run, tmp_path, picture, qwen3_dir):
    out = tmp_path / "rows.npz"

    done = run("rows", picture, "--model", qwen3_dir, "--out", out)

    assert done.exit_code == 0, done.output
    from encodepool_worker.client.preprocess import prepare_image
    from encodepool_worker.towers.spec import read_image_spec

    prepared = prepare_image(picture, read_image_spec(qwen3_dir))
    rows = load_tower(qwen3_dir).encode([TowerItem(torch.from_numpy(prepared.pixels), (prepared.grid,))])
    with np.load(out) as arrays:
        assert sorted(arrays) == ["square.deepstack", "square.main"]
        assert np.array_equal(arrays["square.main"], rows[:, :256].numpy())
        assert np.array_equal(arrays["square.deepstack"], rows[:, 256:].numpy())


def test_rows_in_bfloat16_are_written_as_bits(run, tmp_path, picture, qwen25_dir):
    out = tmp_path / "rows.npz"

    assert run("rows", picture, "--model", qwen25_dir, "--out", out, "--dtype", "bfloat16").exit_code == 0

    with np.load(out) as arrays:
        assert list(arrays) == ["square.main"]
        bits = torch.from_numpy(arrays["square.main"].view(np.int16)).view(torch.bfloat16)
    assert bits.shape[1] == 256
    assert torch.isfinite(bits).all()


def test_rows_says_what_is_wrong_in_one_line(run, tmp_path, picture, qwen3_dir):
    out = tmp_path / "rows.npz"

    missing = run("rows", tmp_path / "absent.png", "--model", qwen3_dir, "--out", out)
    text = run("rows", picture, "--model", qwen3_dir, "--out", tmp_path / "rows.txt")
    debug = run("rows", picture, "--model", tmp_path, "--out", out, "--debug")
    usage = run("rows", picture, "--model", qwen3_dir)

    assert (missing.exit_code, missing.stderr) == (1, f"error: {tmp_path}/absent.png does not exist\n")
    assert debug.exit_code == 1
    assert "Traceback" in debug.stderr
    assert debug.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/config.json does not exist")
    assert (usage.exit_code, text.exit_code) == (2, 2)
    assert "--out writes a .npz file: call it rows.npz" in text.stderr
    assert not out.exists()
