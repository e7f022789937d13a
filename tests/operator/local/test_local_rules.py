"""What a manifest becomes on one machine: flags, variables, devices, notes and refusals."""

import os
from dataclasses import replace
from types import MappingProxyType

import pytest
import yaml

from encodepool_operator.core.endpoints import documents
from encodepool_operator.core.record import PortBlock
from encodepool_operator.local import up as up_module
from encodepool_operator.local.command import visible_devices, worker_environment, worker_flags
from encodepool_operator.local.errors import LocalError, ManifestError
from encodepool_operator.local.fit import MODEL_TYPES, check_fit
from encodepool_operator.local.manifest import load, load_kept
from encodepool_operator.local.publish import empty_documents, read_documents, write_documents
from encodepool_operator.local.statedir import StateDir, StateDirBusy, write_atomic
from encodepool_worker.towers.spec import FAMILIES

PORTS = PortBlock(20000, 20001, 20002, 20003)


@pytest.fixture
def manifest(tmp_path):
    """``manifest(key=value, ...)``: a loaded manifest with these keys of ``spec``."""

    def make(**spec):
        config = tmp_path / "models" / "tiny" / "config.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        if not config.exists():
            config.write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
        path = tmp_path / "pool.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "encodepool.dev/v1alpha1",
                    "kind": "EncodePool",
                    "metadata": {"name": "pool"},
                    "spec": {"model": {"path": "models/tiny"}, **spec},
                }
            )
        )
        return load(path)

    return make


def flags(spec, tmp_path, pod=0):
    state_dir = StateDir.at(tmp_path / "state")
    words = worker_flags(spec, pool="pool", group=1, incarnation=7, pod=pod, ports=PORTS, state_dir=state_dir)
    assert all(word.startswith("--") for word in words[::2])
    return dict(zip(words[::2], words[1::2], strict=True))


def test_a_relative_model_path_is_taken_from_the_manifests_folder(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    loaded = manifest()
    assert loaded.pool.spec.model.path == str(tmp_path / "models" / "tiny")

    kept = tmp_path / "elsewhere" / "pool.yaml"
    kept.parent.mkdir()
    write_atomic(kept, loaded.text)
    assert load_kept(kept).pool == loaded.pool


def test_the_worker_is_told_everything_the_manifest_says(manifest, tmp_path):
    spec = manifest(
        batching={"maxTokensPerBatch": 100000, "maxItemsPerBatch": 7, "maxQueueSeconds": 9},
        store={"deviceMiB": 5, "hostMiB": 6},
        transfer={"backend": "mooncake", "protocol": "rdma", "ibDevices": ["a", "b"], "timeoutSeconds": 8},
        drain={"timeoutSeconds": 0},
        publish={"servedModelName": "org/model"},
        args=["--log-level", "debug"],
    ).pool.spec
    told = flags(spec, tmp_path)
    assert told == {
        "--model": str(tmp_path / "models" / "tiny"),
        "--dtype": "auto",
        "--served-model-name": "org/model",
        "--device": "auto",
        "--host": "127.0.0.1",
        "--bootstrap-port": "20000",
        "--grpc-port": "20001",
        "--dist-init-port": "20002",
        "--metrics-port": "20003",
        "--tensor-parallel-size": "1",
        "--max-tokens-per-batch": "100000",
        "--max-items-per-batch": "7",
        "--max-queue-seconds": "9",
        "--max-queue-tokens": "100000",
        "--store-device-mib": "5",
        "--store-host-mib": "6",
        "--transfer-backend": "mooncake",
        "--transfer-protocol": "rdma",
        "--ib-devices": "a,b",
        "--transfer-timeout-seconds": "8",
        "--quarantine-seconds": "16",
        "--drain-seconds": "0.1",
        "--pool": "pool",
        "--group": "1",
        "--incarnation": "7",
        "--state-dir": str(tmp_path / "state"),
        "--termination-log": str(tmp_path / "state" / "run" / "1.7.termination"),
        "--log-level": "debug",
    }


def test_without_devices_a_group_runs_on_the_cpu_with_its_share_of_cores(manifest, tmp_path):
    spec = manifest(accelerator={"perRank": 0}).pool.spec
    assert flags(spec, tmp_path)["--device"] == "cpu"
    env = worker_environment(
        spec, {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}, devices=[], cpus=0, temp_dir=tmp_path
    )
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["TMPDIR"] == str(tmp_path)
    assert env["PATH"] == "/bin"


def test_our_variables_come_from_the_manifest_alone_and_its_env_comes_last(manifest, tmp_path):
    spec = manifest(env=[{"name": "OMP_NUM_THREADS", "value": "3"}, {"name": "A", "value": "b"}]).pool.spec
    env = worker_environment(
        spec, {"ENCODEPOOL_LOG_LEVEL": "debug"}, devices=["2", "5"], cpus=8, temp_dir=tmp_path
    )
    assert "ENCODEPOOL_LOG_LEVEL" not in env
    assert (env["OMP_NUM_THREADS"], env["A"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "b", "2,5")


def test_devices_are_those_the_caller_may_see():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-1f"}) == ("3", "GPU-1f")


def test_a_pool_that_needs_more_devices_than_there_are_is_refused(manifest):
    spec = manifest(accelerator={"perRank": 2}, replicas=2, transfer={"backend": "tcp"}).pool.spec
    check_fit(spec, devices=["0", "1", "2", "3"], environ={})
    with pytest.raises(ManifestError, match=r"spec\.accelerator\.perRank: 2 groups need 4 GPUs.*shows 3"):
        check_fit(spec, devices=["0", "1", "2"], environ={})
    one = manifest(replicas=1, transfer={"backend": "tcp"}).pool.spec
    with pytest.raises(ManifestError, match=r"1 group needs 1 GPU, this machine shows 0"):
        check_fit(one, devices=(), environ={})


def test_what_no_start_could_change_is_refused_before_the_first_with_the_field(manifest, tmp_path):
    def problems(*, environ=MappingProxyType({}), rdma_devices=tmp_path / "none", **spec):
        loaded = manifest(accelerator={"perRank": 0}, **spec).pool.spec
        try:
            check_fit(loaded, devices=(), environ=environ, rdma_devices=rdma_devices)
        except ManifestError as error:
            return [str(error), *error.details]
        return []

    tcp = {"backend": "tcp"}
    assert problems(transfer=tcp, tensorParallelSize=3) == []  # nothing is known of its heads
    (tmp_path / "models" / "tiny" / "config.json").write_text(
        '{"model_type": "qwen3_vl", "vision_config": {"num_heads": 16}}'
    )
    assert problems(transfer=tcp, tensorParallelSize=8) == []
    heads, rdma = problems(tensorParallelSize=3)
    assert heads == (
        "spec.tensorParallelSize: 3 ranks cannot share the 16 heads of the model's vision tower evenly; "
        "choose one of 1, 2, 4, 8, 16"
    )
    assert rdma.startswith("spec.transfer.protocol: rdma (which mooncake takes if nothing is said)")
    assert rdma.endswith("none is missing); set protocol to tcp")
    assert problems(rdma_devices=tmp_path) == []
    assert problems(environ={"MC_FORCE_TCP": "1"}) == []
    assert problems(env=[{"name": "MC_FORCE_TCP", "value": "1"}]) == []
    source = {"fieldRef": {"fieldPath": "status.hostIP"}}  # of a cluster; here it is not set
    assert problems(env=[{"name": "MC_FORCE_TCP", "valueFrom": source}]) == [rdma]
    assert problems(args=["--transfer-protocol=tcp"]) == problems(replicas=0) == []
    assert problems(environ=None) == []

    def ports(size, **spec):
        return problems(transfer=tcp, network={"portRange": {"start": 20000, "size": size}}, **spec)

    assert ports(12, replicas=3) == ports(4, replicas=1) == []
    (few,) = ports(11, replicas=3)
    assert few.startswith("spec.network.portRange.size: must be at least 12 on one machine, is 11: 4 ports")


def test_of_a_model_on_the_hub_nothing_is_looked_up_where_the_command_runs(manifest, tmp_path, monkeypatch):
    """Its name is no folder, and the current one may be a checkpoint of another model."""
    monkeypatch.chdir(tmp_path)
    for text in ('{"vision_config": {"num_heads": 16}}', "no JSON"):
        (tmp_path / "config.json").write_text(text)
        loaded = manifest(
            model={"name": "org/model"},
            accelerator={"perRank": 0},
            transfer={"backend": "tcp"},
            tensorParallelSize=3,
        )
        check_fit(loaded.pool.spec, devices=(), environ={}, replaces=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist; name the folder of a checkpoint"),
        ('{"model_type": ', "cannot be read as JSON (Expecting value"),
        ("[]", "has model_type None; choose a model with one of qwen2_5_vl, qwen3_vl, qwen3_vl_moe"),
        ('{"model_type": "llama"}', "has model_type 'llama'"),
        ('{"model_type": "qwen3_vl"}', "has no vision_config; name the folder of the whole model"),
    ],
)
def test_a_folder_that_our_worker_would_not_load_replaces_no_groups_that_run(manifest, tmp_path, text, says):
    spec = manifest(accelerator={"perRank": 0}, transfer={"backend": "tcp"}).pool.spec
    file = tmp_path / "models" / "tiny" / "config.json"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(ManifestError) as refused:
        check_fit(spec, devices=(), environ={}, replaces=True)
    assert f"spec.model.path: {file} {says}" in str(refused.value)
    # In a first start the worker tells it, and without groups nobody loads it.
    check_fit(spec, devices=(), environ={})
    check_fit(replace(spec, replicas=0), devices=(), environ={}, replaces=True)


def test_the_models_that_are_let_through_are_those_of_our_worker():
    assert set(MODEL_TYPES) == set(FAMILIES)


def test_a_worker_of_the_users_own_and_a_running_controller_say_for_themselves_whether_they_take_rdma(
    manifest, tmp_path, monkeypatch
):
    asked = []

    def check(spec, *, devices, environ, replaces):
        asked.append(environ)
        raise ManifestError("no")

    monkeypatch.setattr(up_module, "check_fit", check)
    manifest()
    where, mine = StateDir.at(tmp_path / "state"), {"PATH": "/bin"}

    def up(worker):
        with pytest.raises(ManifestError):
            up_module.up(
                tmp_path / "pool.yaml", where, mine, worker=worker, note=asked.append, progress=asked.append
            )
        return asked.pop()

    assert up("") == mine
    assert up("env MC_FORCE_TCP=1 encodepool-worker serve") is None
    where.create()
    with where.locked():
        assert up("") is None
    assert up("") == mine


def test_what_only_a_cluster_can_do_is_named(manifest):
    notes = manifest(
        image="worker:1",
        resources={"limits": {"memory": "1Gi"}},
        env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
    ).notes
    assert notes[0] == "without effect on one machine: spec.image, spec.resources"
    assert notes[1].startswith("variables from Secrets and ConfigMaps are not read")
    assert manifest().notes == ()
    small = {"portRange": {"start": 20000, "size": 4}}
    (note,) = manifest(replicas=1, network=small).notes
    assert note.endswith("a rollout starts more groups and finds no ports below 8")


def test_pods_of_a_group_have_addresses_of_their_own_and_the_same_ports(manifest, tmp_path):
    spec = manifest(tensorParallelSize=4, ranksPerPod=2).pool.spec
    first, second = (flags(spec, tmp_path, pod) for pod in (0, 1))
    differ = {name: (first[name], second[name]) for name in first if first[name] != second[name]}
    assert differ.pop("--termination-log") == (
        str(tmp_path / "state/run/1.7.termination"),
        str(tmp_path / "state/run/1.7.1.termination"),
    )
    assert differ == {"--host": ("127.0.0.1", "127.0.0.2"), "--pod-index": ("0", "1")}
    assert (first["--dist-init-host"], first["--ranks-per-pod"]) == ("127.0.0.1", "2")


def test_all_ranks_share_one_supervisor_unless_the_manifest_says_otherwise(manifest, tmp_path):
    spec = manifest(tensorParallelSize=4).pool.spec
    assert spec.pods_per_group == 1
    assert "--pod-index" not in flags(spec, tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is not YAML"),
        ("", "must hold one EncodePool"),
        ("- a", "must hold one EncodePool"),
        ("a: 1\n---\nb: 2", "must hold one EncodePool"),
        ("spec:\n  replicas: 2\n  replicas: 3", "the key 'replicas' stands there twice"),
        ("a: 1", "apiVersion: must be encodepool.dev/v1alpha1"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused_in_words(tmp_path, text, says):
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError, match=says):
        load(path)


def test_a_missing_manifest_is_refused_in_words(tmp_path):
    with pytest.raises(ManifestError, match=r"cannot read .*: No such file"):
        load(tmp_path / "no.yaml")


def test_a_directory_has_one_holder_at_a_time(tmp_path):
    state_dir = StateDir.at(tmp_path)
    assert state_dir.holder() is None
    with state_dir.locked():
        assert state_dir.holder() == os.getpid()
        with pytest.raises(StateDirBusy, match=f"in use by process {os.getpid()}"):
            with state_dir.locked():
                pass
    assert state_dir.holder() is None


def test_a_state_directory_that_cannot_be_made_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match=r"cannot write the state directory .*: Not a directory"):
        StateDir.at(tmp_path / "file" / "state").create()


def test_the_gateways_file_is_replaced_before_the_list_of_all_groups(tmp_path):
    """Whoever sees a group in endpoints.json can rely on the gateway's file."""
    before = documents("default", "pool", "model", ())
    write_documents(tmp_path, before)
    assert read_documents(tmp_path) == before
    (tmp_path / "endpoints.json").unlink()
    (tmp_path / "endpoints.json").mkdir()
    after = {name: text + " " for name, text in before.items()}
    with pytest.raises(IsADirectoryError):
        write_documents(tmp_path, after)
    assert (tmp_path / "workers.json").read_text() == after["workers.json"]


def test_an_emptied_list_still_names_its_pool(tmp_path):
    write_documents(tmp_path, documents("default", "pool", "model", ()))
    assert empty_documents(tmp_path) == documents("default", "pool", "model", ())
    (tmp_path / "endpoints.json").write_text("{}")
    assert empty_documents(tmp_path) == {}


def test_a_failed_replacement_leaves_the_old_text_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \udc80")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
