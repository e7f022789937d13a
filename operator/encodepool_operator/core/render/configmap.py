"""The ConfigMap with the published list."""

from collections.abc import Mapping
from typing import Any

from encodepool_operator.api import names
from encodepool_operator.api.types import EncodePool

from . import common


def build(pool: EncodePool, documents: Mapping[str, str]) -> dict[str, Any]:
    """``documents``: file name -> text, as ``core.endpoints`` makes them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": common.metadata(pool.metadata, names.endpoints_config_map(pool.metadata.name)),
        "data": dict(sorted(documents.items())),
    }
