"""The channel of distributed autograd to its worker: everything `dist` asks of an agent.

The parts of `dist` get a `Channel`, never the agent: what they may do to a worker is listed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from contextvars import Context as Variables
from contextvars import copy_context
from pickle import PickleBuffer
from typing import Any, TypeVar

from aiograd.errors import AiogradError
from aiograd.rpc import remote_exceptions
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import Directory, PeerInfo
from aiograd.rpc.extension import Departure
from aiograd.rpc.link.ledger import Account
from aiograd.rpc.link.link import Link
from aiograd.rpc.observe.tracing import PassTrace, trace_joined_pass, trace_pass
from aiograd.rpc.runtime.deadlines import Bucket
from aiograd.rpc.scope import current_guest, inherited_deadline

T = TypeVar("T")


class Channel:
    """Carries out what the engine and the registry decide: on the loop, in a thread, to a peer."""

    name: str
    rank: int
    incarnation: bytes

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.name, self.rank, self.incarnation = agent.name, agent.rank, agent.incarnation
        self.me: PeerInfo = PeerInfo(*self.identity)  # as it travels in messages: without addresses
        # Members by name and rank. Where the incarnation matters, `link_to` and `reach` are asked: the
        # directory may know a successor already, or not yet know a worker that has called us.
        self.directory: Directory = agent.directory
        self.lease: float = agent.options.lease  # seconds after which a lost peer's contexts are doubted
        # Bound methods, because these run for every message and need no other words here.
        self.post: Callable[..., None] = agent.post
        self.post_plain: Callable[[Link, str, tuple[Any, ...], list[PickleBuffer]], bool] = agent.post_plain
        # By name and incarnation; WorkerLost if it is gone.
        self.link_to: Callable[[str, bytes], Link] = agent.links.exactly
        self.restricts: Callable[[PeerInfo], bool] = agent.restricts
        self.spawn: Callable[..., asyncio.Task[Any]] = agent.spawn
        # Raises in a thread, loop or process that cannot call.
        self.check_affinity: Callable[[], bool] = agent.here
        self.account: Callable[[str], Account] = agent.accounts.of  # of a partner, by its name

    @property
    def identity(self) -> tuple[str, int, bytes]:
        """Name, rank and incarnation of this worker."""
        return self.name, self.rank, self.incarnation

    @property
    def closed(self) -> bool:
        """Whether the worker has been closed."""
        return self._agent.closed

    def random_start(self) -> int:
        """Return where a counter of ids starts, so that a restarted worker repeats none of them."""
        return self._agent.runtime.random.getrandbits(24) << 20

    def unguessable(self) -> int:
        """Return 48 secret random bits."""
        return int.from_bytes(self._agent.runtime.token_bytes(6), "little")

    # ── time ────────────────────────────────────────────────────────────────────────────────────

    def time(self) -> float:
        """Return the loop's time."""
        return self._agent.loop.time()

    def later(
        self, seconds: float, action: Callable[..., None], *args: Any
    ) -> asyncio.TimerHandle:
        """Run an action on the loop after some seconds."""
        return self._agent.loop.call_later(seconds, action, *args)

    def next_tick(self, action: Callable[..., None], *args: Any) -> None:
        """Run an action in the next iteration of the loop: what was posted has left by then."""
        self._agent.loop.call_soon(action, *args)

    def time_left(self) -> float:
        """Return the seconds that the running call has left, or infinity."""
        return inherited_deadline() - self._agent.runtime.time()

    @property
    def default_timeout(self) -> float:
        """The seconds of `Options.timeout`."""
        return self._agent.options.timeout

    def deadline_in(self, seconds: float) -> Bucket:
        """Return the bucket of objects whose `expire` is called in some seconds."""
        return self._agent.deadlines.bucket(self._agent.loop.time() + seconds)

    # ── loop and threads ────────────────────────────────────────────────────────────────────────

    def future(self) -> asyncio.Future[None]:
        """Return a new future of the worker's loop."""
        return self._agent.loop.create_future()

    def on_loop(self, action: Callable[..., None], *args: Any) -> None:
        """Run an action on the worker's loop: now if this is its thread, else soon."""
        # At once where that is possible: when `release` returns on the loop, passes have ended.
        if threading.get_ident() == self._agent.thread:
            action(*args)
        else:
            # A closed loop raises. Its contexts and passes ended with it, so nothing is left to do.
            with contextlib.suppress(RuntimeError):
                self._agent.loop.call_soon_threadsafe(action, *args)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a function off the loop, under the variables of the caller."""
        # The agent's own threads, as for called functions: `Options.threads` limits both together.
        # Not `asyncio.to_thread`, because the pool is injected: a simulator runs it in its own order.
        job = _Job(function, asyncio.get_running_loop().create_future())
        # What a partner's message began counts for the partner's share of the threads.
        guest = current_guest()
        if guest is not None and self._agent.restricts(guest):
            self._agent.thread_shares.of(guest.name).submit(job)
        else:
            self._agent.pool.submit(job)
        await job.done
        error, job.error = job.error, None
        try:
            if error is not None:
                raise error
        finally:  # its traceback holds this frame, which must not hold the error in turn
            del error
        return job.result  # type: ignore[no-any-return]

    def yield_core(self) -> None:
        """Let a process that a message has just woken up have this core, if it found no other."""
        self._agent.runtime.give_way()

    def trace_pass(self) -> PassTrace | None:
        """Return what observes a pass that starts here and now; None if nothing does."""
        return trace_pass(self._agent)

    def trace_joined_pass(self, parent: str) -> PassTrace | None:
        """Return what observes our part of another worker's pass; None if nothing does."""
        return trace_joined_pass(self._agent, parent)

    # ── peers ───────────────────────────────────────────────────────────────────────────────────

    def notify(self, peer: PeerInfo, service: str, *args: Any) -> asyncio.Future[Any]:
        """Send an idempotent message until it is acknowledged, however long that takes.

        The future gets the answer. Nobody has to look at its exception.
        """
        future: asyncio.Future[Any] = self._unlimited(
            lambda: self._agent.request(peer, service, *args, timeout=math.inf, retry=True)
        )
        # Aborts outlive the wait for them, so their futures are often dropped before they are done.
        future.add_done_callback(_retrieve)
        return future

    def ask(
        self, peer: str | PeerInfo, service: str, *args: Any, timeout: float
    ) -> asyncio.Future[Any]:
        """Ask a service of a peer once."""
        future: asyncio.Future[Any] = self._unlimited(
            lambda: self._agent.request(peer, service, *args, timeout=timeout)
        )
        return future

    def _unlimited(self, action: Callable[[], T]) -> T:
        """Run an action outside the deadline of the running call.

        An abort must reach its peers most of all when the time of the call that began the pass is
        up, and a timer or a task inherits that deadline from where it was made.
        """
        # A copy, because a Context cannot be entered twice and this may be nested in it.
        variables: Variables = self._agent.context.copy()
        return variables.run(action)

    def describe(self, error: BaseException, peer: PeerInfo) -> Any:
        """Return an error in a form that a peer can read."""
        codec = self._agent.codec_for(peer)
        return remote_exceptions.describe(codec, error, Departure(peer, "error"))

    def rebuild(self, fault: Any, sender: PeerInfo, worker: str) -> Exception:
        """Return the error of `worker` that `sender` described."""
        return remote_exceptions.rebuild(self._agent.codec_for(sender), fault, worker)

    def is_connected(self, peer: PeerInfo) -> bool:
        """Whether there is a connection to this incarnation of a worker."""
        link = self._agent.links.get(peer.incarnation)
        return link is not None and link.is_open

    def reach(self, name: str, incarnation: bytes) -> PeerInfo | None:
        """Return that very incarnation of a worker; None if no session with it can be had."""
        try:
            return self.link_to(name, incarnation).peer
        except AiogradError:
            return None


class _Job:
    """One function for the agent's threads."""

    def __init__(self, function: Callable[[], Any], done: asyncio.Future[None]) -> None:
        self.function, self.done = function, done
        # By these, hooks and backward functions find their worker, its deadline and its guest.
        self._variables: Variables = copy_context()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the function; called in a thread."""
        try:
            self.result = self._variables.run(self.function)
        except BaseException as error:
            self.error = error

    def finished(self) -> None:
        """Wake up the awaiting task; called on the loop."""
        if not self.done.done():  # it is done if the task was cancelled meanwhile
            self.done.set_result(None)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future as seen, or asyncio would log it."""
    if not future.cancelled():
        future.exception()
