"""`progress` and `as_completed`: how far long work is, shown once, where it was started.

    for item in ag.progress(items, "training"):      in a called function, on any worker
        │ counts
        ▼
    Reports: looks at all bars of this worker every 0.1 s ══ one post per caller ══▶ its Reports
                                                                                         │
                         that call was made by a call, too: on to its caller  ◀── else ──▶ Display

An item costs one addition: nothing is sent, and no clock is read, where the items are. Bars that
end between two looks are never sent. A bar at the caller goes with its call, however that ends, so
no message has to arrive for it to go. Messages are one-way: the next one says what a lost one did.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Generator, Iterable, Iterator, Sized
from typing import Any, Final, Generic, TypeVar

from aiograd._progress import DISPLAY
from aiograd.errors import AiogradError, ProtocolError
from aiograd.rpc.agent import Agent, current_agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.scope import SCOPE

T = TypeVar("T")
SERVICE: Final = "progress"
EVERY: Final = 0.1  # seconds between two looks: more often than people see would only cost time
LONGEST: Final = 80  # characters of a title from another worker
MOST: Final = 64  # bars of one call that are shown: another worker must not fill our memory
_LARGEST: Final = 1 << 62


class Bar(Generic[T]):
    """What `ag.progress` returns: iterate over it with `for`, or `async for`.

    >>> for step in (bar := ag.progress(range(2), "training")):
    ...     bar.say(f"step {step}")
    step 0
    step 1
    """

    def __init__(self, iterable: Any, title: str | None, total: int | None) -> None:
        known = len(iterable) if total is None and isinstance(iterable, Sized) else total
        self._iterable = iterable
        self.title: str = title or ""
        self.total: int | None = known
        self.done: int = 0

    def __iter__(self) -> Iterator[T]:
        with self._shown() as tick:
            for item in self._iterable:
                yield item
                self.done += 1
                if tick is not None:
                    tick()

    async def __aiter__(self) -> AsyncIterator[T]:
        with self._shown() as tick:
            async for item in self._iterable:
                yield item
                self.done += 1
                if tick is not None:
                    tick()

    def say(self, text: str) -> None:
        """Print a line that stays; the bar makes room for it."""
        DISPLAY.say(text)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[Any]:
        """Show the bar here, or at the caller of the running call; gives what every item calls."""
        self.done = 0
        call = SCOPE.get().call
        # Asked once per loop and not per item: a bar must not slow down what it shows.
        reports = None if call is None else Reports.of(current_agent())
        if reports is not None:
            reports.begin(self, call)
            try:
                yield None
            finally:
                reports.end(self)
            return

        def tick() -> None:
            DISPLAY.update(self, self.title, self.done, self.total)

        tick()
        try:
            yield tick
        finally:
            DISPLAY.remove(self)


def progress(iterable: Any, title: str | None = None, total: int | None = None) -> Bar[Any]:
    """Iterate, and show a bar in the terminal while the loop runs.

    `total` is for what has no length. Works inside called functions, too: the bar is shown once, at
    the caller; of nested calls at the first one. Bars with the same title are added up, so a group
    of workers that load parts of one thing has one bar. Asynchronous iterables are read by
    `async for`. Without a terminal nothing is shown. `bar.say(text)` prints a line above the bar.

        >>> def load(parts):
        ...     return [part * 2 for part in ag.progress(parts, "loading")]
        >>> await ag.Group(["worker0", "worker1"]).map(load, [[1, 2], [3]])
        [[2, 4], [6]]
        >>> sum(ag.progress(range(4), "adding"))
        6
    """
    return Bar(iterable, title, total)


class Completed(AsyncIterator[T]):
    """What `ag.as_completed` returns."""

    def __init__(self, futures: Iterable[Awaitable[T]], title: str | None) -> None:
        # Started now, all of them: an iterator that is never read must not keep calls from running.
        waiting = [asyncio.ensure_future(each) for each in futures]
        self._queue: asyncio.Queue[asyncio.Future[T]] = asyncio.Queue()
        self._left = self._total = len(waiting)
        self._title, self._done = title, 0
        for future in waiting:
            future.add_done_callback(self._ended)
        self._show()

    def _ended(self, future: asyncio.Future[T]) -> None:
        # The callback runs once per future. Waiting for all that are left, after each result, would
        # make n results cost n².
        self._queue.put_nowait(future)
        self._done += 1
        self._show()

    def _show(self) -> None:
        if self._title is None:
            return
        if self._done < self._total:
            DISPLAY.update(id(self), self._title, self._done, self._total)
        else:
            DISPLAY.remove(id(self))

    def __aiter__(self) -> Completed[T]:
        return self

    async def __anext__(self) -> T:
        if not self._left:
            raise StopAsyncIteration
        future = await self._queue.get()
        self._left -= 1
        # Raises here, in the turn of the failed one; `_left` was counted down before, so that the
        # reader can go on.
        return future.result()

    def __iter__(self) -> Generator[Awaitable[T], None, None]:
        for _ in range(self._left):
            yield self.__anext__()

    def __len__(self) -> int:
        return self._left


def as_completed(
    futures: Iterable[Awaitable[T]], progress: str | bool | None = None
) -> Completed[T]:
    """Iterate over the results of calls in the order in which they come.

    Takes futures of calls, RRefs, tasks, any awaitables. A failed one raises its error at its turn;
    the others go on, and the iterator can be read further. `progress` shows a bar: True, or its
    title. A plain `for` gives awaitables, as `asyncio.as_completed` does.

        >>> calls = [ag.rpc_async("worker1", pow, args=(2, n)) for n in range(4)]
        >>> sorted([value async for value in ag.as_completed(calls, progress="powers")])
        [1, 2, 4, 8]
        >>> for next_one in ag.as_completed([ag.rpc_async("worker0", abs, args=(-1,))]):
        ...     await next_one
        1
    """
    title = None if progress in (None, False) else "" if progress is True else str(progress)
    return Completed(futures, title)


# ── across workers ──────────────────────────────────────────────────────────────────────────────

# What a bar at a caller is known by: the incarnation of the worker, its call, the bar's number.
_Key = tuple[bytes, int, int]


class _Reported:
    """A bar of this worker, or one that passes through it on its way to an outer caller."""

    __slots__ = ("bar", "number", "place", "sent", "state")

    def __init__(self, bar: Bar[Any] | None, place: tuple[PeerInfo, int], number: int) -> None:
        self.bar = bar  # None: it passes through
        self.place, self.number = place, number  # who called, and the number of that call there
        self.state: tuple[str, int, int | None] = ("", 0, None)
        self.sent: Any = None  # the state that was sent last


class Reports:
    """The bars of one worker that are shown elsewhere, and those of others that are shown here."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._bars: dict[Any, _Reported] = {}  # by bar, or by the key of one that passes through
        self._shown: dict[tuple[bytes, int], set[int]] = {}  # (worker, call): numbers of bars here
        self._number = 0
        # Runs while there are bars. None at rest, so that an idle worker does not wake up.
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def of(agent: Agent) -> Reports | None:
        """Return the part of a worker; None for an agent without."""
        found: Reports | None = agent.parts.get(Reports)
        return found

    def counters(self) -> dict[str, int]:
        """Return how many bars are reported by this worker, or shown at it."""
        return {"progress_bars": len(self._bars) + sum(map(len, self._shown.values()))}

    # ── at the callee ───────────────────────────────────────────────────────────────────────────

    def begin(self, bar: Bar[Any], call: Any) -> None:
        """Report a bar from now on to the caller of a call that runs here. From any thread."""
        self._on_loop(self._begin, bar, call)

    def end(self, bar: Bar[Any]) -> None:
        """Stop reporting a bar. From any thread."""
        self._on_loop(self._end, bar)

    def _on_loop(self, function: Any, *args: Any) -> None:
        with contextlib.suppress(AiogradError):  # a bar is no reason to fail
            if self._agent.here():
                function(*args)
            else:
                self._agent.from_thread(function, *args)

    def _begin(self, bar: Any, call: Any) -> None:
        place = self._caller_of(call)
        if place is not None:
            self._number += 1
            self._bars[bar] = _Reported(bar if isinstance(bar, Bar) else None, place, self._number)
            # The first look comes after a while: a loop that ends at once sends nothing.
            if self._timer is None:
                self._timer = self._agent.loop.call_later(EVERY, self._look)

    def _end(self, bar: Any) -> None:
        reported = self._bars.pop(bar, None)
        # What was never sent need not be taken back.
        if reported is not None and reported.sent is not None:
            self._post(reported.place[0], [(reported.place[1], reported.number, "", -1, None)])

    def _caller_of(self, call: Any) -> tuple[PeerInfo, int] | None:
        # Searched for, once per bar: keeping it for every call would be paid by every call.
        for link in self._agent.links.all():
            number = link.callee.execution.number_of(call)
            if number is not None:
                return link.peer, number
        return None

    def _look(self) -> None:
        """Send what has changed, one message per caller."""
        self._timer = None
        posts: dict[PeerInfo, list[Any]] = {}
        for reported in self._bars.values():
            if (bar := reported.bar) is not None:
                reported.state = (bar.title, bar.done, bar.total)
            # A loop that waits sends nothing, however long it takes.
            if reported.state != reported.sent:
                reported.sent = reported.state
                peer, call = reported.place
                posts.setdefault(peer, []).append((call, reported.number, *reported.state))
        for peer, entries in posts.items():
            self._post(peer, entries)
        if self._bars and not self._agent.closed:
            self._timer = self._agent.loop.call_later(EVERY, self._look)

    def _post(self, peer: PeerInfo, entries: list[Any]) -> None:
        with contextlib.suppress(AiogradError):  # the peer is lost, and its call with it
            self._agent.post(peer, SERVICE, entries)

    # ── at the caller ───────────────────────────────────────────────────────────────────────────

    def received(self, sender: PeerInfo, entries: Any) -> None:
        """Show the bars of calls that we made and that are under way, or pass them on."""
        if type(entries) not in (list, tuple) or not all(map(_well_formed, entries)):
            raise ProtocolError("progress: malformed entries", sender.name)
        link = self._agent.links.get(sender.incarnation)
        if link is None:
            return
        for call, number, title, done, total in entries:
            place, future = (sender.incarnation, call), link.caller.pending.get(call)
            if done < 0:  # also after the call, whose answer may have come first
                self._drop((*place, number))
                continue
            if future is None:
                continue
            # One callback per call and not per bar. It takes away what is left of bars whose end
            # was lost, or never sent by a function that was cancelled.
            if place not in self._shown:
                self._shown[place] = set()
                future.add_done_callback(functools.partial(self._future_done, place))
            numbers = self._shown[place]
            if number in numbers or len(numbers) < MOST:
                numbers.add(number)
                # Cut here: a bar that passes through keeps its title for as long as it is there.
                state = (title[:LONGEST], done, total)
                self._show((*place, number), future.info.parent, state)

    def _show(self, key: _Key, parent: Any, state: tuple[str, int, int | None]) -> None:
        if parent is None:
            DISPLAY.update((self, key), _printable(state[0]), state[1], state[2])
        else:
            # From here it goes on as a bar of our own, to the caller of the call that made this
            # one.
            if key not in self._bars:
                self._begin(key, parent)
            if (reported := self._bars.get(key)) is not None:
                reported.state = state

    def _drop(self, key: _Key) -> None:
        # The entry of the call stays: each new one adds a callback to the call, and a peer may show
        # and end bars on and on.
        numbers = self._shown.get(key[:2])
        if numbers is not None:
            numbers.discard(key[2])
        self._end(key)
        DISPLAY.remove((self, key))

    def _future_done(self, place: tuple[bytes, int], _: object) -> None:
        self._call_ended(place)

    def _call_ended(self, place: tuple[bytes, int]) -> None:
        for number in list(self._shown.get(place, ())):
            self._drop((*place, number))
        self._shown.pop(place, None)

    def peer_lost(self, peer: PeerInfo, error: Exception) -> None:
        """Take away what a lost worker showed: the future of a stream does not end with it."""
        # A copy: the end of a call deletes its entry.
        for place in list(self._shown):
            if place[0] == peer.incarnation:
                self._call_ended(place)

    def close(self) -> None:
        """Stop looking, and clear the line."""
        if self._timer is not None:
            self._timer.cancel()
        for place in list(self._shown):
            self._call_ended(place)


def _well_formed(entry: Any) -> bool:
    if type(entry) not in (list, tuple) or len(entry) != 5:
        return False
    call, number, title, done, total = entry
    numbers = (call, number, done, 0 if total is None else total)
    return type(title) is str and all(type(n) is int and -1 <= n < _LARGEST for n in numbers)


def _printable(title: str) -> str:
    """Return a title that cannot move the cursor."""
    return "".join(c for c in title[:LONGEST] if c.isprintable())


def attach(agent: Agent) -> Reports:
    """Plug progress into an agent."""
    reports = agent.parts[Reports] = Reports(agent)
    agent.services[SERVICE] = reports.received
    agent.lost.append(reports.peer_lost)
    return reports
