"""The server of the page."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import os
import signal
import sys

import aiohttp
import pytest

import aiograd as ag
from aiograd.errors import RpcError
from aiograd.observe.snapshot import Data, WorkerRow
from aiograd.views.page import source
from aiograd.views.page.dashboard import Dashboard
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def served(count=1, **settings):
    async with (
        ag.LocalCluster(count, processes=False) as cluster,
        ag.Dashboard(cluster, **settings) as page,
        aiohttp.ClientSession() as client,
    ):
        yield cluster, page, client


async def first_event(answer):
    line = await answer.content.readline()
    assert line.startswith(b"data: ")
    return json.loads(line[6:])


async def test_the_page_and_its_files_are_served_with_strict_headers():
    async with served() as (_, page, client):
        async with client.get(page.url) as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            text = await answer.text()
        for name in ("app.js", "app.css", "htm-preact.js", "icon.svg"):
            assert name in text
            async with client.get(page.url + name) as answer:
                assert answer.status == 200
        async with client.get(page.url + "../../etc/passwd") as answer:
            assert answer.status in (403, 404)
        assert page.url.split("/")[3] not in repr(page)


async def test_wrong_tokens_other_hosts_and_other_methods_are_refused():
    async with served() as (_, page, client):
        base = page.url.rsplit("/", 2)[0]
        for path in ("/", "/wrong/", "/wrong/events", "/wrong/logs.json"):
            async with client.get(base + path) as answer:
                assert answer.status == 403
                assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        async with client.get(page.url, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
        async with client.post(page.url) as answer:
            assert answer.status == 405
        cross = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        async with client.get(page.url + "events", headers=cross) as answer:
            assert answer.status == 403


async def test_events_have_the_cluster_and_nothing_is_asked_without_a_page():
    async with served(2, every=0.05) as (_, page, client):
        feed = page._feed
        assert feed._task is None
        async with client.get(page.url + "events") as answer:
            assert answer.content_type == "text/event-stream"
            found = await first_event(answer)
            assert [row["name"] for row in found["workers"]] == ["worker0", "worker1", "driver"]
            assert feed.pages == 1
        await until(lambda: feed.pages == 0 and feed._task is None)


async def test_ten_pages_share_one_snapshot():
    # Rare ones, so that the next is not taken while a busy machine opens the ten.
    async with served(every=60.0) as (_, page, client), contextlib.AsyncExitStack() as stack:
        answers = [
            await stack.enter_async_context(client.get(page.url + "events")) for _ in range(10)
        ]
        found = await asyncio.gather(*map(first_event, answers))
        assert len({each["taken"] for each in found}) == 1
        assert page._feed.pages == 10


async def test_a_worker_that_is_stopped_while_it_is_looked_at_is_told_and_the_others_go_on():
    async with (
        ag.LocalCluster(2) as cluster,
        ag.Dashboard(cluster, every=0.05) as page,
        aiohttp.ClientSession() as client,
        client.get(page.url + "events", read_bufsize=2**22) as answer,
    ):
        os.kill(cluster.pid("worker0"), signal.SIGSTOP)
        try:
            states = {}
            while states.get("worker0") != "stopped":
                line = await answer.content.readline()
                if line.startswith(b"data: "):
                    states = {row["name"]: row["state"] for row in json.loads(line[6:])["workers"]}
                assert await cluster["worker1"].call(abs, -1) == 1
            assert states == {"worker0": "stopped", "worker1": "running", "driver": "running"}
        finally:
            os.kill(cluster.pid("worker0"), signal.SIGCONT)


class Failing:
    """A source that answers once."""

    def __init__(self):
        self.fails = False

    async def snapshot(self):
        if self.fails:
            raise RpcError("it is gone")
        return Data(1.0, "x", workers=[WorkerRow("<b>x</b>", 0)])

    async def stacks(self, names=None):
        raise RpcError("it is gone")

    async def logs(self, after):
        return {}

    async def recording(self, seconds):
        return {"seconds": seconds, "spans": {}, "silent": {"x": "gone"}}


async def test_a_cluster_that_is_gone_is_told_and_the_page_stays():
    source = Failing()
    async with Dashboard.of(source, every=0.05) as page, aiohttp.ClientSession() as client:
        async with client.get(page.url + "events") as answer:
            assert (await first_event(answer))["workers"][0]["name"] == "<b>x</b>"
            source.fails = True
            found = {}
            while "error" not in found:
                line = await answer.content.readline()
                found = json.loads(line[6:]) if line.startswith(b"data: ") else found
            assert found["error"] == "it is gone"
        async with client.get(page.url + "stacks.json") as answer:
            assert (answer.status, await answer.text()) == (503, "it is gone")
        for context in ("1", "none"):
            found = await _get(client, f"{page.url}graph.json?context={context}")
            assert found.keys() == {"why"}


async def test_stacks_logs_recordings_and_pictures_are_answered():
    async with served() as (cluster, page, client):
        async with client.get(page.url + "stacks.json?worker=worker0") as answer:
            assert (await answer.json()).keys() == {"worker0"}
        async with client.get(page.url + 'logs.json?after={"worker0":') as answer:
            assert await answer.json() == {"worker0": [0, []]}
        recorded = asyncio.create_task(_get(client, page.url + "record.json?seconds=0.3"))
        while not recorded.done():
            await cluster["worker0"].call(divmod, 7, 2)
        assert (await recorded)["rows"][0]["name"] == "divmod"
        w = ag.ones(2, requires_grad=True)
        async with ag.context() as ctx:
            await ag.rpc_async("worker0", ag.tanh, args=(w,))
            found = await _get(client, f"{page.url}graph.json?context={ctx.id}")
            assert found["svg"].startswith("<svg")


async def test_a_graph_that_is_too_large_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(source, "NODES", 3)
    async with served() as (_, page, client):
        w = ag.ones(2, requires_grad=True)
        async with ag.context() as ctx:
            await ag.rpc_async("worker0", ag.tanh, args=(w,))
            found = await _get(client, f"{page.url}graph.json?context={ctx.id}")
            assert "too large for a picture" in found["why"]


async def _get(client, url):
    async with client.get(url) as answer:
        return await answer.json()


async def test_a_report_is_written_at_once_and_again_when_awaited(tmp_path):
    async with served() as (_, page, client):
        report = page.report(tmp_path / "a.html")
        assert "nothing was seen yet" in (tmp_path / "a.html").read_text()
        assert await report == tmp_path / "a.html"
        assert '"name": "worker0"' in (tmp_path / "a.html").read_text()
        async with client.get(page.url + "report.html") as answer:
            assert "attachment" in answer.headers["Content-Disposition"]
            assert '"name": "worker0"' in await answer.text()


async def test_a_local_cluster_serves_its_page_and_closes_it():
    async with ag.LocalCluster(1, processes=False, dashboard=True) as cluster:
        url = cluster.dashboard.url
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            assert answer.status == 200
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(url)


def test_without_aiohttp_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "aiohttp":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "aiograd.views.page.dashboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"aiograd\[dashboard\]"):
        _ = ag.Dashboard
