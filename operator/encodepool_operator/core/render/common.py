"""What all children have in common: name, labels, and the pool as their owner."""

from typing import Any

from encodepool_operator.api import labels
from encodepool_operator.api.types import Metadata


def metadata(
    pool: Metadata, name: str, *, group: int | None = None, component: str = "encode"
) -> dict[str, Any]:
    """``metadata`` of a child of ``pool``."""
    return {
        "name": name,
        "namespace": pool.namespace,
        "labels": labels.child_labels(pool.name, group, component),
        "ownerReferences": [owner(pool)],
    }


def owner(pool: Metadata) -> dict[str, Any]:
    """The pool as controller. ``blockOwnerDeletion`` would need a right on the pool's finalizers."""
    return {
        "apiVersion": labels.API,
        "kind": labels.KIND,
        "name": pool.name,
        "uid": pool.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def is_owned(child: Any, pool_uid: str) -> bool:
    """Whether the pool with this uid is the child's controller. Others are never written."""
    references = child.get("metadata", {}).get("ownerReferences") or ()
    return any(item.get("controller") and item.get("uid") == pool_uid for item in references)
