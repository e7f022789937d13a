"""What the planner asks for. A shell carries the actions out, in order.

Rules for the shell:

1. In order. When an action without a group fails, the rest of the plan is dropped; when an action of
   a group fails, the later actions of that group are dropped and the others go on. Then plan again.
2. After a plan with actions, take a new snapshot and plan again at once (several steps of a group
   follow one another in successive plans); after a plan without actions, wait for a change or for
   ``Plan.wake_at``.
3. ``version`` and ``uid`` are preconditions. Where the object has changed since, the action fails.
4. A shell that wrote the status less than a second ago may leave ``WriteStatus`` out: it is planned
   again, and is the last action of its plan.
5. ``reason`` is one sentence for humans: the Event, the log line, the line of ``encodepool plan``.

``record`` is always the whole record: it replaces what the object holds. Actions that take a record
write it in the same operation as what they do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .record import GroupRecord
from .snapshot import Publication, RevisionRecord


@dataclass(frozen=True, slots=True)
class SaveRevision:
    """Keep this revision (create it, or give an existing one a new number)."""

    revision: RevisionRecord
    reason: str
    group: None = None


@dataclass(frozen=True, slots=True)
class DropRevision:
    """Delete a kept revision that no group uses and that is beyond the history limit."""

    name: str
    reason: str
    group: None = None


@dataclass(frozen=True, slots=True)
class ApplyChild:
    """Write this Service or disruption budget: the whole object, by force."""

    kind: str
    name: str
    rendered: Mapping[str, Any]
    reason: str
    group: None = None


@dataclass(frozen=True, slots=True)
class DropChild:
    """Delete a Service or disruption budget of ours that is not wanted any more."""

    kind: str
    name: str
    reason: str
    version: str = ""
    group: None = None


@dataclass(frozen=True, slots=True)
class ReserveIncarnations:
    """Store ``last`` as the highest incarnation ever used, before the starts that follow use it."""

    last: int
    reason: str
    group: None = None


@dataclass(frozen=True, slots=True)
class RecordGroup:
    """Write the record and nothing else: a seal, a withdrawal, the start of a drain.

    ``replicas`` and ``revision`` are what the object has already (0, or all pods of a group), for a
    shell that can only write whole objects. A revision that is lost is replaced by the wanted one; no
    pod moves by that.
    """

    group: int
    replicas: int
    revision: RevisionRecord
    record: GroupRecord
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class RepairGroup:
    """Write the group's object again as it was, because somebody edited it. Moves no pod.

    ``remove`` are JSON pointers into the object of ``version``: additions that have to go first.
    """

    group: int
    replicas: int
    revision: RevisionRecord
    record: GroupRecord
    remove: tuple[str, ...]
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take the published label off this pod; the annotations may stay."""

    group: int
    pod: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Put the published label and the annotations on the leader, in one operation."""

    group: int
    pod: str
    uid: str
    publication: Publication
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class WriteEndpoints:
    """Replace the published documents, file name -> text. ``workers.json`` goes before
    ``endpoints.json`` where they are separate files."""

    documents: Mapping[str, str]
    reason: str
    version: str = ""
    group: None = None


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Ask for 0 pods and write the record. Pods get SIGTERM and their grace period
    (``drain.timeoutSeconds`` + 15 of the group's revision), then SIGKILL.

    ``revision`` as in ``RecordGroup``.
    """

    group: int
    revision: RevisionRecord
    record: GroupRecord
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Ask for ``replicas`` pods of ``revision`` with the incarnation and ports of ``record``.

    ``version`` is "" when the group's object is to be created, else the object exists, asks for no
    pods and none of its pods is left.
    """

    group: int
    replicas: int
    revision: RevisionRecord
    record: GroupRecord
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete the object of a stopped group that is not wanted any more."""

    group: int
    reason: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one pod. ``grace_s`` None = its own grace period, 0 = by force (its node is lost)."""

    group: int
    pod: str
    uid: str
    grace_s: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Replace the pool's status (JSON values, the keys of the resource's ``status``)."""

    status: Mapping[str, Any]
    reason: str
    group: None = None


Action: TypeAlias = (
    SaveRevision
    | DropRevision
    | ApplyChild
    | DropChild
    | ReserveIncarnations
    | RecordGroup
    | RepairGroup
    | Withdraw
    | Publish
    | WriteEndpoints
    | StopGroup
    | StartGroup
    | DeleteGroup
    | DeletePod
    | WriteStatus
)
