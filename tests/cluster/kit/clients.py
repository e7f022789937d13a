"""Kubernetes clients that talk to a test cluster whatever proxies the environment names.

The packages are imported where they are used: they take more than a second to load, and taking a
cluster down needs none of them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from kubernetes import client
    from kubernetes.aio import client as aio_client_package

SyncClient: TypeAlias = "client.ApiClient"
AioClient: TypeAlias = "aio_client_package.ApiClient"
TOKEN_S = 24 * 3600


def sync_client(kubeconfig: Path) -> SyncClient:
    from kubernetes import client, config

    settings = client.Configuration()
    load: Any = config.load_kube_config  # It has no annotations.
    load(str(kubeconfig), client_configuration=settings, persist_config=False)
    settings.proxy = None
    return client.ApiClient(settings)


async def aio_client(kubeconfig: Path) -> AioClient:
    from kubernetes.aio import client, config

    settings = client.Configuration()
    load: Any = config.load_kube_config  # It has no annotations.
    await load(str(kubeconfig), client_configuration=settings, persist_config=False)
    settings.proxy = None
    return client.ApiClient(settings)


def token_of(api: SyncClient, namespace: str, name: str) -> str:
    """A token of the service account, valid for a day."""
    from kubernetes import client

    request = client.AuthenticationV1TokenRequest(
        spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=TOKEN_S)
    )
    answer = client.CoreV1Api(api).create_namespaced_service_account_token(name, namespace, request)
    assert answer.status is not None
    assert answer.status.token is not None
    return str(answer.status.token)
