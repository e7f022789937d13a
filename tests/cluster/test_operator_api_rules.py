"""What the operator's writes rely on, asked of the API server itself."""

import asyncio

import pytest

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
