import asyncio
import json
import random

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from encodepool_operator.kube import client as client_module
from encodepool_operator.kube.backoff import wait_s
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import ApiError, LoginError, NotLeading, Unreachable
from encodepool_operator.kube.kinds import CONFIG_MAP, POD, POOL, STATEFUL_SET
from encodepool_operator.kube.login import log_in


def status(code, reason="", message="no", **more):
    return web.json_response({"kind": "Status", "reason": reason, "message": message, **more}, status=code)


class Server:
    """Answers each request with the next answer of a list, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def answer(self, request):
        self.asked.append((request.method, request.path_qs, request.content_type, await request.text()))
        made = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return made() if callable(made) else made


def run_against(server, use, **more):
    """Run ``use(client)`` against ``server``; its result, and the calls that were counted."""
    calls = []

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        configuration.proxy = None
        client = Client(configuration, lambda verb, code, taken_s: calls.append((verb, code)), seed=1, **more)
        try:
            return await use(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run()), calls


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.001)


def test_paths_are_those_of_the_api():
    assert POD.path("ns", "a b") == "/api/v1/namespaces/ns/pods/a%20b"
    assert STATEFUL_SET.path() == "/apis/apps/v1/statefulsets"
    assert (
        POOL.path("ns", "p", "status") == "/apis/encodepool.dev/v1alpha1/namespaces/ns/encodepools/p/status"
    )


def test_an_apply_names_the_field_manager_and_carries_its_preconditions():
    server = Server(lambda: web.json_response({"metadata": {}}))
    obj = {"metadata": {"namespace": "ns", "name": "a", "uid": "u", "resourceVersion": "7"}, "data": {}}

    async def use(client):
        await client.apply(CONFIG_MAP, obj)
        await client.apply(CONFIG_MAP, {"metadata": {"namespace": "ns", "name": "a"}}, create=True)

    run_against(server, use)
    (method, path, kind, first), (*_, second) = server.asked
    assert (method, path) == (
        "PATCH",
        "/api/v1/namespaces/ns/configmaps/a?fieldManager=encodepool&force=true",
    )
    assert kind == "application/apply-patch+yaml"
    assert json.loads(first) == {"apiVersion": "v1", "kind": "ConfigMap", **obj}
    # No object has this version: the apply makes one, or is refused.
    assert json.loads(second)["metadata"]["resourceVersion"] == "1"


def test_a_delete_carries_its_preconditions_and_leaves_dependents_to_the_background():
    server = Server(lambda: web.json_response({"kind": "Status"}))
    run_against(server, lambda c: c.delete(POD, "ns", "a", uid="u", version="7", grace_s=0))
    assert json.loads(server.asked[0][3]) == {
        "propagationPolicy": "Background",
        "preconditions": {"uid": "u", "resourceVersion": "7"},
        "gracePeriodSeconds": 0,
    }


def test_a_list_is_read_page_by_page():
    def page(names, more):
        items = [{"metadata": {"name": name}} for name in names]
        return web.json_response({"metadata": {"resourceVersion": "9", "continue": more}, "items": items})

    server = Server(lambda: page(["a", "b"], "token"), lambda: page(["c"], ""))
    listed, _ = run_against(server, lambda c: c.list(POD, "ns", "k=v"))
    assert [item["metadata"]["name"] for item in listed.items] == ["a", "b", "c"]
    assert listed.items[0]["kind"] == "Pod"
    assert listed.version == "9"
    assert "labelSelector=k%3Dv" in server.asked[1][1]
    assert "continue=token" in server.asked[1][1]


def test_a_busy_server_is_asked_again():
    server = Server(
        lambda: status(503, "ServiceUnavailable"),
        lambda: status(429, "TooManyRequests", details={"retryAfterSeconds": 0}),
        lambda: web.json_response({"metadata": {"name": "a"}}),
    )
    got, calls = run_against(server, lambda c: c.get(POD, "ns", "a"))
    assert got["metadata"]["name"] == "a"
    assert calls == [("get", "503"), ("get", "429"), ("get", "200")]


@pytest.mark.parametrize(
    ("code", "reason", "message", "is_"),
    [
        (404, "NotFound", "no", "gone"),
        (410, "Gone", "too old", "gone"),
        (409, "Conflict", "changed", "changed"),
        (422, "Invalid", 'metadata.uid: Invalid value: "x": field is immutable', "changed"),
        (422, "Invalid", "spec.replicas: must be positive", ""),
        (403, "Forbidden", "no right", ""),
    ],
)
def test_an_answer_that_will_not_change_is_not_asked_for_again(code, reason, message, is_):
    server = Server(lambda: status(code, reason, message))
    with pytest.raises(ApiError, match=reason) as caught:
        run_against(server, lambda c: c.get(POD, "ns", "a"))
    assert len(server.asked) == 1
    error = caught.value
    assert (error.gone, error.changed, error.transient) == (is_ == "gone", is_ == "changed", False)


def test_a_server_that_stays_busy_is_given_up_on_with_what_it_asked_for():
    server = Server(lambda: status(500, "InternalError"))
    with pytest.raises(ApiError, match="InternalError"):
        run_against(server, lambda c: c.get(POD, "ns", "a"))
    assert len(server.asked) == client_module.TRIES
    # A long wait is the caller's to make, who has other pools to care for.
    server = Server(lambda: status(429, "TooManyRequests", details={"retryAfterSeconds": 30}))
    with pytest.raises(ApiError) as caught:
        run_against(server, lambda c: c.get(POD, "ns", "a"))
    assert caught.value.retry_after_s == 30
    assert len(server.asked) == 1


def test_who_loses_the_lease_between_two_tries_writes_no_more():
    held = [True]

    def busy():
        held.clear()
        return status(503, "ServiceUnavailable")

    async def use(client):
        with pytest.raises(NotLeading):
            await client.merge(POD, "ns", "a", {})
        with pytest.raises(NotLeading):
            await client.create(POD, {"metadata": {"namespace": "ns"}})
        return await client.get(POD, "ns", "a")

    server = Server(busy, lambda: web.json_response({"metadata": {}}))
    run_against(server, use, may_write=lambda: bool(held))
    assert [method for method, *_ in server.asked] == ["PATCH", "GET"]


def test_no_answer_is_said_so(free_port):
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{free_port()}"
    configuration.proxy = None

    async def use():
        client = Client(configuration)
        try:
            await client.get(POD, "ns", "a")
        finally:
            await client.close()

    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        asyncio.run(use())


def test_waits_grow_to_a_minute_and_differ():
    source = random.Random(1)
    waits = [wait_s(n, 1.0, source) for n in range(1, 30)]
    assert 0.5 <= waits[0] <= 1.0
    assert all(30 < wait <= 60 for wait in waits[7:])
    assert len(set(waits)) == len(waits)


def test_without_any_cluster_the_message_says_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(LoginError, match="none"):
        asyncio.run(log_in())


def test_the_kubeconfig_names_server_and_namespace(monkeypatch, tmp_path):
    file = tmp_path / "config"
    file.write_text(
        json.dumps(
            {
                "current-context": "one",
                "contexts": [
                    {"name": "one", "context": {"cluster": "c", "user": "u"}},
                    {"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
                ],
                "clusters": [{"name": "c", "cluster": {"server": "https://example.com:6443"}}],
                "users": [{"name": "u", "user": {"token": "secret"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{file}")
    login = asyncio.run(log_in())
    assert (login.configuration.host, login.namespace) == ("https://example.com:6443", "default")
    assert asyncio.run(log_in(context="two")).namespace == "team"
    with pytest.raises(LoginError, match="three"):
        asyncio.run(log_in(context="three"))
