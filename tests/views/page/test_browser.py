"""The page in a browser: every view, with a running, stuck and failing job, and a killed worker.

Needs Playwright's client and a Chromium: `make browser` installs the first and runs these.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import aiograd as ag
from aiograd.errors import BackwardFailed
from tests.support.browser import MISSING, NARROW, opened, show
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.deadline(90),
]
VIEWS = ("overview", "calls", "waits", "references", "contexts", "logs", "profile")


@ag.serial
class Stage:
    def link(self, following):
        self.following = following

    async def step(self):
        return await self.following.rpc_async().step()


def explode(gradient):
    raise ValueError("planted")


def fragile(x):
    y = x * 2
    y.register_hook(explode)
    return y.sum()


async def test_every_view_of_a_running_job_can_be_clicked_through(tmp_path):
    async with ag.LocalCluster(2, dashboard=True) as cluster:
        kept = ag.remote("worker0", ag.zeros, args=(1000,))
        await kept
        name = "</td><img src=x onerror=alert(1)>"
        await cluster["worker1"].call(print, name)
        waiting = cluster["worker1"].call(asyncio.sleep, 60)
        async with opened(cluster.dashboard.url) as page:
            for view in VIEWS:
                await show(page, view)
                assert await page.locator("main section").count() > 0
            await show(page, "overview")
            text = await page.inner_text('table[data-table="workers"]')
            assert "worker0" in text
            assert "driver" in text
            await show(page, "calls")
            await page.wait_for_selector('table[data-table="calls"] >> text=sleep')
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
        pid = cluster.pid("worker1")
        os.kill(pid, signal.SIGSTOP)
        try:
            await page.wait_for_selector("text=worker1 is stopped.")
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
                await show(page, "contexts")
                await page.wait_for_selector("text=planted")
                await page.click(f"button >> text={ctx.id}")
                await page.wait_for_selector("img.graph")
                width = "document.querySelector('img.graph').naturalWidth"
                await until(lambda: page.evaluate(width))


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
