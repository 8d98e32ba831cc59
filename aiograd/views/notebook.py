"""The live view in a notebook: `cluster.live()`. Needs `aiograd[notebook]`.

An anywidget: one ES module, and data over the connection of the kernel. So it works where no port
of the kernel's host can be reached: Colab, a remote VS Code, JupyterHub.

    Live ── a task takes a digest per second, until it is closed ──▶ trait `digest` ──▶ the cell

The view is a table of the workers and what waits; the page (`ag.Dashboard`) has the rest.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from aiograd.errors import AiogradError
from aiograd.views.page.digest import digest
from aiograd.views.page.source import Source, WorkerSource

EVERY: Final = 1.0  # seconds
_SCRIPT: Final = Path(__file__).parent / "page" / "assets" / "live.js"


def live(cluster: Any, every: float = EVERY) -> Any:
    """Return the widget of a cluster; ImportError with what to install if that is missing."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError:
        text = "the live view needs anywidget: pip install 'aiograd[notebook]'"
        raise ImportError(text) from None

    base: Any = anywidget.AnyWidget  # the same for a type checker with and without it

    class Live(base):  # type: ignore[misc]
        """What a cluster does, live."""

        _esm = _SCRIPT.read_text(encoding="utf-8")
        digest = traitlets.Dict().tag(sync=True)

        def __init__(self, source: Source) -> None:
            super().__init__()
            self._source = source
            loop = asyncio.get_running_loop()
            self._task: asyncio.Task[None] | None = loop.create_task(self._run())

        async def _run(self) -> None:
            while True:
                try:
                    self.digest = slim(digest(await self._source.snapshot()))
                except (AiogradError, OSError, ValueError) as error:
                    self.digest = {"error": str(error)}
                    return  # the cluster is closed: the cell says so, and asks no more
                await asyncio.sleep(every)

        def close(self) -> None:
            """Stop asking, and remove the widget."""
            if self._task is not None:
                self._task.cancel()
                self._task = None
            super().close()

    return Live(WorkerSource(cluster.driver.agent))


def slim(found: dict[str, Any]) -> dict[str, Any]:
    """Return what the cell shows of a digest."""
    keep = ("name", "state", "why", "memory", "lag", "calling", "called", "counters")
    return {
        "taken": found["taken"],
        "workers": [{key: row[key] for key in keep} for row in found["workers"]],
        "findings": [
            {"title": each["title"], "guilty": each["guilty"], "hops": each["hops"][:8]}
            for each in found["findings"][:5]
        ],
        "calls": found["call_count"],
        "values": found["reference_count"],
    }
