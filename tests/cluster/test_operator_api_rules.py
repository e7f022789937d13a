"""What the operator's writes rely on, asked of the API server itself."""

import asyncio

import pytest
from tests.cluster.operator_stage import Pools, apply_definition

from encodepool_operator.api.parse import parse_pool
from encodepool_operator.controller import observe, pools
from encodepool_operator.controller.execute import Executor, Work
from encodepool_operator.core.actions import WriteEndpoints
from encodepool_operator.core.render import configmap
from encodepool_operator.kube.cache import Cache
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import ApiError
from encodepool_operator.kube.kinds import CONFIG_MAP, POD


@pytest.fixture
def ask(cluster):
    """``ask(use)``: the result of ``use(client)`` with the operator's own client."""

    def run(use):
        async def connected():
            async with await cluster.aio_client() as api:
                client = Client(api.configuration)
                try:
                    return await use(client)
                finally:
                    await client.close()

        return asyncio.run(connected())

    return run


def config_map(namespace, text="1", **metadata):
    return {"metadata": {"namespace": namespace, "name": "list", **metadata}, "data": {"k": text}}


def test_an_apply_that_may_only_create_never_changes_what_is_there(ask, namespace):
    async def story(client):
        made = await client.apply(CONFIG_MAP, config_map(namespace), create=True)
        with pytest.raises(ApiError) as caught:
            await client.apply(CONFIG_MAP, config_map(namespace, "2"), create=True)
        assert caught.value.changed
        return made, await client.get(CONFIG_MAP, namespace, "list")

    made, left = ask(story)
    assert left == made


def test_an_apply_with_a_uid_does_not_make_a_deleted_object_again(ask, namespace):
    async def story(client):
        made = (await client.apply(CONFIG_MAP, config_map(namespace), create=True))["metadata"]
        known = {"uid": made["uid"], "resourceVersion": made["resourceVersion"]}
        await client.delete(CONFIG_MAP, namespace, "list", uid=made["uid"])
        with pytest.raises(ApiError) as caught:
            await client.apply(CONFIG_MAP, config_map(namespace, "2", **known))
        assert caught.value.changed
        # Nor is another object of the same name taken for it.
        await client.apply(CONFIG_MAP, config_map(namespace, "other"), create=True)
        with pytest.raises(ApiError) as caught:
            await client.apply(CONFIG_MAP, config_map(namespace, "2", uid=known["uid"]))
        assert caught.value.changed
        return await client.get(CONFIG_MAP, namespace, "list")

    assert ask(story)["data"] == {"k": "other"}


def test_an_apply_of_what_is_there_already_is_no_new_version(ask, namespace):
    async def story(client):
        first = await client.apply(CONFIG_MAP, config_map(namespace), create=True)
        again = await client.apply(CONFIG_MAP, config_map(namespace))
        return first["metadata"]["resourceVersion"], again["metadata"]["resourceVersion"]

    first, again = ask(story)
    assert first == again


def test_a_patch_of_a_pod_holds_only_for_the_pod_and_state_it_was_meant_for(ask, namespace):
    pod = {
        "metadata": {"namespace": namespace, "name": "p"},
        "spec": {"containers": [{"name": "c", "image": "localhost/nothing:1"}]},
    }

    async def story(client):
        made = (await client.create(POD, pod))["metadata"]
        label = {"labels": {"a": "b"}}
        for wrong in ({"uid": "0" * 8}, {"uid": made["uid"], "resourceVersion": "1"}):
            with pytest.raises(ApiError) as caught:
                await client.merge(POD, namespace, "p", {"metadata": {**label, **wrong}})
            assert caught.value.changed
        await client.merge(POD, namespace, "p", {"metadata": {**label, "uid": made["uid"]}})
        with pytest.raises(ApiError) as caught:
            await client.delete(POD, namespace, "p", uid="0" * 8)
        assert caught.value.changed
        return (await client.get(POD, namespace, "p"))["metadata"]["labels"]

    assert ask(story) == {"a": "b"}


def test_what_is_not_there_is_gone_for_every_verb(ask, namespace):
    async def story(client):
        for request in (
            client.get(CONFIG_MAP, namespace, "none"),
            client.merge(CONFIG_MAP, namespace, "none", {}),
            client.delete(CONFIG_MAP, namespace, "none"),
        ):
            with pytest.raises(ApiError) as caught:
                await request
            assert caught.value.gone

    ask(story)


def test_a_late_write_of_a_list_does_not_replace_a_newer_one(ask, kube, namespace):
    """As by an operator that was frozen, and does not know yet that another one leads."""
    apply_definition(kube)
    pool = parse_pool(Pools(kube, namespace).create("demo", replicas=0))

    async def story(client):
        filed = pools.Pools()
        cache = Cache(observe.TRIM, lambda kind, before, after: filed.note(kind, before, after))
        executor = Executor(client, cache, observe.Observer(filed, "default:1"))

        async def write(text, version=""):
            planned = WriteEndpoints({"workers.json": text}, "it has changed", version)
            return await executor.carry_out(Work(pool.metadata, pool, None, "1"), [planned])

        assert (await write("1")).complete
        seen = observe.version(cache.get(CONFIG_MAP, namespace, "demo-endpoints"))
        newer = configmap.build(pool, {"workers.json": "2"})
        await client.apply(CONFIG_MAP, newer)
        late = await write("old", seen)
        assert (late.changed, late.done) == (True, [])
        live = await client.get(CONFIG_MAP, namespace, "demo-endpoints")
        assert live["data"] == {"workers.json": "2"}
        # It knows now what is there.
        assert (await write("3", observe.version(live))).complete

    ask(story)
