"""The page of a cluster in the machine's own Chromium, driven by Playwright's client.

`make browser` installs the client; `AIOGRAD_CHROMIUM` names another browser than Debian's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

try:
    from playwright import async_api
except ModuleNotFoundError:
    async_api = None  # type: ignore[assignment]

CHROMIUM = os.environ.get("AIOGRAD_CHROMIUM") or shutil.which("chromium")
# Why there is no browser; empty if there is one.
MISSING = (
    "Playwright is not installed: `make browser` does that"
    if async_api is None
    else "there is no Chromium on this machine (Debian: apt install chromium)"
    if CHROMIUM is None
    else ""
)
NARROW, WIDE = {"width": 400, "height": 800}, {"width": 1280, "height": 860}


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Start the browser."""
    async with async_api.async_playwright() as driver:
        # Without a sandbox: containers and root have none, and it opens our own page only.
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def opened(url: str, *, scheme: str = "light", size: Any = WIDE) -> AsyncIterator[Any]:
    """Open the page; at the end, the console must have no errors."""
    errors: list[str] = []
    async with chromium() as browser:
        context = await browser.new_context(color_scheme=scheme, viewport=size)
        page = await context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        await page.goto(url)
        await page.wait_for_selector("main")
        yield page
    assert errors == [], errors[:5]


async def show(page: Any, view: str) -> None:
    """Choose a view as a user does."""
    await page.click(f'nav a[href="#/{view}"]')
    # By a locator: `wait_for_selector` gives handles, which the client keeps with the page.
    await page.locator(f'nav a[href="#/{view}"][aria-current="page"]').wait_for()
