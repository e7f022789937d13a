"""kopf as watch engine: events go into the cache, and nothing else is kopf's business.

Only ``on.event`` handlers, which store nothing in objects; selectors are the server's; no peering, no
posting, no scanning for kinds and namespaces that come and go.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kopf

from encodepool_operator.kube.kinds import Kind
from encodepool_operator.kube.login import Login, log_in

from .resync import Watched

Heard = Callable[[Kind, str | None, Mapping[str, Any]], None]

SERVER_S = 600
CONNECT_S = 10.0
REQUEST_S = 30.0
INACTIVITY_S = 70.0
"""Bookmarks come every 60 s; a stream without any is dead and is opened anew."""

PAGE = 500


def registry_of(watched: Sequence[Watched], heard: Heard, login: Login) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    for one in watched:
        _watch(registry, one.kind, heard)

    @kopf.on.login(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def connect(**_: Any) -> kopf.ConnectionInfo:
        # Asked again when the server refuses what it was given last time.
        nonlocal login
        if not first.is_set():
            first.set()
        else:
            login = await log_in()
        return await connection_of(login)

    first = asyncio.Event()
    return registry


def _watch(registry: kopf.OperatorRegistry, kind: Kind, heard: Heard) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)
    async def told(event: Mapping[str, Any], **_: Any) -> None:
        heard(kind, event["type"], event["object"])


async def connection_of(login: Login) -> kopf.ConnectionInfo:
    """The same credentials as the client's, in kopf's form."""
    found = login.configuration
    bearer = await found.get_api_key_with_prefix("BearerToken")
    scheme, _, token = (bearer or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert or None,
        insecure=not found.verify_ssl,
        scheme=scheme.capitalize() or None,
        token=token or None,
        certificate_path=found.cert_file or None,
        private_key_path=found.key_file or None,
        username=found.username or None,
        password=found.password or None,
        proxy_url=found.proxy or None,
        default_namespace=login.namespace,
    )


def settings_of(watched: Sequence[Watched]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.server_timeout = SERVER_S
    settings.watching.connect_timeout = CONNECT_S
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = REQUEST_S
    settings.networking.connect_timeout = CONNECT_S
    settings.queueing.exit_timeout = 0.5
    settings.process.ultimate_exiting_timeout = 20.0
    for one in watched:
        if one.selector:
            settings.watching.label_selectors[one.kind.group, one.kind.version, one.kind.plural] = (
                one.selector
            )
    return settings


def check(watched: Sequence[Watched], settings: kopf.OperatorSettings) -> None:
    """Without its selector a watch would bring all objects of the cluster. Raises RuntimeError."""
    wanted = sorted(one.selector for one in watched if one.selector)
    found = sorted(settings.watching.label_selectors.values())
    if found != wanted:
        raise RuntimeError(f"the watches' selectors are {found}, not {wanted}")


async def watch(
    watched: Sequence[Watched],
    namespaces: Sequence[str],
    heard: Heard,
    login: Login,
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Watch until ``stop``; anything else that ends a watch is raised.

    ``namespaces`` as for Resync. kopf takes SIGTERM and SIGINT for itself while it starts; ``started``
    is called after that, so that the caller can take them back.
    """
    logging.getLogger("kopf").setLevel(logging.WARNING)
    settings = settings_of(watched)
    check(watched, settings)
    everywhere = "" in namespaces
    # kopf cancels all tasks at its end but those that it is told of.
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry_of(watched, heard, login),
        settings=settings,
        standalone=True,
        clusterwide=everywhere,
        namespaces=() if everywhere else tuple(namespaces),
        stop_flag=stop,
    )
    started()
    await kopf.run_tasks(tasks, ignored=others)
