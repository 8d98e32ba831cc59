"""Take the pictures of the page again: a job with something in every view, seen in Chromium.

make .venv/.browser.ok && .venv/bin/python docs/pictures/pages.py
"""

import asyncio
import random
import sys
import time
from pathlib import Path

import aiograd as ag

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.support.browser import NARROW, chromium  # noqa: E402

SIZE = {"width": 1200, "height": 700}


@ag.serial
class Stage:
    """A stage of a ring, which waits for itself."""

    def link(self, following):
        self.following = following

    async def step(self):
        return await self.following.rpc_async().step()


async def train_step(seconds):
    await asyncio.sleep(seconds)


async def evaluate(seconds):
    await asyncio.sleep(seconds)


def slow(gradient):
    time.sleep(60.0)


def last_layer(x):
    y = ag.tanh(x * 2)
    y.register_hook(slow)
    return y


async def first_layers(x):
    return await ag.rpc_async("worker2", last_layer, args=(x * 3,))


def layer(x):
    return ag.tanh(x)


async def work(name):
    """Keep a worker busy."""
    rng = random.Random(name)
    while True:
        function = train_step if rng.random() < 0.7 else evaluate
        await ag.rpc_async(name, function, args=(rng.uniform(1.0, 4.5),))


async def run_pass():
    """Run a pass that takes a while."""
    w = ag.ones(64, requires_grad=True)
    async with ag.context() as ctx:
        long = ag.rpc_async("worker0", first_layers, args=(w,))
        short = [ag.rpc_async(f"worker{i}", layer, args=(w,)) for i in (1, 3)]
        await ctx.backward(sum(y.sum() for y in await asyncio.gather(long, *short)))


async def ring():
    """Let three workers wait for each other."""
    stages = [ag.remote(f"worker{i}", Stage) for i in range(3)]
    for i, stage in enumerate(stages):
        await stage.rpc_async().link(stages[(i + 1) % 3])
    await stages[0].rpc_async(timeout=300).step()


async def shoot(browser, url, name, view, *, scheme="light", size=SIZE):
    """Take one picture."""
    context = await browser.new_context(color_scheme=scheme, viewport=size)
    page = await context.new_page()
    await page.goto(f"{url}#/{view}")
    await page.wait_for_selector("main section")
    await asyncio.sleep(2.5)
    await page.screenshot(path=HERE / name)
    await context.close()


async def main():
    """Run the job, and take all pictures."""
    async with ag.LocalCluster(4, dashboard=True) as cluster, chromium() as browser:
        url = cluster.dashboard.url
        tasks = [asyncio.create_task(work(worker.name)) for worker in cluster]
        context = await browser.new_context(viewport=SIZE)
        page = await context.new_page()
        await page.goto(f"{url}#/calls")
        await asyncio.sleep(62)  # the last minute
        await page.screenshot(path=HERE / "page.png")
        tasks.append(asyncio.create_task(run_pass()))
        await page.goto(f"{url}#/contexts")
        await page.wait_for_selector("path.edge.awaited", state="attached")
        await asyncio.sleep(2.5)
        await page.screenshot(path=HERE / "page_contexts.png")
        await shoot(browser, url, "page_narrow.png", "contexts", size=NARROW)
        tasks.append(asyncio.create_task(ring()))
        await asyncio.sleep(8)
        tall = {**SIZE, "height": 1090}
        await shoot(browser, url, "page_waits.png", "waits", scheme="dark", size=tall)
        for task in tasks:
            task.cancel()
        await cluster.close(graceful=False)


if __name__ == "__main__":
    asyncio.run(main())
