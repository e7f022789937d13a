"""Pools whose children are compared with files, and what a start of a group of theirs looks like."""

from typing import Any

from encodepool_operator.api.parse import parse_pool
from encodepool_operator.api.types import EncodePool
from encodepool_operator.core.record import GroupRecord, PortBlock
from encodepool_operator.core.render import children, configmap, controllerrevision, pod, statefulset
from encodepool_operator.core.revision import canonical, choose, read_spec
from encodepool_operator.core.snapshot import RevisionRecord

STARTED_AT = 1_800_000_000.0
NAMESPACE = "epd"
UID = "0b7c9f4e-0000-4000-8000-000000000001"

POOLS: dict[str, dict[str, Any]] = {
    "tiny": {
        "replicas": 2,
        "model": {"path": "/srv/models/tiny"},
        "publish": {"servedModelName": "tiny-qwen3-vl"},
        "accelerator": {"perRank": 0},
        "store": {"deviceMiB": 64},
        "transfer": {"protocol": "tcp"},
        "resources": {"limits": {"cpu": "500m", "memory": "1024Mi"}},
    },
    "rdma": {
        "replicas": 4,
        "tensorParallelSize": 8,
        "model": {
            "name": "acme/vl-235b",
            "revision": "main",
            "tokenSecretRef": {"name": "hub", "key": "token"},
        },
        "network": {"hostNetwork": True},
        "transfer": {"ibDevices": ["mlx5_0", "mlx5_1"]},
        "rdma": {"resourceName": "rdma/ib", "count": 8},
        "sharedMemory": "32Gi",
        "rollout": {"maxUnavailable": 2},
        "placement": {
            "topology": {"exclusive": True},
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "priorityClassName": "serving",
        },
    },
    "pair": {
        "tensorParallelSize": 2,
        "model": {"name": "acme/vl-8b", "cache": {"emptyDir": {"sizeLimit": "50Gi"}}},
        "image": "registry.example/worker@sha256:0123",
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "encode",
        "drain": {"timeoutSeconds": 0},
        "restart": {"startupDeadlineSeconds": 61},
    },
    "split": {
        "replicas": 3,
        "tensorParallelSize": 4,
        "ranksPerPod": 2,
        "model": {"name": "acme/vl-8b"},
        "network": {"ipFamily": "IPv4"},
        "placement": {"topology": {"key": "example.com/nvlink", "mode": "Preferred"}},
    },
    "cache": {
        "model": {
            "name": "acme/vl-8b",
            "cache": {"pvc": {"claimName": "models", "subPath": "hub"}},
        },
        "env": [{"name": "HOME", "value": "/home/encode"}, {"name": "HF_TOKEN", "value": ""}],
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "args": ["--log-level=debug"],
    },
    "merged": {
        "model": {"path": "/models/vl", "cache": {"hostPath": {"path": "/data/models"}}},
        "sharedMemory": "0",
        "placement": {
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "noisy"}}}
                    ]
                }
            },
            "topology": {"exclusive": True, "mode": "Required"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        "podTemplate": {
            "metadata": {
                "labels": {"team": "vision", "app.kubernetes.io/name": "mine"},
                "annotations": {"example.com/scrape": "true"},
            },
            "spec": {
                "hostNetwork": True,
                "hostPID": False,
                "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}],
                "securityContext": {"runAsNonRoot": True, "fsGroup": 1000},
                "initContainers": [{"name": "warm", "image": "busybox", "command": ["true"]}],
                "affinity": {
                    "podAntiAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "loud"}}}
                        ]
                    }
                },
                "containers": [
                    {
                        "name": "log",
                        "image": "busybox",
                        "resources": {"requests": {"cpu": "0.1", "memory": "1073741824"}},
                    },
                    {
                        "name": "encode",
                        "image": "not-this-one",
                        "env": [
                            {"name": "ENCODEPOOL_HOST", "value": "0.0.0.0"},
                            {"name": "EXTRA", "value": ""},
                        ],
                        "ports": [
                            {"name": "debug", "containerPort": 6060},
                            {"name": "grpc", "containerPort": 1},
                        ],
                        "securityContext": {
                            "readOnlyRootFilesystem": True,
                            "capabilities": {"add": ["SYS_NICE"], "drop": ["ALL"]},
                        },
                        "readinessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 60},
                        "resources": {"limits": {"memory": "8Gi", "nvidia.com/gpu": 4}},
                        "volumeMounts": [
                            {"name": "scratch", "mountPath": "/scratch", "readOnly": False},
                            {"name": "scratch", "mountPath": "/tmp"},
                        ],
                    },
                ],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
            },
        },
    },
}


def pool_of(name: str, uid: str = UID) -> EncodePool:
    return parse_pool(
        {
            "apiVersion": "encodepool.dev/v1alpha1",
            "kind": "EncodePool",
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid, "generation": 1},
            "spec": POOLS[name],
        }
    )


def revision_of(pool: EncodePool) -> RevisionRecord:
    """The pool's first revision, with its template."""
    chosen = choose(pool.spec, "encodepool/worker:1", ())
    spec = read_spec(chosen)
    assert spec is not None
    rendered = pod.template(pool.metadata.name, chosen.name, spec)
    return RevisionRecord(
        chosen.name, chosen.number, chosen.source, chosen.spec, template=canonical(rendered)
    )


def record_of(pool: EncodePool, revision: str, incarnation: int = 7) -> GroupRecord:
    ports = pool.spec.network.port_range.start + 4 * incarnation
    metrics = ports + 3 if pool.spec.network.host_network else pool.spec.network.metrics_port
    return GroupRecord(incarnation, revision, PortBlock(ports, ports + 1, ports + 2, metrics), STARTED_AT)


def objects_of(pool: EncodePool) -> list[dict[str, Any]]:
    """Every child of the pool, with group 1 running."""
    revision = revision_of(pool)
    record = record_of(pool, revision.name)
    documents = {"workers.json": '{"version":1,"workers":[]}\n', "smg-args": ""}
    return [
        controllerrevision.build(pool, revision),
        *(children.render(pool, kind, name) for kind, name in children.wanted(pool)),
        configmap.build(pool, documents),
        statefulset.build(pool, 1, pool.spec.pods_per_group, record, revision),
    ]
