"""Whether the cluster serves the resource, and with a schema as new as this program's.

An older schema drops fields that it does not know without a word, so it is said in every pool's status.
"""

import asyncio

import structlog

from encodepool_operator.api.crd import served_schema_problem
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import ApiError, KubeError
from encodepool_operator.kube.kinds import DEFINITION, POOL

ASK_AGAIN_S = 5.0

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


async def schema_problem(client: Client) -> str:
    """What is wrong with the served schema, "" if nothing or if we may not see it."""
    try:
        found = await client.get(DEFINITION, "", f"{POOL.plural}.{POOL.group}")
    except KubeError as error:
        log.info("the CRD cannot be read, so its schema is not compared", why=str(error))
        return ""
    return served_schema_problem(found["metadata"].get("annotations") or {})
