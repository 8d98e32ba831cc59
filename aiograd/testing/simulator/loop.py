"""An event loop whose time is a number: it never sleeps, it jumps to the next timer.

Every callback belongs to the node in whose `contextvars.Context` it was made, or to the world.
That is how one loop plays several processes: callbacks of a crashed node are never run again, those
of a paused one wait. Within a node the order is asyncio's own, because code may rely on it; between
nodes, which share nothing but the network, the order is drawn from the seed.

Sockets, executors and subprocesses would leave the simulation, and are refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

# Callbacks in a row without time passing. More means a livelock, such as two nodes that answer each
# other for ever: the largest workload, a crowd of 5,000 calls, needs 3,900.
_LIVELOCK: Final = 50_000


class SimulationError(RuntimeError):
    """The simulated program did something that cannot be simulated, or can never end."""


class Deadlock(SimulationError):
    """Nothing is scheduled any more, but something is still awaited.

    A real loop would sleep for ever; a simulated one knows that nothing can happen any more.
    """


class Owner(Protocol):
    """What callbacks belong to: a node, which may be crashed, paused or slow."""

    alive: bool
    busy_until: float  # its callbacks wait until then
    cost: float  # seconds that each of its callbacks takes
    held: deque[asyncio.Handle]  # callbacks that wait
    discarded: list[Any]  # callbacks that will never run, kept so that nothing is finalised


OWNER: Final[contextvars.ContextVar[Owner | None]] = contextvars.ContextVar("owner", default=None)


class SimTask(asyncio.Task[Any]):
    """A task whose hash does not depend on its address.

    A TaskGroup keeps its tasks in a set, and cancels them in the order of the set: with hashes from
    addresses two runs of one seed would differ.
    """

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimFuture(asyncio.Future[Any]):
    """A future whose hash does not depend on its address."""

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """asyncio's loop over virtual time."""

    # BaseEventLoop's own queues, which its type hints leave out.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool
    _check_closed: Any

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._now = 0.0
        self._random = rng
        self._still = 0  # callbacks since time passed last
        self._made = 0  # tasks and futures so far
        self.steps: int = 0  # callbacks run so far
        # Called before each callback with its owner: crash points are counted, and happen, here.
        self.boundary: Callable[[Owner | None], None] | None = None
        # Threads that wait for a lock: (lock, context, go on, turn). `threads` adds to it.
        self.blocked: list[tuple[Any, contextvars.Context, Any, Any]] = []
        self.owners: weakref.WeakKeyDictionary[asyncio.Task[Any], Owner | None] = (
            weakref.WeakKeyDictionary()
        )
        # The simulation has ended. Finalisers of what is freed from now on may still call the loop;
        # nothing that they schedule is run.
        self.over = False
        self.troubles: list[str] = []  # what asyncio would only log
        self.set_exception_handler(self._trouble)

    def time(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._now

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def _run_once(self) -> None:
        # Replaces asyncio's own: the same steps without a selector, so time passes only here.
        scheduled, ready = self._scheduled, self._ready
        self._sweep_timers()
        if not ready and not self._stopping:
            if not scheduled:
                raise Deadlock("nothing will ever happen again, but something is still awaited")
            self._advance(scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                ready.append(timer)
        for handle in self._batch():
            # Asked again: a callback of this batch may have cancelled a later one.
            if not handle.cancelled():
                self._play(handle)
        if self.blocked:
            self._unblock()

    def _unblock(self) -> None:
        """Let threads whose lock was released go on, in the order in which they began to wait."""
        free = [entry for entry in self.blocked if not entry[0].locked()]
        if free:
            self.blocked = [entry for entry in self.blocked if entry[0].locked()]
            for _, context, go_on, turn in free:
                self.call_soon(go_on, turn, context=context)

    def _advance(self, when: float) -> None:
        if when > self._now:
            self._now, self._still = when, 0

    def _sweep_timers(self) -> None:
        # As asyncio does. Without it, the timers of deadlines that were met would pile up.
        scheduled = self._scheduled
        if self._timer_cancelled_count > 100 and self._timer_cancelled_count * 2 > len(scheduled):
            for timer in scheduled:
                if timer.cancelled():
                    timer._scheduled = False  # type: ignore[attr-defined]
            scheduled[:] = [timer for timer in scheduled if not timer.cancelled()]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1

    def _batch(self) -> list[asyncio.Handle]:
        """Take what is ready now: in order for each node, in random order between nodes."""
        ready = list(self._ready)
        self._ready.clear()
        if len(ready) < 2:
            return ready
        # By identity, but in the order of first appearance: addresses do not decide anything.
        queues: dict[int, deque[asyncio.Handle]] = {}
        for handle in ready:
            queues.setdefault(id(_owner(handle)), deque()).append(handle)
        if len(queues) == 1:
            return ready
        waiting = list(queues.values())
        mixed: list[asyncio.Handle] = []
        while len(waiting) > 1:
            at = self._random.randrange(len(waiting))
            mixed.append(waiting[at].popleft())
            if not waiting[at]:
                del waiting[at]
        mixed.extend(waiting[0])
        return mixed

    def _play(self, handle: asyncio.Handle) -> None:
        self.steps += 1
        self._still += 1
        if self._still > _LIVELOCK:
            raise SimulationError(f"{_LIVELOCK} callbacks without time passing: {handle!r}")
        owner = _owner(handle)
        if self.boundary is not None:
            self.boundary(owner)
        if owner is None:
            handle._run()
        elif not owner.alive:
            owner.discarded.append(handle)
        elif owner.held or owner.busy_until > self._now:
            # Also behind others that are held, when the node is free again: order is kept.
            self._hold(owner, handle)
        else:
            handle._run()
            if owner.cost:
                owner.busy_until = max(owner.busy_until, self._now + owner.cost)

    def _hold(self, owner: Owner, handle: asyncio.Handle) -> None:
        owner.held.append(handle)
        if len(owner.held) == 1:
            self._wake_at(owner)

    def _wake_at(self, owner: Owner) -> None:
        # In a context without an owner: in the node's own the call would be held as well.
        nobody = contextvars.Context()
        self.call_at(max(owner.busy_until, self._now), self._wake, owner, context=nobody)

    def _wake(self, owner: Owner) -> None:
        """Run callbacks that a node has missed, until it is busy or dead again."""
        while owner.held and owner.alive and owner.busy_until <= self._now:
            handle = owner.held.popleft()
            if not handle.cancelled():
                handle._run()
                if owner.cost:
                    owner.busy_until = max(owner.busy_until, self._now + owner.cost)
        if not owner.alive:
            owner.discarded.extend(owner.held)
            owner.held.clear()
        elif owner.held:
            self._wake_at(owner)

    # ── whose tasks ─────────────────────────────────────────────────────────────────────────────

    def create_task(
        self,
        coro: Any,
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        """As `asyncio.BaseEventLoop`; note the node in whose context the task runs."""
        self._check_closed()
        self._made += 1
        task = SimTask(self._made, coro, loop=self, name=name, context=context)
        self.owners[task] = OWNER.get() if context is None else context.get(OWNER)
        if self.over:
            coro.close()  # a finaliser of something that crashed; it will never run
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def create_future(self) -> asyncio.Future[Any]:
        """As `asyncio.BaseEventLoop`."""
        self._made += 1
        return SimFuture(self._made, loop=self)

    def tasks_of(self, owner: Owner | None) -> list[asyncio.Task[Any]]:
        """List the tasks that a node has not finished."""
        return [task for task, its in self.owners.items() if its is owner and not task.done()]

    # ── after the end ───────────────────────────────────────────────────────────────────────────

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle: asyncio.Handle = super()._call_soon(callback, args, context)  # type: ignore[misc]
        if self.over:  # a finaliser of something that crashed
            self._ready.clear()
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As `asyncio.BaseEventLoop`; without effect after the simulation."""
        timer = super().call_at(when, callback, *args, context=context)
        if self.over:
            self._scheduled.clear()
        return timer

    def pending(self, owner: Owner) -> list[asyncio.Handle]:
        """List the callbacks and timers that a node still has scheduled."""
        everything = [*self._ready, *self._scheduled, *owner.held]
        return [each for each in everything if not each.cancelled() and _owner(each) is owner]

    # ── what asyncio expects of a loop, and what is refused ─────────────────────────────────────

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """The loop never sleeps, so nobody has to wake it."""

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.over:
            error = context.get("exception")
            self.troubles.append(f"{context.get('message')}: {error!r}")

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        """Refuse: no seed decides when a real thread ends."""
        raise SimulationError(f"threads of an executor cannot be simulated ({func!r})")

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: no seed decides when real bytes arrive."""
        raise SimulationError("real sockets cannot be simulated")

    create_server: Any = create_connection
    create_unix_connection: Any = create_connection
    create_unix_server: Any = create_connection
    create_datagram_endpoint: Any = create_connection
    subprocess_exec: Any = create_connection
    subprocess_shell: Any = create_connection
    connect_read_pipe: Any = create_connection
    connect_write_pipe: Any = create_connection


def _owner(handle: asyncio.Handle) -> Owner | None:
    return handle._context.get(OWNER)  # type: ignore[attr-defined,no-any-return]
