"""Looking at a cluster without changing it: for the commands ``status``, ``plan`` and ``encode --pool``."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from encodepool_operator.api import names
from encodepool_operator.api.parse import parse_pool, parse_spec
from encodepool_operator.core.plan import plan
from encodepool_operator.kube.cache import Cache
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import ApiError, KubeError
from encodepool_operator.kube.kinds import CONFIG_MAP, POOL
from encodepool_operator.kube.login import log_in

from .observe import TRIM, WATCHED, Observer
from .pools import Pools

POLL_S = 1.0

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Where:
    """``namespace`` "" and ``context`` None: as the kubeconfig says. ``name`` "": all pools."""

    namespace: str = ""
    context: str | None = None
    everywhere: bool = False
    name: str = ""


@asynccontextmanager
async def _connected(where: Where) -> AsyncIterator[tuple[Client, str]]:
    """A client, and the namespace to look in. Raises LoginError."""
    login = await log_in(context=where.context)
    client = Client(login.configuration)
    try:
        yield client, where.namespace or login.namespace
    finally:
        await client.close()


async def read_pools(where: Where) -> list[Object]:
    """The pools, as the API server has them, by namespace and name. Raises KubeError."""
    async with _connected(where) as (client, namespace):
        return await _pools(client, namespace, where)


async def follow_pools(
    where: Where, show: Callable[[Sequence[Object]], None], trouble: Callable[[str], None]
) -> None:
    """Show the pools, and again after every change, until cancelled. Raises KubeError at the first look.

    Later ones that fail are told to ``trouble``, once for a row of them: an API server may be restarted
    under a watcher.
    """
    shown: list[Object] | None = None
    told = False
    async with _connected(where) as (client, namespace):
        while True:
            try:
                pools = await _pools(client, namespace, where)
            except KubeError as error:
                if shown is None:
                    raise
                if not told:
                    trouble(str(error))
                told = True
            else:
                told = False
                if pools != shown:
                    show(pools)
                    shown = pools
            await asyncio.sleep(POLL_S)


async def read_documents(where: Where, pools: Sequence[str], document: str) -> list[str | None]:
    """One published document of each of these pools ([NS/]NAME), in their order; None where there is none.

    Raises KubeError.
    """
    async with _connected(where) as (client, own):
        return [await _document(client, pool, own, document) for pool in pools]


async def _document(client: Client, pool: str, own: str, document: str) -> str | None:
    namespace, _, name = pool.rpartition("/")
    try:
        found = await client.get(CONFIG_MAP, namespace or own, names.endpoints_config_map(name))
    except ApiError as error:
        if error.gone:
            return None
        raise
    text = (found.get("data") or {}).get(document)
    return None if text is None else str(text)


async def plan_for(where: Where, document: Mapping[str, Any], *, default_image: str) -> list[dict[str, Any]]:
    """The next actions for the pool of ``document`` as if it had been applied: action, group, reason.

    Raises InvalidPool and KubeError.
    """
    given = parse_pool(document).metadata
    async with _connected(where) as (client, own):
        namespace = where.namespace or str((document.get("metadata") or {}).get("namespace") or own)
        pools = Pools()
        cache = Cache(TRIM, lambda kind, before, after: _ignored(pools.note(kind, before, after)))
        for watched in WATCHED:
            try:
                listed = await client.list(watched.kind, namespace, watched.selector)
            except ApiError as error:
                if not error.gone:
                    raise
                message = "the CRD is not installed: kubectl apply -f crds/"
                raise KubeError(message) from error
            for item in listed.items:
                cache.put(watched.kind, item)
    key = (namespace, given.name)
    held = pools.get(key)
    live: Object = held.pool if held is not None and held.pool is not None else {}
    wanted = _as_applied(document, live, namespace)
    cache_pool = {**wanted, "status": live["status"]} if live.get("status") else wanted
    pools.note(POOL, held.pool if held is not None else None, cache_pool)
    snapshot = Observer(pools, default_image).snapshot(key, parse_pool(wanted))
    return [
        {"action": type(action).__name__, "group": action.group, "reason": action.reason}
        for action in plan(snapshot, time.time()).actions
    ]


async def _pools(client: Client, namespace: str, where: Where) -> list[Object]:
    try:
        if where.name:
            return [await client.get(POOL, namespace, where.name)]
        listed = await client.list(POOL, "" if where.everywhere else namespace)
    except ApiError as error:
        if error.gone and where.name:
            return []
        if error.gone:
            raise KubeError("the CRD is not installed: kubectl apply -f crds/") from error
        raise
    return sorted(listed.items, key=lambda pool: (pool["metadata"]["namespace"], pool["metadata"]["name"]))


def _as_applied(document: Mapping[str, Any], live: Object, namespace: str) -> dict[str, Any]:
    """What the API server would have if ``document`` were applied to ``live`` ({} = not there).

    Raises InvalidPool.
    """
    meta, known = dict(document.get("metadata") or {}), dict(live.get("metadata") or {})
    changed = not live or parse_spec(document.get("spec")) != parse_spec(live.get("spec"))
    return {
        "apiVersion": document.get("apiVersion"),
        "kind": document.get("kind"),
        "metadata": {
            "name": meta.get("name"),
            "namespace": namespace,
            "uid": known.get("uid", ""),
            "resourceVersion": known.get("resourceVersion", "0"),
            "generation": int(known.get("generation", 0)) + int(changed),
            "labels": {**(known.get("labels") or {}), **(meta.get("labels") or {})},
            "annotations": {**(known.get("annotations") or {}), **(meta.get("annotations") or {})},
        },
        "spec": document.get("spec"),
    }


def _ignored(_: object) -> None:
    pass
