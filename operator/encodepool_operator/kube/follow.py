"""One object, kept in sight: a list, then a watch of a few seconds, then a list again.

A watch can fall silent without an error, behind a proxy or a lost connection. As each lasts only
``WATCH_S``, what it did not tell is known that much later at the latest. Needed of the API server: list
and watch on objects of this name (a Role's resourceNames will do).
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from .backoff import wait_s
from .client import Client
from .errors import ApiError, KubeError
from .kinds import Kind

WATCH_S = 5
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0

Object = Mapping[str, Any]


async def follow_object(
    client: Client,
    kind: Kind,
    namespace: str,
    name: str,
    heard: Callable[[Object | None], None],
    trouble: Callable[[str], None],
) -> None:
    """Call ``heard`` with the object (None = not there) at every change, and at least once each WATCH_S.

    ``trouble`` is told why that is not possible now; it goes on. Ends by being cancelled, or with
    ApiError where the server forbids the very first look.
    """
    source = random.Random()
    failures, seen = 0, False
    while True:
        try:
            listed = await client.list(kind, namespace, name=name)
            heard(listed.items[0] if listed.items else None)
            failures, seen = 0, True
            async for event in client.watch(kind, namespace, name, listed.version, WATCH_S):
                heard(None if event["type"] == "DELETED" else event["object"])
        except KubeError as error:
            if not seen and isinstance(error, ApiError) and error.code in (401, 403):
                raise
            trouble(str(error))
            failures += 1
            await asyncio.sleep(wait_s(failures, FIRST_WAIT_S, source, LONGEST_WAIT_S))
