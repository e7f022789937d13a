"""What the operator renders, asked of the API server itself: what that fills in or leaves out is no drift.

``UPDATE_GOLDEN=1 pytest tests/cluster/test_operator_render.py`` writes its answers into the files of
tests/operator/core/render/live, which tests without a cluster compare with.
"""

import asyncio
import json
import os

import pytest
from kubernetes import client
from tests.cluster.operator_stage import GROUP, PLURAL, VERSION, apply_definition
from tests.operator.core.render.render_pools import NAMESPACE, POOLS, UID, objects_of, pool_of, revision_of
from tests.operator.core.render.test_render_drift import LIVE

from encodepool_operator.core.render import drift
from encodepool_operator.kube.client import FIELD_MANAGER, Client
from encodepool_operator.kube.kinds import BY_NAME

EDIT = {
    "shareProcessNamespace": True,
    "tolerations": [{"key": "zz", "operator": "Exists"}],
    "containers": [
        {"name": "spy", "image": "x"},
        {
            "name": "encode",
            "env": [{"name": "ADDED", "value": "1"}],
            "volumeMounts": [{"name": "scratch", "mountPath": "/a"}],
        },
    ],
}
RESTART = {"annotations": {"kubectl.kubernetes.io/restartedAt": "2026"}}


@pytest.fixture(scope="module")
def apply(cluster, kube):
    """``apply(pool, ...)``: the answers to the pool's objects, written by the operator's own client."""
    core = client.CoreV1Api(kube)
    core.create_namespace({"metadata": {"name": NAMESPACE}})

    def answers(pool, *, dry_run):
        async def ask():
            async with await cluster.aio_client() as api:
                own = Client(api.configuration)
                try:
                    return [
                        await own.apply(BY_NAME[obj["kind"]], obj, create=True, dry_run=dry_run)
                        for obj in objects_of(pool)
                    ]
                finally:
                    await own.close()

        return asyncio.run(ask())

    yield answers
    core.delete_namespace(NAMESPACE)


def record(name, recorded, uid=UID):
    """Without what is another one each time."""
    if not os.environ.get("UPDATE_GOLDEN"):
        return
    for obj in recorded if isinstance(recorded, list) else [recorded]:
        obj.pop("status", None)
        for key in ("creationTimestamp", "resourceVersion", "uid"):
            obj["metadata"].pop(key, None)
        fields = obj["metadata"].pop("managedFields", None)
        if fields is not None:
            fields = [entry for entry in fields if entry.get("subresource") != "status"]
            obj["metadata"]["managedFields"] = [{**entry, "time": "2026-01-01T00:00:00Z"} for entry in fields]
    text = json.dumps(recorded, indent=1, sort_keys=True).replace(uid, UID)
    (LIVE / f"{name}.json").write_text(text + "\n")


@pytest.mark.parametrize("name", POOLS)
def test_what_the_server_fills_in_and_leaves_out_is_no_drift(apply, name):
    pool = pool_of(name)
    answers = apply(pool, dry_run=True)
    for rendered, answer in zip(objects_of(pool), answers, strict=True):
        assert drift.compare(rendered, answer) is None
    assert drift.compare_group(pool, answers[-1], 1, revision_of(pool), FIELD_MANAGER) is None
    for answer in answers:
        del answer["metadata"]["managedFields"]
    record(name, answers)


def test_what_others_add_is_found_by_their_names(apply, kube):
    apply_definition(kube)
    pools = client.CustomObjectsApi(kube)
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "EncodePool",
        "metadata": {"name": "merged"},
        "spec": POOLS["merged"],
    }
    # Without it the garbage collector takes its objects away.
    made = pools.create_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURAL, body)
    pool = pool_of("merged", made["metadata"]["uid"])
    apply(pool, dry_run=False)
    apps = client.AppsV1Api(kube)
    for manager, template in (("kubectl-edit", {"spec": EDIT}), ("kubectl-rollout", {"metadata": RESTART})):
        live = apps.patch_namespaced_stateful_set(
            "merged-1",
            NAMESPACE,
            {"spec": {"template": template}},
            field_manager=manager,
            _preload_content=False,
        )
    live = json.loads(live.data)
    pools.delete_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURAL, "merged")
    found = drift.compare_group(pool, live, 1, revision_of(pool), FIELD_MANAGER)
    assert "kubectl-edit, kubectl-rollout added " in found.reason
    assert len(found.remove) == 5
    record("merged-with-additions", live, pool.metadata.uid)
