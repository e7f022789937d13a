"""Services, the disruption budget and edited objects: what the planner does about them, and when not."""

import json
from dataclasses import replace

import pytest

from encodepool_operator.core.actions import (
    ApplyChild,
    DropChild,
    RecordGroup,
    RepairGroup,
    SaveRevision,
    StartGroup,
    StopGroup,
    WriteEndpoints,
)
from encodepool_operator.core.plan import plan
from encodepool_operator.core.snapshot import ChildObject, Drift


@pytest.fixture
def pool(cluster):
    """Two groups, both listed, nothing left to do."""
    made = cluster(replicas=2)
    made.run()
    return made


def of_kind(planned, *kinds):
    return [action for action in planned.actions if isinstance(action, kinds)]


def test_a_new_pool_gets_its_services_before_the_first_pod(cluster):
    planned = cluster(replicas=2).plan()
    kinds = [type(action) for action in planned.actions]
    assert kinds.index(ApplyChild) > kinds.index(SaveRevision)
    assert max(i for i, kind in enumerate(kinds) if kind is ApplyChild) < kinds.index(StartGroup)
    assert [(a.kind, a.name, a.reason) for a in of_kind(planned, ApplyChild)] == [
        ("Service", "demo-peers", "Service demo-peers is missing"),
        ("Service", "demo-encode", "Service demo-encode is missing"),
        ("PodDisruptionBudget", "demo-leaders", "PodDisruptionBudget demo-leaders is missing"),
    ]


def test_one_machine_has_no_such_children_and_no_pod_template(cluster):
    planned = cluster(replicas=2, shared_host=True).plan()
    assert not of_kind(planned, ApplyChild)
    assert of_kind(planned, SaveRevision)[0].revision.template == ""
    assert of_kind(planned, StartGroup)[0].revision.template == ""


def test_a_new_revision_keeps_the_pod_template_that_its_groups_are_filled_from(cluster):
    planned = cluster(replicas=1).plan()
    (saved,) = of_kind(planned, SaveRevision)
    template = json.loads(saved.revision.template)
    assert template["spec"]["containers"][0]["image"] == "worker:1"
    assert template["metadata"]["labels"]["encodepool.dev/group"] == {"$text": "{group}"}
    assert of_kind(planned, StartGroup)[0].revision == saved.revision


def test_a_kept_template_is_never_rendered_again(pool):
    """An operator that renders otherwise moves no pod and writes nothing."""
    (name,) = pool.revisions
    pool.revisions[name] = replace(pool.revisions[name], template='{"metadata":{},"spec":{"old":true}}')
    assert pool.plan().actions == ()


def test_a_child_is_written_again_when_it_is_gone_or_edited_and_only_then(pool):
    del pool.children["Service", "demo-peers"]
    drift = Drift("spec.minAvailable is 0 instead of 1")
    pool.children["PodDisruptionBudget", "demo-leaders"] = drift
    planned = pool.reconcile()
    assert [action.reason for action in planned.actions] == [
        "Service demo-peers is missing",
        "PodDisruptionBudget demo-leaders is not as it should be: spec.minAvailable is 0 instead of 1",
    ]
    assert pool.plan().actions == ()


def test_a_change_of_replicas_shows_in_the_budget_that_is_written(pool):
    pool.children["PodDisruptionBudget", "demo-leaders"] = Drift("spec.minAvailable is 1 instead of 4")
    pool.edit(replicas=5)
    (applied,) = of_kind(pool.plan(), ApplyChild)
    assert applied.rendered["spec"]["minAvailable"] == 4


def test_groups_of_several_pods_have_no_budget_and_an_old_one_goes(cluster):
    pool = cluster(tensorParallelSize=2, ranksPerPod=1)
    pool.children["PodDisruptionBudget", "demo-leaders"] = None
    pool.run()
    dropped = [action for action in pool.executed if isinstance(action, DropChild)]
    assert [(a.name, a.version) for a in dropped] == [("demo-leaders", "1")]
    assert set(pool.children) == {("Service", "demo-peers"), ("Service", "demo-encode")}


def test_an_object_of_our_name_that_is_not_ours_is_never_written(cluster):
    pool = cluster()
    pool.foreign = frozenset({"Service/demo-peers", "ConfigMap/demo-endpoints"})
    pool.run()
    written = {a.name for a in pool.executed if isinstance(a, ApplyChild)}
    assert written == {"demo-encode", "demo-leaders"}
    assert not [a for a in pool.executed if isinstance(a, WriteEndpoints)]
    assert pool.condition("Stalled") == ("True", "NameTaken")


def test_nothing_starts_while_its_revision_cannot_be_kept(cluster):
    pool = cluster()
    (revision,) = of_kind(pool.plan(), SaveRevision)
    pool.foreign = frozenset({f"ControllerRevision/demo-{revision.revision.name}"})
    planned = pool.plan()
    assert not of_kind(planned, SaveRevision, StartGroup)


def test_an_edited_group_is_written_again_as_it_was_and_stays_listed(pool):
    before = pool.sets[1].annotations
    pool.edit_group(1, Drift("spec.template.spec.hostPID was added", ("/spec/template/spec/hostPID",)))
    planned = pool.reconcile()
    (repair,) = planned.actions
    assert isinstance(repair, RepairGroup)
    assert (repair.group, repair.replicas, repair.remove) == (1, 1, ("/spec/template/spec/hostPID",))
    assert repair.version == "4"
    assert repair.revision.name == repair.record.revision
    assert repair.reason == (
        "the object of group 1 was edited and is written again: spec.template.spec.hostPID was added"
    )
    assert pool.sets[1].annotations == before
    assert pool.listed() == ["0-1", "1-2"]
    assert pool.plan().actions == ()


def test_a_stopped_group_that_was_edited_stays_stopped(pool):
    pool.sets[1].replicas = 0
    pool.settle()
    pool.edit_group(1, Drift("metadata.labels was edited"))
    pool.foreign = frozenset({f"ControllerRevision/demo-{next(iter(pool.revisions))}"})  # nothing starts
    planned = pool.reconcile()
    assert [a.replicas for a in of_kind(planned, RecordGroup, RepairGroup)] == [0]
    pool.edit_group(1, Drift("metadata.labels was edited again"))
    (repair,) = of_kind(pool.plan(), RepairGroup)
    assert repair.replicas == 0


def test_a_number_of_pods_that_somebody_chose_is_set_back(pool):
    pool.sets[0].replicas = 3
    pool.edit_group(0, Drift("spec.replicas is 3 instead of 1"))
    pool.reconcile()
    assert pool.sets[0].replicas == 1
    pool.run()
    assert pool.listed() == ["0-1", "1-2"]


def test_a_plan_that_writes_the_object_anyway_does_not_repair_it(pool):
    pool.edit_group(0, Drift("spec.serviceName was edited"))
    pool.kill("uid-1")
    planned = pool.plan()
    assert [a.group for a in of_kind(planned, StopGroup)] == [0]
    assert not of_kind(planned, RepairGroup)


def test_actions_on_an_object_carry_what_a_whole_write_of_it_needs(pool):
    (old,) = pool.revisions
    pool.now += 5
    pool.edit(image="worker:2", replicas=2)
    planned = pool.plan()
    (drain,) = of_kind(planned, RecordGroup)
    assert (drain.replicas, drain.revision.name) == (1, old), "a record never moves pods"
    pool.run()
    stops = [action for action in pool.executed if isinstance(action, StopGroup)]
    assert {stop.revision.name for stop in stops} == {old}


def test_a_group_whose_revision_was_deleted_is_stopped_with_the_wanted_one(pool):
    (old,) = pool.revisions
    pool.edit(image="worker:2")
    pool.reconcile()
    del pool.revisions[old]
    pool.kill("uid-1")
    (stop,) = of_kind(pool.plan(), StopGroup)
    assert stop.record.revision == old
    assert stop.revision.name in pool.revisions


def test_children_are_told_apart_by_kind_and_name(pool):
    snapshot = replace(pool.snapshot(), children=(ChildObject("PodDisruptionBudget", "demo-peers"),))
    planned = plan(snapshot, pool.now)
    assert len(of_kind(planned, ApplyChild)) == 3
    assert [a.name for a in of_kind(planned, DropChild)] == ["demo-peers"]
