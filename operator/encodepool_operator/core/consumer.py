"""The flags that make the SMG gateway follow a pool, for each way in which it can find workers.

What they are for was measured with SMG 1.13. By default it looks every 10 s whether a worker answers,
and sends images to a dead one until then; and it prefers one prefill worker for like prompts, so that
whoever waits there for rows that never come keeps the others waiting.
"""

from dataclasses import dataclass

from encodepool_operator.api import labels

LIST_FILE = "/run/encodepool/workers.json"
"""Where the file is that ``encodepool endpoints follow`` keeps, in what we print and in the examples."""

STATIC = "smgStatic"
EPD = "--epd-disaggregation"
QUICK = "--load-monitor-interval 1 --prefill-policy round_robin"
"""A worker that has died is found out within about 2 s; and requests spread over the prefill workers."""


@dataclass(frozen=True, slots=True)
class Way:
    """``key`` in ``status.consumer``; ``needs`` is what the user has to add, "" = nothing."""

    key: str
    title: str
    flags: str
    needs: str


def ways(namespace: str, pool: str) -> tuple[Way, ...]:
    """The best first: the first two follow every change, the last knows the groups of now."""
    return (
        Way(
            "smg",
            "Kubernetes discovery",
            f"{EPD} --service-discovery --service-discovery-namespace {namespace} "
            f"--encode-selector {labels.ROUTABLE}=true {labels.POOL}={pool} "
            # With this discovery SMG heeds only the policy of all roles.
            f"{QUICK} --policy round_robin",
            "--prefill-selector and --decode-selector",
        ),
        Way(
            "smgFile",
            "a file that `encodepool endpoints follow` keeps",
            f"{EPD} --discovery-provider file --discovery-file {LIST_FILE} {QUICK}",
            "",
        ),
        Way(
            STATIC,
            "the groups of now, by their addresses",
            f"{EPD} {QUICK}",
            "--prefill and --decode",
        ),
    )


def consumer(namespace: str, pool: str) -> dict[str, str]:
    """``status.consumer``. It names no address, so it changes only with the pool's name."""
    return {way.key: way.flags for way in ways(namespace, pool)}
