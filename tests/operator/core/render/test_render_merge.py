"""The user's pod template under ours: what stands, list by list."""

import pytest

from encodepool_operator.api.parse import InvalidPool, parse_spec
from encodepool_operator.core.render import pod
from encodepool_operator.core.render.merge import merge


@pytest.mark.parametrize(
    ("under", "over", "merged"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
        ({"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"y": 2, "x": 1}}),
        ({"a": None, "b": {"c": None}}, {"d": 1}, {"d": 1, "b": {}}),
        ({"args": ["x"]}, {"args": ["y"]}, {"args": ["y"]}),
        ({"a": "text"}, {"a": ["list"]}, {"a": ["list"]}),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "C"}, {"name": "A", "valueFrom": {}}]},
            {"env": [{"name": "C"}, {"name": "A", "valueFrom": {}}, {"name": "B", "value": "2"}]},
        ),
        (
            {"containers": [{"name": "x", "image": "i"}, {"name": "y"}]},
            {"containers": [{"name": "x", "args": ["a"]}]},
            {"containers": [{"name": "x", "args": ["a"], "image": "i"}, {"name": "y"}]},
        ),
        (
            {"volumeMounts": [{"mountPath": "/a", "name": "u"}, {"mountPath": "/b", "name": "u"}]},
            {"volumeMounts": [{"mountPath": "/a", "name": "o"}]},
            {"volumeMounts": [{"mountPath": "/a", "name": "o"}, {"mountPath": "/b", "name": "u"}]},
        ),
        (
            {"ports": [{"containerPort": 5}, {"name": "grpc", "containerPort": 6}]},
            {"ports": [{"name": "grpc", "containerPort": {"$number": "grpc"}, "protocol": "TCP"}]},
            {
                "ports": [
                    {"name": "grpc", "containerPort": {"$number": "grpc"}, "protocol": "TCP"},
                    {"containerPort": 5},
                ]
            },
        ),
        (
            {"livenessProbe": {"exec": {}}},
            {"livenessProbe": {"httpGet": {}}},
            {"livenessProbe": {"httpGet": {}}},
        ),
        ({"tolerations": [{"key": "a"}, {"key": "b"}]}, {"tolerations": [{"key": "a"}]}, None),
    ],
)
def test_ours_stands_and_theirs_is_added(under, over, merged):
    before = repr((under, over))
    expected = {"tolerations": [{"key": "a"}, {"key": "b"}]} if merged is None else merged
    assert merge(under, over) == expected
    assert repr((under, over)) == before, "neither is changed"


def template(**given):
    return pod.template("demo", "rev", parse_spec({"model": {"name": "m"}, "podTemplate": given}))


def test_labels_and_notes_of_the_user_are_kept_beside_ours():
    built = template(
        metadata={
            "labels": {"team": "x", "app.kubernetes.io/name": "mine"},
            "annotations": {"note": "y"},
        }
    )["metadata"]
    assert built["labels"]["team"] == "x"
    assert built["labels"]["app.kubernetes.io/name"] == "encodepool"
    assert built["annotations"]["note"] == "y"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"metadata": {"labels": {"encodepool.dev/routable": "true"}}}, "spec.podTemplate.metadata.labels"),
        ({"metadata": {"labels": {"llm-d.ai/role": "encode"}}}, "spec.podTemplate.metadata.labels"),
        (
            {"metadata": {"annotations": {"sglang.ai/bootstrap-port": "1"}}},
            "spec.podTemplate.metadata.annotations",
        ),
        ({"spec": {"containers": {"name": "encode"}}}, "spec.podTemplate.spec.containers"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.podTemplate.spec.volumes"),
        ({"spec": {"containers": [{"name": "a", "env": ["x"]}]}}, "spec.podTemplate.spec.containers[0].env"),
    ],
)
def test_a_template_that_cannot_be_merged_is_refused_at_its_place(given, path):
    with pytest.raises(InvalidPool) as caught:
        template(**given)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_user_cannot_take_over_what_a_group_rests_on():
    built = template(
        spec={
            "hostNetwork": True,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "encode",
                    "image": "mine",
                    "command": ["sh"],
                    "args": ["-c"],
                    "lifecycle": {"preStop": {"exec": {}}, "postStart": {"exec": {}}},
                    "tty": True,
                }
            ],
        }
    )["spec"]
    assert (built["hostNetwork"], built["restartPolicy"]) == (False, "Always")
    assert built["terminationGracePeriodSeconds"] == 95
    (engine,) = built["containers"]
    assert engine["command"] == ["encodepool-worker", "serve"]
    assert engine["image"] == ""
    assert engine["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}, "postStart": {"exec": {}}}
    assert engine["tty"] is True


def test_rules_of_affinity_all_hold_together():
    terms = {
        where: {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": where}]}
        for where in ("podAffinity", "podAntiAffinity")
    }
    spec = parse_spec(
        {
            "model": {"name": "m"},
            "placement": {"affinity": terms, "topology": {"exclusive": True}},
            "podTemplate": {"spec": {"affinity": {"podAntiAffinity": terms["podAntiAffinity"]}}},
        }
    )
    rules = pod.template("demo", "rev", spec)["spec"]["affinity"]
    assert len(rules["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]) == 1
    assert len(rules["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]) == 4


def test_alternatives_of_nodes_are_never_widened():
    """Terms of a required nodeAffinity are alternatives: two lists together would allow more nodes."""

    def nodes(name):
        terms = [{"matchExpressions": [{"key": name, "operator": "Exists"}]}]
        return {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        }

    spec = parse_spec(
        {
            "model": {"name": "m"},
            "placement": {"affinity": nodes("placed")},
            "podTemplate": {"spec": {"affinity": nodes("template")}},
        }
    )
    assert pod.template("demo", "rev", spec)["spec"]["affinity"] == nodes("placed")
