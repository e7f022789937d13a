"""The one table of the resource's fields: parser, CRD schema and docs/api.md come from it."""

from typing import Any

from . import types
from .field import INT32_MAX, Field, Kind, Shape, Unset


def _int(key: str, default: Any, minimum: int, maximum: int, doc: str, **more: Any) -> Field:
    return Field(key, Kind.INTEGER, doc, default, minimum, maximum, **more)


def _bool(key: str, default: bool, doc: str, **more: Any) -> Field:
    return Field(key, Kind.BOOLEAN, doc, default, **more)


def _str(key: str, default: Any, doc: str, **more: Any) -> Field:
    return Field(key, Kind.STRING, doc, default, **more)


def _list(key: str, item: Field, max_length: int, doc: str, **more: Any) -> Field:
    return Field(key, Kind.LIST, doc, (), max_length=max_length, item=item, **more)


def _native(key: str, native: str, doc: str) -> Field:
    return Field(key, Kind.NATIVE, doc, {}, native=native)


def _object(key: str, make: type, doc: str, *fields: Field, optional: bool = False, **more: Any) -> Field:
    """An object; left out it is made from its fields' defaults, or None when ``optional``."""
    default: Any = None if optional else {}
    return Field(key, Kind.OBJECT, doc, default, shape=Shape(make, fields), **more)


QUANTITY = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
ABSOLUTE_PATH = r"^/.*$"
_SIZE: dict[str, Any] = {"max_length": 32, "pattern": QUANTITY}


def _item(kind: Kind, doc: str, **more: Any) -> Field:
    return Field("item", kind, doc, **more)


def _native_item(native: str) -> Field:
    return Field("item", Kind.NATIVE, "In Kubernetes' own type.", {}, native=native)


_MODEL = _object(
    "model",
    types.Model,
    "The vision-language model whose vision tower the pool runs.",
    _str("name", "", "Name on the model hub. Exactly one of name and path is required.", max_length=512),
    _str("path", "", "Folder with the model's files, in the pod or on this machine.", max_length=4096),
    _str("revision", "", "Branch, tag or commit on the hub."),
    _str("dtype", "auto", "Type the tower computes in.", choices=("auto", "float16", "bfloat16", "float32")),
    _object(
        "tokenSecretRef",
        types.SecretKeyRef,
        "Secret with the hub's access token.",
        _str("name", Unset.REQUIRED, "Name of the Secret.", min_length=1),
        _str("key", Unset.REQUIRED, "Key in the Secret.", min_length=1),
        optional=True,
    ),
    _object(
        "cache",
        types.ModelCache,
        "What is mounted at /models, for downloaded files: at most one of these. None: an emptyDir "
        "with model.name, nothing with model.path.",
        _object(
            "pvc",
            types.ClaimCache,
            "A PersistentVolumeClaim.",
            _str("claimName", Unset.REQUIRED, "Name of the claim.", min_length=1),
            _str("subPath", "", "Folder inside the volume.", max_length=4096),
            _bool("readOnly", True, "Mount it read-only; nothing is downloaded then."),
            optional=True,
        ),
        _object(
            "hostPath",
            types.HostPathCache,
            "A folder of the node.",
            _str("path", Unset.REQUIRED, "The folder.", min_length=1, max_length=4096, pattern=ABSOLUTE_PATH),
            optional=True,
        ),
        _object(
            "emptyDir",
            types.EmptyDirCache,
            "A folder that lives as long as the pod.",
            _str("sizeLimit", "", "Its largest size.", **_SIZE),
            optional=True,
        ),
    ),
)

_RUNNING = (
    _object(
        "batching",
        types.Batching,
        "How items are put together for one pass of the tower.",
        _int("maxTokensPerBatch", 8192, 1, 1048576, "Tokens of one batch; a larger item goes alone."),
        _int("maxItemsPerBatch", 160, 1, 65536, "Items of one batch."),
        _int("maxQueueSeconds", 60, 1, 3600, "A request that would wait longer is refused."),
    ),
    _object(
        "store",
        types.Store,
        "Memory for embeddings, cache and send buffer in one, per rank.",
        _int("deviceMiB", 4096, 1, 1048576, "MiB on the device (on CPU: in memory).", attr="device_mib"),
        _int("hostMiB", 0, 0, 16777216, "MiB of pinned host memory as second tier.", attr="host_mib"),
    ),
    _object(
        "transfer",
        types.Transfer,
        "How embeddings reach the prefill workers.",
        _str("backend", "mooncake", "Transfer engine.", choices=("mooncake", "tcp")),
        _str(
            "protocol",
            Unset.UNSET,
            "Protocol of the engine. Unset: rdma with mooncake, else tcp.",
            choices=("rdma", "tcp"),
        ),
        _list(
            "ibDevices",
            _item(Kind.STRING, "Device name.", min_length=1, max_length=64, pattern="^[A-Za-z0-9_.:-]+$"),
            16,
            "InfiniBand devices; only with protocol rdma. None: the engine chooses.",
            unique=True,
        ),
        _int("timeoutSeconds", 5, 1, 300, "A write without progress for so long has failed."),
    ),
    _object(
        "network",
        types.Network,
        "Addresses of the workers.",
        _bool("hostNetwork", False, "Use the node's network."),
        _object(
            "portRange",
            types.PortRange,
            "Ports of the workers; each start of a group takes the next block of it.",
            _int("start", 10000, 1024, 65535, "First port."),
            _int("size", 20000, 4, 64512, "Number of ports."),
        ),
        _int("metricsPort", 9400, 1024, 65535, "Port of probes and metrics on a pod network."),
        _str(
            "ipFamily",
            Unset.UNSET,
            "Family of the published address. Unset: the pod's first. Set, a pod with addresses of both "
            "families does not start.",
            choices=("IPv4", "IPv6"),
        ),
    ),
)

_DEVICES = (
    _object(
        "accelerator",
        types.Accelerator,
        "Devices of a rank.",
        _str("resourceName", "nvidia.com/gpu", "Extended resource.", min_length=1, pattern=LABEL_KEY),
        _int("perRank", 1, 0, 16, "Devices per rank; 0 runs on the CPU."),
    ),
    _object(
        "rdma",
        types.Rdma,
        "RDMA devices of a pod.",
        _str("resourceName", "", "Extended resource; empty asks for none.", pattern=LABEL_KEY),
        _int("count", 1, 1, 64, "Devices per pod."),
        _bool("ipcLock", True, "Add the capability IPC_LOCK."),
    ),
    _str("sharedMemory", "", "Size of /dev/shm. Empty: 1 Gi more than ranksPerPod; 0: none.", **_SIZE),
)

_LIFE = (
    _object(
        "restart",
        types.Restart,
        "What happens when a group fails. A group is always recreated as a whole.",
        _object(
            "backoff",
            types.Backoff,
            "The first restart is immediate, later ones wait base x 2^n seconds.",
            _int("baseSeconds", 10, 1, 3600, "First wait.", pods=False),
            _int("maxSeconds", 600, 1, 86400, "Longest wait.", pods=False),
            _int("resetSeconds", 1200, 1, 604800, "A group that ran so long counts anew.", pods=False),
        ),
        _int(
            "maxRestarts",
            Unset.UNSET,
            1,
            INT32_MAX,
            "Restarts of one group and revision before it stays stopped. Unset: no limit.",
            pods=False,
        ),
        _int("startupDeadlineSeconds", 1800, 1, 604800, "A start that takes longer has failed."),
        _int(
            "lostNodeSeconds",
            300,
            0,
            604800,
            "Pods on a lost node are deleted by force after this; 0 means never.",
            pods=False,
        ),
    ),
    _object(
        "rollout",
        types.Rollout,
        "How a change of the pods' spec reaches the groups.",
        Field(
            "maxUnavailable",
            Kind.INT_OR_PERCENT,
            "Healthy groups that may be down for the rollout. Unset: 0 with one replica, else 1.",
            pods=False,
        ),
        Field(
            "maxSurge",
            Kind.INT_OR_PERCENT,
            "Groups above replicas during the rollout. Unset: 1 with one replica, else 0.",
            pods=False,
        ),
        _int("partition", 0, 0, 500, "Groups with a lower index keep their revision.", pods=False),
        _bool("paused", False, "Move no group to the new revision.", pods=False),
        _int(
            "progressDeadlineSeconds",
            3600,
            1,
            604800,
            "Without progress for this long: Progressing=False.",
            pods=False,
        ),
    ),
    _int("revisionHistoryLimit", 5, 0, 50, "Unused revisions that are kept.", pods=False),
    _object(
        "drain",
        types.Drain,
        "How a group that still serves is stopped.",
        _int("timeoutSeconds", 60, 0, 3600, "Time to finish accepted work after SIGTERM."),
        _int("settleSeconds", 10, 0, 600, "Time between withdrawal and SIGTERM, for gateways.", pods=False),
    ),
    _object(
        "publish",
        types.Publish,
        "What gateways are told.",
        _str(
            "servedModelName",
            "",
            "Model name to serve. Empty: model.name, or the last part of model.path.",
            max_length=512,
        ),
    ),
)

_POD = (
    _object(
        "placement",
        types.Placement,
        "Where pods may run.",
        _object(
            "topology",
            types.Topology,
            "Keep the pods of a group together. None: no rule.",
            _str(
                "key",
                "kubernetes.io/hostname",
                "Node label.",
                min_length=1,
                max_length=317,
                pattern=LABEL_KEY,
            ),
            _str("mode", "Required", "Whether pods may run elsewhere.", choices=("Required", "Preferred")),
            _bool("exclusive", False, "No other group of the namespace in the same place."),
            optional=True,
        ),
        Field(
            "nodeSelector",
            Kind.STRING_MAP,
            "Labels a node must have.",
            {},
            max_length=64,
            item=_item(Kind.STRING, "A label's value.", max_length=63),
        ),
        _list("tolerations", _native_item("Toleration"), 64, "Taints that pods tolerate."),
        _native("affinity", "Affinity", "Affinity rules, merged with those of topology."),
        _str("priorityClassName", "", "Priority class."),
        _str("schedulerName", "", "Scheduler."),
        _str("runtimeClassName", "", "Runtime class."),
    ),
    _native("resources", "ResourceRequirements", "Requests and limits of a pod; devices are added."),
    _str("image", "", "Worker image. Empty: the operator's default.", max_length=1024),
    _str(
        "imagePullPolicy",
        Unset.UNSET,
        "When to pull. Unset: Kubernetes' rule.",
        choices=("Always", "IfNotPresent", "Never"),
    ),
    _list(
        "imagePullSecrets",
        _native_item("LocalObjectReference"),
        16,
        "Secrets for the registry.",
        list_keys=("name",),
    ),
    _str("serviceAccountName", "", "Service account of the pods."),
    _list("env", _native_item("EnvVar"), 256, "Environment of the worker.", list_keys=("name",)),
    _list("envFrom", _native_item("EnvFromSource"), 64, "Sources of the worker's environment."),
    _list("args", _item(Kind.STRING, "One argument.", max_length=4096), 256, "Further flags of the worker."),
    _native(
        "podTemplate",
        "PodTemplate",
        "Merged into the pod template under what the operator owns; the container is encode.",
    ),
)

SPEC = _object(
    "spec",
    types.Spec,
    "The pool that is wanted.",
    _int("replicas", 1, 0, 500, "Number of groups.", pods=False),
    _int("tensorParallelSize", 1, 1, 64, "Ranks of a group. Cannot be changed."),
    _int(
        "ranksPerPod",
        Unset.UNSET,
        1,
        64,
        "Ranks in one pod; divides tensorParallelSize. Unset: all of them. Cannot be changed.",
    ),
    _MODEL,
    *_RUNNING,
    *_DEVICES,
    *_LIFE,
    *_POD,
)
"""The whole of ``spec``."""
