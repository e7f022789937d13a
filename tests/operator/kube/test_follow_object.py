"""Keeping one object in sight over list and watch, also when the server fails or falls silent."""

import asyncio
import json

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from encodepool_operator.kube import client as client_module
from encodepool_operator.kube import follow
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.errors import ApiError
from encodepool_operator.kube.kinds import CONFIG_MAP

DEADLINE_S = 20.0


class ConfigMaps:
    """One ConfigMap of a server, which can be told to fail.

    ``refusals`` are the next answers to lists. A watch sends ``changes`` put into the queue; "end" ends it,
    "mute" leaves it open without a word, an integer is an error of that code inside it.
    """

    def __init__(self, text):
        self.text = text
        self.version = 7
        self.refusals = []
        self.changes = asyncio.Queue()
        self.lists = 0
        self.watched = []

    def object(self):
        meta = {"name": "x-endpoints", "resourceVersion": str(self.version)}
        return {"metadata": meta, "data": {"t": self.text}}

    async def answer(self, request):
        assert request.query["fieldSelector"] == "metadata.name=x-endpoints"
        if "watch" in request.query:
            return await self.watch(request)
        self.lists += 1
        if self.refusals:
            code = self.refusals.pop(0)
            return web.json_response({"kind": "Status", "message": "no"}, status=code)
        items = [self.object()] if self.text is not None else []
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def watch(self, request):
        self.watched.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            change = await self.changes.get()
            if change == "end":
                return response
            if change == "mute":
                await asyncio.Event().wait()
            if isinstance(change, int):
                event = {"type": "ERROR", "object": {"kind": "Status", "code": change, "message": "old"}}
            else:
                kind, self.text = change
                self.version += 1
                event = {"type": kind, "object": self.object()}
            await response.write(json.dumps(event).encode() + b"\n")


@pytest.fixture
def following(monkeypatch):
    """``following(text, story)``: ``story(server, next_heard, troubles)`` while the object is followed."""
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(follow, "FIRST_WAIT_S", 0.001)

    def run(text, story):
        async def main():
            server = ConfigMaps(text)
            app = web.Application()
            app.router.add_get("/api/v1/namespaces/ns/configmaps", server.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            configuration = Configuration()
            configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
            configuration.proxy = None
            client = Client(configuration, seed=1)
            heard: asyncio.Queue = asyncio.Queue()
            troubles = []
            task = asyncio.create_task(
                follow.follow_object(
                    client,
                    CONFIG_MAP,
                    "ns",
                    "x-endpoints",
                    lambda found: heard.put_nowait(found and found["data"]["t"]),
                    troubles.append,
                )
            )

            async def next_heard():
                got = asyncio.ensure_future(heard.get())
                async with asyncio.timeout(DEADLINE_S):
                    await asyncio.wait([got, task], return_when=asyncio.FIRST_COMPLETED)
                if not got.done():
                    got.cancel()
                    task.result()
                return await got

            try:
                await story(server, next_heard, troubles)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await client.close()
                await runner.cleanup()

        asyncio.run(main())

    return run


def test_changes_are_heard_from_the_watch_which_begins_where_the_list_ended(following):
    async def story(server, heard, troubles):
        assert await heard() == "one"
        server.changes.put_nowait(("MODIFIED", "two"))
        assert await heard() == "two"
        server.changes.put_nowait(("DELETED", "two"))
        assert await heard() is None
        server.changes.put_nowait(("ADDED", "three"))
        assert await heard() == "three"
        assert (server.watched, server.lists, troubles) == (["7"], 1, [])

    following("one", story)


def test_an_object_that_is_not_there_is_watched_for_all_the_same(following):
    async def story(server, heard, troubles):
        assert await heard() is None
        server.changes.put_nowait(("ADDED", "new"))
        assert await heard() == "new"

    following(None, story)


def test_after_a_watch_that_ended_or_whose_version_is_too_old_it_lists_again(following):
    async def story(server, heard, troubles):
        assert await heard() == "one"
        server.text = "missed"
        server.changes.put_nowait("end")
        assert await heard() == "missed"
        server.text = "missed too"
        server.changes.put_nowait(410)
        assert await heard() == "missed too"
        assert server.lists == 3
        assert "410" in troubles[0]

    following("one", story)


def test_what_a_silent_watch_does_not_tell_is_known_from_the_next_list(following, monkeypatch):
    monkeypatch.setattr(follow, "WATCH_S", 0)
    monkeypatch.setattr(client_module, "WATCH_GRACE_S", 0.3)

    async def story(server, heard, troubles):
        assert await heard() == "one"
        server.changes.put_nowait("mute")
        server.text = "untold"
        while await heard() != "untold":
            pass
        assert troubles == []

    following("one", story)


def test_a_busy_or_broken_server_is_asked_again(following):
    async def story(server, heard, troubles):
        assert await heard() == "one"
        server.refusals = [500, 503, 429, 500, 403]  # three tries are the client's own
        server.text = "later"
        server.changes.put_nowait("end")
        assert await heard() == "later"
        assert len(troubles) == 2  # forbidden for a moment, after it was allowed: somebody edits the Role

    following("one", story)


def test_what_is_forbidden_from_the_start_is_an_error(following):
    async def story(server, heard, troubles):
        with pytest.raises(ApiError) as error:
            await heard()
        assert error.value.code == 403

    def refusing(server, heard, troubles):
        server.refusals = [403]
        return story(server, heard, troubles)

    following("one", refusing)
