"""What marks a routable leader: labels and annotations of its pod."""

from collections.abc import Mapping
from typing import Any

from encodepool_operator.api import labels

from ..record import rfc3339, seconds
from ..snapshot import Publication

_LABELS = {labels.ROUTABLE: "true", labels.ROLE: "encode"}


def patch(publication: Publication | None) -> dict[str, Any]:
    """A merge patch of the pod's metadata; None takes the labels off and leaves the annotations."""
    if publication is None:
        return {"labels": dict.fromkeys(_LABELS)}
    return {
        "labels": dict(_LABELS),
        "annotations": {
            labels.BOOTSTRAP_PORT: str(publication.bootstrap_port),
            labels.WORKER_PORTS: str(publication.grpc_port),
            labels.MODEL_ID: publication.model_id,
            labels.PUBLISHED_AT: None if publication.at is None else rfc3339(publication.at),
        },
    }


def read(given: Mapping[str, str], annotations: Mapping[str, str]) -> Publication | None:
    """What a pod with these labels and annotations tells gateways; None when it is not found by them.

    Values that somebody broke read as 0 and "", which no plan wants, so they are written again.
    """
    if not any(given.get(key) == value for key, value in _LABELS.items()):
        return None
    if any(given.get(key) != value for key, value in _LABELS.items()):
        return Publication(0, 0, "")
    return Publication(
        _port(annotations.get(labels.BOOTSTRAP_PORT, "")),
        _port(annotations.get(labels.WORKER_PORTS, "")),
        annotations.get(labels.MODEL_ID, ""),
        _time(annotations.get(labels.PUBLISHED_AT, "")),
    )


def _time(text: str) -> float | None:
    try:
        return seconds(text)
    except ValueError:
        return None


def _port(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 5 else 0
