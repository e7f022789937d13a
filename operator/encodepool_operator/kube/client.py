"""Requests to the API server: JSON in, JSON out, errors as ``ApiError``.

Writes are server-side applies by one field manager, merge patches and deletions; all carry their
preconditions, so each may be tried again. A request that the server was too busy for, or that got no
answer, is tried again here a few times within seconds; longer waits are the caller's.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient

from .backoff import wait_s
from .errors import ApiError, KubeError, NotLeading, Unreachable
from .kinds import Kind

FIELD_MANAGER = "encodepool"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

NO_SUCH_VERSION = "1"
"""A resourceVersion that no object of a running cluster has.

A server-side apply that carries it creates an object and is refused (409) where there is one, so an
object that we do not know of is never changed. (tests/cluster/test_operator_api_rules.py)"""

REQUEST_S = 15.0
TRIES = 3
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
WATCH_GRACE_S = 2.0
"""So much longer than it was asked to a watch may last before it counts as dead."""

IN_FLIGHT = 32
PAGE = 500

Object = dict[str, Any]
Observe = Callable[[str, str, float], None]
"""Called once per request with verb, code ("0" = no answer) and seconds."""


@dataclass(frozen=True, slots=True)
class Listed:
    items: list[Object]
    version: str


def _ignore(verb: str, code: str, taken_s: float) -> None:
    pass


class Client:
    """Close it. ``may_write`` is asked before every try of a write; where it says no, NotLeading is raised:
    a request may have waited for its turn, or for an answer to its first try, longer than a Lease lasts.
    """

    def __init__(
        self,
        configuration: Any,
        observe: Observe = _ignore,
        seed: int | None = None,
        *,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._api = ApiClient(configuration)
        self._observe = observe
        self._may_write = may_write
        self._random = random.Random(seed)
        self._slots = asyncio.Semaphore(IN_FLIGHT)

    async def close(self) -> None:
        await self._api.close()

    # Reading

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return await self._send("get", "GET", kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str = "", selector: str = "", version: str = "", *, name: str = ""
    ) -> Listed:
        """All objects, or the one with this name; ``version`` "0" = whatever the server has at hand, "" =
        the newest."""
        items: list[Object] = []
        query = {"labelSelector": selector} if selector else {}
        query |= {"fieldSelector": f"metadata.name={name}"} if name else {}
        query |= {"resourceVersion": version} if version else {"limit": str(PAGE)}
        while True:
            page = await self._send("list", "GET", kind.path(namespace), query=query)
            for item in page.get("items") or ():
                # Items of a list do not say what they are.
                items.append({"apiVersion": kind.api_version, "kind": kind.kind, **item})
            meta = page.get("metadata", {})
            if not meta.get("continue"):
                return Listed(items, str(meta.get("resourceVersion", "")))
            query = {key: value for key, value in query.items() if key != "resourceVersion"}
            query["continue"] = meta["continue"]

    async def watch(
        self, kind: Kind, namespace: str, name: str, version: str, lasts_s: int
    ) -> AsyncIterator[Object]:
        """What happens to one object after ``version``, as {"type", "object"}, for at most ``lasts_s``.

        It ends early where the server or the network ends it, and also when they fall silent. Raises
        ApiError (410: the version is too old) and Unreachable.
        """
        query = {
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": version,
            "timeoutSeconds": str(lasts_s),
            "watch": "true",
        }
        url = f"{self._api.configuration.host}{kind.path(namespace)}?{urlencode(query)}"
        timeout = aiohttp.ClientTimeout(total=lasts_s + WATCH_GRACE_S)
        try:
            answer = await self._request("GET", url, None, "application/json", timeout)
            try:
                if answer.status != 200:
                    _read(answer.status, answer.headers, await answer.read())
                async for line in answer.response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        _read(
                            int(event["object"].get("code") or 500), {}, json.dumps(event["object"]).encode()
                        )
                    yield event
            finally:
                answer.response.close()
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(f"GET {url}: {error or type(error).__name__}") from error

    async def raw(self, path: str) -> Object:
        """GET of a path that belongs to no kind (discovery, OpenAPI)."""
        return await self._send("get", "GET", path)

    # Writing

    async def apply(
        self,
        kind: Kind,
        obj: Mapping[str, Any],
        *,
        subresource: str = "",
        create: bool = False,
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply of the whole of what we want of an object; the answer is the object.

        ``metadata.uid`` and ``resourceVersion``, where given, are preconditions. ``create``: 409 if
        there is an object of that name, whoever made it. ``dry_run``: only ask whether it would be taken.
        """
        meta = obj["metadata"]
        if create:
            obj = {**obj, "metadata": {**meta, "resourceVersion": NO_SUCH_VERSION}}
        return await self._send(
            "patch",
            "PATCH",
            kind.path(meta["namespace"], meta["name"], subresource),
            query={"fieldManager": FIELD_MANAGER, "force": "true"} | ({"dryRun": "All"} if dry_run else {}),
            body={"apiVersion": kind.api_version, "kind": kind.kind, **obj},
            content_type=APPLY,
        )

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Merge patch; null removes. ``metadata.uid`` and ``resourceVersion`` are preconditions."""
        return await self._send(
            "patch",
            "PATCH",
            kind.path(namespace, name),
            query={"fieldManager": FIELD_MANAGER},
            body=patch,
            content_type=MERGE,
        )

    async def json_patch(
        self, kind: Kind, namespace: str, name: str, steps: Sequence[Mapping[str, Any]]
    ) -> Object:
        """JSON patch; steps with ``test`` are its preconditions (422 where one fails)."""
        return await self._send(
            "patch",
            "PATCH",
            kind.path(namespace, name),
            query={"fieldManager": FIELD_MANAGER},
            body=steps,
            content_type=JSON_PATCH,
        )

    async def create(self, kind: Kind, obj: Mapping[str, Any], *, tries: int = TRIES) -> Object:
        path = kind.path(obj["metadata"]["namespace"])
        return await self._send("create", "POST", path, body=obj, tries=tries)

    async def replace(self, kind: Kind, obj: Mapping[str, Any]) -> Object:
        """PUT, tried once: the caller has a deadline of its own."""
        meta = obj["metadata"]
        path = kind.path(meta["namespace"], meta["name"])
        return await self._send("update", "PUT", path, body=obj, tries=1)

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        version: str = "",
        grace_s: int | None = None,
    ) -> Object:
        """Delete if ``uid`` and ``version`` still hold; dependents go in the background.

        The answer is the object where it is still there (a pod that ends), else a Status.
        """
        body: Object = {"propagationPolicy": "Background"}
        conditions = {"uid": uid, "resourceVersion": version}
        body["preconditions"] = {key: value for key, value in conditions.items() if value}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        return await self._send("delete", "DELETE", kind.path(namespace, name), body=body)

    # The one way out

    async def _send(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        content_type: str = "application/json",
        tries: int = TRIES,
    ) -> Object:
        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        for attempt in range(1, tries + 1):
            try:
                async with self._slots:
                    if method != "GET" and not self._may_write():
                        raise NotLeading
                    return await self._once(verb, method, url, body, content_type)
            except (Unreachable, ApiError) as error:
                after_s = error.retry_after_s if isinstance(error, ApiError) else None
                again = not isinstance(error, ApiError) or error.transient
                if not again or attempt == tries or (after_s or 0.0) > LONGEST_WAIT_S:
                    raise
            await asyncio.sleep(max(after_s or 0.0, wait_s(attempt, FIRST_WAIT_S, self._random)))
        raise AssertionError("tries is at least 1")

    async def _once(
        self,
        verb: str,
        method: str,
        url: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        content_type: str,
    ) -> Object:
        began_s = time.monotonic()
        code = "0"
        try:
            timeout = aiohttp.ClientTimeout(REQUEST_S)
            answer = await self._request(method, url, body, content_type, timeout)
            code = str(answer.status)
            payload = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{method} {url}: {error or type(error).__name__}") from error
        finally:
            self._observe(verb, code, time.monotonic() - began_s)
        return _read(answer.status, answer.headers, payload)

    async def _request(
        self, method: str, url: str, body: object, content_type: str, timeout: aiohttp.ClientTimeout
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "encodepool"}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], url, method, None)
        return await self._api.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=timeout
        )


def _read(status: int, headers: Mapping[str, str], payload: bytes) -> Object:
    """The decoded object; a failure as the error it is."""
    try:
        value = json.loads(payload)
    except ValueError:
        value = None
    if 200 <= status < 300:
        if not isinstance(value, dict):
            raise KubeError(f"the API server answered {status} with something that is not an object")
        return value
    reason = message = ""
    details: Mapping[str, Any] = {}
    if isinstance(value, dict):
        reason, message = str(value.get("reason") or ""), str(value.get("message") or "")
        details = value.get("details") or {}
    after = headers.get("Retry-After") or details.get("retryAfterSeconds")
    try:
        after_s = float(after) if after is not None else None
    except ValueError:
        after_s = None
    raise ApiError(status, reason, message or payload[:200].decode(errors="replace"), after_s)


def version_of(obj: Mapping[str, Any]) -> int:
    """resourceVersion as the number that it is: newer is larger, within one kind."""
    try:
        return int(obj["metadata"]["resourceVersion"])
    except (KeyError, TypeError, ValueError):
        return 0


def controller_of(obj: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference that says it is the controller."""
    owners: Sequence[Mapping[str, Any]] = obj["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)
