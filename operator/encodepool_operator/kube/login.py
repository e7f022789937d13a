"""Credentials: those of the pod if there are any, else those of the kubeconfig, as kubectl finds it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from .errors import LoginError

TOKEN_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Login:
    """``namespace`` is the pod's own, or the one of the kubeconfig's context, or "default"."""

    configuration: Any
    namespace: str
    in_cluster: bool


async def log_in(*, context: str | None = None) -> Login:
    """A variable KUBECONFIG or a ``context`` comes first, then the pod's service account.

    Raises LoginError.
    """
    explicit = context is not None or bool(os.environ.get("KUBECONFIG"))
    if not explicit and os.environ.get("KUBERNETES_SERVICE_HOST") and (TOKEN_FOLDER / "token").is_file():
        return _of_pod()
    return await _of_kubeconfig(context)


def _of_pod() -> Login:
    found = Configuration()
    try:
        config.load_incluster_config(found)
        namespace = (TOKEN_FOLDER / "namespace").read_text().strip()
    except (config.ConfigException, OSError) as error:
        raise LoginError(f"the pod's service account cannot be used: {error}") from error
    return Login(found, namespace, in_cluster=True)


async def _of_kubeconfig(context: str | None) -> Login:
    named = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    files = [Path(part) for part in named.split(os.pathsep) if part]
    found = Configuration()
    try:
        # Only the first file that exists: the client does not merge several.
        file = next(part for part in files if part.is_file())
        await config.load_kube_config(
            config_file=str(file), context=context, client_configuration=found, persist_config=False
        )
        contexts, current = config.list_kube_config_contexts(str(file))
    except StopIteration:
        raise LoginError(
            f"no cluster: there is no {named}, and this is not a pod with a service account; set KUBECONFIG"
        ) from None
    except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        raise LoginError(f"the kubeconfig {named} cannot be used: {error}") from error
    chosen = current if context is None else next((c for c in contexts if c["name"] == context), current)
    return Login(found, chosen.get("context", {}).get("namespace") or "default", in_cluster=False)
