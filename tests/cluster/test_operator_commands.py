"""The commands for clusters against a real API server. No operator runs: they need none."""

import json
import subprocess

import pytest
from tests.cluster.kit.audit import now
from tests.cluster.operator_stage import Pools, admin_kubeconfig, apply_definition

MANIFEST = """
apiVersion: encodepool.dev/v1alpha1
kind: EncodePool
metadata: {name: planned}
spec:
  replicas: 2
  model: {path: /models/tiny}
  accelerator: {perRank: 0}
  transfer: {backend: tcp}
"""


@pytest.fixture
def pools(kube, namespace):
    apply_definition(kube)
    return Pools(kube, namespace)


@pytest.fixture
def command(cluster, program, tmp_path):
    """``command("status", ...)``: what it printed, how it ended; who asks is "somebody"."""
    kubeconfig = admin_kubeconfig(cluster, "somebody")

    def run(*argv):
        return subprocess.run(
            [program("encodepool"), *argv],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )

    return run


def test_plan_tells_every_step_and_writes_nothing(cluster, pools, command, tmp_path):
    file = tmp_path / "pool.yaml"
    file.write_text(MANIFEST)
    since = now()
    done = command("plan", "-f", str(file), "-n", pools.namespace, "--default-worker-image", "w:1")
    assert done.returncode == 0, done.stderr
    lines = [line.split()[0] for line in done.stdout.splitlines()]
    assert lines[0] == "ACTION"
    assert lines.count("StartGroup") == 2
    assert {"SaveRevision", "ApplyChild", "WriteEndpoints", "ReserveIncarnations"} <= set(lines)
    as_json = json.loads(command("plan", "-f", str(file), "-n", pools.namespace, "-o", "json").stdout)
    starts = [step for step in as_json if step["action"] == "StartGroup"]
    assert [(step["group"], step["reason"]) for step in starts] == [
        (0, "group 0 is missing and is started"),
        (1, "group 1 is missing and is started"),
    ]
    asked = [one for one in cluster.audit(since) if one.user == "somebody"]
    assert asked
    assert not [one for one in asked if one.writes]


def test_plan_names_the_field_that_is_wrong(command, tmp_path):
    file = tmp_path / "pool.yaml"
    file.write_text(MANIFEST.replace("replicas: 2", "replicas: -2"))
    done = command("plan", "-f", str(file))
    assert done.returncode == 2
    assert "spec.replicas" in done.stderr


def test_status_shows_pools_and_one_in_detail(pools, command):
    pools.create("seen", replicas=3)
    table = command("status", "-n", pools.namespace)
    assert table.returncode == 0, table.stderr
    assert "seen" in table.stdout
    assert "/models/tiny" in table.stdout
    everywhere = command("status", "-A")
    assert pools.namespace in everywhere.stdout
    one = json.loads(command("status", "seen", "-n", pools.namespace, "-o", "json").stdout)
    assert one["spec"]["replicas"] == 3
    missing = command("status", "none", "-n", pools.namespace)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "no EncodePool none" in missing.stderr


def test_encode_reads_the_list_of_a_pool(pools, command, tmp_path):
    image = tmp_path / "i.png"
    image.write_bytes(b"")
    unlisted = command("encode", str(image), "--pool", f"{pools.namespace}/quiet")
    assert unlisted.returncode == 1
    assert "has published no list" in unlisted.stderr
    pools.core.create_namespaced_config_map(
        pools.namespace,
        {
            "metadata": {"name": "quiet-endpoints"},
            "data": {
                "endpoints.json": json.dumps(
                    {
                        "apiVersion": "encodepool.dev/v1alpha1",
                        "kind": "EncodeEndpointList",
                        "namespace": pools.namespace,
                        "pool": "quiet",
                        "model": "tiny",
                        "endpoints": [],
                    }
                )
            },
        },
    )
    empty = command("encode", str(image), "--pool", f"{pools.namespace}/quiet")
    assert empty.returncode == 1
    assert "has published no list" not in empty.stderr
    assert "endpoint" in empty.stderr  # the client read the list, and there is nobody in it
