"""The pod template of a revision: rendered once, kept with the revision, filled in per start."""

import json
from functools import lru_cache
from typing import Any

from encodepool_operator.api import labels
from encodepool_operator.api.types import Spec

from ..snapshot import RevisionRecord
from . import fill, quantity
from .engine import MODELS, TEMP, engine_command, grace_s, mounts_models
from .merge import cleaned, merge
from .placement import affinity

TEMP_VOLUME = "encodepool-tmp"
SHM_VOLUME = "encodepool-shm"
MODELS_VOLUME = "encodepool-models"

PERIOD_S = 2
TIMEOUT_S = 1
FAILURES = 3
KILL_GRACE_S = 5
"""A frozen process ignores SIGTERM: what failed its startup or liveness probe is killed
soon. The notice takes this time, and kubelet then gives it 2 s more."""

NOTICE_S = 5
"""From the decision to end a pod to its SIGTERM; meanwhile its worker serves as ever. An eviction or
``kubectl delete pod`` withdraws nobody first: the operator sees the pod leave and takes it off the
list, and gateways follow within about a second."""


def template(pool: str, revision: str, spec: Spec) -> dict[str, Any]:
    """``podTemplate`` with what the operator owns over it. Places are to be filled, see ``fill``."""
    given = cleaned(spec.pod_template)
    user_labels, user_notes = (given.get("metadata", {}).get(kind, {}) for kind in ("labels", "annotations"))
    own_labels = labels.child_labels(pool) | {
        labels.GROUP: fill.text("{group}"),
        labels.INCARNATION: fill.text("{incarnation}"),
    }
    own_notes = {labels.REVISION: revision, "kubectl.kubernetes.io/default-container": labels.CONTAINER}
    pod = given.get("spec", {})
    rules = affinity(pool, spec, pod.pop("affinity", {}), spec.placement.affinity)
    return {
        "metadata": {"annotations": user_notes | own_notes, "labels": user_labels | own_labels},
        "spec": merge(pod, _pod(pool, spec) | ({"affinity": rules} if rules else {})),
    }


@lru_cache(maxsize=256)
def template_of(revision: RevisionRecord) -> Any:
    """The kept template; shared, so never to be changed."""
    return json.loads(revision.template)


def _pod(pool: str, spec: Spec) -> dict[str, Any]:
    """The pod's spec as far as the operator owns it."""
    placement, host_network = spec.placement, spec.network.host_network
    optional = {
        "dnsPolicy": "ClusterFirstWithHostNet" if host_network else "",
        "imagePullSecrets": cleaned(spec.image_pull_secrets),
        "nodeSelector": dict(sorted(placement.node_selector.items())),
        "priorityClassName": placement.priority_class_name,
        "runtimeClassName": placement.runtime_class_name,
        "schedulerName": placement.scheduler_name,
        "serviceAccountName": spec.service_account_name,
        "tolerations": cleaned(placement.tolerations),
    }
    return {
        "automountServiceAccountToken": False,
        "containers": [_container(pool, spec)],
        # A Service called encodepool-grpc would set ENCODEPOOL_GRPC_PORT.
        "enableServiceLinks": False,
        "hostNetwork": host_network,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": NOTICE_S + grace_s(spec),
        "volumes": _volumes(spec),
    } | {key: value for key, value in optional.items() if value}


def _container(pool: str, spec: Spec) -> dict[str, Any]:
    engine = engine_command(pool, spec)
    owned = {str(variable["name"]) for variable in engine.env}
    chosen = [variable for variable in spec.env if variable["name"] not in owned]
    taken = {variable["name"] for variable in chosen}
    defaults = [variable for variable in engine.defaults if variable["name"] not in taken]
    optional: dict[str, Any] = {
        "envFrom": cleaned(spec.env_from),
        "imagePullPolicy": spec.image_pull_policy,
        "resources": _resources(spec),
        # The only privilege that is ever asked for: RDMA pins memory.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}} if _locks_memory(spec) else {},
    }
    return {
        "name": labels.CONTAINER,
        "image": spec.image,
        "command": list(engine.command),
        "args": list(engine.args),
        # Ours first, so that the user's may refer to them.
        "env": cleaned([*engine.env, *defaults, *chosen]),
        "ports": _ports(spec),
        "startupProbe": _probe("/livez", -(-spec.restart.startup_deadline_seconds // PERIOD_S), kill=True),
        "readinessProbe": _probe("/readyz", FAILURES, kill=False),
        "livenessProbe": _probe("/livez", FAILURES, kill=True),
        "lifecycle": {"preStop": {"sleep": {"seconds": NOTICE_S}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(spec),
    } | {key: value for key, value in optional.items() if value}


def _ports(spec: Spec) -> list[dict[str, Any]]:
    """The start's block; under hostNetwork as host ports, so that the scheduler refuses a collision."""
    out = []
    for name, place in (
        ("grpc", "grpc"),
        ("bootstrap", "bootstrap"),
        ("dist-init", "distInit"),
        ("metrics", "metrics"),
    ):
        port = {"name": name, "containerPort": fill.number(place), "protocol": "TCP"}
        out.append(port | {"hostPort": fill.number(place)} if spec.network.host_network else port)
    return out


def _probe(path: str, failures: int, *, kill: bool) -> dict[str, Any]:
    probe: dict[str, Any] = {
        "httpGet": {"path": path, "port": "metrics", "scheme": "HTTP"},
        "periodSeconds": PERIOD_S,
        "timeoutSeconds": TIMEOUT_S,
        "failureThreshold": failures,
        "successThreshold": 1,
    }
    return probe | {"terminationGracePeriodSeconds": KILL_GRACE_S} if kill else probe


def _resources(spec: Spec) -> dict[str, Any]:
    """What the user asks for, and the devices of the pod's ranks."""
    devices: dict[str, Any] = {}
    if spec.accelerator.per_rank:
        devices[spec.accelerator.resource_name] = str(spec.accelerator.per_rank * spec.ranks_per_pod)
    if spec.rdma.resource_name:
        devices[spec.rdma.resource_name] = str(spec.rdma.count)
    ours = {"limits": devices, "requests": dict(devices)} if devices else {}
    return {key: value for key, value in merge(spec.resources, ours).items() if value}


def _locks_memory(spec: Spec) -> bool:
    return bool(spec.rdma.resource_name) and spec.rdma.ipc_lock


def _volumes(spec: Spec) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": TEMP_VOLUME, "emptyDir": {}}]
    shared = spec.shared_memory or f"{1 + spec.ranks_per_pod}Gi"
    if quantity.amount(shared) > 0:
        volumes.append({"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": shared}})
    cache = spec.model.cache
    if cache.pvc is not None:
        claim: dict[str, Any] = {"claimName": cache.pvc.claim_name}
        if cache.pvc.read_only:
            claim["readOnly"] = True
        volumes.append({"name": MODELS_VOLUME, "persistentVolumeClaim": claim})
    elif cache.host_path is not None:
        folder = {"path": cache.host_path.path, "type": "DirectoryOrCreate"}
        volumes.append({"name": MODELS_VOLUME, "hostPath": folder})
    elif mounts_models(spec):
        size = cache.empty_dir.size_limit if cache.empty_dir is not None else ""
        volumes.append({"name": MODELS_VOLUME, "emptyDir": {"sizeLimit": size} if size else {}})
    return volumes


def _mounts(spec: Spec) -> list[dict[str, Any]]:
    paths = {TEMP_VOLUME: TEMP, SHM_VOLUME: "/dev/shm", MODELS_VOLUME: MODELS}
    mounts: list[dict[str, Any]] = [
        {"name": volume["name"], "mountPath": paths[volume["name"]]} for volume in _volumes(spec)
    ]
    claim = spec.model.cache.pvc
    for mount in mounts:
        if mount["name"] == MODELS_VOLUME and claim is not None:
            mount |= {"subPath": claim.sub_path} if claim.sub_path else {}
            mount |= {"readOnly": True} if claim.read_only else {}
    return mounts
