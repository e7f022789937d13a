"""Carries out what the planner asks for, on the cluster.

Every write carries what it was planned from (uid, resourceVersion), and its answer goes into the cache
at once. Actions of different groups run side by side; one without a group waits for all before it, and
all after it wait for it: the order inside a plan is the order of safety.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from encodepool_operator.api import labels, names
from encodepool_operator.api.types import EncodePool, Metadata
from encodepool_operator.core import actions as planned
from encodepool_operator.core.actions import Action
from encodepool_operator.core.record import GroupRecord
from encodepool_operator.core.render import common, configmap, controllerrevision, leader, statefulset
from encodepool_operator.core.snapshot import RevisionRecord
from encodepool_operator.kube.cache import Cache
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import ApiError, KubeError
from encodepool_operator.kube.kinds import (
    BY_NAME,
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    POD,
    POOL,
    REVISION,
    SERVICE,
    STATEFUL_SET,
    Kind,
)

from .gate import ActionKey, key_of
from .observe import Observer, preconditions

Object = Mapping[str, Any]
log = structlog.get_logger(__name__)


class Foreign(Exception):
    """An object has our name and is not ours. ``name`` is "Kind/name"."""

    def __init__(self, kind: Kind, name: str) -> None:
        super().__init__(f"{kind.kind} {name} exists and does not belong to the pool")
        self.name = f"{kind.kind}/{name}"


@dataclass(slots=True)
class Outcome:
    """What became of a plan.

    ``changed``: a precondition failed, plan again from what is there now. ``refused``: what the server
    will not take, and why. ``failed``: the rest (too busy, no answer). ``foreign``: "Kind/name".
    """

    done: list[Action] = field(default_factory=list)
    changed: bool = False
    refused: dict[ActionKey, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return not (self.changed or self.refused or self.failed or self.foreign)


@dataclass(slots=True)
class Work:
    """One plan of one pool. ``version`` is the pool's, and follows our own writes of its status.

    ``given`` is None where the spec cannot be used: then nothing but the status can be written.
    """

    meta: Metadata
    given: EncodePool | None
    status: Mapping[str, Any] | None
    version: str
    outcome: Outcome = field(default_factory=Outcome)

    @classmethod
    def of(cls, pool: EncodePool, obj: Object) -> "Work":
        return cls(pool.metadata, pool, obj.get("status") or None, str(obj["metadata"]["resourceVersion"]))

    @classmethod
    def of_invalid(cls, obj: Object) -> "Work":
        meta = obj["metadata"]
        bare = Metadata(meta["name"], meta["namespace"], meta["uid"], int(meta.get("generation", 0)), {}, {})
        return cls(bare, None, obj.get("status") or None, str(meta["resourceVersion"]))

    @property
    def pool(self) -> EncodePool:
        assert self.given is not None
        return self.given


class Executor:
    def __init__(self, client: Client, cache: Cache, observer: Observer) -> None:
        self._client = client
        self._cache = cache
        self._observer = observer

    async def carry_out(self, work: Work, actions: Sequence[Action]) -> Outcome:
        """Do the actions. Raises NotLeading (from the client); every other failure is in the outcome."""
        failed: set[int] = set()
        for batch in _batches(actions):
            if batch[0].group is None:
                if not await self._try(work, batch[0]):
                    break
                continue
            by_group: dict[int, list[Action]] = {}
            for action in batch:
                if action.group is not None and action.group not in failed:
                    by_group.setdefault(action.group, []).append(action)
            results = await asyncio.gather(*(self._sequence(work, own) for own in by_group.values()))
            failed |= {group for group, good in zip(by_group, results, strict=True) if not good}
        return work.outcome

    async def ask(self, work: Work, start: planned.StartGroup) -> str:
        """Why the server would refuse this start now, "" if it would not. Raises KubeError."""
        rendered = statefulset.build(work.pool, start.group, start.replicas, start.record, start.revision)
        meta = {**rendered["metadata"], **(preconditions(start.version) if start.version else {})}
        try:
            await self._client.apply(
                STATEFUL_SET, {**rendered, "metadata": meta}, create=not start.version, dry_run=True
            )
        except ApiError as error:
            if error.changed or error.gone:
                return ""
            if error.transient:
                raise
            return error.message
        return ""

    def sees(self, namespace: str, name: str) -> bool:
        """Whether the cache has the object "Kind/name"."""
        kind, _, bare = name.partition("/")
        return self._cache.get(BY_NAME[kind], namespace, bare) is not None

    async def is_there(self, namespace: str, stranger: str) -> bool:
        """Whether an object that stood in our way still does. Raises KubeError."""
        kind, _, name = stranger.partition("/")
        try:
            await self._client.get(BY_NAME[kind], namespace, name)
        except ApiError as error:
            if error.gone:
                return False
            raise
        return True

    async def _sequence(self, work: Work, actions: Sequence[Action]) -> bool:
        for action in actions:
            if not await self._try(work, action):
                return False
        return True

    async def _try(self, work: Work, action: Action) -> bool:
        what = type(action).__name__
        meta = work.meta
        told = log.bind(namespace=meta.namespace, pool=meta.name, action=what)
        outcome = work.outcome
        try:
            await self._one(work, action)
        except Foreign as error:
            outcome.foreign.add(error.name)
            told.warning("not done", why=str(error))
            return False
        except ApiError as error:
            if error.changed or error.gone:
                outcome.changed = True
                told.info("not done, the object has changed", why=str(error))
            elif error.transient or error.code == 401:
                outcome.failed.append(str(error))
                told.warning("not done", why=str(error))
            else:
                outcome.refused[key_of(action)] = error.message
                told.warning("refused", why=str(error))
            return False
        except KubeError as error:
            outcome.failed.append(str(error))
            told.warning("not done", why=str(error))
            return False
        outcome.done.append(action)
        if not isinstance(action, planned.WriteStatus):
            told.info(action.reason, group=action.group)
        return True

    async def _one(self, work: Work, action: Action) -> None:
        match action:
            case planned.SaveRevision():
                await self._write(REVISION, work, controllerrevision.build(work.pool, action.revision))
            case planned.DropRevision():
                await self._delete(REVISION, work, names.revision_object(work.meta.name, action.name))
            case planned.ApplyChild():
                await self._write(BY_NAME[action.kind], work, action.rendered)
            case planned.DropChild():
                await self._delete(BY_NAME[action.kind], work, action.name, action.version)
            case planned.WriteEndpoints():
                built = configmap.build(work.pool, action.documents)
                await self._write(CONFIG_MAP, work, built, action.version)
            case planned.ReserveIncarnations():
                await self._write_status(work, {**(work.status or {}), "lastIncarnation": action.last})
            case planned.WriteStatus():
                await self._write_status(work, action.status)
            case planned.RecordGroup():
                await self._write_group(work, action, action.replicas, action.revision, action.record)
            case planned.StartGroup():
                await self._write_group(work, action, action.replicas, action.revision, action.record)
            case planned.StopGroup():
                await self._write_group(work, action, 0, action.revision, action.record)
            case planned.RepairGroup():
                await self._repair(work, action)
            case planned.DeleteGroup():
                name = names.group_object(work.meta.name, action.group)
                await self._delete(STATEFUL_SET, work, name, action.version)
            case planned.DeletePod():
                await self._delete(POD, work, action.pod, f"{action.uid}/", grace_s=action.grace_s)
            case planned.Publish():
                patch = leader.patch(action.publication)
                patch |= {"uid": action.uid, "resourceVersion": action.version}
                await self._mark(work, action.pod, patch)
            case planned.Withdraw():
                await self._mark(work, action.pod, leader.patch(None) | {"uid": action.uid})

    # One object each

    async def _write_group(
        self,
        work: Work,
        action: planned.RecordGroup | planned.StartGroup | planned.StopGroup | planned.RepairGroup,
        replicas: int,
        revision: RevisionRecord,
        record: GroupRecord,
    ) -> None:
        rendered = statefulset.build(work.pool, action.group, replicas, record, revision)
        await self._write(STATEFUL_SET, work, rendered, action.version, revision)

    async def _repair(self, work: Work, action: planned.RepairGroup) -> None:
        """Take out what others added, in the very object it was found in, then write ours again."""
        version = action.version
        if action.remove:
            conditions = preconditions(version)
            steps: list[dict[str, Any]] = [
                {"op": "test", "path": f"/metadata/{key}", "value": value}
                for key, value in conditions.items()
            ]
            steps += [{"op": "remove", "path": path} for path in action.remove]
            meta = work.meta
            name = names.group_object(meta.name, action.group)
            try:
                answer = await self._client.json_patch(STATEFUL_SET, meta.namespace, name, steps)
            except ApiError as error:
                if error.code != 422:
                    raise
                await self._look_again(STATEFUL_SET, work, name)
                raise ApiError(409, "Conflict", error.message) from error
            self._cache.put(STATEFUL_SET, answer)
            version = f"{answer['metadata']['uid']}/{answer['metadata']['resourceVersion']}"
        rendered = statefulset.build(work.pool, action.group, action.replicas, action.record, action.revision)
        await self._write(STATEFUL_SET, work, rendered, version, action.revision)

    async def _write(
        self,
        kind: Kind,
        work: Work,
        rendered: Mapping[str, Any],
        version: str = "",
        revision: RevisionRecord | None = None,
    ) -> None:
        """Apply the whole object: as it was planned from ``version``, else as it is in the cache, else
        only if there is none."""
        meta = rendered["metadata"]
        known = self._cache.get(kind, meta["namespace"], meta["name"])
        if known is not None and not common.is_owned(known, work.meta.uid):
            raise Foreign(kind, meta["name"])
        conditions = preconditions(version) if version else {}
        if not conditions and known is not None:
            conditions = {"uid": known["metadata"]["uid"]}
        try:
            answer = await self._client.apply(
                kind, {**rendered, "metadata": {**meta, **conditions}}, create=not conditions
            )
        except ApiError as error:
            if error.changed or error.gone:
                await self._look_again(kind, work, meta["name"])
            raise
        self._cache.put(kind, answer)
        if kind in (STATEFUL_SET, SERVICE, DISRUPTION_BUDGET):
            self._observer.wrote(kind, work.pool, answer, revision)

    async def _write_status(self, work: Work, status: Mapping[str, Any]) -> None:
        meta = work.meta
        conditions = {"uid": meta.uid, "resourceVersion": work.version}
        obj = {
            "metadata": {"namespace": meta.namespace, "name": meta.name, **conditions},
            "status": dict(status),
        }
        try:
            answer = await self._client.apply(POOL, obj, subresource="status")
        except ApiError as error:
            if error.changed or error.gone:
                await self._look_again(POOL, work, meta.name)
            raise
        self._cache.put(POOL, answer)
        work.version = str(answer["metadata"]["resourceVersion"])
        work.status = answer.get("status")

    async def _mark(self, work: Work, pod: str, metadata: Mapping[str, Any]) -> None:
        try:
            answer = await self._client.merge(POD, work.meta.namespace, pod, {"metadata": dict(metadata)})
        except ApiError as error:
            if error.changed or error.gone:
                await self._look_again(POD, work, pod)
            raise
        self._cache.put(POD, answer)

    async def _delete(
        self, kind: Kind, work: Work, name: str, version: str = "", *, grace_s: int | None = None
    ) -> None:
        namespace = work.meta.namespace
        known = self._cache.get(kind, namespace, name)
        if known is None:
            return
        if kind is not POD and not common.is_owned(known, work.meta.uid):
            raise Foreign(kind, name)
        conditions = preconditions(version)
        uid = conditions["uid"] or known["metadata"]["uid"]
        try:
            answer = await self._client.delete(
                kind, namespace, name, uid=uid, version=conditions.get("resourceVersion", ""), grace_s=grace_s
            )
        except ApiError as error:
            if error.gone:
                self._cache.drop(kind, known)
                return
            if error.changed:
                await self._look_again(kind, work, name)
            raise
        if "deletionTimestamp" in answer.get("metadata", {}):
            self._cache.put(kind, answer)  # it ends in its own time
        else:
            self._cache.drop(kind, known)

    async def _look_again(self, kind: Kind, work: Work, name: str) -> None:
        """Bring the cache up to date about one object; Foreign if it is not ours."""
        meta = work.meta
        try:
            live = await self._client.get(kind, meta.namespace, name)
        except ApiError as error:
            known = self._cache.get(kind, meta.namespace, name)
            if error.gone and known is not None:
                self._cache.drop(kind, known)
            return
        except KubeError:
            return  # the watch will tell
        marks = live["metadata"].get("labels") or {}
        if kind in (POOL, POD) or common.is_owned(live, meta.uid) or labels.POOL in marks:
            self._cache.put(kind, live)
        if kind not in (POOL, POD) and not common.is_owned(live, meta.uid):
            raise Foreign(kind, name)


def _batches(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Runs of actions that have a group, and single actions that have none."""
    run: list[Action] = []
    for action in actions:
        if action.group is None:
            if run:
                yield run
                run = []
            yield [action]
        else:
            run.append(action)
    if run:
        yield run
