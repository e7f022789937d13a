"""Whether the cluster serves the resource, and with a schema as new as this program's.

An older schema drops fields that it does not know without a word, so it is said in every pool's status.
"""

import asyncio

import structlog

from encodepool_operator.api.crd import published_schema_problem, served_schema_problem
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import ApiError, KubeError
from encodepool_operator.kube.kinds import DEFINITION, POOL

ASK_AGAIN_S = 5.0
LOOK_AGAIN_S = 10.0

log = structlog.get_logger(__name__)


async def wait_until_served(client: Client) -> None:
    """Return once the API server serves EncodePools of our version."""
    said = ""
    while True:
        try:
            served = await client.raw(POOL.api_path)
            if any(item.get("name") == POOL.plural for item in served.get("resources") or ()):
                return
            why = f"{POOL.api_version} has no {POOL.plural}"
        except ApiError as error:
            why = "the CRD is not installed: kubectl apply -f crds/" if error.gone else str(error)
        except KubeError as error:
            why = str(error)
        if why != said:
            log.warning("waiting for the EncodePool resource", why=why)
            said = why
        await asyncio.sleep(ASK_AGAIN_S)


async def schema_problem(client: Client, *, clusterwide: bool) -> str:
    """What is wrong with the served schema, "" if nothing or if it cannot be told."""
    try:
        problem = await _compare(client, clusterwide)
    except KubeError as error:
        log.info("the served schema cannot be compared", why=str(error))
        return ""
    if problem:
        log.warning("the served schema is outdated", why=problem)
    return problem


async def until_schema_fits(client: Client, *, clusterwide: bool) -> None:
    """Return once an outdated schema has been replaced: nobody should have to restart the operator."""
    while True:
        await asyncio.sleep(LOOK_AGAIN_S)
        try:
            if not await _compare(client, clusterwide):
                log.info("the served schema fits now")
                return
        except KubeError as error:
            log.info("the served schema cannot be compared", why=str(error))


async def _compare(client: Client, clusterwide: bool) -> str:
    """Who watches all of the cluster may read the CRD, and compares generations. Others see only what
    every account does, the published schema, and compare fields. Raises KubeError."""
    if clusterwide:
        found = await client.get(DEFINITION, "", f"{POOL.plural}.{POOL.group}")
        return served_schema_problem(found["metadata"].get("annotations") or {})
    return published_schema_problem(await client.raw(f"/openapi/v3{POOL.api_path}"))
