"""The agent: one worker's machinery for calling others and being called.

It decides for each call and request to whom, until when and by which path it goes (`call` chooses
between the fast and the general one), and is where other layers plug in: `travellers`, `baggage`,
`result_store`, `services`, `lost`, `returned`, `watched`, `post_refused`, `ops`, `fault_injector`,
`wrapper`, `parts`. `envelope` packs a call, and the link to its peer sends it and settles its
future. The cluster layer knows who the peers are, and fills the `directory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pickle import PickleBuffer
from types import FrameType
from typing import Any

from aiograd.errors import AiogradError, NotAllowed, WorkerClosed
from aiograd.rpc import scope
from aiograd.rpc.affinity import check_affinity, close_in_children, watch_forks
from aiograd.rpc.callee.exposure import ClassTraveller
from aiograd.rpc.callee.functions import ServiceShipments, Shipment, Shipper, Target
from aiograd.rpc.caller.streams import Stream
from aiograd.rpc.directory import NOWHERE, Directory, PeerInfo, Whereabouts, WorkerInfo
from aiograd.rpc.envelope import check_size, pack_call, pack_service
from aiograd.rpc.extension import (
    Baggage,
    Departure,
    FaultInjector,
    RecordTraveller,
    ResultStore,
    Travellers,
)
from aiograd.rpc.future import CallInfo, Future
from aiograd.rpc.link.connection import LAST_WORDS, hang_up
from aiograd.rpc.link.dialer import Dialer
from aiograd.rpc.link.handshaking import Authenticator
from aiograd.rpc.link.inbound_budget import Budget
from aiograd.rpc.link.ledger import Accounts
from aiograd.rpc.link.link import Link
from aiograd.rpc.link.links import Links
from aiograd.rpc.link.listener import Listener
from aiograd.rpc.link.shared_memory import ParallelCopier
from aiograd.rpc.observe.metrics import Limits
from aiograd.rpc.observe.profile import Profile
from aiograd.rpc.observe.tally import Tally
from aiograd.rpc.observe.tracing import Trace, trace
from aiograd.rpc.options import Options, check_timeout
from aiograd.rpc.retry import retry_call, retry_request
from aiograd.rpc.runtime.deadlines import Deadlines
from aiograd.rpc.runtime.polling import Polling
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.runtime.thread_shares import ThreadShares
from aiograd.rpc.runtime.threads import ThreadPool
from aiograd.rpc.scope import current_scope
from aiograd.wire.buffers import BufferPool
from aiograd.wire.codec import Codec, Payload
from aiograd.wire.fastcodec import Boxes, encode_plain
from aiograd.wire.framing import SMALL
from aiograd.wire.handshake import NO_CLUSTER, Identity, make_incarnation
from aiograd.wire.messages import CALL, FAST, LAZY, OP, REQUEST, STREAM
from aiograd.wire.names import check_name, check_rank
from aiograd.wire.safecodec import DataCodec

_log = logging.getLogger("aiograd")
Service = Callable[..., Any]  # handler(sender: PeerInfo, *args) -> value | Awaitable


class Agent:
    """One worker's machinery. Make it on the loop it lives on, `start` it, `close` it."""

    name: str
    rank: int
    thread: int
    process: int

    def __init__(
        self,
        name: str,
        rank: int,
        *,
        secret: bytes | Mapping[str, bytes],
        options: Options | None = None,
        runtime: Runtime | None = None,
        cluster: bytes = NO_CLUSTER,
        whereabouts: Whereabouts = NOWHERE,
        ops: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.name, self.rank = check_name(name), check_rank(rank)
        self.options: Options = options if options is not None else Options()
        self.runtime: Runtime = runtime if runtime is not None else Runtime()
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.thread, self.process = threading.get_ident(), os.getpid()
        self.loop_runs: Callable[[], bool] = self.loop.is_running  # never, in a forked child
        watch_forks(self)
        close_in_children(self)
        self.incarnation: bytes = make_incarnation(self.name, self.runtime.token_bytes(16))
        self.whereabouts = whereabouts  # as other members know them
        self.closed: bool = False
        self.started: int = 0  # calls ever made; two equal readings say that none was made between

        # What other layers plug in.
        self.parts: dict[type, Any] = {}
        self.directory: Directory = Directory()
        self.travellers: Travellers = Travellers()
        self.plain_travellers: Travellers = (
            Travellers()
        )  # types that need care only where nothing is pickled
        self.plain_travellers.add(PeerInfo, RecordTraveller("peer", PeerInfo))
        self.plain_travellers.add(WorkerInfo, RecordTraveller("worker", WorkerInfo))
        self.plain_travellers.add(type, ClassTraveller(self.name))
        self.baggage: Baggage | None = None
        self.result_store: ResultStore | None = None
        self.services: dict[str, Service] = {}
        # Called on the loop when a session with a peer is lost, or could not begin (then again and
        # again); and on both sides when another one begins, before anything of it is delivered.
        self.lost: list[Callable[[PeerInfo, Exception], None]] = []
        self.returned: list[Callable[[PeerInfo], None]] = []
        # Each gives the incarnations of peers whose loss its layer must hear of at once: these keep
        # their connections, also when nobody calls them.
        self.watched: list[Callable[[], Iterable[bytes]]] = []
        # By the name of a service: told on the loop when a peer could not take a post for it, for
        # want of memory above all. Posts are not numbered for their senders, so the error says who
        # refused, not which one: what may have depended on it fails.
        self.post_refused: dict[str, Callable[[PeerInfo, Exception], None]] = {}
        self.ops: Mapping[str, Callable[..., Any]] = ops if ops is not None else {}
        self.fault_injector: FaultInjector | None = None
        # Recordings of whatever is called here, innermost last. None: calls are neither recorded
        # nor counted, which is all that the paths of a call ask.
        self.profiles: list[Profile] | None = None
        self.tally: Tally | None = None  # counts calls; then `profiles` is not None
        # Gives what runs in place of a function that is called here; None: the function itself.
        self.wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

        # Our own.
        self.codec: Codec = Codec(self.travellers)
        # For peers that may not run code here.
        self.data_codec: DataCodec = DataCodec(self.travellers, self.plain_travellers)
        self.shipper: Shipper = Shipper(self.codec)
        why = "only exposed functions may be called here"
        self.refused: Target = Target.broken("a function", NotAllowed(why, self.name))
        self.inside: Target = Target(
            None, "a function"
        )  # stands for functions that come inside their call
        self.deadlines: Deadlines = Deadlines(self.loop)
        self.pool: ThreadPool = self.runtime.pool(self.loop, self.options.threads, self.name)
        self.thread_shares: ThreadShares = ThreadShares(
            self.loop, self.pool, self.options.partner_threads, self.options.threads
        )
        self.context: contextvars.Context = contextvars.Context()  # in which called functions run
        self.context.run(scope.use, self)
        self._service_shipments = ServiceShipments()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.memory: BufferPool = BufferPool()  # in which large messages arrive
        self.copier: ParallelCopier = ParallelCopier()
        self.limits: Limits = Limits()  # which of them others have reached
        self.budget: Budget = Budget(self.options.inbound_budget, self.limits)
        self.accounts: Accounts = Accounts(
            self.name, self.budget, self.options, self.limits, self.loop.time
        )
        self.polling: Polling = Polling(self.loop, self.runtime, self.pool)
        options, runtime = self.options, self.runtime
        identity = Identity(
            self.name,
            self.rank,
            self.incarnation,
            cluster,
            options.max_message,
            options.max_inflight,
        )
        self._authenticator = authenticator = Authenticator(
            identity, secret, options, runtime.token_bytes, self.directory
        )
        self.dialer: Dialer = Dialer(authenticator, runtime, options, self.directory)
        self.links: Links = Links(self, self.dialer)
        self.listener: Listener = Listener(
            authenticator, runtime, options, self.limits, self.links, self.dialer.peer_connected
        )
        self._routes = self.links.routes
        self._links_by_incarnation = self.links.table
        self.directory.add(self.info)

    # ── living ──────────────────────────────────────────────────────────────────────────────────

    async def start(self, *addresses: str) -> None:
        """Listen at the addresses, and become the process's last started agent."""
        try:
            for address in addresses:
                await self.listener.listen(address)
        except BaseException:
            await self.close()
            raise
        self.directory.add(self.info)
        scope.opened(self)

    @property
    def info(self) -> PeerInfo:
        """This worker as others should know it."""
        restricted, exceptions = self.options.restriction
        host, locality, labels = self.whereabouts
        return PeerInfo(
            self.name,
            self.rank,
            self.incarnation,
            self.listener.addresses,
            restricted,
            exceptions,
            host,
            locality,
            labels,
        )

    @property
    def identity(self) -> Identity:
        """This worker as it presents itself in a handshake."""
        return self._authenticator.identity

    @property
    def cluster(self) -> bytes:
        """The id of the cluster that this worker has joined: 16 bytes, zeros before."""
        return self._authenticator.identity.cluster

    def trusts(self, peer: PeerInfo) -> bool:
        """Whether a peer may call anything here: then its calls are not a guest's."""
        trusted = self.options.mode_for(peer.name) == "trusted"
        return trusted and not peer.restricts(self.name)

    def restricts(self, peer: PeerInfo) -> bool:
        """Whether only plain data crosses the connection to a peer: if either side wants it so."""
        link = self.links.table.get(peer.incarnation)
        if link is not None:  # agreed on, for as long as it lives
            return link.restricted
        return self.options.mode_for(peer.name) == "restricted" or peer.restricts(self.name)

    def codec_for(self, peer: PeerInfo) -> Codec | DataCodec:
        """Return the codec for what is exchanged with a peer: pickle, or plain data only."""
        link = self._links_by_incarnation.get(peer.incarnation)
        restricted = self.restricts(peer) if link is None else link.restricted
        return self.data_codec if restricted else self.codec

    @property
    def refusals(self) -> Mapping[str, str]:
        """Where the latest connections came from that were refused here, and why.

        Or their names, if they have proven those: a hint where a worker is missing."""
        return self.listener.refusals

    async def connect(self, address: str) -> PeerInfo:
        """Dial an address of which only the address is known (a rendezvous); who answered."""
        return await self.dialer.connect(address, self.links)

    async def close(self) -> None:
        """Abort: local waiters get WorkerClosed, peers see the connection end."""
        if self.closed:
            return
        self.closed = True
        scope.closed(self)
        self.listener.close()
        self.dialer.close()
        links = self.links.close()
        mine = {asyncio.current_task()}
        tasks = {task for link in links for task in link.callee.execution.tasks()} - mine
        for link in links:
            link.close()
        self.pool.close()
        self.copier.close()
        self.polling.closed = True
        self.deadlines.close()
        tasks |= self._tasks - mine
        for task in tasks:
            task.cancel()
        if tasks:
            # Those who wanted to wait for them have done so; some ignore that they are cancelled.
            await asyncio.wait(tasks, timeout=LAST_WORDS)
        await hang_up([link.connection for link in links if link.connection is not None])

    def descriptors(self) -> Iterator[int]:
        """Give what this worker has open: its listeners and connections."""
        yield from self.listener.descriptors()
        yield from self.dialer.descriptors()
        for link in list(self.links.all()):
            yield from link.descriptors()

    def spawn(
        self, work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """A task that is tracked, and cancelled when the agent closes."""
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def use_boxes(self, boxes: Boxes) -> None:
        """Let classes that every peer knows take the fast codec.

        Over links that are there already, too: a worker that joins has dialled the coordinator
        before the layers that know these classes are attached."""
        self.travellers.boxes = self.travellers.common_boxes = boxes
        for link in self.links.all():
            link.boxes = boxes

    # ── calling ─────────────────────────────────────────────────────────────────────────────────

    def call(
        self,
        to: Any,
        func: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        keep: bytes | None = None,
        frame: FrameType | None = None,
        future: Future[Any] | None = None,
        once: bool = False,
    ) -> Future[Any]:
        """Call `func` on another worker. What is known before sending is raised here.

        `keep` is the token under which the result stays there. `frame` is the call site, `future`
        a fresh one of the caller's own kind to answer with. `once`: even if it could be retried."""
        here = threading.get_ident() == self.thread
        if not (here and self.loop_runs()):  # `here()` written out: every call comes this way
            check_affinity(self)
        link = self._routes.get(to) if type(to) is str else None
        if link is None:
            link = self.link(to)
        if type(args) is not tuple:
            args = as_tuple(args)
        if kwargs is not None and type(kwargs) is not dict:
            kwargs = as_dict(kwargs)
        if frame is None:
            frame = sys._getframe(1)
        if link.restricted:
            shipment = self.shipper.named(func, link.peer)
        else:
            shipment = self.shipper.of(func, link.peer)
        if shipment.idempotent and keep is None and not once:
            return retry_call(self, to, func, args, kwargs, timeout, frame, future)
        scope = current_scope()
        if timeout is None and scope.call is None:  # what `deadline` gives, nearly always
            seconds = self.options.timeout
            deadline = self.loop.time() + seconds
        else:
            seconds, deadline = self.deadline(timeout)
        if future is None:
            future = Future(loop=self.loop)
        label = shipment.kind if keep is None else "remote"
        future.info = info = CallInfo(shipment.name, label, seconds, deadline, frame)
        if scope.call is not None:
            info.parent = scope.call
        carried = self.baggage.current() if self.baggage is not None else None
        if carried is not None and keep is not None:
            info.carried = carried
        if not shipment.quiet:
            self.started += 1
            if scope.recording is not None:
                info.trace = Trace(scope.recording, self, link.peer, label)
        if (
            here
            and carried is None
            and not kwargs
            and info.trace is None
            and shipment.data is not None  # else the function goes inside its call
            and not link.restricted
            and link.caller.start_batched(future, shipment, args, keep)
        ):
            return future
        self._start_call(link, future, func, (args, kwargs), shipment, carried, keep)
        return future

    def _start_call(
        self,
        link: Link,
        future: Future[Any],
        func: Any,
        arguments: tuple[Any, ...],
        shipment: Shipment,
        carried: Any,
        keep: bytes | None = None,
        flags: int = 0,
    ) -> None:
        """Pack a call in full: travellers, baggage, a function that goes inside; and start it."""
        info = future.info
        departure = Departure(link.peer, info.label, carried)
        inside = shipment.data is None
        value = (func, *arguments) if inside else arguments
        metadata = None if info.trace is None else info.trace.ask(None)
        more, payload = pack_call(self, link, value, departure, keep, metadata)
        info.undo = departure.undo
        flags |= more | (shipment.flags & OP)
        known = None if inside else shipment
        if threading.get_ident() == self.thread:
            link.caller.start(future, CALL, flags, known, payload)
        else:
            # In the caller's context: the scope says whose child the call is (`caller.window`).
            self.from_thread(link.caller.start_from_thread, future, CALL, flags, known, payload)

    def stream(
        self,
        to: Any,
        func: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        frame: FrameType | None = None,
    ) -> Stream[Any]:
        """Call a generator function; iterate over what comes. On the loop only.

        `timeout` is for the whole stream; without one, each item may take `Options.timeout`.
        `frame` is the call site."""
        self.here()
        link = self.link(to)
        ship = self.shipper.named if link.restricted else self.shipper.of
        shipment = ship(func, link.peer)
        patience = None
        if timeout is None and current_scope().deadline == math.inf:
            patience, timeout = self.options.timeout, math.inf
        seconds, deadline = self.deadline(timeout)
        carried = self.baggage.current() if self.baggage is not None else None
        future: Future[Any] = Future(loop=self.loop)
        future.info = info = CallInfo(shipment.name, "call", seconds, deadline, frame)
        info.trace, info.parent = trace(self, link.peer, "stream"), current_scope().call
        stream: Stream[Any] = Stream(future, link, None if patience == math.inf else patience)
        arguments = (as_tuple(args), kwargs)
        self._start_call(link, future, func, arguments, shipment, carried, flags=STREAM)
        return stream

    def request(
        self,
        to: Any,
        service: str,
        *args: Any,
        timeout: float | None = None,
        carry: bool = False,
        retry: bool = False,
        lazy: bool = False,
        future: Future[Any] | None = None,
        frame: FrameType | None = None,
    ) -> Future[Any]:
        """Ask a service of another worker. `retry`: again and again until it answers.

        `carry`: the request is made for user code, so it carries the baggage. `lazy`: nobody waits
        for the answer, so both messages may wait for others. `frame` is the call site."""
        here = self.here()
        link = self._routes.get(to) if type(to) is str else None
        if link is None:
            link = self.link(to)
        seconds, deadline = self.deadline(timeout)
        if future is None:
            future = Future(loop=self.loop)
        future.info = info = CallInfo(service, service, seconds, deadline, frame)
        if retry:
            retry_request(self, future, link, service, args, deadline, carry)
            return future
        carried = None
        if carry:
            carried = self.baggage.current() if self.baggage is not None else None
            info.trace = trace(self, link.peer, service.rpartition(".")[2])
        departure = Departure(link.peer, service, carried)
        flags, payload = pack_service(self, link, args, departure)
        info.undo = departure.undo
        if lazy and flags & FAST:
            flags |= LAZY
        shipment = self._service_shipments[service]
        if here:
            link.caller.start(future, REQUEST, flags, shipment, payload)
        else:
            self.from_thread(
                link.caller.start_from_thread, future, REQUEST, flags, shipment, payload
            )
        return future

    def post(self, to: Any, service: str, *args: Any, carried: Any = None) -> None:
        """Tell a service something; nobody answers. In order with everything else to that peer.

        Raises if the peer is lost. One that is lost later is announced by `lost`, and one that
        cannot take the post by `post_refused`. `carried` is the baggage of the post, if any."""
        here = self.here()
        link = self.link(to)
        departure = Departure(link.peer, service, carried)
        flags, payload = pack_service(self, link, args, departure)
        shipment = self._service_shipments[service]
        if here:
            link.post(shipment, flags, payload, departure.undo)
        else:
            self.from_thread(_post_or_drop, link, shipment, flags, payload, departure.undo)

    def post_plain(
        self, link: Link, service: str, args: tuple[Any, ...], lent: list[PickleBuffer]
    ) -> bool:
        """Post, on the loop, what is known to be plain data; False if it may not go like that."""
        if link.restricted:
            return False
        payload = Payload(encode_plain(args, lent), lent)
        if lent or len(payload.data) > SMALL:
            check_size(payload, service, link.max_message)
        link.post(self._service_shipments[service], FAST, payload, None)
        return True

    def report_refused_post(self, peer: PeerInfo, service: str, error: Exception) -> None:
        """Tell a service that a peer could not take a post for it (see `post_refused`)."""
        callback = self.post_refused.get(service) if type(service) is str else None
        if callback is None:
            link = self.links.get(peer.incarnation)
            if link is None or link.may_log():  # a partner may say so of posts that never were
                _log.error("%s: %s refused %.80r: %.500r", self.name, peer.name, service, error)
            return
        try:
            callback(peer, error)
        except Exception:
            _log.exception("%s: a callback for a refused %.80r failed", self.name, service)

    # ── threads and time ────────────────────────────────────────────────────────────────────────

    def here(self) -> bool:
        """Whether this is the worker's thread; raises where the worker cannot be used at all."""
        here = threading.get_ident() == self.thread
        if not (here and self.loop_runs()):
            check_affinity(self)
        return here

    def from_thread(self, func: Callable[..., Any], *args: Any) -> None:
        """Let the loop do something; WorkerClosed if it runs no more."""
        try:
            self.loop.call_soon_threadsafe(func, *args)
        except RuntimeError:
            raise WorkerClosed(f"the loop of {self.name} has ended", self.name) from None

    def deadline(self, timeout: float | None) -> tuple[float, float]:
        """Return the seconds a call made now may take, and the loop time when they are over."""
        inherited = current_scope().deadline
        if inherited == math.inf:
            seconds = self.options.timeout if timeout is None else check_timeout(timeout)
            return seconds, (self.loop.time() + seconds if seconds != math.inf else seconds)
        now = self.loop.time()
        left = max(inherited - now, 0.0)
        seconds = left if timeout is None else min(check_timeout(timeout), left)
        return seconds, now + seconds

    def link(self, to: Any) -> Link:
        """Return the link to the worker that `to` means; UnknownWorker, TypeError, ValueError."""
        return self.links.find(to)

    def __repr__(self) -> str:
        return f"<Agent {self.name} rank {self.rank}{' closed' if self.closed else ''}>"


current_agent: Callable[[], Agent] = scope.current  # which is below, and does not know the type


def _post_or_drop(link: Link, *message: Any) -> None:
    """Post from another thread: nobody is left there to hear that the peer is lost."""
    with contextlib.suppress(AiogradError):
        link.post(*message)


def as_tuple(args: Any) -> tuple[Any, ...]:
    """Check arguments by position, as a user gave them."""
    if not isinstance(args, list | tuple):
        raise TypeError(f"args is a tuple, not {type(args).__name__}")
    return tuple(args)


def as_dict(kwargs: Any) -> dict[str, Any]:
    """Check arguments by name, as a user gave them."""
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a dict, not {type(kwargs).__name__}")
    return dict(kwargs)
