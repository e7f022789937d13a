"""Specs that break one rule each, and some that come close; for the parser and for a real API server."""

from typing import Any

Spec = dict[str, Any]

BROKEN: tuple[tuple[Spec, str], ...] = (
    ({"model": {}}, "spec.model: needs name (on the model hub) or path (a folder)"),
    ({"model": {"name": "a", "path": "/b"}}, "spec.model: must have only one of name and path"),
    ({"model": {"path": "//"}}, "spec.model.path: must name a folder, is '//'"),
    (
        {"model": {"name": "a", "cache": {"emptyDir": {}, "hostPath": {"path": "/x"}}}},
        "spec.model.cache: must have only one of pvc, hostPath and emptyDir",
    ),
    (
        {"tensorParallelSize": 4, "ranksPerPod": 3},
        "spec.ranksPerPod: must divide tensorParallelSize (4), is 3",
    ),
    (
        {"transfer": {"backend": "tcp", "protocol": "rdma"}},
        "spec.transfer.protocol: must be tcp with backend tcp, is 'rdma'",
    ),
    (
        {"transfer": {"protocol": "tcp", "ibDevices": ["mlx5_0"]}},
        "spec.transfer.ibDevices: may be set only with protocol rdma",
    ),
    (
        {"transfer": {"ibDevices": ["mlx5_0", "mlx5_0"]}},
        "spec.transfer.ibDevices: must not name a device twice",
    ),
    (
        {"network": {"portRange": {"start": 65000, "size": 1000}}},
        "spec.network.portRange: must end at 65535 or before, ends at 65999",
    ),
    (
        {"network": {"portRange": {"start": 29999, "size": 4}}},
        "spec.network.portRange: must stay out of 30000-32767 (NodePorts), is 29999-30002",
    ),
    (
        {"network": {"portRange": {"start": 60000, "size": 100}}},
        "spec.network.portRange: must stay out of 32768-60999 (outgoing connections), is 60000-60099",
    ),
    (
        {"network": {"metricsPort": 10000}},
        "spec.network.metricsPort: must lie outside portRange, is 10000",
    ),
    (
        {"restart": {"backoff": {"baseSeconds": 20, "maxSeconds": 10}}},
        "spec.restart.backoff.maxSeconds: must be at least baseSeconds (20), is 10",
    ),
    (
        {"rollout": {"maxUnavailable": 0, "maxSurge": "0%"}},
        "spec.rollout.maxUnavailable: must not be 0 while maxSurge is 0: no group could ever move",
    ),
    ({"env": [{"value": "x"}]}, "spec.env[0].name: is required"),
    ({"env": [{"name": "A"}, {"name": "A"}]}, "spec.env[1].name: must not be given twice, is 'A'"),
    (
        {"podTemplate": {"containers": []}},
        "spec.podTemplate.containers: unknown field; a pod template has metadata and spec",
    ),
    ({"podTemplate": {"spec": 5}}, "spec.podTemplate.spec: must be an object"),
    (
        {"env": [{"name": "ENCODEPOOL_SEED", "value": "1"}]},
        "spec.env[0].name: must not start with ENCODEPOOL_: those are the operator's, is 'ENCODEPOOL_SEED'",
    ),
    (
        {"podTemplate": {"metadata": {"labels": {"encodepool.dev/pool": "x"}}}},
        "spec.podTemplate.metadata.labels: must not have keys of encodepool.dev/ or of gateways: those are "
        "the operator's, has 'encodepool.dev/pool'",
    ),
    (
        {"podTemplate": {"metadata": {"annotations": {"encodepool.dev/x": "x"}}}},
        "spec.podTemplate.metadata.annotations: must not have keys of encodepool.dev/ or of gateways: those "
        "are the operator's, has 'encodepool.dev/x'",
    ),
    (
        {"podTemplate": {"spec": {"volumes": [{"emptyDir": {}}]}}},
        "spec.podTemplate.spec.volumes: must be a list of objects that have their key (name)",
    ),
)
"""(what is set in the spec, the parser's one problem)"""

CLOSE: tuple[Spec, ...] = (
    {"network": {"portRange": {"start": 61000, "size": 4000}}},
    {"network": {"portRange": {"start": 29000, "size": 1000}}},
    {"rollout": {"maxUnavailable": 0}},
    {"rollout": {"maxUnavailable": 0, "maxSurge": 1}},
    {"transfer": {"ibDevices": ["mlx5_0"]}},
    {"model": {"name": "a", "cache": {"hostPath": {"path": "/x"}}}},
    {"podTemplate": {"spec": {"hostPID": True}}},
)
"""Specs that are fine."""
