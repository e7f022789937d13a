"""Rules that need more than one field, and values that are derived while parsing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from . import labels
from .types import PortRange, Spec

NODE_PORTS = range(30000, 32768)
"""Kubernetes' default range for NodePorts."""

EPHEMERAL_PORTS = range(32768, 61000)
"""Linux' default range for outgoing connections: a port of it may be in use at any moment."""


def spec_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """(field path, message) of every broken rule, for a spec whose single fields are right."""
    yield from _model_problems(spec)
    tp, per_pod = spec.tensor_parallel_size, spec.ranks_per_pod
    if per_pod is not None and tp % per_pod:
        yield "spec.ranksPerPod", f"must divide tensorParallelSize ({tp}), is {per_pod}"
    if spec.transfer.backend == "tcp" and spec.transfer.protocol == "rdma":
        yield "spec.transfer.protocol", "must be tcp with backend tcp, is 'rdma'"
    elif spec.transfer.ib_devices and _protocol(spec) != "rdma":
        yield "spec.transfer.ibDevices", "may be set only with protocol rdma"
    if len(set(spec.transfer.ib_devices)) < len(spec.transfer.ib_devices):
        yield "spec.transfer.ibDevices", "must not name a device twice"
    yield from _port_problems(spec.network.port_range, spec.network.metrics_port)
    backoff = spec.restart.backoff
    if backoff.max_seconds < backoff.base_seconds:
        yield (
            "spec.restart.backoff.maxSeconds",
            f"must be at least baseSeconds ({backoff.base_seconds}), is {backoff.max_seconds}",
        )
    down, surge = spec.rollout.max_unavailable, spec.rollout.max_surge
    if down is not None and surge is not None and down.value == surge.value == 0:
        yield "spec.rollout.maxUnavailable", "must not be 0 while maxSurge is 0: no group could ever move"
    yield from _env_problems(spec)
    yield from _template_problems(spec.pod_template)


def derive(spec: Spec) -> Spec:
    """Fill in what follows from other fields. Never written back to the resource."""
    per_pod: int | None = spec.ranks_per_pod
    return replace(
        spec,
        ranks_per_pod=spec.tensor_parallel_size if per_pod is None else per_pod,
        transfer=replace(spec.transfer, protocol=_protocol(spec)),
    )


def refused_changes(old: Spec, new: Spec) -> list[tuple[str, str]]:
    """(field path, message) of changes that a pool cannot follow."""
    return [
        (f"spec.{key}", f"cannot be changed (from {before} to {after}); make another pool")
        for key, before, after in (
            ("tensorParallelSize", old.tensor_parallel_size, new.tensor_parallel_size),
            ("ranksPerPod", old.ranks_per_pod, new.ranks_per_pod),
        )
        if before != after
    ]


def _protocol(spec: Spec) -> str:
    return spec.transfer.protocol or ("rdma" if spec.transfer.backend == "mooncake" else "tcp")


def _model_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    if not spec.model.name and not spec.model.path:
        yield "spec.model", "needs name (on the model hub) or path (a folder)"
    elif spec.model.name and spec.model.path:
        yield "spec.model", "must have only one of name and path"
    elif spec.model.path and not spec.model.path.strip("/"):
        yield "spec.model.path", f"must name a folder, is {spec.model.path!r}"
    cache = spec.model.cache
    if sum(part is not None for part in (cache.pvc, cache.host_path, cache.empty_dir)) > 1:
        yield "spec.model.cache", "must have only one of pvc, hostPath and emptyDir"


def _port_problems(ports: PortRange, metrics_port: int) -> Iterator[tuple[str, str]]:
    stop = ports.start + ports.size
    if stop > 65536:
        yield "spec.network.portRange", f"must end at 65535, ends at {stop - 1}"
    for reserved, what in ((NODE_PORTS, "NodePorts"), (EPHEMERAL_PORTS, "outgoing connections")):
        if ports.start < reserved.stop and reserved.start < stop:
            yield (
                "spec.network.portRange",
                f"must stay out of {reserved.start}-{reserved.stop - 1} ({what}), "
                f"is {ports.start}-{stop - 1}",
            )
    if ports.start <= metrics_port < stop:
        yield "spec.network.metricsPort", f"must lie outside portRange, is {metrics_port}"


def _env_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for i, variable in enumerate(spec.env):
        name = variable.get("name")
        path = f"spec.env[{i}].name"
        if not isinstance(name, str) or not name:
            yield path, "is required"
        elif name.startswith(labels.ENV_PREFIX):
            yield path, f"must not start with {labels.ENV_PREFIX}: those are the operator's, is {name!r}"
        elif name in seen:
            yield path, f"must not be given twice, is {name!r}"
        else:
            seen.add(name)


def _template_problems(template: Any) -> Iterator[tuple[str, str]]:
    for key, value in template.items():
        if key not in ("metadata", "spec"):
            yield f"spec.podTemplate.{key}", "unknown field; a pod template has metadata and spec"
        elif not hasattr(value, "items"):
            yield f"spec.podTemplate.{key}", "must be an object"
