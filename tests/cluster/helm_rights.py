"""What the chart's roles grant, what the operator asked for, and a story in which it needs all of it."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.cluster.kit.audit import Asked
from tests.cluster.kit.waiting import wait_for
from tests.cluster.operator_stage import GROUP, PLURAL, VERSION, Object, Pools


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one resource, as a rule spells it. ``namespace`` "" is everywhere, ``name`` "" is any."""

    namespace: str
    group: str
    resource: str
    verb: str
    name: str = ""


def rights_of(manifest: str, account: str, account_namespace: str) -> set[Right]:
    """What the roles in a rendered chart grant to the account, rule by rule."""
    objects = [one for one in yaml.safe_load_all(manifest) if one]
    roles = {
        (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one for one in objects
    }
    subject = {"kind": "ServiceAccount", "name": account, "namespace": account_namespace}
    found: set[Right] = set()
    for binding in objects:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding") or subject not in binding["subjects"]:
            continue
        namespace = binding["metadata"].get("namespace", "")
        role = roles[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]
        for rule in role["rules"]:
            every = itertools.product(
                rule["apiGroups"], rule["resources"], rule["verbs"], rule.get("resourceNames", [""])
            )
            found |= {Right(namespace, *one) for one in every}
    return found


PUBLIC = ("/api", "/apis", "/openapi", "/version")
"""Paths that every account may read: discovery. They name no resource."""


def needed(asked: Asked) -> list[tuple[str, str, str, str, str]]:
    """(namespace, group, resource, verb, name) of what a request needed, [] for discovery.

    A server-side apply is a patch, and where it made the object a create as well.
    """
    if not asked.resource:
        assert asked.verb == "get"
        assert asked.uri.startswith(PUBLIC), asked.uri
        return []
    resource = "/".join(filter(None, (asked.resource, asked.subresource)))
    verbs = [asked.verb] + (["create"] if asked.verb == "patch" and asked.code == 201 else [])
    return [(asked.namespace, asked.group, resource, verb, asked.name) for verb in verbs]


def differences(rights: Iterable[Right], requests: Iterable[Asked]) -> tuple[list[Any], list[Right]]:
    """(needs of requests that no right covers, rights that no request needed)."""
    rights = sorted(rights)
    uncovered, unused = set(), set(rights)
    for asked in requests:
        for need in needed(asked):
            namespace, group, resource, verb, name = need
            covering = {
                right
                for right in rights
                if right.namespace in ("", namespace)
                and (right.group, right.resource, right.verb) == (group, resource, verb)
                and right.name in ("", name)
            }
            unused -= covering
            if not covering:
                uncovered.add(need)
    return sorted(uncovered), sorted(unused)


# The story

AWAY: Object = {"spec": {"nodeSelector": {"stand-in": "only"}}}
"""A ``podTemplate`` that keeps the scheduler's hands off pods which a stand-in is to bind."""

RACE_S = 90.0
HITS = 5


class Story:
    """All that the operator can be brought to do, in pools whose pods a stand-in plays.

    ``asked`` tells what the operator has asked for by now.
    """

    def __init__(self, pools: Pools, asked: Callable[[], list[Asked]]) -> None:
        self._pools = pools
        self._asked = asked

    def tell(self, hand_over: Callable[[], None]) -> None:
        """``hand_over`` makes another replica lead."""
        pools = self._pools
        hash_of_none = self._hash("unsaved", replicas=0)
        taken = self._take_names(f"unsaved-{hash_of_none}")
        pools.create("blocked", replicas=1, podTemplate=AWAY)
        pools.create("unsaved", replicas=0, podTemplate=AWAY)

        pools.create("main", podTemplate=AWAY, revisionHistoryLimit=0)
        pools.wait_ready("main")
        first = pools.status("main")["currentRevision"]
        pools.patch("main", model={"path": "/models/other"})
        wait_for(
            lambda: self._is_gone(f"ControllerRevision/main-{first}"), 60, "the old revision being dropped"
        )
        pools.wait_ready("main")

        hand_over()
        self._lose(lambda: pools.core.delete_namespaced_pod("main-0-0", pools.namespace))
        self._lose(self._orphan)  # Another group takes its place, and its pod is deleted.
        wait_for(lambda: self._is_gone("Pod/main-1-0"), 60, "the pod without a group being gone")
        self._leave_behind("main")
        wait_for(lambda: self._is_gone("Service/main-left"), 30, "the Service that is not wanted being gone")
        wait_for(lambda: self._is_gone("PodDisruptionBudget/main-left"), 30, "the budget being gone")
        self._race_for_the_pool()
        pools.scale("main", 2)
        pools.wait_ready("main", 60)
        self._race_for_pods()

        pools.scale("main", 1)
        wait_for(lambda: len(pools.groups("main")) == 1, 30, "the other groups being deleted")
        wait_for(lambda: self._told("blocked") | self._told("unsaved") >= taken, 30, f"Events about {taken}")
        for name in ("main", "blocked", "unsaved"):
            pools.delete(name)
        wait_for(lambda: pools.children("main") == [], 60, "everything of the pool being gone")

    def _is_gone(self, child: str) -> bool:
        return child not in self._pools.children("main")

    def _told(self, pool: str) -> set[str]:
        events = self._pools.events(pool)
        return {message.split()[0] for reason, message in events if reason == "NameTaken"}

    def _hash(self, name: str, **spec: Any) -> str:
        """Of the revision that a pool of this name and spec has."""
        pools = self._pools
        pools.create(name, podTemplate=AWAY, **spec)
        found = wait_for(lambda: pools.status(name).get("updateRevision"), what="the revision's name")
        pools.delete(name)
        wait_for(lambda: pools.children(name) == [], what=f"everything of {name} being gone")
        return str(found)

    def _take_names(self, revision: str) -> set[str]:
        """Make objects that stand in the way of pools "blocked" and "unsaved"; "Kind/name" of each.

        The operator does not see them, as they lack its label: it is refused, and then looks at each.
        """
        pools, space = self._pools, self._pools.namespace
        choice = {"matchLabels": {"a": "b"}}
        pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}

        def named(name: str, **rest: Any) -> Object:
            return {"metadata": {"name": name}, **rest}

        for name in ("blocked-peers", "blocked-encode"):
            web = {"selector": {"a": "b"}, "ports": [{"port": 80}]}
            pools.core.create_namespaced_service(space, named(name, spec=web))
        pools.core.create_namespaced_config_map(space, named("blocked-endpoints"))
        pools.policy.create_namespaced_pod_disruption_budget(
            space, named("blocked-leaders", spec={"selector": choice, "maxUnavailable": 1})
        )
        group = {"replicas": 0, "serviceName": "s", "selector": choice, "template": pod}
        pools.apps.create_namespaced_stateful_set(space, named("blocked-0", spec=group))
        pools.apps.create_namespaced_controller_revision(space, named(revision, revision=1, data={}))
        return {
            "Service/blocked-peers",
            "Service/blocked-encode",
            "ConfigMap/blocked-endpoints",
            "PodDisruptionBudget/blocked-leaders",
            "StatefulSet/blocked-0",
            f"ControllerRevision/{revision}",
        }

    def _lose(self, lose: Callable[[], Any]) -> None:
        """Lose a pod in some way; returns when another one is listed in its place."""
        pools = self._pools
        before = {one["id"] for one in pools.workers("main")}
        assert len(before) == 2
        lose()

        def replaced() -> bool:
            listed = {one["id"] for one in pools.workers("main")}
            return len(listed) == 2 and listed != before

        wait_for(replaced, 60, "another group in the list")
        pools.wait_ready("main")

    def _orphan(self) -> None:
        """Delete a group's object and leave its pod, which then belongs to nobody. So do the revisions
        that Kubernetes keeps of the object, but those are not ours to delete."""
        apps, namespace = self._pools.apps, self._pools.namespace
        whole = client.V1DeleteOptions(propagation_policy="Orphan")
        apps.delete_namespaced_stateful_set("main-1", namespace, body=whole)
        of_group = f"{GROUP}/pool=main,{GROUP}/group=1"

        def orphans() -> bool:
            found = apps.list_namespaced_controller_revision(namespace, label_selector=of_group).items
            return bool(found) and not any(one.metadata.owner_references for one in found)

        wait_for(orphans, what="the revisions being nobody's")
        apps.delete_collection_namespaced_controller_revision(namespace, label_selector=of_group)

    def _leave_behind(self, pool: str) -> None:
        """Children of the pool that are not wanted, as another version of the operator may have made."""
        pools = self._pools
        owner = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "EncodePool",
            "name": pool,
            "uid": pools.get(pool)["metadata"]["uid"],
            "controller": True,
        }
        meta = {
            "name": f"{pool}-left",
            "labels": {f"{GROUP}/pool": pool},
            "ownerReferences": [owner],
        }
        web = {"selector": {"a": "b"}, "ports": [{"port": 80}]}
        pools.core.create_namespaced_service(pools.namespace, {"metadata": meta, "spec": web})
        budget = {"selector": {"matchLabels": {"a": "b"}}, "maxUnavailable": 1}
        pools.policy.create_namespaced_pod_disruption_budget(
            pools.namespace, {"metadata": meta, "spec": budget}
        )

    def _race_for_the_pool(self) -> None:
        """Change the pool until a write of its status has come too late and the operator has read it."""
        pools = self._pools

        def change() -> None:
            self._mark(
                lambda note: pools.custom.patch_namespaced_custom_object(
                    GROUP, VERSION, pools.namespace, PLURAL, "main", note
                )
            )

        self._race(change, "encodepools")

    def _race_for_pods(self) -> None:
        """Change pods that are not listed yet until one could not be marked and the operator has read it."""
        core, namespace = self._pools.core, self._pools.namespace
        unlisted = f"{GROUP}/pool=main,!{GROUP}/routable"

        def change() -> None:
            for pod in core.list_namespaced_pod(namespace, label_selector=unlisted).items:
                name = pod.metadata.name
                for _ in range(HITS):
                    self._mark(lambda note, name=name: core.patch_namespaced_pod(name, namespace, note))

        self._race(change, "pods")

    def _race(self, change: Callable[[], None], resource: str) -> None:
        """``change`` something all the time, while a group comes and goes, until the operator gets it."""
        pools, turns, target = self._pools, itertools.cycle((3, 2)), 2

        def raced() -> bool:
            nonlocal target
            if len(pools.workers("main")) == target:
                target = next(turns)
                pools.scale("main", target)
            return (resource, "get") in {(one.resource, one.verb) for one in self._asked()}

        with _again_and_again(change):
            wait_for(raced, RACE_S, f"the operator reading {resource} anew")

    def _mark(self, patch: Callable[[Object], Any]) -> None:
        """Change an object in a way that matters to nobody; it may be gone."""
        try:
            patch({"metadata": {"annotations": {"example.com/mark": uuid.uuid4().hex}}})
        except ApiException as error:
            if error.status != 404:
                raise


@contextmanager
def _again_and_again(call: Callable[[], None]) -> Iterator[None]:
    """Call it in a thread of its own, without a rest, while in the context."""
    ended = threading.Event()
    failed: list[Exception] = []

    def run() -> None:
        try:
            while not ended.is_set():
                call()
        except Exception as error:  # noqa: BLE001 - raised below, in the test's own thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]
