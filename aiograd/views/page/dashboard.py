"""`Dashboard`: serves the page of a cluster, and writes reports. Needs `aiograd[dashboard]`.

    browser ◀── server-sent events, one digest per second ── Feed ◀── Source.snapshot()
            ─── GET stacks, logs, graph, record ───────────▶ Source

One snapshot per second serves all pages that are open; while none is, nothing is asked. The server
runs on the loop of the program, installs no signal handlers, and listens on loopback. `security`
says who may see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from aiohttp import web

from aiograd.errors import AiogradError
from aiograd.rpc.agent import current_agent
from aiograd.views.page.digest import digest, slim
from aiograd.views.page.report import TYPES, asset, render
from aiograd.views.page.security import HEADERS, refusal
from aiograd.views.page.source import Source, WorkerSource
from aiograd.views.record import as_bars

EVERY: Final = 1.0  # seconds between two snapshots
HISTORY: Final = 300  # digests that are kept: numbers of five minutes, everything of the last one
_LONGEST: Final = 60.0  # seconds of a recording
_PAGES: Final = 64  # at once; more are refused


class Dashboard:
    """The page of a cluster: `async with ag.Dashboard(cluster) as page: print(page.url)`.

    Without a cluster it is that of the current worker. It shows workers, calls, who waits for whom,
    references, contexts and passes, logs, and recordings. It can only be read, and only from this
    host by those who know its address; `hosts` are further names under which it may be reached, as
    through a proxy.

        >>> async with ag.Dashboard() as page:
        ...     print(page.url[:17])
        http://127.0.0.1:
    """

    def __init__(
        self,
        cluster: Any = None,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        hosts: Collection[str] = (),
        every: float = EVERY,
    ) -> None:
        self._cluster, self._port, self._host = cluster, port, host
        self._hosts = frozenset(name.lower() for name in hosts)
        self._every = every
        self._token = secrets.token_urlsafe(32)
        self._source: Source | None = None
        self._feed: Feed | None = None
        self._runner: web.AppRunner | None = None
        self.url: str = ""  # where it is, once it is served

    @classmethod
    def of(cls, source: Source, **settings: Any) -> Dashboard:
        """Return the page of another source, such as a guest of a cluster."""
        made = cls(**settings)
        made._source = source
        return made

    async def start(self) -> Dashboard:
        """Serve the page."""
        if self._source is None:
            self._source = WorkerSource(_agent_of(self._cluster))
        self._feed = Feed(self._source, self._every)
        app = web.Application(middlewares=[self._guard()])
        app.router.add_get("/{token}/", self._asset)
        for name, answer in self._answers().items():
            app.router.add_get(f"/{{token}}/{name}", answer)
        app.router.add_get("/{token}/{name}", self._asset)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=0.5
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        port = self._runner.addresses[0][1]
        name = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{name}:{port}/{self._token}/"
        return self

    async def close(self) -> None:
        """Stop serving; pages that are open say so."""
        if self._feed is not None:
            await self._feed.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Dashboard:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def report(self, path: str | Path) -> Report:
        """Write the page as one file, with what was seen last; awaited, with a new snapshot."""
        assert self._feed is not None, "serve the page first: `async with ag.Dashboard(...)`"
        return Report(self._feed, Path(path))

    def __repr__(self) -> str:
        # Without the token: a repr ends up in logs.
        where = self.url.partition(self._token)[0] or "not served"
        return f"<Dashboard {where}>"

    def _repr_html_(self) -> str:
        return f'<a href="{self.url}" target="_blank" rel="noreferrer">the page of this cluster</a>'

    # ── answering ───────────────────────────────────────────────────────────────────────────────

    def _guard(self) -> Any:
        """Return what every request passes: who may not see the page gets no answer of it."""

        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._answer(request, handler)

        return web.middleware(guard)

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        token = request.path.split("/")[1] if request.path.count("/") > 1 else ""
        refused = refusal(request.method, token, request.headers, self._token, self._hosts)
        try:
            if refused is not None:
                raise _Refused(*refused)
            answer: web.StreamResponse = await handler(request)
        except _Refused as error:
            answer = web.Response(status=error.status, text=error.text)
        except web.HTTPException as error:
            answer = web.Response(status=error.status, text=error.reason)
        except (AiogradError, OSError, ValueError, TimeoutError) as error:
            answer = web.Response(status=503, text=str(error))
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    def _answers(self) -> Mapping[str, Callable[[web.Request], Any]]:
        return {
            "events": self._events,
            "stacks.json": self._stacks,
            "logs.json": self._logs,
            "record.json": self._record,
            "graph.json": self._graph,
            "report.html": self._report,
        }

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name") or "index.html"
        if name not in TYPES:
            raise web.HTTPNotFound
        return web.Response(text=asset(name), content_type=TYPES[name], charset="utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        assert self._feed is not None
        if self._feed.pages >= _PAGES:
            raise web.HTTPServiceUnavailable
        headers = {**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            async for event in self._feed.events():
                await answer.write(event)
        return answer

    async def _stacks(self, request: web.Request) -> web.Response:
        assert self._source is not None
        worker = request.query.get("worker")
        return web.json_response(await self._source.stacks([worker] if worker else None))

    async def _logs(self, request: web.Request) -> web.Response:
        assert self._source is not None
        try:
            after = json.loads(request.query.get("after", "{}"))
        except ValueError:
            after = {}
        return web.json_response(await self._source.logs(after if isinstance(after, dict) else {}))

    async def _record(self, request: web.Request) -> web.Response:
        assert self._source is not None
        seconds = min(max(float(request.query.get("seconds", "5")), 0.1), _LONGEST)
        return web.json_response(as_bars(await self._source.recording(seconds)))

    async def _graph(self, request: web.Request) -> web.Response:
        # Why there is none is an answer as well: contexts come and go, also between two looks.
        draw = getattr(self._source, "graph", None)
        svg, why = None, "There is no picture: who serves this page has no part of the context."
        try:
            svg = None if draw is None else await draw(int(request.query.get("context", "0")))
        except (AiogradError, ValueError) as error:
            why = str(error)
        return web.json_response({"svg": svg} if svg is not None else {"why": why})

    async def _report(self, request: web.Request) -> web.Response:
        assert self._feed is not None
        await self._feed.refresh()
        headers = {"Content-Disposition": 'attachment; filename="aiograd.html"'}
        text = await self._feed.report()
        return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)


class _Refused(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text


class Feed:
    """Takes snapshots while somebody looks, and gives each to all pages."""

    def __init__(self, source: Source, every: float) -> None:
        self._source, self._every = source, every
        self.pages: int = 0
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # set, and replaced, with every digest
        self._event = b""
        self._logs: Mapping[str, Any] = {}
        self._closed = False

    async def events(self) -> Any:
        """Give digests as server-sent events, the last one at once."""
        self.pages += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            if self._event:
                yield self._event
            while not self._closed:
                await self._news.wait()
                yield self._event
        finally:
            self.pages -= 1

    async def refresh(self) -> None:
        """Take a snapshot now."""
        try:
            found = digest(await self._source.snapshot())
        except (AiogradError, OSError, ValueError, TimeoutError) as error:
            # The page stays, and says what it does not know.
            found = {"error": str(error) or type(error).__name__, "taken": time.time()}
        if "error" not in found:
            if self.history:  # only the last one is kept whole: a page may be open for hours
                self.history[-1] = slim(self.history[-1])
            self.history.append(found)
        found["every"] = self._every
        self._event = b"data: " + json.dumps(found, separators=(",", ":")).encode() + b"\n\n"
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def report(self) -> str:
        """Return the page with what was seen so far."""
        with contextlib.suppress(AiogradError, OSError, ValueError, TimeoutError):
            self._logs = await self._source.logs({})
        return self.frozen()

    def frozen(self) -> str:
        """Return the page with what was seen so far, without asking anybody."""
        nothing = {"error": "nothing was seen yet", "taken": time.time()}
        return render(list(self.history)[-61:] or [nothing], self._logs)

    async def close(self) -> None:
        """End all events."""
        self._closed = True
        self._news.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self.pages:
                began = loop.time()
                await self.refresh()
                # From beginning to beginning; a snapshot that takes long must not be the only work.
                took = loop.time() - began
                await asyncio.sleep(max(self._every - took, took, 0.05))
        finally:
            self._task = None


class Report:
    """A report that was written; await it to write it again with a new snapshot."""

    path: Path

    def __init__(self, feed: Feed, path: Path) -> None:
        self._feed = feed
        self.path: Path = path
        path.write_text(feed.frozen(), encoding="utf-8")

    def __await__(self) -> Generator[Any, None, Path]:
        return self._write().__await__()

    async def _write(self) -> Path:
        await self._feed.refresh()
        self.path.write_text(await self._feed.report(), encoding="utf-8")
        return self.path


def _agent_of(cluster: Any) -> Any:
    """Return the agent of a cluster's driver, of a worker, or the current one."""
    if cluster is None:
        return current_agent()
    agent = getattr(getattr(cluster, "driver", cluster), "agent", None)
    if agent is None:
        raise TypeError(f"a page is of a cluster or a Worker, not of {type(cluster).__name__}")
    return agent
