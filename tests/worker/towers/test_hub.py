"""Model names are found in the hub's cache, and only what the tower needs has to be there."""

import json
import os
import subprocess
import sys

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"

SCRIPT = """
import sys
from encodepool_worker.errors import ConfigError
from encodepool_worker.towers.hub import resolve_model
try:
    print(resolve_model(sys.argv[1], sys.argv[2], weights=sys.argv[3] == "weights"))
except ConfigError as wrong:
    print(f"refused: {wrong}")
"""


@pytest.fixture
def cached(tmp_path):
    """A hub cache with one model in two files, of which only the first holds vision tensors."""
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    weight_map = {"model.visual.x": "1.safetensors", "lm_head.weight": "2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (snapshot / "1.safetensors").write_bytes(b"")
    return snapshot


@pytest.fixture
def resolve(tmp_path):
    def run(model, revision="", weights=True):
        """In a process of its own: the hub's client reads its variables when it is imported."""
        environment = {
            **os.environ,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1",
        }
        arguments = [model, revision, "weights" if weights else ""]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_a_cached_model_needs_no_hub(cached, resolve):
    assert resolve("org/model") == str(cached)
    assert resolve("org/model", revision=COMMIT) == str(cached)
    assert resolve(str(cached)) == str(cached)


def test_what_is_missing_is_named(cached, resolve, tmp_path):
    (cached / "1.safetensors").unlink()

    refused = resolve("org/model")

    assert refused.startswith("refused: model 'org/model' is neither a folder nor complete in the hub cache")
    assert resolve("org/model", weights=False) == str(cached)
    assert resolve("org/other").startswith("refused: model 'org/other' is neither")
    assert resolve(str(tmp_path / "absent")).endswith("absent' is not a folder")
