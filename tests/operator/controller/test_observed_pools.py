"""From objects in the cache to the planner's snapshot."""

from dataclasses import replace

import pytest

from encodepool_operator.api.parse import parse_pool
from encodepool_operator.core.actions import WriteEndpoints
from encodepool_operator.core.plan import plan

KEY = ("ns", "demo")


@pytest.fixture
def look(stage, make_pool):
    """``look()``: the snapshot of the pool as it is in the cache now."""

    def snapshot():
        return stage.observer.snapshot(KEY, parse_pool({**make_pool(), **stage.pools.get(KEY).pool}))

    return snapshot


@pytest.fixture
def complete(stage, make_pool, make_group, make_others, make_pod):
    """The pool with two groups of one pod and everything else; the objects as they were put."""
    stage.put(make_pool() | {"status": {"lastIncarnation": 9}})
    others = [stage.put(obj) for obj in make_others()]
    groups = [stage.put(make_group(index)) for index in (0, 1)]
    pods = [stage.put(make_pod(index)) for index in (0, 1)]
    return {"others": others, "groups": groups, "pods": pods}


def test_a_pool_as_the_operator_wrote_it_has_no_drift(complete, look, kept, record):
    found = look()
    assert [group.index for group in found.groups] == [0, 1]
    group = found.groups[0]
    assert (group.object.replicas, group.object.generation, group.object.observed_generation) == (1, 1, 1)
    assert (group.object.current_pods, group.object.drift) == (1, None)
    assert (group.object.record.incarnation, group.object.record.ports) == (7, record.ports)
    assert [pod.name for pod in group.pods] == ["demo-0-0"]
    assert found.revisions == (kept,)
    assert found.documents == {"workers.json": "{}", "endpoints.json": "[]"}
    assert found.last_incarnation == 9
    assert sorted(child.name for child in found.children) == ["demo-encode", "demo-leaders", "demo-peers"]
    assert all(child.drift is None for child in found.children)
    assert found.foreign == frozenset()


def test_a_group_in_which_nothing_changed_is_the_very_same_object(stage, complete, look):
    before = look().groups
    stage.put(complete["pods"][1], labels={**complete["pods"][1]["metadata"]["labels"], "x": "y"})
    after = look().groups
    assert after[0] is before[0]
    assert after[1] is not before[1]


def test_a_list_is_replaced_only_as_it_was_seen(complete, look):
    (listed,) = (obj for obj in complete["others"] if obj["kind"] == "ConfigMap")
    meta = listed["metadata"]
    found = look()
    assert found.documents_version == f"{meta['uid']}/{meta['resourceVersion']}"
    (write,) = (action for action in plan(found, 1e9).actions if isinstance(action, WriteEndpoints))
    assert write.version == found.documents_version


def test_the_spec_that_was_last_used_is_kept_by_the_newest_revision(stage, complete, pool, make_pool):
    meta = replace(pool.metadata, generation=8)
    used = stage.observer.last_used(KEY, meta)
    assert (used.metadata.generation, used.spec.replicas) == (8, 2)
    assert (used.spec.model, used.spec.image) == (pool.spec.model, pool.spec.image)
    for obj in complete["others"]:
        if obj["kind"] == "ControllerRevision":
            stage.drop(obj)
    assert stage.observer.last_used(KEY, meta) is None


def test_an_edited_child_and_an_edited_group_have_drift(stage, complete, look):
    service = next(obj for obj in complete["others"] if obj["metadata"]["name"] == "demo-peers")
    stage.put(service | {"spec": service["spec"] | {"publishNotReadyAddresses": False}})
    group = complete["groups"][1]
    spec = group["spec"] | {"serviceName": "other"}
    stage.put(group | {"spec": spec})
    found = look()
    assert (
        "publishNotReadyAddresses" in next(c for c in found.children if c.name == "demo-peers").drift.reason
    )
    assert "serviceName" in found.groups[1].object.drift.reason
    assert found.groups[0].object.drift is None


def test_a_difference_that_our_own_write_ended_in_is_left_alone(stage, complete, look, pool, kept):
    group = complete["groups"][0]
    changed = stage.put(group | {"spec": group["spec"] | {"revisionHistoryLimit": 9}})
    assert look().groups[0].object.drift is not None
    # We write it again, and something on the cluster changes it again within the same request.
    stage.observer.wrote(stage.kind(changed), pool, changed, kept)
    stage.put(changed)
    assert look().groups[0].object.drift is None
    # Another difference is told.
    stage.put(changed | {"spec": changed["spec"] | {"revisionHistoryLimit": 8}})
    assert look().groups[0].object.drift is not None


def test_what_another_controls_is_named_and_left_out(stage, complete, look):
    other = [{"kind": "EncodePool", "name": "demo", "uid": "an-earlier-pool", "controller": True}]
    stage.put(complete["groups"][0], ownerReferences=other)
    for obj in complete["others"]:
        stage.put(obj, ownerReferences=[])
    found = look()
    assert found.foreign >= {
        "StatefulSet/demo-0",
        "ConfigMap/demo-endpoints",
        "Service/demo-peers",
        "PodDisruptionBudget/demo-leaders",
    }
    assert [group.index for group in found.groups] == [1]  # its pods are the other's, too
    assert (found.documents, found.children, found.revisions) == (None, (), ())
    assert found.documents_version == ""


def test_a_pool_that_was_made_anew_owns_nothing_of_the_one_before(stage, complete, look, make_pool):
    assert look().groups
    stage.put(make_pool(), uid="the-next-pool")
    found = look()
    assert (found.groups, found.revisions, found.children, found.documents) == ((), (), (), None)
    assert "StatefulSet/demo-1" in found.foreign
    # The garbage collector takes the old ones.
    for obj in [*complete["others"], *complete["groups"], *complete["pods"]]:
        stage.drop(obj)
    assert look().foreign == frozenset()


def test_pods_of_a_deleted_statefulset_are_still_its_groups(stage, complete, look):
    stage.drop(complete["groups"][0])
    stage.put(complete["pods"][0], ownerReferences=[])
    found = look().groups[0]
    assert found.object is None
    assert [pod.name for pod in found.pods] == ["demo-0-0"]


@pytest.mark.parametrize("name", ["demo-x", "demo-00", "other-0", "demo-0-0-0", "demo"])
def test_a_statefulset_of_another_name_is_not_a_group(stage, complete, look, make_group, name):
    before = look().groups
    stray = make_group(0)
    stray["metadata"]["name"] = name
    stage.put(stray)
    assert look().groups == before


def test_a_pod_that_only_borrows_our_labels_is_not_a_member(stage, complete, look, make_pod):
    stray = make_pod(0, 1)
    stray["metadata"]["ownerReferences"][0] |= {"kind": "ReplicaSet"}
    stage.put(stray)
    assert len(look().groups[0].pods) == 1


def test_annotations_that_cannot_be_read_are_no_record(stage, complete, look):
    group = complete["groups"][0]
    notes = group["metadata"]["annotations"] | {"encodepool.dev/ports": "some"}
    stage.put(group, annotations=notes)
    found = look().groups[0].object
    assert (found.record, found.drift) == (None, None)


def test_a_foreign_key_in_the_list_is_not_published_by_us(stage, complete, look):
    listed = next(obj for obj in complete["others"] if obj["kind"] == "ConfigMap")
    stage.put(listed | {"data": listed["data"] | {"extra": "x"}})
    assert "extra" not in look().documents


def test_a_change_names_the_pool_that_it_concerns(stage, complete, make_pod, make_pool):
    stage.changed.clear()
    stage.put(make_pod(1), uid="another")
    stray = make_pod()
    stray["metadata"]["labels"] = {"app": "else"}
    stray["metadata"]["name"] = "else"
    stage.put(stray)
    assert stage.changed == [KEY, None]
    assert stage.pools.existing() == [KEY]
    for obj in [make_pool(), *complete["others"], *complete["groups"], *complete["pods"]]:
        meta = obj["metadata"]
        stage.drop(stage.cache.get(stage.kind(obj), meta["namespace"], meta["name"]) | {"kind": obj["kind"]})
    assert stage.pools.all() == []


def test_ports_of_other_pools_on_the_nodes_network_are_taken(stage, complete, make_pool, make_group, record):
    spec = {"network": {"hostNetwork": True}}
    other = make_group(0)
    other["metadata"] |= {
        "name": "other-0",
        "labels": {"encodepool.dev/pool": "other"},
        "ownerReferences": [],
    }
    other["spec"]["template"]["spec"]["hostNetwork"] = True
    stage.put(other)
    on_nodes = parse_pool(make_pool(**spec))
    assert stage.observer.snapshot(KEY, on_nodes).taken_ports == frozenset(record.ports)
    assert stage.observer.snapshot(KEY, parse_pool(make_pool())).taken_ports == frozenset()
