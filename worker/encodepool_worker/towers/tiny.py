"""A complete small checkpoint, made up from a seed, for tests and for trying things out.

It has what a published one has: configuration, tokenizer with chat template, image
preprocessing, and float32 weights of tower and language model in one safetensors file, so that
``transformers``, a gateway and this worker load it the way they load a real model.
"""

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from ..errors import ConfigError

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or part.type == 'video_url' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_HIDDEN = 256

TINY_FAMILIES = ("qwen3_vl", "qwen2_5_vl")


def write_tiny_model(folder: str | Path, family: str = "qwen3_vl", seed: int = 0) -> Path:
    """Write the checkpoint; the same family and seed give the same bytes. Returns the folder.

    It is written beside a new folder, or within an empty one, and moved when it is complete: nothing
    half done stays. Raises ConfigError when the folder holds something already.
    """
    out = Path(folder)
    if family not in TINY_FAMILIES:
        raise ConfigError([f"family {family!r} is not one of {', '.join(TINY_FAMILIES)}"])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([f"{out} is not empty: name a new folder, or empty this one"])
    # An empty folder may be a mount, which cannot be replaced as a whole.
    existed = out.exists()
    draft = (out if existed else out.parent) / f".{out.name}.{secrets.token_hex(4)}"
    try:
        draft.mkdir(parents=True)
    except OSError as failed:
        raise ConfigError([f"{out} cannot be made: {failed.strerror}"]) from failed
    try:
        _write_files(draft, family, seed)
        if existed:
            for path in list(draft.iterdir()):
                path.rename(out / path.name)
        else:
            _rename(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone already when it was renamed
    return out


def _rename(draft: Path, out: Path) -> None:
    try:
        draft.rename(out)
    except OSError as failed:
        raise ConfigError([f"{out} cannot be made: {failed.strerror}"]) from failed


def _write_files(out: Path, family: str, seed: int) -> None:
    token_ids, vocab_size = _write_tokenizer(out)
    tokens = {
        "image_token_id": token_ids["<|image_pad|>"],
        "video_token_id": token_ids["<|video_pad|>"],
        "vision_start_token_id": token_ids["<|vision_start|>"],
        "vision_end_token_id": token_ids["<|vision_end|>"],
    }
    ends: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
    }
    _write_weights(out, family, {**tokens, "tie_word_embeddings": False}, vocab_size, ends, seed)
    _write_json(out / "preprocessor_config.json", _preprocessor(family))


def _write_tokenizer(out: Path) -> tuple[dict[str, int], int]:
    """A byte-level tokenizer that covers any text. Returns the special ids and the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["what is in the picture? describe the colours and the shapes"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            "chat_template": _TEMPLATE,
        },
    )
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in _SPECIAL}, len(vocabulary)


def _write_weights(
    out: Path, family: str, top: dict[str, Any], vocab_size: int, ends: dict[str, Any], seed: int
) -> None:
    import torch
    from safetensors.torch import save_file

    from .weights import SkipInit, fill_seeded

    model: Any
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        **ends,
    }
    vision: dict[str, Any] = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": _HIDDEN,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    with SkipInit():
        if family == "qwen3_vl":
            from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

            text |= {
                "head_dim": 64,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5000000.0,
                    "mrope_section": [12, 10, 10],
                    "mrope_interleaved": True,
                },
            }
            vision |= {
                "patch_size": 16,
                "num_position_embeddings": 576,
                "deepstack_visual_indexes": [0, 1, 2],
            }
            model = Qwen3VLForConditionalGeneration(
                Qwen3VLConfig(text_config=text, vision_config=vision, **top)
            )
        else:
            from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

            text |= {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000000.0,
                    "mrope_section": [8, 12, 12],
                }
            }
            vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]}
            model = Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=vision, **top)
            )
    fill_seeded(model, seed)
    model.config.dtype = torch.float32
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    _write_json(out / "generation_config.json", {"eos_token_id": [ends["eos_token_id"]]})
    # Not save_pretrained: it renames Qwen2.5-VL's tensors to the names of the first release.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def _preprocessor(family: str) -> dict[str, Any]:
    from .spec import FAMILIES

    known = FAMILIES[family]
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor" if family == "qwen3_vl" else "Qwen2_5_VLProcessor",
        "patch_size": known.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": list(known.image_mean),
        "image_std": list(known.image_std),
        "size": {"shortest_edge": known.min_pixels, "longest_edge": known.max_pixels},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
