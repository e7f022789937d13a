"""What the planner sees of one pool, on a cluster or on one machine.

The shell builds a ``Snapshot`` (from its watch cache, or from its own process table), calls
``plan(snapshot, now)`` and carries out the actions. Everything here is a plain fact that was
observed; what it means is decided in ``group``, ``rollout``, ``drain`` and ``endpoints``.

On one machine, a *group object* is an entry of the state file (on a cluster: a StatefulSet) and a
*pod* is one supervisor process with its children.

Times are wall-clock seconds since the epoch (UTC), as ``now`` is. A shell that reuses the very same
``GroupSnapshot`` object for a group in which nothing changed lets caches work by identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from encodepool_operator.api.types import EncodePool

from .record import GroupRecord


class PodPhase(StrEnum):
    """Kubernetes' pod phases. Locally: PENDING until the process runs, then RUNNING, and
    FAILED or SUCCEEDED from its exit until the group is stopped."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class ContainerFailure:
    """How the container ``encode`` last ended. On a cluster: ``state`` or ``lastState.terminated``.

    ``exit_code`` is negative for no known code, 128 + n for signal n. ``reason`` is one word
    (``Error``, ``OOMKilled``, ``Unhealthy``); ``message`` the termination message, any length.
    """

    exit_code: int | None
    reason: str
    message: str = ""
    container: str = "encode"
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """What the leader pod tells gateways: the values of the label's annotations.

    Present means: ``encodepool.dev/routable=true`` and ``llm-d.ai/role=encode`` are set and the
    annotations hold these values. ``at``: when they were written, None when nobody can tell; the same
    values written at another time are the same publication.
    """

    bootstrap_port: int
    grpc_port: int
    model_id: str
    at: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod of a group as last observed.

    ``index``       ordinal in the group; the leader is 0
    ``incarnation`` the pod's incarnation label (locally: the start it belongs to)
    ``ips``         ``status.podIPs`` in order; locally ``("127.0.0.1",)``
    ``launched``    its container has run at least once (the image is there)
    ``started``     its startup probe has passed
    ``ready``       its readiness probe passes and it is not terminating
    ``ready_changed_at``  when ``ready`` last changed, if known
    ``restart_count``     in-place container restarts (locally always 0: a dead process is FAILED)
    ``failure``     how the container last ended, if it ever did
    ``disrupted``   eviction, preemption or node drain (condition DisruptionTarget, reason Evicted)
    ``terminating_since`` deletion or SIGTERM asked for, still there
    ``waiting``     why it does not run yet ("ImagePullBackOff", "Unschedulable: ..."), else ""
    ``node_lost_since``   its node is gone or not Ready since then; None while the node is well
    ``exclusive_volume``  mounts a ReadWriteOnce claim: must not be deleted by force
    ``publication`` the published label and annotations, None while not published
    ``version``     opaque precondition (resourceVersion), handed back in actions
    """

    name: str
    uid: str
    index: int
    incarnation: int
    phase: PodPhase = PodPhase.PENDING
    ips: tuple[str, ...] = ()
    node: str = ""
    zone: str = ""
    launched: bool = False
    started: bool = False
    ready: bool = False
    ready_changed_at: float | None = None
    restart_count: int = 0
    failure: ContainerFailure | None = None
    disrupted: bool = False
    terminating_since: float | None = None
    waiting: str = ""
    node_lost_since: float | None = None
    exclusive_volume: bool = False
    publication: Publication | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """Why a live object is not as it was rendered: somebody edited it.

    ``reason`` names the place and both values. ``remove`` are JSON pointers to additions of others
    that have to go; writing our object again does not remove them.
    """

    reason: str
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildObject:
    """A child of the pool that is neither a group's nor a revision nor the list.

    ``drift`` as in ``GroupObject``.
    """

    kind: str
    name: str
    drift: Drift | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class GroupObject:
    """The object that makes a group's pods: its StatefulSet, or the local executor's entry.

    ``replicas``            pods asked for: 0 = stopped, else pods per group
    ``generation``          grows with every change of what is asked for
    ``observed_generation`` the last generation that whoever makes the pods has acted upon
    ``current_pods``        pods it says exist (``status.replicas``)
    ``record``              the durable annotations, decoded; None when they cannot be read (somebody
                            edited them): the group is then recreated
    ``deleting``            deletion was asked for, the object is still there
    ``version``             opaque precondition (resourceVersion), handed back in actions
    ``drift``               its difference from what was rendered, found by ``render.drift``. Left out
                            is one that was there in the answer to our own write: something on the
                            cluster insists on it, and writing again would never end. Locally None:
                            nobody else writes the state file
    """

    replicas: int
    generation: int
    observed_generation: int
    current_pods: int
    record: GroupRecord | None
    deleting: bool = False
    version: str = ""
    drift: Drift | None = None


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group index: its object and its pods, sorted by pod index, then uid.

    ``object`` is None when only pods are left (somebody deleted the object); pods carry the group
    index in a label, so they are found without it. Two pods of one index may be there at once.
    """

    index: int
    object: GroupObject | None
    pods: tuple[PodFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class RevisionRecord:
    """One kept revision (on a cluster a ControllerRevision of the pool).

    ``name``    hash of the resolved pod-relevant spec and the render version
    ``number``  grows with each new or re-chosen revision; the highest is the newest
    ``source``  hash of the same parts *before* defaults of the operator were filled in, so that an
                operator with another default image keeps the choice
    ``spec``    the resolved parts as canonical JSON; ``revision.read_spec`` gives typed values
    ``template`` the pod template made from it, canonical JSON with places to be filled per start
                (``render.fill``); "" locally, where pods are processes
    """

    name: str
    number: int
    source: str
    spec: str
    template: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a shell cannot do what is planned: ``reason`` is one CamelCase word, ``message`` a sentence that
    stays the same as long as the trouble does."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One pool and everything that exists because of it.

    ``groups``           every index that has an object or a pod, sorted by index
    ``revisions``        every kept revision, any order
    ``last_incarnation`` ``status.lastIncarnation``; locally the user's counter; 0 when none
    ``documents``        what is published now, file name -> text; None when nothing ever was
    ``documents_version`` opaque precondition of theirs, handed back in the action that replaces them
    ``status``           the pool's status as last written; None when never
    ``taken_ports``      ports that must not be given out on this network: blocks of other pools'
                         groups (hostNetwork: of the cluster; locally: of this machine) and ports that
                         could not be bound. Empty on a pod network.
    ``shared_host``      True when all pods share one network whatever the spec says: local mode
    ``default_image``    the operator's image for pools that name none
    ``foreign``          "Kind/name" of objects that bear our names and are not ours: never touched
    ``children``         the Services and the disruption budget that exist; None where a shell has none
                         and wants none, on one machine: then no revision gets a pod template either
    ``troubles``         what the status is to tell of beside the groups: writes that were refused
    """

    pool: EncodePool
    groups: tuple[GroupSnapshot, ...] = ()
    revisions: tuple[RevisionRecord, ...] = ()
    last_incarnation: int = 0
    documents: Mapping[str, str] | None = None
    status: Mapping[str, Any] | None = None
    taken_ports: frozenset[int] = field(default_factory=frozenset)
    shared_host: bool = False
    default_image: str = ""
    foreign: frozenset[str] = field(default_factory=frozenset)
    children: tuple[ChildObject, ...] | None = None
    troubles: tuple[Trouble, ...] = ()
    documents_version: str = ""
