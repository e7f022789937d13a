"""The kinds of objects that the operator reads and writes, and where the API server has them."""

from dataclasses import dataclass
from urllib.parse import quote

from encodepool_operator.api import labels


@dataclass(frozen=True, slots=True)
class Kind:
    """``group`` is "" for the core API."""

    group: str
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def api_path(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of the collection, or of one object of it. No namespace: cluster-wide."""
        parts = [self.api_path]
        if namespace:
            parts.append(f"namespaces/{quote(namespace, safe='')}")
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


POOL = Kind(labels.API_GROUP, labels.API_VERSION, labels.KIND, "encodepools")
POD = Kind("", "v1", "Pod", "pods")
STATEFUL_SET = Kind("apps", "v1", "StatefulSet", "statefulsets")
REVISION = Kind("apps", "v1", "ControllerRevision", "controllerrevisions")
SERVICE = Kind("", "v1", "Service", "services")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
EVENT = Kind("", "v1", "Event", "events")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
DEFINITION = Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")

CHILDREN = (STATEFUL_SET, REVISION, SERVICE, CONFIG_MAP, DISRUPTION_BUDGET)
"""What a pool owns, apart from pods, which its StatefulSets make."""

BY_NAME = {kind.kind: kind for kind in (POOL, POD, *CHILDREN)}
