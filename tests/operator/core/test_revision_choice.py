"""Which changes of a spec are a new revision, and what is kept."""

import json
from dataclasses import replace

import pytest

from encodepool_operator.core import revision
from encodepool_operator.core.revision import choose, read_spec, superfluous
from encodepool_operator.core.snapshot import RevisionRecord


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 7},
        {"rollout": {"maxSurge": 2, "paused": True}},
        {"restart": {"maxRestarts": 3, "backoff": {"baseSeconds": 1}, "lostNodeSeconds": 0}},
        {"revisionHistoryLimit": 1},
        {"drain": {"settleSeconds": 1}},
        {"tensorParallelSize": 1},  # written out, but the default
        {"transfer": {"protocol": "rdma"}},  # written out, but what would be derived
        {"model": {"name": "acme/vl-2b", "dtype": "auto"}},
    ],
)
def test_what_does_not_reach_the_pods_is_no_new_revision(make_spec, change):
    assert choose(make_spec(**change), "i", []) == choose(make_spec(), "i", [])


@pytest.mark.parametrize(
    "change",
    [
        {"image": "x"},
        {"args": ["--log-level", "debug"]},
        {"model": {"name": "acme/vl-4b"}},
        {"model": {"name": "acme/vl-2b", "cache": {"emptyDir": {}}}},
        {"drain": {"timeoutSeconds": 5}},
        {"restart": {"startupDeadlineSeconds": 60}},
        {"network": {"hostNetwork": True}},
        {"env": [{"name": "A", "value": "1"}]},
        {"publish": {"servedModelName": "vl"}},
    ],
)
def test_what_reaches_the_pods_is_a_new_revision(make_spec, change):
    assert choose(make_spec(**change), "i", []).name != choose(make_spec(), "i", []).name


def test_the_name_is_pinned_so_that_an_operator_upgrade_moves_nothing(make_spec):
    """If this fails, every pool of every user is rolled out by the upgrade: change RENDER_VERSION and
    this name together, on purpose."""
    assert revision.RENDER_VERSION == 1
    assert choose(make_spec(image="worker:1"), "", []).name == "c05ecadc51"


def test_the_default_image_is_filled_in_once_and_kept(make_spec):
    first = choose(make_spec(), "worker:1", [])
    assert read_spec(first).image == "worker:1"
    assert choose(make_spec(replicas=3), "worker:2", [first]) == first
    changed = choose(make_spec(args=["x"]), "worker:2", [first])
    assert read_spec(changed).image == "worker:2"


def test_naming_the_image_that_runs_already_moves_nothing(make_spec):
    first = choose(make_spec(), "worker:1", [])
    assert choose(make_spec(image="worker:1"), "worker:2", [first]).name == first.name


def test_going_back_makes_the_old_revision_the_newest(make_spec):
    a = choose(make_spec(image="a"), "", [])
    b = choose(make_spec(image="b"), "", [a])
    assert (a.number, b.number) == (1, 2)
    again = choose(make_spec(image="a"), "", [a, b])
    assert again == replace(a, number=3)
    assert choose(make_spec(image="a"), "", [again, b]) == again


def test_a_kept_revision_gives_back_the_spec_of_its_pods(make_spec):
    spec = make_spec(
        replicas=4,
        tensorParallelSize=4,
        ranksPerPod=2,
        image="a",
        placement={"topology": {}, "nodeSelector": {"a": "b"}},
        transfer={"backend": "tcp"},
        network={"ipFamily": "IPv6"},
        rollout={"maxSurge": "10%"},
        restart={"maxRestarts": 3},
    )
    kept = read_spec(choose(spec, "", []))
    assert kept.pods_per_group == 2
    assert replace(kept, replicas=4, rollout=spec.rollout, restart=spec.restart) == spec
    assert kept.replicas == 1, "scale fields stand at their defaults"


@pytest.mark.parametrize("text", ["{", '{"inventedLater": 1}', '{"model":{"name":5}}'])
def test_a_revision_that_cannot_be_read_is_none(text):
    assert read_spec(RevisionRecord("x", 1, "s", text)) is None


def test_the_spec_is_kept_as_canonical_json(make_spec):
    text = choose(make_spec(image="ä"), "", []).spec
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def test_unused_revisions_beyond_the_limit_are_superfluous_oldest_first():
    kept = [RevisionRecord(name, number, "", "") for number, name in enumerate("abcdef")]
    names = [record.name for record in superfluous(kept, frozenset("af"), 2)]
    assert names == ["c", "b"]
    assert superfluous(kept, frozenset("abcdef"), 0) == []
