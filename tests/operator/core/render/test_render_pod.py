"""What a pod template says: names, ports, devices, memory, probes, environment, placement."""

import json
from dataclasses import replace

import pytest
from tests.operator.core.render.render_pools import POOLS, pool_of, record_of, revision_of

from encodepool_operator.api import labels
from encodepool_operator.api.parse import parse_spec
from encodepool_operator.core.render import fill, pod, statefulset
from encodepool_worker.settings import BY_NAME, Settings

MODEL = {"name": "acme/vl"}


def container(spec, name="encode"):
    template = pod.template("demo", "rev", parse_spec({"model": MODEL} | spec))
    return next(item for item in template["spec"]["containers"] if item["name"] == name)


def pod_of(spec):
    return pod.template("demo", "rev", parse_spec({"model": MODEL} | spec))["spec"]


def started(name):
    pool = pool_of(name)
    revision = revision_of(pool)
    record = record_of(pool, revision.name)
    return statefulset.build(pool, 3, pool.spec.pods_per_group, record, revision), record


@pytest.mark.parametrize("name", POOLS)
def test_every_place_is_filled_and_every_quantity_is_text(name):
    built, _ = started(name)
    text = json.dumps(built)
    assert "$text" not in text
    assert "$number" not in text
    assert "{group}" not in text
    assert built["spec"]["template"]["metadata"]["labels"]["encodepool.dev/group"] == "3"


@pytest.mark.parametrize("name", [name for name in POOLS if POOLS[name].get("tensorParallelSize", 1) == 1])
def test_the_worker_takes_every_flag_and_reads_the_same_settings(name):
    built, record = started(name)
    engine = built["spec"]["template"]["spec"]["containers"][0]
    assert engine["command"] == ["encodepool-worker", "serve"]
    read = Settings.from_argv(engine["args"])
    spec = pool_of(name).spec
    assert (read.group, read.incarnation, read.pool) == (3, record.incarnation, name)
    ports = record.ports
    assert (read.grpc_port, read.bootstrap_port, read.metrics_port) == (
        ports.grpc,
        ports.bootstrap,
        ports.metrics,
    )
    assert (read.transfer_backend, read.transfer_protocol) == ("mooncake", spec.transfer.protocol)
    assert read.store_device_mib == spec.store.device_mib


@pytest.mark.parametrize("name", POOLS)
def test_every_flag_is_a_setting_of_the_worker_and_the_host_is_its_variable(name):
    built, _ = started(name)
    engine = built["spec"]["template"]["spec"]["containers"][0]
    flags = {arg.removeprefix("--").partition("=")[0].replace("-", "_") for arg in engine["args"]}
    assert flags <= set(BY_NAME)
    assert engine["env"][0]["name"] == BY_NAME["host"].variable


def test_the_image_decides_about_users_and_privileges():
    built = container({})
    assert "securityContext" not in built
    assert "securityContext" not in pod_of({})


@pytest.mark.parametrize(
    ("rdma", "locks"),
    [
        ({}, False),
        ({"ipcLock": True}, False),
        ({"resourceName": "rdma/ib"}, True),
        ({"resourceName": "rdma/ib", "ipcLock": False}, False),
    ],
)
def test_memory_is_locked_only_when_rdma_asks_for_it(rdma, locks):
    context = container({"rdma": rdma}).get("securityContext")
    assert context == ({"capabilities": {"add": ["IPC_LOCK"]}} if locks else None)


def test_devices_are_counted_per_pod_and_stand_over_what_the_user_asks_for():
    built = container(
        {
            "tensorParallelSize": 8,
            "ranksPerPod": 4,
            "accelerator": {"resourceName": "example.com/gpu", "perRank": 2},
            "resources": {"limits": {"example.com/gpu": 1, "memory": "1Gi"}},
        }
    )
    assert built["resources"] == {
        "limits": {"example.com/gpu": "8", "memory": "1Gi"},
        "requests": {"example.com/gpu": "8"},
    }
    assert "resources" not in container({"accelerator": {"perRank": 0}})


def test_probes_follow_the_times_of_the_contract():
    built = container({"restart": {"startupDeadlineSeconds": 61}})
    startup, ready, alive = built["startupProbe"], built["readinessProbe"], built["livenessProbe"]
    for probe in (startup, ready, alive):
        assert (probe["periodSeconds"], probe["timeoutSeconds"]) == (2, 1)
        assert probe["httpGet"]["port"] == "metrics"
    assert [probe["httpGet"]["path"] for probe in (startup, ready, alive)] == ["/livez", "/readyz", "/livez"]
    assert startup["failureThreshold"] * 2 >= 61
    assert ready["failureThreshold"] == alive["failureThreshold"] == 3
    assert startup["terminationGracePeriodSeconds"] == alive["terminationGracePeriodSeconds"] == 5
    assert "terminationGracePeriodSeconds" not in ready, "the API refuses it"


def test_the_grace_period_leaves_time_for_a_write_that_times_out_as_the_drain_ends():
    """Notice, drain, transfer timeout, twice that (10 s at least) of rest, and 15 s."""

    def grace_s(**transfer):
        pod = pod_of({"drain": {"timeoutSeconds": 100}, "transfer": transfer})
        return pod["terminationGracePeriodSeconds"]

    assert grace_s() == 5 + 100 + 5 + 10 + 15
    assert grace_s(timeoutSeconds=20) == 5 + 100 + 20 + 40 + 15


def test_ports_of_the_block_are_named_and_on_a_host_network_host_ports():
    built, record = started("rdma")
    template = built["spec"]["template"]["spec"]
    assert template["hostNetwork"] is True
    assert template["dnsPolicy"] == "ClusterFirstWithHostNet"
    ports = template["containers"][0]["ports"]
    assert {port["name"]: port["hostPort"] for port in ports} == {
        "grpc": record.ports.grpc,
        "bootstrap": record.ports.bootstrap,
        "dist-init": record.ports.dist_init,
        "metrics": record.ports.metrics,
    }
    assert all(port["containerPort"] == port["hostPort"] for port in ports)
    tiny, _ = started("tiny")
    assert not any("hostPort" in port for port in tiny["spec"]["template"]["spec"]["containers"][0]["ports"])


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ({}, "2Gi"),
        ({"tensorParallelSize": 8}, "9Gi"),
        ({"tensorParallelSize": 8, "ranksPerPod": 2}, "3Gi"),
        ({"sharedMemory": "512Mi"}, "512Mi"),
        ({"sharedMemory": "0"}, None),
        ({"sharedMemory": "0Gi"}, None),
    ],
)
def test_shared_memory_is_asked_for_or_computed(spec, size):
    volumes = {volume["name"]: volume for volume in pod_of(spec)["volumes"]}
    mounts = [mount["mountPath"] for mount in container(spec)["volumeMounts"]]
    if size is None:
        assert "encodepool-shm" not in volumes
        assert "/dev/shm" not in mounts
    else:
        assert volumes["encodepool-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}
        assert "/dev/shm" in mounts


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ({"name": "a"}, {"emptyDir": {}}),
        ({"path": "/models/a"}, None),
        ({"path": "/models/a", "cache": {"emptyDir": {}}}, {"emptyDir": {}}),
        ({"name": "a", "cache": {"emptyDir": {"sizeLimit": "9Gi"}}}, {"emptyDir": {"sizeLimit": "9Gi"}}),
        (
            {"name": "a", "cache": {"hostPath": {"path": "/d"}}},
            {"hostPath": {"path": "/d", "type": "DirectoryOrCreate"}},
        ),
        (
            {"name": "a", "cache": {"pvc": {"claimName": "c", "readOnly": False}}},
            {"persistentVolumeClaim": {"claimName": "c"}},
        ),
    ],
)
def test_a_model_cache_is_mounted_at_models_and_never_hides_a_folder_of_the_image(model, source):
    volumes = {volume.pop("name"): volume for volume in pod_of({"model": model})["volumes"]}
    assert volumes.get("encodepool-models") == source
    names = {variable["name"] for variable in container({"model": model})["env"]}
    assert ("HF_HOME" in names) == (source is not None)


def test_a_read_only_claim_is_mounted_read_only_and_nothing_is_fetched():
    spec = {"model": MODEL | {"cache": {"pvc": {"claimName": "c", "subPath": "x"}}}}
    built = container(spec)
    assert built["volumeMounts"][-1] == {
        "name": "encodepool-models",
        "mountPath": "/models",
        "subPath": "x",
        "readOnly": True,
    }
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in built["env"]


def test_our_variables_come_first_and_defaults_give_way_to_the_users():
    spec = {
        "model": MODEL | {"tokenSecretRef": {"name": "s", "key": "k"}},
        "env": [{"name": "HOME", "value": "/h"}, {"name": "HF_TOKEN", "value": "mine"}],
    }
    env = container(spec)["env"]
    assert [variable["name"] for variable in env] == ["ENCODEPOOL_HOST", "HF_TOKEN", "HF_HOME", "HOME"]
    assert env[1]["valueFrom"] == {"secretKeyRef": {"name": "s", "key": "k"}}
    assert env[3]["value"] == "/h"


def test_threads_follow_the_limit_of_the_pod():
    env = {v["name"]: v for v in container({"resources": {"limits": {"cpu": 2}}})["env"]}
    assert env["OMP_NUM_THREADS"]["valueFrom"] == {"resourceFieldRef": {"resource": "limits.cpu"}}


@pytest.mark.parametrize(("family", "field"), [(None, "status.podIP"), ("IPv6", "status.podIPs")])
def test_the_host_is_the_pods_address_of_the_family(family, field):
    env = container({"network": {"ipFamily": family}})["env"]
    assert env[0] == {"name": "ENCODEPOOL_HOST", "valueFrom": {"fieldRef": {"fieldPath": field}}}


def test_the_rank_of_a_pod_comes_from_its_index_only_where_a_group_has_several():
    env = {v["name"]: v for v in container({"tensorParallelSize": 4, "ranksPerPod": 2})["env"]}
    path = env["ENCODEPOOL_POD_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == f"metadata.labels['{labels.POD_INDEX}']"
    assert env["ENCODEPOOL_DIST_INIT_HOST"]["value"] == {"$text": "demo-{group}-0.demo-peers"}
    assert "ENCODEPOOL_POD_INDEX" not in {v["name"] for v in container({})["env"]}


def test_text_of_the_user_is_neither_expanded_nor_filled_in():
    built = container({"model": {"path": "/m/$(HOME)/{group}"}, "args": ["--seed=$(SEED)"]})
    assert "--model=/m/$$(HOME)/{group}" in built["args"]
    assert built["args"][-1] == "--seed=$(SEED)", "the user's own arguments may refer to variables"


@pytest.mark.parametrize(
    "odd", [{"$number": "x"}, {"$number": 5}, {"$text": 5}, {"$text": "a", "b": "c"}, {}]
)
def test_what_only_looks_like_a_place_is_left_as_it_is(odd):
    assert fill.filled({"labels": odd}, {"group": 1}) == {"labels": odd}


def test_service_links_cannot_set_a_setting():
    assert pod_of({})["enableServiceLinks"] is False


@pytest.mark.parametrize("mode", ["Required", "Preferred"])
def test_topology_keeps_a_group_together_and_others_away(mode):
    rules = pod_of(
        {
            "tensorParallelSize": 2,
            "ranksPerPod": 1,
            "placement": {"topology": {"key": "rack", "mode": mode, "exclusive": True}},
        }
    )["affinity"]
    when = f"{mode.lower()}DuringSchedulingIgnoredDuringExecution"
    (together,) = rules["podAffinity"][when]
    apart = rules["podAntiAffinity"][when]
    if mode == "Preferred":
        together, apart = together["podAffinityTerm"], [item["podAffinityTerm"] for item in apart]
    group = {"$text": "{group}"}
    assert together == {
        "labelSelector": {"matchLabels": {"encodepool.dev/pool": "demo", "encodepool.dev/group": group}},
        "topologyKey": "rack",
    }
    assert [item["labelSelector"]["matchExpressions"] for item in apart] == [
        [
            {"key": "encodepool.dev/pool", "operator": "In", "values": ["demo"]},
            {"key": "encodepool.dev/group", "operator": "NotIn", "values": [group]},
        ],
        [
            {"key": "encodepool.dev/pool", "operator": "Exists"},
            {"key": "encodepool.dev/pool", "operator": "NotIn", "values": ["demo"]},
        ],
    ]


def test_without_topology_there_are_no_rules():
    assert "affinity" not in pod_of({})
    assert "affinity" not in pod_of({"placement": {"topology": {}}}), "one pod is always together"


def test_a_template_depends_on_nothing_but_its_revision():
    pool = pool_of("rdma")
    other = replace(pool, spec=replace(pool.spec, replicas=9, revision_history_limit=1))
    assert revision_of(pool) == revision_of(other)
