"""The published list as files: ``DIR/endpoints/*``, each replaced atomically."""

import json
from collections.abc import Mapping
from pathlib import Path

from encodepool_operator.core import endpoints

from .statedir import read_text, write_atomic

NAMES = (endpoints.SMG_WORKERS, endpoints.SMG_ARGS, endpoints.WORKERS, endpoints.ENDPOINTS)
"""In the order in which they are written: whoever waits for endpoints.json finds the others done."""


def read_documents(folder: Path) -> dict[str, str] | None:
    """What is published now, file name -> text; None when nothing ever was."""
    found = {name: text for name in NAMES if (text := read_text(folder / name)) is not None}
    return found or None


def empty_documents(folder: Path) -> dict[str, str]:
    """The list of the same pool with nobody in it; nothing where no list can be read."""
    try:
        known = json.loads((read_documents(folder) or {})[endpoints.ENDPOINTS])
        return endpoints.documents(known["namespace"], known["pool"], known["model"], ())
    except (KeyError, TypeError, ValueError):
        return {}


def write_documents(folder: Path, documents: Mapping[str, str]) -> None:
    """Replace every file whose text differs. Raises ValueError for a name that is not published."""
    unknown = sorted(set(documents) - set(NAMES))
    if unknown:
        raise ValueError(f"not among the published files: {', '.join(unknown)}")
    for name in NAMES:
        if name in documents and read_text(folder / name) != documents[name]:
            write_atomic(folder / name, documents[name])
