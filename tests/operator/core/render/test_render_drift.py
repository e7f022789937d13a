"""Rendered against live objects.

The files in ``live/`` are what an API server (1.36.3) answered when the objects of ``render_pools`` were
applied, and after two other managers had added things. After a change of what is rendered they are written
anew by ``UPDATE_GOLDEN=1 pytest tests/cluster/test_operator_render.py``, never by hand.
"""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from tests.operator.core.render.render_pools import POOLS, objects_of, pool_of, revision_of

from encodepool_operator.core.render import common, controllerrevision, drift, quantity
from encodepool_operator.kube.client import FIELD_MANAGER as MANAGER

LIVE = Path(__file__).parent / "live"


def recorded(name):
    """The pool as it was when the objects were recorded, and the objects."""
    lives = json.loads((LIVE / f"{name}.json").read_text())
    return pool_of(name.partition("-")[0]), lives if isinstance(lives, list) else [lives]


@pytest.mark.parametrize("name", POOLS)
def test_what_the_server_fills_in_and_leaves_out_is_no_drift(name):
    pool, lives = recorded(name)
    rendered = objects_of(pool)
    assert [live["kind"] for live in lives] == [item["kind"] for item in rendered]
    for item, live in zip(rendered, lives, strict=True):
        assert drift.compare(item, live) is None
    assert drift.compare_group(pool, lives[-1], 1, revision_of(pool), MANAGER) is None


@pytest.mark.parametrize("name", POOLS)
def test_a_kept_revision_reads_as_it_was_written(name):
    pool, lives = recorded(name)
    read = controllerrevision.read(lives[0], name, pool.metadata.uid)
    assert read == revision_of(pool)
    assert controllerrevision.read(lives[0], name, "another uid") is None


def test_revisions_of_statefulsets_are_not_ours():
    pool, _ = recorded("tiny")
    theirs = {
        "metadata": {
            "name": "tiny-1-6f7d9c",
            "ownerReferences": [{"kind": "StatefulSet", "uid": "u", "controller": True}],
        },
        "data": {"spec": {}},
        "revision": 1,
    }
    assert controllerrevision.read(theirs, "tiny", pool.metadata.uid) is None
    theirs["metadata"]["ownerReferences"] = [common.owner(pool.metadata)]
    assert controllerrevision.read(theirs, "tiny", pool.metadata.uid) is None


def at(value, path):
    *way, last = path
    for key in way:
        value = value[key]
    return value, last


TEMPLATE = ("spec", "template", "spec")
ENGINE = (*TEMPLATE, "containers", 0)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("spec", "replicas"), 3, "spec.replicas is 3 instead of 1"),
        ((*TEMPLATE, "hostNetwork"), True, "spec.template.spec.hostNetwork is true instead of false"),
        (
            (*ENGINE, "image"),
            "evil",
            'spec.template.spec.containers[encode].image is "evil" instead of "encodepool/worker:1"',
        ),
        (
            ("metadata", "labels", "encodepool.dev/pool"),
            None,
            "metadata.labels.encodepool.dev/pool is missing",
        ),
        ((*ENGINE, "args"), ["x"], "spec.template.spec.containers[encode].args has 1 items instead of 23"),
        ((*ENGINE, "env"), [], "spec.template.spec.containers[encode].env[ENCODEPOOL_HOST] is missing"),
        ((*ENGINE, "env"), None, "spec.template.spec.containers[encode].env is missing"),
        (
            (*ENGINE, "resources", "limits", "cpu"),
            "501m",
            'spec.template.spec.containers[encode].resources.limits.cpu is "501m" instead of "500m"',
        ),
        ((*ENGINE, "livenessProbe"), None, "spec.template.spec.containers[encode].livenessProbe is missing"),
        (("metadata", "ownerReferences"), [], "is missing"),
    ],
)
def test_an_edit_is_told_with_its_place_and_both_values(path, value, reason):
    pool, lives = recorded("tiny")
    live = deepcopy(lives[-1])
    holder, last = at(live, path)
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    found = drift.compare_group(pool, live, 1, revision_of(pool), MANAGER)
    assert found is not None
    assert found.remove == ()
    assert found.reason.endswith(reason)
    assert len(found.reason) < 250


def test_a_stopped_group_is_compared_as_a_stopped_one():
    pool, lives = recorded("tiny")
    live = deepcopy(lives[-1])
    live["spec"]["replicas"] = 0
    assert drift.compare_group(pool, live, 1, revision_of(pool), MANAGER) is None


def test_nothing_is_said_about_an_object_whose_annotations_or_revision_cannot_be_read():
    pool, lives = recorded("tiny")
    live = deepcopy(lives[-1])
    unreadable = replace(revision_of(pool), spec="{}")
    assert drift.compare_group(pool, live, 1, unreadable, MANAGER) is None
    live["metadata"]["annotations"]["encodepool.dev/ports"] = "x"
    assert drift.compare_group(pool, live, 1, revision_of(pool), MANAGER) is None


def test_a_service_whose_ports_were_swapped_is_told():
    pool, lives = recorded("tiny")
    rendered = next(item for item in objects_of(pool) if item["metadata"]["name"] == "tiny-encode")
    live = deepcopy(next(item for item in lives if item["metadata"]["name"] == "tiny-encode"))
    live["spec"]["ports"].reverse()
    assert drift.compare(rendered, live) is None, "ports are told apart by number"
    live["spec"]["ports"][0]["targetPort"] = "grpc"
    assert drift.compare(rendered, live).reason == (
        'spec.ports[8998/TCP].targetPort is "grpc" instead of "bootstrap"'
    )


def test_additions_of_others_in_the_template_are_found_and_can_be_taken_out():
    pool, (live,) = recorded("merged-with-additions")
    found = drift.compare_group(pool, live, 1, revision_of(pool), MANAGER)
    assert "kubectl-edit, kubectl-rollout added " in found.reason
    assert found.remove == (
        "/spec/template/spec/shareProcessNamespace",
        "/spec/template/spec/containers/1/volumeMounts/0",
        "/spec/template/spec/containers/1/env/0",
        "/spec/template/spec/containers/0",
        "/spec/template/metadata/annotations/kubectl.kubernetes.io~1restartedAt",
    )
    for pointer in found.remove:
        holder, last = at(
            live,
            [int(part) if part.isdecimal() else part.replace("~1", "/") for part in pointer.split("/")[1:]],
        )
        del holder[last]
    left = drift.compare_group(pool, live, 1, revision_of(pool), MANAGER)
    assert left.reason == "spec.template.spec.tolerations has 1 items instead of 2"
    assert left.remove == ()


def test_additions_outside_the_template_and_our_own_are_left_alone():
    pool, (live,) = recorded("merged-with-additions")
    live["metadata"]["labels"]["added"] = "by somebody"
    for entry in live["metadata"]["managedFields"]:
        entry["manager"] = MANAGER
    found = drift.compare_group(pool, live, 1, revision_of(pool), MANAGER)
    assert found.remove == (), "what a webhook adds to our own write counts as ours"


@pytest.mark.parametrize(
    ("rendered", "live", "same"),
    [
        ({"a": False}, {}, True),
        ({"a": 0}, {}, True),
        ({"a": ""}, {}, True),
        ({"a": {}}, {}, True),
        ({"a": []}, {}, True),
        ({"a": False}, {"a": True}, False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": True}, {}, False),
        ({"a": {"b": 1}}, {"a": 2}, False),
        ({"a": [1]}, {"a": 1}, False),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"sizeLimit": "1000m"}, {"sizeLimit": "1"}, True),
        ({"value": "1Gi"}, {"value": "1024Mi"}, False),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a", "effect": "x"}]}, True),
    ],
)
def test_values_are_compared_as_the_server_keeps_them(rendered, live, same):
    assert (drift.compare(rendered, live) is None) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [("1Gi", "1024Mi"), ("0.5", "500m"), (4, "4"), ("1e3", "1k"), ("1E", "1000P"), ("1u", "1000n")],
)
def test_equal_amounts(one, other):
    assert quantity.same(one, other)


@pytest.mark.parametrize("text", ["", "x", "1Xi", "1.2.3", True, None])
def test_what_is_no_quantity_is_the_same_as_nothing(text):
    assert not quantity.same(text, text)
    with pytest.raises(ValueError, match="quantity"):
        quantity.amount(text)
