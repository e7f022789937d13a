"""Rules that need more than one field, and names."""

import re

import pytest
from tests.operator.api import rule_tables

from encodepool_operator.api import labels, names
from encodepool_operator.api.parse import InvalidPool, parse_pool
from encodepool_operator.api.rules import RULES, refused_changes

MODEL = {"name": "m"}


@pytest.mark.parametrize(("spec", "problem"), rule_tables.BROKEN)
def test_a_broken_rule_is_told_at_its_field(manifest, spec, problem):
    with pytest.raises(InvalidPool) as caught:
        parse_pool(manifest(**spec))
    assert [str(found) for found in caught.value.problems] == [problem]


def test_every_rule_is_in_the_table():
    told = [problem for _, problem in rule_tables.BROKEN]
    for rule in RULES:
        place = re.escape(rule.path).replace(r"\*", "[^ ]+")
        assert any(re.match(f"{place}: {re.escape(rule.message)}", text) for text in told), rule.message


@pytest.mark.parametrize("spec", rule_tables.CLOSE)
def test_what_looks_close_to_a_rule_may_pass(manifest, spec):
    parse_pool(manifest(**spec))


def test_the_shape_of_a_group_cannot_be_changed(manifest):
    old = parse_pool(manifest(tensorParallelSize=4)).spec
    new = parse_pool(manifest(tensorParallelSize=4, ranksPerPod=2, replicas=9)).spec
    assert refused_changes(old, old) == []
    assert refused_changes(old, new) == [
        ("spec.ranksPerPod", "cannot be changed (from 4 to 2); make another pool")
    ]
    fewer = parse_pool(manifest(tensorParallelSize=2)).spec  # says nothing of ranksPerPod, which follows
    assert [path for path, _ in refused_changes(old, fewer)] == ["spec.tensorParallelSize"]
    assert [path for path, _ in refused_changes(new, fewer)] == ["spec.tensorParallelSize"]


@pytest.mark.parametrize("name", ["a", "demo", "a-1", "x" * 40])
def test_good_names(name):
    assert names.name_problem(name) is None


@pytest.mark.parametrize("name", ["", "A", "1a", "-a", "a-", "a_b", "a.b", "x" * 41, "a\n"])
def test_bad_names(name):
    assert names.name_problem(name)


def test_the_longest_names_still_fit_into_a_label():
    assert len(names.pod("x" * names.NAME_LIMIT, 499, 63)) <= 63
    assert len(names.revision_object("x" * names.NAME_LIMIT, "0123456789")) <= 63


def test_names_of_children():
    assert names.group_object("demo", 3) == "demo-3"
    assert names.peers_service("demo") == "demo-peers"
    assert names.encode_service("demo") == "demo-encode"
    assert names.endpoints_config_map("demo") == "demo-endpoints"
    assert names.endpoint_id("epd", "demo", 2, 14) == "epd/demo/2-14"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"model": {"name": "acme/vl"}, "publish": {"servedModelName": "vl"}}, "vl"),
        ({"model": {"name": "acme/vl"}}, "acme/vl"),
        ({"model": {"path": "/models/tiny/"}}, "tiny"),
        ({"model": {"path": "tiny"}}, "tiny"),
    ],
)
def test_the_served_name_is_chosen_or_the_hub_name_or_the_folder(manifest, spec, name):
    assert names.served_model_name(parse_pool(manifest(**spec)).spec) == name


def test_labels_of_a_child_name_its_pool_and_group():
    assert labels.child_labels("demo", 3) == {
        "app.kubernetes.io/name": "encodepool",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": "encode",
        "app.kubernetes.io/managed-by": "encodepool-operator",
        "encodepool.dev/pool": "demo",
        "encodepool.dev/group": "3",
    }
    assert "encodepool.dev/group" not in labels.child_labels("demo")
