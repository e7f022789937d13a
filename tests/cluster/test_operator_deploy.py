"""``make cluster-up WITH=example``: the pool that it applies, and what it prints."""

from kubernetes import client
from tests.cluster.kit import deploy
from tests.cluster.kit.images import HOST
from tests.cluster.operator_stage import GROUP, PLURAL, VERSION, apply_definition


def images(value):
    """Every ``image`` below."""
    if isinstance(value, dict):
        own = [value["image"]] if isinstance(value.get("image"), str) else []
        return own + [image for part in value.values() for image in images(part)]
    return [image for part in value for image in images(part)] if isinstance(value, list) else []


def test_the_example_runs_from_this_environment_and_is_taken(kube, namespace):
    apply_definition(kube)
    pool = deploy.example_pool()
    assert set(images(pool)) == {HOST}
    taken = client.CustomObjectsApi(kube).create_namespaced_custom_object(
        GROUP, VERSION, namespace, PLURAL, pool, dry_run="All", field_validation="Strict"
    )
    assert taken["spec"]["replicas"] == 2


def test_what_is_printed_begins_with_the_kubeconfig(tmp_path):
    assert deploy.next_steps(tmp_path / "k", tmp_path, "") == [f"export KUBECONFIG={tmp_path / 'k'}"]
