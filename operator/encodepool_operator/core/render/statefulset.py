"""The StatefulSet of one group."""

from typing import Any

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import EncodePool

from ..record import GroupRecord, annotations_of
from ..snapshot import RevisionRecord
from . import common, fill
from .pod import template_of


def build(
    pool: EncodePool, group: int, replicas: int, record: GroupRecord, revision: RevisionRecord
) -> dict[str, Any]:
    """The whole object; ``revision`` is the one whose template the group's pods have.

    ``OnDelete``: a changed template moves no pod; groups are stopped and started by ``replicas``.
    """
    meta = pool.metadata
    selector = {labels.POOL: meta.name, labels.GROUP: str(group)}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": common.metadata(meta, names.group_object(meta.name, group), group=group)
        | {"annotations": annotations_of(record)},
        "spec": {
            "replicas": replicas,
            "serviceName": names.peers_service(meta.name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": selector},
            "template": fill.filled(template_of(revision), fill.values_of(group, record)),
        },
    }
