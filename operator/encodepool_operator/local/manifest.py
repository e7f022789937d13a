"""A manifest for this machine: read, checked, and fitted to what one machine can mean by it.

The same file serves a cluster. What only a cluster can do (images, placement, Secrets ...) is
named in ``Manifest.notes`` and has no effect; what cannot work here is refused with its field path.
A port range that is too small for rollouts only is named there too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from encodepool_operator.api.parse import InvalidPool, parse_pool
from encodepool_operator.api.types import EncodePool, Spec
from encodepool_operator.core.addresses import port_space
from encodepool_operator.core.rollout import budget

from .errors import ManifestError

CLUSTER_ONLY = (
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "serviceAccountName",
    "placement",
    "resources",
    "sharedMemory",
    "rdma",
    "podTemplate",
)
"""Keys of ``spec`` without effect on one machine."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked manifest. ``text`` is what the state directory keeps: paths in it are absolute."""

    pool: EncodePool
    text: str
    notes: tuple[str, ...]


def load(path: Path) -> Manifest:
    """Read a user's manifest; a relative ``model.path`` is taken from the manifest's folder.

    Raises ManifestError with every problem and its field path.
    """
    document = _read(path)
    match document:
        case {"spec": {"model": {"path": str(given)}}} if given:
            document["spec"]["model"]["path"] = str(path.absolute().parent / Path(given).expanduser())
    manifest = _checked(document, str(path))
    folder = manifest.pool.spec.model.path
    if folder and not Path(folder).is_dir():
        raise ManifestError(f"{path}: spec.model.path: there is no folder {folder} on this machine")
    return manifest


def load_kept(path: Path) -> Manifest:
    """Read the copy in a state directory. Raises ManifestError."""
    return _checked(_read(path), str(path))


def load_document(path: Path) -> dict[str, Any]:
    """The one document of a file, not checked any further. Raises ManifestError."""
    return _read(path)


def needed_devices(spec: Spec) -> int:
    """Accelerators of one pod of a group."""
    return spec.accelerator.per_rank * spec.ranks_per_pod


def gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands there twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path} is not UTF-8 text") from error
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ManifestError(f"{path} must hold one EncodePool and nothing else")
    return documents[0]


def _checked(document: dict[str, Any], source: str) -> Manifest:
    try:
        pool = parse_pool(document)
    except InvalidPool as error:
        problems = [f"{source}: {problem}" for problem in error.problems]
        raise ManifestError(problems[0], tuple(problems[1:])) from error
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return Manifest(pool, text, tuple(_notes(document["spec"], pool.spec)))


def _notes(given: Mapping[str, Any], spec: Spec) -> list[str]:
    ignored = [f"spec.{key}" for key in CLUSTER_ONLY if given.get(key)]
    notes = []
    if ignored:
        notes.append(f"without effect on one machine: {', '.join(ignored)}")
    if spec.env_from or any("value" not in variable for variable in spec.env):
        notes.append("variables from Secrets and ConfigMaps are not read: set them before `up`")
    if spec.model.token_secret_ref is not None:
        notes.append("spec.model.tokenSecretRef is not read: set HF_TOKEN before `up`")
    ports, most = port_space(spec.network, shared_host=True), spec.replicas
    most += budget(spec.rollout, spec.replicas).max_surge
    if spec.replicas <= ports.slots < most:
        notes.append(
            f"spec.network.portRange.size: a rollout starts more groups and finds no ports below "
            f"{most * ports.stride}"
        )
    return notes
