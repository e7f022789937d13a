"""A manifest to start from."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def manifest() -> Callable[..., dict[str, Any]]:
    """``manifest(replicas=3, ...)``: a valid manifest with these keys of ``spec`` set."""

    def make(**spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "encodepool.dev/v1alpha1",
            "kind": "EncodePool",
            "metadata": {"name": "demo"},
            "spec": {"model": {"name": "acme/vl-2b"}, **spec},
        }

    return make
