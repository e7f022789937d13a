"""Labels and annotations, all in one place. Those of other projects carry that project's prefix."""

API_GROUP = "encodepool.dev"
API_VERSION = "v1alpha1"
API = f"{API_GROUP}/{API_VERSION}"
KIND = "EncodePool"
ENDPOINT_LIST_KIND = "EncodeEndpointList"
CONTAINER = "encode"
ENV_PREFIX = "ENCODEPOOL_"

# On every child.
APP_NAME = "app.kubernetes.io/name"
APP_INSTANCE = "app.kubernetes.io/instance"
APP_COMPONENT = "app.kubernetes.io/component"
APP_MANAGED_BY = "app.kubernetes.io/managed-by"
POOL = f"{API_GROUP}/pool"
GROUP = f"{API_GROUP}/group"

# On pods.
INCARNATION = f"{API_GROUP}/incarnation"
POD_INDEX = "apps.kubernetes.io/pod-index"
"""Set by the StatefulSet controller; "0" is the leader."""

# On a routable leader.
ROUTABLE = f"{API_GROUP}/routable"
ROLE = "llm-d.ai/role"
BOOTSTRAP_PORT = "sglang.ai/bootstrap-port"
WORKER_PORTS = "smg.ai/worker-ports"
MODEL_ID = f"{API_GROUP}/model-id"
PUBLISHED_AT = f"{API_GROUP}/published-at"
GATEWAY_KEYS = (ROLE, BOOTSTRAP_PORT, WORKER_PORTS)
"""Keys of other projects by which gateways find encode workers."""

# Durable annotations of a group's object.
REVISION = f"{API_GROUP}/revision"
PORTS = f"{API_GROUP}/ports"
STARTED_AT = f"{API_GROUP}/started-at"
SEAL = f"{API_GROUP}/seal"
RESTARTS = f"{API_GROUP}/restarts"
LAST_FAILURE = f"{API_GROUP}/last-failure"
WITHDRAWN_AT = f"{API_GROUP}/withdrawn-at"
DRAINING_SINCE = f"{API_GROUP}/draining-since"
RESUMED = f"{API_GROUP}/resumed"

# On the pool, written by users.
RESUME = f"{API_GROUP}/resume"
"""Any new value starts the groups again that ``restart.maxRestarts`` has stopped."""


# On the CustomResourceDefinition.
SCHEMA_GENERATION = f"{API_GROUP}/schema-generation"
SCHEMA_HASH = f"{API_GROUP}/schema-hash"


def is_ours(key: str) -> bool:
    """Whether only the operator may set this label or annotation on a pod."""
    return key.startswith(f"{API_GROUP}/") or key in GATEWAY_KEYS


def child_labels(pool: str, group: int | None = None, component: str = "encode") -> dict[str, str]:
    """Labels of a child of ``pool``; with ``group``, of one of that group's objects."""
    labels = {
        APP_NAME: "encodepool",
        APP_INSTANCE: pool,
        APP_COMPONENT: component,
        APP_MANAGED_BY: "encodepool-operator",
        POOL: pool,
    }
    if group is not None:
        labels[GROUP] = str(group)
    return labels
