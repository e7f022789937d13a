"""The ControllerRevisions of a pool: what its revisions were, and the pod template of each.

Their data cannot be changed; only the number of one can. StatefulSets make ControllerRevisions too,
with the labels of their pods, so ours are told from them by owner.
"""

import json
from collections.abc import Mapping
from typing import Any

from encodepool_operator.api import names
from encodepool_operator.api.types import EncodePool

from ..revision import canonical
from ..snapshot import RevisionRecord
from . import common

COMPONENT = "revision"


def build(pool: EncodePool, record: RevisionRecord) -> dict[str, Any]:
    meta = pool.metadata
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": common.metadata(meta, names.revision_object(meta.name, record.name), component=COMPONENT),
        "revision": record.number,
        "data": {
            "source": record.source,
            "spec": json.loads(record.spec),
            "template": json.loads(record.template),
        },
    }


def read(live: Mapping[str, Any], pool: str, pool_uid: str) -> RevisionRecord | None:
    """Inverse of ``build``; None for an object that is not a revision of this pool."""
    name = str(live["metadata"]["name"])
    data = live.get("data")
    if not common.is_owned(live, pool_uid) or not isinstance(data, Mapping):
        return None
    if not name.startswith(f"{pool}-") or not data.keys() >= {"source", "spec", "template"}:
        return None
    return RevisionRecord(
        name=name.removeprefix(f"{pool}-"),
        number=int(live.get("revision", 0)),
        source=str(data["source"]),
        spec=canonical(data["spec"]),
        template=canonical(data["template"]),
    )
