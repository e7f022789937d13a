"""The EncodePool resource as frozen values. Built by ``parse``, which takes every default from the
table in ``fields``; nothing here has a default of its own.

Seconds, MiB and counts are named so. Parts in Kubernetes' own types (tolerations, env, podTemplate
...) stay JSON values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

JsonObject: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IntOrPercent:
    """A count of groups, or a share of the pool's replicas in percent."""

    value: int
    percent: bool = False

    def of(self, total: int, *, round_up: bool) -> int:
        """Groups out of ``total``; a share is rounded as told, as Deployments do."""
        if not self.percent:
            return self.value
        scaled = self.value * total
        return -(-scaled // 100) if round_up else scaled // 100

    def __str__(self) -> str:
        return f"{self.value}%" if self.percent else str(self.value)


@dataclass(frozen=True, slots=True)
class SecretKeyRef:
    name: str
    key: str


@dataclass(frozen=True, slots=True)
class ClaimCache:
    claim_name: str
    sub_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class HostPathCache:
    path: str


@dataclass(frozen=True, slots=True)
class EmptyDirCache:
    size_limit: str


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Where model files live in the pod; at most one is set, none means an emptyDir."""

    pvc: ClaimCache | None
    host_path: HostPathCache | None
    empty_dir: EmptyDirCache | None


@dataclass(frozen=True, slots=True)
class Model:
    """Exactly one of ``name`` (hub) and ``path`` (folder) is not empty."""

    name: str
    path: str
    revision: str
    dtype: str
    token_secret_ref: SecretKeyRef | None
    cache: ModelCache


@dataclass(frozen=True, slots=True)
class Store:
    """MiB per rank."""

    device_mib: int
    host_mib: int


@dataclass(frozen=True, slots=True)
class Batching:
    max_tokens_per_batch: int
    max_items_per_batch: int
    max_queue_seconds: int


@dataclass(frozen=True, slots=True)
class Transfer:
    backend: str
    protocol: str
    ib_devices: tuple[str, ...]
    timeout_seconds: int


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports [start, start + size)."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Network:
    """``ip_family`` is "IPv4", "IPv6", or "" for the pod's first address."""

    host_network: bool
    port_range: PortRange
    metrics_port: int
    ip_family: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """``per_rank`` 0 means CPU."""

    resource_name: str
    per_rank: int


@dataclass(frozen=True, slots=True)
class Rdma:
    """``resource_name`` "" asks for no device."""

    resource_name: str
    count: int
    ipc_lock: bool


@dataclass(frozen=True, slots=True)
class Backoff:
    base_seconds: int
    max_seconds: int
    reset_seconds: int


@dataclass(frozen=True, slots=True)
class Restart:
    """``max_restarts`` None means no limit; ``lost_node_seconds`` 0 means never by force."""

    backoff: Backoff
    max_restarts: int | None
    startup_deadline_seconds: int
    lost_node_seconds: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """None for ``max_unavailable`` / ``max_surge``: depends on replicas, see core.rollout."""

    max_unavailable: IntOrPercent | None
    max_surge: IntOrPercent | None
    partition: int
    paused: bool
    progress_deadline_seconds: int


@dataclass(frozen=True, slots=True)
class Drain:
    timeout_seconds: int
    settle_seconds: int


@dataclass(frozen=True, slots=True)
class Publish:
    served_model_name: str


@dataclass(frozen=True, slots=True)
class Topology:
    """Pods of a group share one value of node label ``key``; ``exclusive``: with no other group."""

    key: str
    mode: str
    exclusive: bool


@dataclass(frozen=True, slots=True)
class Placement:
    topology: Topology | None
    node_selector: JsonObject
    tolerations: tuple[JsonObject, ...]
    affinity: JsonObject
    priority_class_name: str
    scheduler_name: str
    runtime_class_name: str


@dataclass(frozen=True, slots=True)
class Spec:
    """``ranks_per_pod`` is filled in; ``image`` "" means the operator's default image."""

    replicas: int
    tensor_parallel_size: int
    ranks_per_pod: int
    model: Model
    batching: Batching
    store: Store
    transfer: Transfer
    network: Network
    accelerator: Accelerator
    rdma: Rdma
    shared_memory: str
    restart: Restart
    rollout: Rollout
    revision_history_limit: int
    drain: Drain
    publish: Publish
    placement: Placement
    resources: JsonObject
    image: str
    image_pull_policy: str
    image_pull_secrets: tuple[JsonObject, ...]
    service_account_name: str
    env: tuple[JsonObject, ...]
    env_from: tuple[JsonObject, ...]
    args: tuple[str, ...]
    pod_template: JsonObject

    @property
    def pods_per_group(self) -> int:
        return self.tensor_parallel_size // self.ranks_per_pod


@dataclass(frozen=True, slots=True)
class Metadata:
    """``uid`` is "" and ``generation`` 0 for a manifest that no API server has seen."""

    name: str
    namespace: str
    uid: str
    generation: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EncodePool:
    metadata: Metadata
    spec: Spec
