"""Every reason that a condition or an Event of a pool can have: what it means, and whether somebody must act.

Each has a page in docs/runbooks; a test holds this table, the pages and the code against each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass

FOLDER = "docs/runbooks"


@dataclass(frozen=True, slots=True)
class Reason:
    """``where`` names the conditions that have it, and "Event". ``act`` is what somebody has to do, in
    one sentence; "" where the operator goes on by itself."""

    name: str
    where: tuple[str, ...]
    meaning: str
    act: str = ""

    @property
    def page(self) -> str:
        return f"{FOLDER}/{self.name}.md"


def _reason(name: str, where: str, meaning: str, act: str = "") -> Reason:
    return Reason(name, tuple(where.split()), meaning, act)


TABLE = (
    _reason("Complete", "Ready Progressing", "every group that is wanted is listed, on the wanted revision"),
    _reason("Enough", "Available", "no more groups are missing from the list than the rollout may take out"),
    _reason("Listed", "EndpointsPublished", "at least one group is in the published list"),
    _reason("NoGroupFailed", "Degraded", "no group has failed or waits to be started again"),
    _reason("Incomplete", "Ready Reconciling", "groups are missing, too many, or on an old revision"),
    _reason("Moving", "Progressing", "groups are being started, stopped or moved to the wanted revision"),
    _reason("Paused", "Progressing", "spec.rollout.paused holds the rollout where it is"),
    _reason(
        "TooFew",
        "Available",
        "more groups are missing from the list than a rollout may take out",
        "see why in the group's own reason; if nothing failed, wait for the start",
    ),
    _reason(
        "NoGroupListed",
        "EndpointsPublished",
        "the published list is empty: a gateway sends pixels to prefill, or refuses images",
        "find out why no group becomes ready, or raise spec.replicas",
    ),
    _reason(
        "GroupsFailed",
        "Degraded",
        "a group failed and waits to be started again, or is on a lost node",
        "read lastFailure of the group: exit code, reason and the end of its log",
    ),
    _reason(
        "RestartsExhausted",
        "Stalled",
        "a group failed more often than spec.restart.maxRestarts allows and stays stopped",
        "mend the cause, then change the annotation encodepool.dev/resume of the pool",
    ),
    _reason(
        "ProgressDeadlineExceeded",
        "Progressing Stalled",
        "no group has come further for spec.rollout.progressDeadlineSeconds",
        "find the group that is not ready and what its pod waits for",
    ),
    _reason(
        "PortsExhausted",
        "Stalled",
        "every block of spec.network.portRange is held by another group",
        "widen spec.network.portRange, or move pools apart",
    ),
    _reason(
        "NameTaken",
        "Stalled Event",
        "an object that the pool would make is there already and belongs to somebody else",
        "delete or rename the object, or give the pool another name",
    ),
    _reason(
        "WriteRefused",
        "Stalled Event",
        "the API server will not take an object that the pool needs",
        "the message is the API server's: change the field, the quota or the policy that it names",
    ),
    _reason(
        "SchemaOutdated",
        "Stalled",
        "the CRD on the cluster is older than the operator, which drops fields without a word",
        "kubectl apply --server-side -f crds/",
    ),
    _reason(
        "InvalidSpec",
        "Ready Stalled Event",
        "the spec cannot be used; what runs goes on as it is",
        "correct the fields that the message names",
    ),
    _reason("GroupStarted", "Event", "a group's pods are being made"),
    _reason("GroupPublished", "Event", "a group has proved ready and was put into the list"),
    _reason("GroupWithdrawn", "Event", "a group was taken off the list"),
    _reason("GroupDraining", "Event", "a group is off the list and finishes what it has accepted"),
    _reason("GroupStopped", "Event", "a group's pods were told to end, as planned"),
    _reason("GroupDeleted", "Event", "a group that is not wanted any more was removed"),
    _reason("GroupRepaired", "Event", "somebody edited the StatefulSet of a group; it was written as it was"),
    _reason("RevisionSaved", "Event", "a change of the spec reaches pods: its revision was kept"),
    _reason(
        "GroupFailed",
        "Event",
        "a group failed and was stopped; it is started again as a whole, at another address",
        "nothing the first time; if it repeats, read the exit code and the message",
    ),
    _reason(
        "PodDeleted",
        "Event",
        "the operator removed a pod that hung on a lost node, or that belongs to no group",
        "look after the node that the message names",
    ),
)

BY_NAME = {reason.name: reason for reason in TABLE}


def to_act_on(conditions: Iterable[tuple[str, str]]) -> list[Reason]:
    """Those of (type, reason) that ask for somebody, each once, in the order of the table."""
    found = {reason for kind, reason in conditions if reason in BY_NAME and kind in BY_NAME[reason].where}
    return [reason for reason in TABLE if reason.name in found and reason.act]


def index() -> str:
    """docs/runbooks/README.md."""
    lines = [
        "# Runbooks",
        "",
        "A page for every reason that a condition or an Event of a pool can have. Made from the table in",
        "`operator/encodepool_operator/core/reasons.py`.",
    ]
    for title, chosen in (
        ("Somebody has to look", [reason for reason in TABLE if reason.act]),
        ("Nothing to do", [reason for reason in TABLE if not reason.act]),
    ):
        lines += ["", f"## {title}", "", "| reason | of | means |", "|---|---|---|"]
        lines += [f"| [{r.name}]({r.name}.md) | {', '.join(r.where)} | {r.meaning} |" for r in chosen]
    return "\n".join(lines)
