"""Rules that need more than one field, and values that are derived while parsing.

One list serves the parser, the CRD's CEL rules and docs/api.md. Where a rule has no CEL, the schema
itself refuses what breaks it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from . import labels
from .native import LIST_KEYS
from .types import Spec

NODE_PORTS = range(30000, 32768)
"""Kubernetes' default range for NodePorts."""

EPHEMERAL_PORTS = range(32768, 61000)
"""Linux' default range for outgoing connections: a port of it may be in use at any moment."""

Findings: TypeAlias = Iterator[tuple[str, str]]
"""(what stands for ``*`` in the rule's path, what was found); the text goes behind the message."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold for a spec whose single fields are right.

    ``path``    the field to change, ``*`` for an item or key that varies
    ``message`` what is required there; the parser adds what it found, the API server does not
    ``broken``  every place where a spec breaks it
    ``cel``     the same for the API server, over the object at ``scope``; "" where the schema does it
    """

    path: str
    message: str
    broken: Callable[[Spec], Findings]
    cel: str = ""
    scope: str = "spec"

    @property
    def field_path(self) -> str:
        """``path`` from ``scope`` on, as ``fieldPath`` of a CEL rule wants it."""
        return self.path.removeprefix(self.scope)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A field that cannot be changed; ``cel`` compares ``self`` with ``oldSelf`` (the specs)."""

    key: str
    attribute: str
    cel: str

    message = "cannot be changed; make another pool"


_rules: list[Rule] = []


def _rule(
    path: str, message: str, cel: str = "", scope: str = "spec"
) -> Callable[[Callable[[Spec], Findings]], Callable[[Spec], Findings]]:
    def add(broken: Callable[[Spec], Findings]) -> Callable[[Spec], Findings]:
        _rules.append(Rule(path, message, broken, cel, scope))
        return broken

    return add


@_rule(
    "spec.model",
    "needs name (on the model hub) or path (a folder)",
    "(has(self.model.name) && self.model.name != '') || (has(self.model.path) && self.model.path != '')",
)
def _model_is_named(spec: Spec) -> Findings:
    if not spec.model.name and not spec.model.path:
        yield "", ""


@_rule(
    "spec.model",
    "must have only one of name and path",
    "!has(self.model.name) || self.model.name == '' || !has(self.model.path) || self.model.path == ''",
)
def _model_is_named_once(spec: Spec) -> Findings:
    if spec.model.name and spec.model.path:
        yield "", ""


@_rule(
    "spec.model.path",
    "must name a folder",
    "!has(self.model.path) || !self.model.path.matches('^/+$')",
)
def _path_is_a_folder(spec: Spec) -> Findings:
    if spec.model.path and not spec.model.name and not spec.model.path.strip("/"):
        yield "", f", is {spec.model.path!r}"


@_rule(
    "spec.model.cache",
    "must have only one of pvc, hostPath and emptyDir",
    "[has(self.model.cache.pvc), has(self.model.cache.hostPath), has(self.model.cache.emptyDir)]"
    ".filter(x, x).size() <= 1",
)
def _one_cache(spec: Spec) -> Findings:
    cache = spec.model.cache
    if sum(part is not None for part in (cache.pvc, cache.host_path, cache.empty_dir)) > 1:
        yield "", ""


@_rule(
    "spec.ranksPerPod",
    "must divide tensorParallelSize",
    "!has(self.ranksPerPod) || self.tensorParallelSize % self.ranksPerPod == 0",
)
def _pods_are_equal(spec: Spec) -> Findings:
    tp, per_pod = spec.tensor_parallel_size, spec.ranks_per_pod
    if per_pod is not None and tp % per_pod:
        yield "", f" ({tp}), is {per_pod}"


@_rule(
    "spec.transfer.protocol",
    "must be tcp with backend tcp",
    "self.transfer.backend != 'tcp' || !has(self.transfer.protocol) || self.transfer.protocol == 'tcp'",
)
def _tcp_has_no_rdma(spec: Spec) -> Findings:
    if spec.transfer.backend == "tcp" and spec.transfer.protocol == "rdma":
        yield "", ", is 'rdma'"


@_rule(
    "spec.transfer.ibDevices",
    "may be set only with protocol rdma",
    "!has(self.transfer.ibDevices) || self.transfer.ibDevices.size() == 0 || "
    "(has(self.transfer.protocol) ? self.transfer.protocol == 'rdma' : self.transfer.backend == 'mooncake')",
)
def _devices_are_for_rdma(spec: Spec) -> Findings:
    if spec.transfer.ib_devices and _protocol(spec) != "rdma":
        yield "", ""


@_rule("spec.transfer.ibDevices", "must not name a device twice")
def _devices_differ(spec: Spec) -> Findings:
    if len(set(spec.transfer.ib_devices)) < len(spec.transfer.ib_devices):
        yield "", ""


@_rule(
    "spec.network.portRange",
    "must end at 65535 or before",
    "self.network.portRange.start + self.network.portRange.size <= 65536",
)
def _ports_exist(spec: Spec) -> Findings:
    ports = spec.network.port_range
    if ports.start + ports.size > 65536:
        yield "", f", ends at {ports.start + ports.size - 1}"


def _ports_stay_out_of(reserved: range, what: str) -> None:
    @_rule(
        "spec.network.portRange",
        f"must stay out of {reserved.start}-{reserved.stop - 1} ({what})",
        f"self.network.portRange.start >= {reserved.stop} || "
        f"self.network.portRange.start + self.network.portRange.size <= {reserved.start}",
    )
    def broken(spec: Spec) -> Findings:
        ports = spec.network.port_range
        stop = ports.start + ports.size
        if ports.start < reserved.stop and reserved.start < stop:
            yield "", f", is {ports.start}-{stop - 1}"


_ports_stay_out_of(NODE_PORTS, "NodePorts")
_ports_stay_out_of(EPHEMERAL_PORTS, "outgoing connections")


@_rule(
    "spec.network.metricsPort",
    "must lie outside portRange",
    "self.network.metricsPort < self.network.portRange.start || "
    "self.network.metricsPort >= self.network.portRange.start + self.network.portRange.size",
)
def _metrics_port_is_apart(spec: Spec) -> Findings:
    ports, port = spec.network.port_range, spec.network.metrics_port
    if ports.start <= port < ports.start + ports.size:
        yield "", f", is {port}"


@_rule(
    "spec.restart.backoff.maxSeconds",
    "must be at least baseSeconds",
    "self.restart.backoff.maxSeconds >= self.restart.backoff.baseSeconds",
)
def _backoff_grows(spec: Spec) -> Findings:
    backoff = spec.restart.backoff
    if backoff.max_seconds < backoff.base_seconds:
        yield "", f" ({backoff.base_seconds}), is {backoff.max_seconds}"


@_rule(
    "spec.rollout.maxUnavailable",
    "must not be 0 while maxSurge is 0: no group could ever move",
    "!has(self.rollout.maxUnavailable) || !has(self.rollout.maxSurge) || "
    "!((self.rollout.maxUnavailable == 0 || self.rollout.maxUnavailable == '0%') && "
    "(self.rollout.maxSurge == 0 || self.rollout.maxSurge == '0%'))",
)
def _rollout_can_move(spec: Spec) -> Findings:
    down, surge = spec.rollout.max_unavailable, spec.rollout.max_surge
    if down is not None and surge is not None and down.value == surge.value == 0:
        yield "", ""


@_rule("spec.env[*].name", "is required")
def _variables_have_names(spec: Spec) -> Findings:
    for i, variable in enumerate(spec.env):
        if not isinstance(variable.get("name"), str) or not variable["name"]:
            yield str(i), ""


@_rule(
    "spec.env[*].name",
    f"must not start with {labels.ENV_PREFIX}: those are the operator's",
    f"!self.name.startsWith('{labels.ENV_PREFIX}')",
    scope="spec.env[*]",
)
def _variables_are_not_ours(spec: Spec) -> Findings:
    for i, variable in enumerate(spec.env):
        if str(variable.get("name")).startswith(labels.ENV_PREFIX):
            yield str(i), f", is {variable['name']!r}"


@_rule("spec.env[*].name", "must not be given twice")
def _variables_differ(spec: Spec) -> Findings:
    seen: set[Any] = set()
    for i, variable in enumerate(spec.env):
        name = variable.get("name")
        if isinstance(name, str) and name and name in seen:
            yield str(i), f", is {name!r}"
        seen.add(name if isinstance(name, str) else None)


@_rule("spec.podTemplate.*", "unknown field; a pod template has metadata and spec")
def _template_has_two_parts(spec: Spec) -> Findings:
    for key in spec.pod_template:
        if key not in ("metadata", "spec"):
            yield key, ""


@_rule("spec.podTemplate.*", "must be an object")
def _template_parts_are_objects(spec: Spec) -> Findings:
    for key in ("metadata", "spec"):
        if not hasattr(spec.pod_template.get(key, {}), "items"):
            yield key, ""


def _reserved_keys(kind: str) -> None:
    reserved = f"[{', '.join(repr(key) for key in labels.GATEWAY_KEYS)}]"

    @_rule(
        f"spec.podTemplate.metadata.{kind}",
        f"must not have keys of {labels.API_GROUP}/ or of gateways: those are the operator's",
        f"!has(self.podTemplate) || !has(self.podTemplate.metadata) || "
        f"!has(self.podTemplate.metadata.{kind}) || self.podTemplate.metadata.{kind}.all(key, "
        f"!key.startsWith('{labels.API_GROUP}/') && !(key in {reserved}))",
    )
    def broken(spec: Spec) -> Findings:
        metadata = spec.pod_template.get("metadata", {})
        given = metadata.get(kind, {}) if hasattr(metadata, "get") else {}
        for key in given if hasattr(given, "items") else ():
            if labels.is_ours(str(key)):
                yield "", f", has {key!r}"


_reserved_keys("labels")
_reserved_keys("annotations")


@_rule("spec.podTemplate.spec.*", "must be a list of objects that have their key")
def _template_lists_can_be_merged(spec: Spec) -> Findings:
    pod = spec.pod_template.get("spec", {})
    if hasattr(pod, "items"):
        yield from _unmergeable(pod, "")


RULES: tuple[Rule, ...] = tuple(_rules)
"""In the order of the fields."""

FIXED: tuple[Fixed, ...] = (
    Fixed(
        "tensorParallelSize", "tensor_parallel_size", "self.tensorParallelSize == oldSelf.tensorParallelSize"
    ),
    Fixed(
        "ranksPerPod",
        "ranks_per_pod",
        "(has(self.ranksPerPod) ? self.ranksPerPod : self.tensorParallelSize) == "
        "(has(oldSelf.ranksPerPod) ? oldSelf.ranksPerPod : oldSelf.tensorParallelSize)",
    ),
)
"""Fields that decide how many pods a group has."""


def spec_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """(field path, message) of every broken rule, for a spec whose single fields are right."""
    for rule in RULES:
        for place, found in rule.broken(spec):
            yield rule.path.replace("*", place), rule.message + found


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
    out = []
    # All ranks in one pod, before and after: then ranksPerPod (unset, as a rule) only follows.
    follows = all(spec.ranks_per_pod == spec.tensor_parallel_size for spec in (old, new))
    for fixed in FIXED:
        before, after = getattr(old, fixed.attribute), getattr(new, fixed.attribute)
        if before != after and not (follows and fixed.key == "ranksPerPod"):
            out.append(
                (f"spec.{fixed.key}", f"cannot be changed (from {before} to {after}); make another pool")
            )
    return out


def _protocol(spec: Spec) -> str:
    return spec.transfer.protocol or ("rdma" if spec.transfer.backend == "mooncake" else "tcp")


def _unmergeable(value: Any, path: str) -> Findings:
    """Places in a pod's spec where a list that Kubernetes merges by key is none."""
    for key, inner in value.items():
        where = f"{path}.{key}" if path else str(key)
        keys = LIST_KEYS.get(key)
        if keys is not None and not (
            isinstance(inner, list | tuple)
            and all(hasattr(item, "items") and item.get(keys[0]) for item in inner)
        ):
            yield where, f" ({keys[0]})"
        elif keys is not None:
            for i, item in enumerate(inner):
                yield from _unmergeable(item, f"{where}[{i}]")
