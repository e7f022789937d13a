"""What the frontend knows of the model: names and sizes from its JSON files. No weights, no torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..settings import Settings
from ..towers.hub import resolve_model
from ..towers.spec import ImageSpec, read_image_spec, read_json, read_tower_spec
from ..types import TowerSpec

PREPROCESSOR_FILE = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``image`` is None where the checkpoint does not say how it wants its images."""

    served_name: str
    name: str
    revision: str
    folder: Path
    spec: TowerSpec
    config: dict[str, Any]
    image: ImageSpec | None

    @property
    def preprocessing(self) -> str:
        """The preprocessing facts that pixels depend on, as one text."""
        return json.dumps(asdict(self.image), sort_keys=True) if self.image else ""

    @property
    def architectures(self) -> list[str]:
        found = self.config.get("architectures")
        return [str(name) for name in found] if isinstance(found, list) else []

    def number(self, name: str) -> int:
        """A size of the language model, wherever the config keeps it; 0 if it does not say."""
        text = self.config.get("text_config")
        for part in (self.config, text if isinstance(text, dict) else {}):
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
                return value
        return 0


def read_model(settings: Settings) -> ModelFacts:
    """Raises ConfigError."""
    folder = resolve_model(settings.model, settings.model_revision, weights=False)
    spec = read_tower_spec(folder, settings.dtype)
    has_preprocessor = (folder / PREPROCESSOR_FILE).exists()
    return ModelFacts(
        served_name=settings.served_name,
        name=settings.model,
        revision=settings.model_revision,
        folder=folder,
        spec=spec,
        config=read_json(folder / "config.json", "a model folder has one"),
        image=read_image_spec(folder) if has_preprocessor else None,
    )
