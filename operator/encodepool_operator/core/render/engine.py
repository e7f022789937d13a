"""How a worker is started: the one place that knows an engine's command line and environment.

The flags that follow from the spec are the same on a cluster and on one machine; addresses, ports and
identity are added by whoever starts the worker.
"""

from dataclasses import dataclass
from typing import Any

from encodepool_operator.api import names
from encodepool_operator.api.labels import ENV_PREFIX, POD_INDEX
from encodepool_operator.api.types import JsonObject, Spec

from . import fill

COMMAND = ("encodepool-worker", "serve")

MODELS = "/models"
"""Where the model cache is mounted."""

TEMP = "/tmp"

LEAST_DRAIN_S = 0.1
"""The worker wants a positive time; a manifest may say 0."""

LEAST_QUARANTINE_S = 10
LEAST_QUEUE_TOKENS = 65536

END_S = 15
"""For a worker's processes to end, once what was accepted is done or told that it failed."""


def quarantine_s(spec: Spec) -> int:
    """How long memory of a timed-out write rests: twice the timeout is the least, 10 s the contract's."""
    return max(LEAST_QUARANTINE_S, 2 * spec.transfer.timeout_seconds)


def grace_s(spec: Spec) -> int:
    """From SIGTERM to SIGKILL: the drain; a write that times out at its very end, and its rest; the end."""
    return spec.drain.timeout_seconds + spec.transfer.timeout_seconds + quarantine_s(spec) + END_S


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """``args`` and ``env`` may hold places to be filled; ``defaults`` are variables a user may replace."""

    command: tuple[str, ...]
    args: tuple[Any, ...]
    env: tuple[JsonObject, ...]
    defaults: tuple[JsonObject, ...]


def engine_command(pool: str, spec: Spec) -> EngineCommand:
    """Command, arguments and environment of the container ``encode``, ``spec.args`` last."""
    flags: dict[str, Any] = {
        **worker_flags(spec, device="cpu" if spec.accelerator.per_rank == 0 else "cuda"),
        "bootstrap-port": "{bootstrap}",
        "grpc-port": "{grpc}",
        "dist-init-port": "{distInit}",
        "metrics-port": "{metrics}",
        "pool": pool,
        "group": "{group}",
        "incarnation": "{incarnation}",
    }
    places = {f"{{{name}}}" for name in fill.NAMES}
    args = [
        fill.text(f"--{name}={value}") if value in places else f"--{name}={_literal(value)}"
        for name, value in flags.items()
    ]
    return EngineCommand(COMMAND, (*args, *spec.args), tuple(_owned(pool, spec)), tuple(_defaults(spec)))


def worker_flags(spec: Spec, *, device: str) -> dict[str, Any]:
    """Flags of ``encodepool-worker serve`` that follow from the spec, name -> value, in a fixed order."""
    flags: dict[str, Any] = {
        "model": spec.model.path or spec.model.name,
        "model-revision": spec.model.revision,
        "dtype": spec.model.dtype,
        "served-model-name": names.served_model_name(spec),
        "device": device,
        "tensor-parallel-size": spec.tensor_parallel_size,
        "max-tokens-per-batch": spec.batching.max_tokens_per_batch,
        "max-items-per-batch": spec.batching.max_items_per_batch,
        "max-queue-seconds": spec.batching.max_queue_seconds,
        # A batch must fit in the queue; the worker's own default suits its default batch.
        "max-queue-tokens": max(LEAST_QUEUE_TOKENS, spec.batching.max_tokens_per_batch),
        "store-device-mib": spec.store.device_mib,
        "store-host-mib": spec.store.host_mib,
        "transfer-backend": spec.transfer.backend,
        "transfer-protocol": spec.transfer.protocol,
        "ib-devices": ",".join(spec.transfer.ib_devices),
        "transfer-timeout-seconds": spec.transfer.timeout_seconds,
        "quarantine-seconds": quarantine_s(spec),
        "drain-seconds": max(LEAST_DRAIN_S, spec.drain.timeout_seconds),
    }
    return {name: value for name, value in flags.items() if value != ""}


def mounts_models(spec: Spec) -> bool:
    """With a path and no cache, the folder is in the image and must not be hidden by a mount."""
    cache = spec.model.cache
    return bool(spec.model.name) or any((cache.pvc, cache.host_path, cache.empty_dir))


def _literal(value: Any) -> str:
    """A value that kubelet does not expand: ``$(NAME)`` in it means what it says."""
    return str(value).replace("$(", "$$(")


def _owned(pool: str, spec: Spec) -> list[JsonObject]:
    """Variables that nobody else may set."""
    # An address must be known when the process starts, and only kubelet knows it. With a family asked
    # for, the pod must have no address of the other: a list of two is refused by the worker.
    field = "status.podIPs" if spec.network.ip_family else "status.podIP"
    env: list[JsonObject] = [_from_field("HOST", field)]
    if spec.pods_per_group > 1:
        env += [
            _from_field("POD_INDEX", f"metadata.labels['{POD_INDEX}']"),
            {"name": f"{ENV_PREFIX}RANKS_PER_POD", "value": str(spec.ranks_per_pod)},
            {
                "name": f"{ENV_PREFIX}DIST_INIT_HOST",
                "value": fill.text(f"{names.pod_pattern(pool)}-0.{names.peers_service(pool)}"),
            },
        ]
    secret = spec.model.token_secret_ref
    if secret is not None:
        reference = {"secretKeyRef": {"name": secret.name, "key": secret.key}}
        env.append({"name": "HF_TOKEN", "valueFrom": reference})
    return env


def _defaults(spec: Spec) -> list[JsonObject]:
    """Variables that make a pod work whatever its image, user and root file system are."""
    env: list[JsonObject] = [{"name": "HOME", "value": TEMP}]
    if mounts_models(spec):
        env.append({"name": "HF_HOME", "value": MODELS})
    claim = spec.model.cache.pvc
    if claim is not None and claim.read_only:
        env.append({"name": "HF_HUB_OFFLINE", "value": "1"})
    if "cpu" in spec.resources.get("limits", {}):
        # Else one thread for each core of the node, however few of them the pod may use.
        reference = {"resourceFieldRef": {"resource": "limits.cpu"}}
        env.append({"name": "OMP_NUM_THREADS", "valueFrom": reference})
    return env


def _from_field(name: str, path: str) -> JsonObject:
    return {"name": f"{ENV_PREFIX}{name}", "valueFrom": {"fieldRef": {"fieldPath": path}}}
