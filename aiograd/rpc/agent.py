"""The agent: one worker's machinery for calling others and being called.

It owns the links to its peers, finds out how functions and arguments travel, and is where other
layers plug in: `travellers`, `baggage`, `keeper`, `services`, `parts`, `lost`, `ops`, `faults`.
Who the peers are is the cluster layer's business; it fills the `directory`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import pickle
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import FrameType
from typing import Any

from aiograd.errors import NotAllowed, WorkerClosed, WorkerLost
from aiograd.rpc import current
from aiograd.rpc.callee import pack
from aiograd.rpc.current import DEADLINE
from aiograd.rpc.deadlines import Deadlines
from aiograd.rpc.directory import Directory, PeerInfo, check_name
from aiograd.rpc.doors import Doors
from aiograd.rpc.functions import SERVICE, Shipment, Shipper, Target, function_name
from aiograd.rpc.future import Future
from aiograd.rpc.link import Link
from aiograd.rpc.options import Options, check_timeout
from aiograd.rpc.runtime import Runtime
from aiograd.rpc.travel import Baggage, Departure, Keeper, Travellers
from aiograd.rpc.verdict import Faults
from aiograd.wire.messages import CALL, OP, REQUEST
from aiograd.wire.payload import Codec, Payload, encode_plain
from aiograd.wire.session import Identity

_log = logging.getLogger("aiograd")

Service = Callable[..., Any]  # handler(sender: PeerInfo, *args) -> value | Awaitable


class Agent:
    """One worker's machinery. Make it on the loop it lives on, `start` it, `close` it."""

    def __init__(
        self,
        name: str,
        rank: int,
        *,
        secret: bytes,
        options: Options | None = None,
        runtime: Runtime | None = None,
        cluster: bytes = bytes(16),
        ops: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.name, self.rank = check_name(name), rank
        self.options = options if options is not None else Options()
        self.runtime = runtime if runtime is not None else Runtime()
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.incarnation = self.runtime.token_bytes(16)
        self.closed = False
        self.started = 0  # calls ever made; two equal readings say that none was made between

        # What other layers plug in.
        self.parts: dict[type, Any] = {}
        self.directory = Directory()
        self.travellers = Travellers()
        self.baggage: Baggage | None = None
        self.keeper: Keeper | None = None
        self.services: dict[str, Service] = {}
        self.lost: list[Callable[[PeerInfo, Exception], None]] = []
        self.ops: Mapping[str, Callable[..., Any]] = ops if ops is not None else {}
        self.faults: Faults | None = None

        # Our own.
        self.codec = Codec(self.travellers)
        self.shipper = Shipper(self.codec)
        self.deadlines = Deadlines(self.loop)
        self.pool = self.runtime.pool(self.loop, self.options.threads, self.name)
        self.context = contextvars.Context()  # in which called functions run
        self.context.run(current.use, self)
        self.context.run(DEADLINE.set, math.inf)
        self._links: dict[bytes, Link] = {}  # by incarnation
        self._routes: dict[Any, Link] = {}  # by what callers wrote, until the directory changes
        self._routes_version = -1
        self._service_shipments: dict[str, Shipment] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reserved = 0  # bytes of messages arriving now
        self._heart: asyncio.TimerHandle | None = None
        self._doors = Doors(self, secret, cluster)
        self.directory.add(PeerInfo(name, rank, self.incarnation, ()))

    # ── living ──────────────────────────────────────────────────────────────────────────────────

    async def start(self, *addresses: str) -> None:
        """Listen at the addresses, and become the process's last started agent."""
        try:
            for address in addresses:
                await self._doors.listen(address)
        except BaseException:
            await self.close()
            raise
        self.directory.add(self.info)
        current.opened(self)

    @property
    def info(self) -> PeerInfo:
        """This worker as others should know it."""
        return PeerInfo(self.name, self.rank, self.incarnation, self._doors.addresses)

    @property
    def identity(self) -> Identity:
        options = self.options
        return Identity(
            self.name,
            self.rank,
            self.incarnation,
            self._doors.cluster,
            options.max_message,
            options.max_inflight,
        )

    async def connect(self, address: str) -> PeerInfo:
        """Dial an address of which only the address is known (a rendezvous); who answered."""
        return await self._doors.meet(address)

    async def drain(self, deadline: float) -> bool:
        """Wait until no call of ours is under way and none is running here; False if time is up.

        `deadline` is loop time."""
        while self.outstanding() or self.counters()["running_calls"]:
            left = deadline - self.loop.time()
            if left <= 0:
                return False
            await asyncio.sleep(min(0.005, left))
        return True

    async def close(self) -> None:
        """Abort: local waiters get WorkerClosed, peers see the connection end."""
        if self.closed:
            return
        self.closed = True
        current.closed(self)
        if self._heart is not None:
            self._heart.cancel()
        self._doors.close()
        for link in list(self._links.values()):
            link.close()
        self.pool.close()
        self.deadlines.close()
        me = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not me]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.options.grace)
        await asyncio.sleep(0)  # transports tell their protocols

    def spawn(
        self, work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """A task that is tracked, and cancelled when the agent closes."""
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ── calling ─────────────────────────────────────────────────────────────────────────────────

    def call(
        self,
        to: Any,
        func: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        keep: Any = None,
        frame: FrameType | None = None,
        future: Future[Any] | None = None,
    ) -> Future[Any]:
        """Call `func` on another worker. What is known before sending is raised here.

        `future` is a fresh one of the caller's own kind to answer with."""
        link = self.link(to)
        if type(args) is not tuple:
            args = _as_tuple(args)
        shipment = self.shipper.of(func, link.peer)
        seconds, deadline = self.deadline(timeout)
        held = self.baggage.current() if self.baggage is not None else None
        if future is None:
            future = Future(loop=self.loop)
        future._function, future._seconds = shipment.name, seconds
        future._kind = shipment.kind if keep is None else "remote"
        future.made_at(frame if frame is not None else sys._getframe(1))
        self.started += 1
        embedded = shipment.data is None
        flags = shipment.flags & OP
        payload: Payload | None = None
        if held is None and keep is None and not embedded:
            data = encode_plain(args, kwargs)
            if data is not None:
                payload = Payload(data)
        if payload is None:
            departure = Departure(link.peer, future._kind, held)
            value = (func, args, kwargs) if embedded else (args, kwargs)
            extra = {} if keep is None else {"keep": keep}
            try:
                more, payload = pack(link, value, departure, extra, lambda: "call")
            except BaseException:
                departure.cancel()
                raise
            flags |= more
            future._undo = departure.undo
        self._begin(link, future, CALL, flags, deadline, shipment, payload, embedded)
        return future

    def request(
        self,
        to: Any,
        service: str,
        *args: Any,
        timeout: float | None = None,
        carry: bool = False,
        retry: bool = False,
        future: Future[Any] | None = None,
    ) -> Future[Any]:
        """Ask a service of another worker."""
        link = self.link(to)
        seconds, deadline = self.deadline(timeout)
        if future is None:
            future = Future(loop=self.loop)
        future._function = future._kind = service
        future._seconds = seconds
        held = self.baggage.current() if carry and self.baggage is not None else None
        departure = Departure(link.peer, service, held)
        try:
            flags, payload = pack(link, args, departure, {}, lambda: f"{service} arguments")
        except BaseException:
            departure.cancel()
            raise
        future._undo = departure.undo
        shipment = self._service(service)
        self._begin(link, future, REQUEST, flags, deadline, shipment, payload, False)
        return future

    def post(self, to: Any, service: str, *args: Any, held: Any = None) -> None:
        """Tell a service something; nobody answers. In order with everything else to that peer.

        `held` is the baggage to take along, if any."""
        link = self.link(to)
        departure = Departure(link.peer, service, held)
        try:
            flags, payload = pack(link, args, departure, {}, lambda: f"{service} arguments")
        except BaseException:
            departure.cancel()
            raise
        shipment = self._service(service)
        if threading.get_ident() == self.thread:
            link.post(shipment, flags, payload, departure.undo)
        else:
            self.loop.call_soon_threadsafe(link.post, shipment, flags, payload, departure.undo)

    def _begin(self, link: Link, future: Future[Any], *rest: Any) -> None:
        if threading.get_ident() == self.thread:
            link.begin(future, *rest)
        else:
            self.loop.call_soon_threadsafe(link.begin, future, *rest)

    def _service(self, name: str) -> Shipment:
        shipment = self._service_shipments.get(name)
        if shipment is None:
            shipment = self._service_shipments[name] = Shipment(name, name.encode(), SERVICE, name)
        return shipment

    def deadline(self, timeout: float | None) -> tuple[float, float]:
        """Seconds a call made now may take, and the loop time when they are over."""
        inherited = DEADLINE.get()
        if inherited == math.inf:
            seconds = self.options.timeout if timeout is None else check_timeout(timeout)
            return seconds, (self.loop.time() + seconds if seconds != math.inf else seconds)
        now = self.loop.time()
        left = max(inherited - now, 0.0)
        seconds = left if timeout is None else min(check_timeout(timeout), left)
        return seconds, now + seconds

    def link(self, to: Any) -> Link:
        """The link to the worker that `to` means; UnknownWorker, TypeError, ValueError."""
        if self.closed:
            raise WorkerClosed(f"{self.name} was shut down", self.name)
        if self._routes_version != self.directory.version:
            self._routes.clear()
            self._routes_version = self.directory.version
        if type(to) is str:
            link = self._routes.get(to)
            if link is not None:
                return link
        peer = self.directory.find(to)
        link = self.link_of(peer)
        if type(to) is str:
            self._routes[to] = link
        return link

    def link_of(self, peer: PeerInfo) -> Link:
        link = self._links.get(peer.incarnation)
        if link is None:
            link = self._links[peer.incarnation] = Link(self, peer)
            if peer.incarnation == self.incarnation:
                self._doors.open_self(link)
            if self._heart is None:
                self._heart = self.loop.call_later(self.options.heartbeat, self._beat)
        elif link.peer.addresses != peer.addresses:
            link.peer = peer
        return link

    def dial(self, link: Link) -> None:
        """Connect a link that has something to send."""
        link.state = "dialling"
        self.spawn(self._doors.dial(link))

    # ── being called ────────────────────────────────────────────────────────────────────────────

    def resolve(self, flags: int, data: bytes) -> Target:
        """What a peer's DEFINE means here."""
        if flags & SERVICE:
            return Target(None, data.decode(), data.decode())
        if flags & OP:
            name = data.decode()
            op = self.ops.get(name)
            if op is None:
                return Target.broken(name, NotAllowed(f"there is no op {name!r} here", self.name))
            return Target(op, name, "op")
        if self.options.mode != "trusted":
            return Target.broken(
                "function", NotAllowed("only exposed functions may be called here", self.name)
            )
        try:
            func = pickle.loads(data)
        except Exception as error:
            error.add_note(
                f"the function could not be found on {self.name}: it travels by reference, "
                "so its module must be importable there and contain it"
            )
            return Target.broken("function", error)
        return Target(func, function_name(func))

    # ── what links tell us ──────────────────────────────────────────────────────────────────────

    def peer_lost(self, peer: PeerInfo, error: Exception) -> None:
        if self.closed or peer.incarnation == self.incarnation:
            return
        for callback in list(self.lost):
            try:
                callback(peer, error)
            except Exception:
                _log.exception("%s: a callback for the loss of %s failed", self.name, peer.name)

    def declare_lost(self, peer: PeerInfo, why: str) -> None:
        """Others know that a peer is gone: end everything with it, and let nobody back in as it."""
        link = self.link_of(peer)
        if link.connection is not None:
            link.connection.transport.abort()
        link.lose(WorkerLost(peer.name, why=why))

    def forget(self, peer: PeerInfo) -> None:
        """A peer left the cluster for good: drop its link."""
        link = self._links.pop(peer.incarnation, None)
        self._routes.clear()
        if link is not None:
            link.lose(WorkerLost(peer.name, why="it left the cluster"))
            if link.connection is not None:
                link.connection.transport.abort()

    def reserve(self, size: int) -> bool:
        """Memory for a message of `size` bytes that is about to arrive."""
        if self._reserved + size > self.options.inbound_budget:
            return False
        self._reserved += size
        return True

    def release(self, size: int) -> None:
        self._reserved -= size

    def _beat(self) -> None:
        self._heart = self.loop.call_later(self.options.heartbeat, self._beat)
        for link in list(self._links.values()):
            link.beat()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────

    def outstanding(self) -> int:
        """Calls made here that have not ended."""
        return sum(
            future._kind in ("call", "op", "remote")
            for link in self._links.values()
            for future in link.pending.values()
        )

    def counters(self) -> dict[str, int]:
        """For `debug_info`; all 0 at rest."""
        links = self._links.values()
        return {
            "pending_calls": sum(len(link.pending) for link in links),
            "running_calls": sum(
                incoming.kind == CALL and not incoming.target.quiet
                for link in links
                for incoming in link.callee.running.values()
            ),
            "abandoned_calls": sum(link.callee.abandoned for link in links),
            "buffered_bytes": sum(link.outbox.size for link in links),
        }

    def suspects(self) -> Sequence[str]:
        """Names of peers that are connected but silent."""
        return [link.peer.name for link in self._links.values() if link.suspect]

    def __repr__(self) -> str:
        return f"<Agent {self.name} rank {self.rank}{' closed' if self.closed else ''}>"


def _as_tuple(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, list | tuple):
        raise TypeError(f"args is a tuple, not {type(args).__name__}")
    return tuple(args)
