"""The commands for clusters against a real API server. No operator runs: they need none."""

import json
import os
import pty
import signal
import subprocess

import pytest
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.kit.audit import now
from tests.cluster.operator_stage import Pools, admin_kubeconfig, apply_definition

from encodepool_operator.core.consumer import consumer

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


@pytest.fixture
def watch_status(cluster, program, tmp_path):
    """``watch_status(argv, stdout)``: `encodepool status --watch`, ended after the test."""
    kubeconfig = admin_kubeconfig(cluster, "watcher")
    started = []

    def start(*argv, stdout):
        env = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "xterm"}
        command = [program("encodepool"), "status", *argv, "--watch"]
        started.append(subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=env, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def interrupted(process):
    """Its exit code and what it said last."""
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    return process.returncode, said


def test_watched_through_a_pipe_each_change_is_a_table_of_whole_lines(
    pools, watch_status, tmp_path, wait_for
):
    out = tmp_path / "out"
    pools.create("piped", replicas=1)
    with out.open("wb") as file:
        process = watch_status("-n", pools.namespace, stdout=file)
    wait_for(lambda: "piped" in out.read_text(), 30, "the first table")
    pools.patch("piped", replicas=7, model={"path": "/models/" + "long-" * 30})
    wait_for(lambda: "long-" * 30 in out.read_text(), 10, "the second table")
    rows = [line.split() for line in out.read_text().splitlines()]
    assert [(row[1], row[2]) for row in rows if row] == [
        ("NAME", "DESIRED"),
        ("piped", "1"),
        ("NAME", "DESIRED"),
        ("piped", "7"),
    ]
    assert "\x1b" not in out.read_text()
    code, said = interrupted(process)
    assert (code, said.strip()) == (130, "encodepool: interrupted")


def test_watched_on_a_terminal_one_table_changes_in_place(pools, watch_status, wait_for):
    pools.create("live", replicas=1)
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = watch_status("live", "-n", pools.namespace, stdout=theirs)
    os.close(theirs)
    seen = ""

    def shows(text):
        nonlocal seen
        try:
            seen += os.read(ours, 65536).decode()
        except BlockingIOError:
            pass
        return text in seen

    wait_for(lambda: shows("CONDITION"), 30, "the pool in detail")
    status = {
        "conditions": [
            {
                "type": "Available",
                "status": "False",
                "reason": "TooFew",
                "message": "0 of 1",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ]
    }
    pools.custom.patch_namespaced_custom_object_status(
        "encodepool.dev", "v1alpha1", pools.namespace, "encodepools", "live", {"status": status}
    )
    wait_for(lambda: shows("docs/runbooks/TooFew.md"), 10, "the condition, and where to read of it")
    # The second table was drawn over the first: the cursor went up to it.
    assert "\x1b[1A" in seen.partition("TooFew")[0]
    assert interrupted(process)[0] == 130
    os.close(ours)


def test_watching_goes_on_while_the_server_does_not_answer(
    cluster, pools, spawn, program, tmp_path, wait_for
):
    pools.create("patient", replicas=1)
    with FaultProxy(admin_kubeconfig(cluster, "patient"), tmp_path).running() as proxy:
        env = {"KUBECONFIG": str(proxy.kubeconfig)}
        out = tmp_path / "out"
        process = spawn([program("encodepool"), "status", "-n", pools.namespace, "-w"], out, env=env)
        wait_for(lambda: "patient" in out.read_text(), 30, "the first table")
        proxy.fault(lambda asked: True, cut=True)
        wait_for(lambda: "trying again" in out.read_text(), 30, "a word about it")
        proxy.mend()
        pools.patch("patient", replicas=5)
        wait_for(lambda: " 5 " in out.read_text(), 30, "the change")
        assert process.poll() is None


def test_the_gateways_flags_are_those_of_the_status_and_name_the_groups_of_now(pools, command):
    pools.create("asked")
    tokens = "--encode grpc://10.0.0.5:10001 10000\n--encode grpc://10.0.0.6:10004 10003\n"
    pools.core.create_namespaced_config_map(
        pools.namespace, {"metadata": {"name": "asked-endpoints"}, "data": {"smg-args": tokens}}
    )
    shown = command("status", "asked", "-n", pools.namespace, "-o", "smg")
    assert shown.returncode == 0, shown.stderr
    kubernetes, file, static = (line for line in shown.stdout.splitlines() if not line.startswith("#"))
    flags = consumer(pools.namespace, "asked")
    assert (kubernetes, file) == (flags["smg"], flags["smgFile"])
    assert static == flags["smgStatic"] + " " + " ".join(tokens.split())
    notes = [line for line in shown.stdout.splitlines() if line.startswith("#")]
    assert "add --prefill-selector and --decode-selector" in notes[1]
    # A pool without a list has the other ways all the same.
    pools.create("listless")
    assert command("status", "-n", pools.namespace, "-o", "smg").stdout.count("--service-discovery ") == 2


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
