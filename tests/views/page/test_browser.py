"""The page in a browser: every view, with a running, stuck and failing job, and a killed worker.

Needs Playwright's client and a Chromium: `make browser` installs the first and runs these.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

import aiograd as ag
from aiograd.errors import BackwardFailed
from tests.support.browser import MISSING, NARROW, opened, show
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.deadline(90),
    # One loop is enough here: `test_dashboard` has the server on both.
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]
VIEWS = ("overview", "calls", "waits", "references", "contexts", "logs", "profile")


@ag.serial
class Stage:
    def link(self, following):
        self.following = following

    async def step(self):
        return await self.following.rpc_async().step()


GATE = threading.Event()


def wait_for_gate(gradient):
    GATE.wait(60.0)


def open_gate():
    GATE.set()


def gated(x):
    y = x * 2
    y.register_hook(wait_for_gate)
    return y.sum()


async def relayed(x):
    return await ag.rpc_async("worker1", gated, args=(x * 3,))


async def marked():
    await asyncio.sleep(60)


marked.__qualname__ = marked.__name__ = "<img src=x onerror=alert(2)>"


def explode(gradient):
    raise ValueError("planted")


def fragile(x):
    y = x * 2
    y.register_hook(explode)
    return y.sum()


async def every_view(page):
    """Click through all views; each has something to show."""
    for view in VIEWS:
        await show(page, view)
        await page.wait_for_selector("main section h2")


async def test_every_view_of_a_running_job_can_be_clicked_through(tmp_path):
    async with ag.LocalCluster(2, dashboard=True) as cluster:
        kept = ag.remote("worker0", ag.zeros, args=(1000,))
        await kept
        name = "</td><img src=x onerror=alert(1)>"
        await cluster["worker1"].call(print, name)
        waiting = cluster["worker1"].call(asyncio.sleep, 60)
        with_markup = cluster["worker0"].call(marked)
        async with opened(cluster.dashboard.url) as page:
            await every_view(page)
            await show(page, "overview")
            text = await page.inner_text('table[data-table="workers"]')
            assert "worker0" in text
            assert "driver" in text
            await show(page, "calls")
            await page.wait_for_selector('table[data-table="calls"] >> text=sleep')
            await page.wait_for_selector('table[data-table="calls"] >> text=<img src=x')
            await page.fill("#filter", "nothing like it")
            await page.wait_for_selector("text=No call is under way.")
            await page.fill("#filter", "sleep")
            await page.click('table[data-table="calls"] th button >> text=age')
            assert await page.get_attribute('th[aria-sort="descending"]', "scope") == "col"
            await show(page, "references")
            await page.wait_for_selector('table[data-table="references"] >> text=Tensor[1000]')
            await show(page, "logs")
            await page.wait_for_selector("text=<img src=x")  # as text, and nothing of it as markup
            assert await page.locator("main img").count() == 0
            await show(page, "profile")
            await page.select_option("#sec", "1")
            await page.click("main button.act")
            await page.wait_for_selector("text=spans in 1 s")
            await page.goto(cluster.dashboard.url + "#/worker/worker1")
            await page.click("text=Show stacks")
            await page.wait_for_selector("h3 >> text=MainThread")
        waiting.cancel()
        with_markup.cancel()
        del kept


async def test_a_stuck_job_is_told_in_red_with_its_lines():
    async with ag.LocalCluster(3, dashboard=True) as cluster:
        stages = [ag.remote(f"worker{i}", Stage) for i in range(3)]
        for i, stage in enumerate(stages):
            await stage.rpc_async().link(stages[(i + 1) % 3])
        future = stages[0].rpc_async(timeout=80).step()
        async with opened(cluster.dashboard.url, scheme="dark") as page:
            await show(page, "waits")
            await page.wait_for_selector("text=cycle of 3 calls")
            assert await page.locator(".finding").first.locator("tbody tr").count() == 3
            assert await page.locator("svg path.edge.bad").count() == 3
            await every_view(page)
        future.cancel()
        del stages


async def test_a_killed_and_a_stopped_worker_are_told_and_the_page_stays():
    async with (
        ag.LocalCluster(2, dashboard=True) as cluster,
        opened(cluster.dashboard.url) as page,
    ):
        await page.wait_for_selector("text=3 of 3")
        await cluster.kill("worker0")
        await page.wait_for_selector("text=worker0 is lost.")
        await every_view(page)
        await page.goto(cluster.dashboard.url + "#/worker/worker0")
        await page.wait_for_selector("h2 >> text=worker0")
        assert "null" not in await page.inner_text("main")
        await show(page, "overview")
        pid = cluster.pid("worker1")
        os.kill(pid, signal.SIGSTOP)
        try:
            await page.wait_for_selector("text=worker1 is stopped.")
            await page.goto(cluster.dashboard.url + "#/worker/worker1")
            await page.click("text=Show stacks")  # which it cannot give
            await page.wait_for_selector("text=SIGSTOP")
            await show(page, "overview")
        finally:
            os.kill(pid, signal.SIGCONT)
        await cluster.restart("worker0")
        await page.wait_for_selector("text=3 of 3")


async def test_a_failed_pass_is_shown_with_its_context():
    async with ag.LocalCluster(2, dashboard=True) as cluster:
        w = ag.ones(3, requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", fragile, args=(w,))
            with pytest.raises(BackwardFailed):
                await ctx.backward(y)
            async with opened(cluster.dashboard.url) as page:
                await every_view(page)
                await show(page, "contexts")
                await page.wait_for_selector(".notice.bad >> text=planted")
                await page.click(f"button >> text={ctx.id}")
                await page.wait_for_selector('svg.pass [data-state="failed"]')
                await page.wait_for_selector("img.graph")
                width = "document.querySelector('img.graph').naturalWidth"
                await until(lambda: page.evaluate(width))


async def test_a_pass_moves_through_the_picture_of_its_workers():
    async with ag.LocalCluster(2, dashboard=True) as cluster:
        w = ag.ones(3, requires_grad=True)
        async with ag.context() as ctx:
            loss = await ag.rpc_async("worker0", relayed, args=(w,))
            async with opened(cluster.dashboard.url) as page:
                await show(page, "contexts")
                for name in ("driver", "worker0", "worker1"):
                    await page.wait_for_selector(f'[data-worker="{name}"][data-state="idle"]')
                running = asyncio.create_task(ctx.backward(loss))
                await page.wait_for_selector('[data-worker="worker1"][data-state="computing"]')
                for name in ("driver", "worker0"):
                    await page.wait_for_selector(f'[data-worker="{name}"][data-state="waiting"]')
                for edge in ("driver>worker0", "worker0>worker1"):
                    path = page.locator(f'path.edge.awaited[data-edge="{edge}"]')
                    await path.wait_for(state="attached")  # "hidden" is what a straight line is
                await every_view(page)
                await show(page, "contexts")
                await cluster["worker1"].call(open_gate)
                await running
                await page.wait_for_selector("text=No backward pass is under way.")
                assert await page.locator("path.edge.awaited").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_narrow_page_does_not_scroll_sideways(scheme):
    async with (
        ag.LocalCluster(2, dashboard=True) as cluster,
        opened(cluster.dashboard.url, scheme=scheme, size=NARROW) as page,
    ):
        for view in VIEWS:
            await page.goto(f"{cluster.dashboard.url}#/{view}")
            await page.wait_for_selector(f'nav a[href="#/{view}"][aria-current="page"]')
            assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await page.goto(f"{cluster.dashboard.url}#/worker/worker1")
        await page.wait_for_selector("h2 >> text=worker1")
        assert await page.evaluate("document.documentElement.scrollWidth") == 400


async def test_the_page_works_by_keyboard_and_names_what_it_shows():
    async with (
        ag.LocalCluster(2, dashboard=True) as cluster,
        opened(cluster.dashboard.url) as page,
    ):
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
        await page.focus('nav a[href="#/calls"]')
        await page.keyboard.press("Enter")
        await page.wait_for_selector('nav a[href="#/calls"][aria-current="page"]')
        unnamed = await page.evaluate(
            "[...document.querySelectorAll('svg, input, select, button, [role=region]')]"
            ".filter(e => !(e.getAttribute('aria-label') || e.labels?.length || e.textContent))"
            ".length"
        )
        assert unnamed == 0


async def test_a_report_opens_without_a_server(tmp_path):
    async with ag.LocalCluster(2, dashboard=True) as cluster:
        path = await cluster.dashboard.report(tmp_path / "report.html")
    async with opened(path.as_uri()) as page:
        await page.wait_for_selector("text=3 of 3")
        for view in VIEWS:
            await show(page, view)


async def test_a_page_says_when_it_has_lost_its_server():
    async with ag.LocalCluster(1, processes=False) as cluster:
        served = await ag.Dashboard(cluster).start()
        async with opened(served.url) as page:
            await page.wait_for_selector("text=2 of 2")
            await served.close()
            await page.wait_for_selector("text=The page has lost its server.")
