"""Which revision of the pods' spec a pool wants, and which ones are kept.

A revision is named by a hash over the parts of the spec that reach a group's pods and over
``RENDER_VERSION``. Replicas, rollout rules and the like are not in it, so scaling moves no group.
The operator's default image is filled in once per choice of the rest of the spec and kept with the
revision: an operator upgrade moves nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

from encodepool_operator.api.document import pod_document
from encodepool_operator.api.parse import InvalidPool, parse_spec
from encodepool_operator.api.types import Spec

from .snapshot import RevisionRecord

RENDER_VERSION = 1
"""Changes only on purpose: a change moves every group of every pool to new pods."""

HASH_CHARACTERS = 10


def choose(spec: Spec, default_image: str, kept: Sequence[RevisionRecord]) -> RevisionRecord:
    """The revision that the spec asks for, from ``kept`` where it is there.

    Its number is higher than every other kept one's: going back to an earlier spec makes that
    revision the newest again.
    """
    source = _hash(pod_document(spec, sparse=True))
    chosen = None
    if not spec.image:
        same = [record for record in kept if record.source == source]
        chosen = max(same, key=lambda record: record.number, default=None)
    if chosen is None:
        resolved = replace(spec, image=spec.image or default_image)
        name = _hash(pod_document(resolved, sparse=True))
        chosen = next((record for record in kept if record.name == name), None)
        if chosen is None:
            chosen = RevisionRecord(name, 0, source, canonical(pod_document(resolved, sparse=False)))
    others = max((record.number for record in kept if record.name != chosen.name), default=0)
    return chosen if chosen.number > others else replace(chosen, number=others + 1)


@lru_cache(maxsize=256)
def read_spec(record: RevisionRecord) -> Spec | None:
    """The revision's spec; fields that do not reach pods stand at their defaults.

    None when this version of the operator cannot read it (kept by another version).
    """
    try:
        return parse_spec(json.loads(record.spec))
    except (InvalidPool, ValueError):
        return None


def superfluous(
    kept: Sequence[RevisionRecord], used: frozenset[str], history_limit: int
) -> list[RevisionRecord]:
    """Revisions to drop: not in ``used`` and not among the ``history_limit`` newest of the rest."""
    unused = sorted((record for record in kept if record.name not in used), key=lambda record: -record.number)
    return unused[history_limit:]


def canonical(value: Any) -> str:
    """JSON with one spelling: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _hash(document: Any) -> str:
    text = canonical({"renderVersion": RENDER_VERSION, "spec": document})
    return sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
