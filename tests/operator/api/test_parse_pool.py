"""From a manifest to a pool: defaults, and every problem at once with its field path."""

import pytest

from encodepool_operator.api.parse import InvalidPool, parse_pool, parse_spec
from encodepool_operator.api.types import IntOrPercent, PortRange


def problems_of(document):
    with pytest.raises(InvalidPool) as caught:
        parse_pool(document)
    return [str(problem) for problem in caught.value.problems]


def test_a_manifest_needs_only_a_name_and_a_model(manifest):
    pool = parse_pool(manifest())
    assert (pool.metadata.name, pool.metadata.namespace, pool.metadata.uid) == ("demo", "default", "")
    spec = pool.spec
    assert (spec.replicas, spec.tensor_parallel_size, spec.ranks_per_pod, spec.pods_per_group) == (1, 1, 1, 1)
    assert (spec.store.device_mib, spec.store.host_mib) == (4096, 0)
    assert spec.network.port_range == PortRange(10000, 20000)
    assert (spec.transfer.backend, spec.transfer.protocol) == ("mooncake", "rdma")
    assert (spec.drain.timeout_seconds, spec.drain.settle_seconds) == (60, 10)
    assert (spec.rollout.max_unavailable, spec.rollout.max_surge) == (None, None)
    assert spec.restart.max_restarts is None
    assert spec.placement.topology is None
    assert spec.image == ""


def test_what_is_given_is_taken(manifest):
    pool = parse_pool(
        manifest(
            replicas=4,
            tensorParallelSize=4,
            ranksPerPod=2,
            rollout={"maxUnavailable": "25%", "maxSurge": 2},
            transfer={"backend": "tcp"},
            placement={"topology": {"exclusive": True}, "tolerations": [{"key": "gpu"}]},
            model={"path": "/models/vl", "cache": {"pvc": {"claimName": "models"}}},
            env=[{"name": "A", "value": "1"}],
            args=["--log-level", "debug"],
            resources={"limits": {"cpu": 4}},
            podTemplate={"metadata": {"labels": {"team": "x"}}},
        )
        | {
            "metadata": {
                "name": "demo",
                "namespace": "epd",
                "uid": "u",
                "generation": 3,
                "annotations": {"a": "b"},
                "labels": None,
                "resourceVersion": "77",
                "managedFields": [],
            },
            "status": {"replicas": 1},
        }
    )
    assert (pool.metadata.uid, pool.metadata.generation, pool.metadata.annotations) == ("u", 3, {"a": "b"})
    spec = pool.spec
    assert (spec.pods_per_group, spec.transfer.protocol) == (2, "tcp")
    assert (spec.rollout.max_unavailable, spec.rollout.max_surge) == (
        IntOrPercent(25, percent=True),
        IntOrPercent(2),
    )
    assert spec.placement.topology.key == "kubernetes.io/hostname"
    assert spec.model.cache.pvc.read_only is True
    assert spec.args == ("--log-level", "debug")
    assert spec.pod_template == {"metadata": {"labels": {"team": "x"}}}


def test_a_key_without_a_value_is_left_out(manifest):
    assert parse_pool(manifest(replicas=None, rollout=None, image=None)).spec.replicas == 1


def test_every_problem_is_reported_at_once_with_its_path(manifest):
    document = manifest(
        replica=2,
        model={"nam": "x", "cache": {"pvc": {}}},
        rollout={"maxUnavailable": "120%"},
        network={"portRange": {"start": 29000}},
        env=[{"name": 3}, {"name": "ENCODEPOOL_X"}, 4],
    )
    document["metadata"]["name"] = "Demo"
    document["kind"] = "Pool"
    assert problems_of(document) == [
        "kind: must be EncodePool, is 'Pool'",
        "metadata.name: must be lower case letters, digits and '-', starting with a letter, is 'Demo'",
        "spec.replica: unknown field; did you mean replicas?",
        "spec.model.nam: unknown field; did you mean name?",
        "spec.model.cache.pvc.claimName: is required",
        "spec.rollout.maxUnavailable: must be a number of groups or a share from 0% to 100%, is '120%'",
        "spec.env[2]: must be an object, is 4",
        "spec.network.portRange: must stay out of 30000-32767 (NodePorts), is 29000-48999",
        "spec.network.portRange: must stay out of 32768-60999 (outgoing connections), is 29000-48999",
        "spec.env[0].name: is required",
        "spec.env[1].name: must not start with ENCODEPOOL_: those are the operator's, is 'ENCODEPOOL_X'",
    ]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"replicas": "3"}, "spec.replicas: must be an integer, is '3'"),
        ({"replicas": 3.0}, "spec.replicas: must be an integer, is 3.0"),
        ({"replicas": True}, "spec.replicas: must be an integer, is true"),
        ({"replicas": 501}, "spec.replicas: must be between 0 and 500, is 501"),
        ({"replicas": -1}, "spec.replicas: must be between 0 and 500, is -1"),
        ({"replicas": [1]}, "spec.replicas: must be an integer, is a list"),
        (
            {"network": {"hostNetwork": "yes"}},
            "spec.network.hostNetwork: must be true or false, is 'yes'",
        ),
        ({"image": 5}, "spec.image: must be a string, is 5"),
        ({"image": "x" * 1025}, "spec.image: must have 0 to 1024 characters, has 1025"),
        (
            {"model": {"name": "m", "dtype": "int8"}},
            "spec.model.dtype: must be one of auto, float16, bfloat16, float32, is 'int8'",
        ),
        ({"imagePullPolicy": ""}, "spec.imagePullPolicy: must be one of Always, IfNotPresent, Never, is ''"),
        ({"sharedMemory": "8 GB"}, "spec.sharedMemory: must match ^[0-9]+"),
        ({"args": "x"}, "spec.args: must be a list, is 'x'"),
        ({"args": ["x"] * 257}, "spec.args: must have at most 256 items, has 257"),
        ({"args": ["a", 2]}, "spec.args[1]: must be a string, is 2"),
        ({"drain": 5}, "spec.drain: must be an object, is 5"),
        (
            {"drain": {"settleSecond": 5}},
            "spec.drain.settleSecond: unknown field; did you mean settleSeconds?",
        ),
        ({"store": {"DEVICEMIB": 5}}, "spec.store.DEVICEMIB: unknown field; did you mean deviceMiB?"),
        ({"zzz": 1}, "spec.zzz: unknown field"),
        ({"podTemplate": []}, "spec.podTemplate: must be an object, is a list"),
        (
            {"placement": {"nodeSelector": {"a": 1}}},
            "spec.placement.nodeSelector.a: must be a string, is 1",
        ),
        ({"placement": {"nodeSelector": 1}}, "spec.placement.nodeSelector: must be an object, is 1"),
        (
            {"placement": {"nodeSelector": {str(i): "" for i in range(65)}}},
            "spec.placement.nodeSelector: must have at most 64 keys, has 65",
        ),
        ({"rollout": {"maxSurge": -1}}, "spec.rollout.maxSurge: must be a number of groups or a share"),
        ({"rollout": {"maxSurge": True}}, "spec.rollout.maxSurge: must be a number of groups or a share"),
        ({"rollout": {"maxSurge": "05%"}}, "spec.rollout.maxSurge: must be a number of groups or a share"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_required(manifest, spec, problem):
    (found,) = problems_of(manifest(**spec))
    assert found.startswith(problem)
    assert len(found) < 200


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"apiVersion": "encodepool.dev/v1"}, "apiVersion: must be encodepool.dev/v1alpha1"),
        ({"spce": {}}, "spce: unknown field; did you mean spec?"),
        ({"metadata": None}, "metadata: must be an object, is empty"),
        ({"metadata": {}}, "metadata.name: is required"),
        ({"metadata": {"name": 5}}, "metadata.name: must be a string, is 5"),
        ({"metadata": {"name": "x" * 41}}, "metadata.name: must be at most 40 characters, has 41"),
        ({"metadata": {"name": "0a"}}, "metadata.name: must be lower case letters"),
        ({"metadata": {"name": "a", "namespace": 5}}, "metadata.namespace: must be a string, is 5"),
        ({"metadata": {"name": "a", "generation": "1"}}, "metadata.generation: must be an integer"),
        ({"metadata": {"name": "a", "annotations": {"x": 1}}}, "metadata.annotations.x: must be a string"),
        ({"spec": 3}, "spec: must be an object, is 3"),
        ({"spec": None}, "spec: must be an object, is empty"),
    ],
)
def test_what_is_wrong_around_the_spec_is_told(manifest, change, problem):
    (found,) = problems_of(manifest() | change)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("document", "kind"), [(None, "empty"), ([], "a list"), ("x", "a string"), (3, "a number")]
)
def test_a_document_that_is_no_object_is_refused(document, kind):
    assert problems_of(document) == [f"(document): must be an object, is {kind}"]


@pytest.mark.parametrize("value", [True, (1,), object()])
def test_any_yaml_value_is_named_in_words(value):
    assert problems_of(value)[0].startswith("(document): must be an object, is a")


def test_a_spec_alone_has_the_same_checks():
    assert parse_spec({"model": {"path": "/m"}}).model.path == "/m"
    with pytest.raises(InvalidPool, match=r"spec\.model: needs name"):
        parse_spec({})


@pytest.mark.parametrize(
    ("value", "total", "up", "down"),
    [
        (IntOrPercent(3), 10, 3, 3),
        (IntOrPercent(25, percent=True), 10, 3, 2),
        (IntOrPercent(100, percent=True), 7, 7, 7),
        (IntOrPercent(0, percent=True), 7, 0, 0),
    ],
)
def test_a_share_is_rounded_as_told(value, total, up, down):
    assert (value.of(total, round_up=True), value.of(total, round_up=False)) == (up, down)
