"""kopf as watch engine: events go into the cache, and nothing else is kopf's business.

Only ``on.event`` handlers, which store nothing in objects; selectors are the server's; no peering, no
posting, no scanning for kinds and namespaces that come and go.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import kopf

from encodepool_operator.kube.backoff import wait_s
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
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 15.0
"""Shorter than for writes: as long as nothing is watched, a frozen worker stays in the list."""


END_S = 2.0
WATCHER = "watcher for "
"""How the names of kopf's tasks begin that watch one kind each."""


class WatchEnded(Exception):
    """A watch has ended by an answer that kopf does not try again after, such as 410 to the request itself.

    The process begins anew; an error within a watch that means "too old" is not one of them."""


class Backoffs:
    """Waits between tries, without an end: kopf gives up, and is deaf from then on, after the last one."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._random = source or random.Random()

    def __iter__(self) -> Iterator[float]:
        failures = 0
        while True:
            failures += 1
            yield wait_s(failures, FIRST_WAIT_S, self._random, LONGEST_WAIT_S)


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
    settings.networking.error_backoffs = Backoffs()
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
    """Watch until ``stop``; anything else that ends a watch is raised (WatchEnded).

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
    running = asyncio.create_task(kopf.run_tasks(tasks, ignored=others), name="kopf")
    # Before it ends for that, kopf waits for seconds and then cancels whatever runs, also what is ours.
    done, _ = await asyncio.wait({running, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        error = task.exception() if not task.cancelled() else None
        if error is not None:
            await _end_watchers()
            raise WatchEnded(f"a watch has ended: {error}") from error
    await running


async def _end_watchers() -> None:
    """End what kopf leaves running when one watch has failed.

    A watcher that is cancelled together with kopf's other tasks, as at the end of the event loop, may
    overlook it and go on, and the process never ends.
    """
    watchers = [task for task in asyncio.all_tasks() if task.get_name().startswith(WATCHER)]
    for task in watchers:
        task.cancel()
    if watchers:
        await asyncio.wait(watchers, timeout=END_S)
