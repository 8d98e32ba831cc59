"""`RRef`: a value that stays where it is, and may be used from anywhere.

What users see. It wraps one record of this worker's part of the protocol: the `OwnerRecord` of a
value here, or the `UserRecord` of a fork of a value elsewhere. `RRefs` does everything that needs
the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    TypeVarTuple,
    overload,
)

from aiograd._frames import users_frame
from aiograd._html import GREEN, card, code, quiet
from aiograd.errors import NotOwner, RRefError, WorkerClosed, WrongThread
from aiograd.rpc.directory import To, WorkerInfo
from aiograd.rpc.future import CallInfo, Future
from aiograd.rref.futures import CreateFuture, block_on, wake
from aiograd.rref.proxy import AsyncProxy, RemoteProxy, StreamProxy, SyncProxy, method_name
from aiograd.rref.refcount.records import (
    OwnerRecord,
    Record,
    Use,
    UserRecord,
    format_id,
    with_callback,
)
from aiograd.rref.registry import RRefs, current_rrefs

if TYPE_CHECKING:
    from aiograd.rpc.api import Kwargs

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")
P = ParamSpec("P")


class RRef(Generic[T_co]):
    """A reference to a value that stays with its owner.

    `RRef(value)` makes this worker the owner; `ag.remote(to, f)` another one. References travel as
    arguments and results; the owner keeps the value until the last of them is dropped. `await rref`
    fetches a copy.

        >>> rref = ag.RRef({"a": 1})
        >>> rref.owner_name(), rref.local_value()
        ('driver', {'a': 1})
        >>> def read(rref, key):
        ...     return rref.rpc_sync().get(key)
        >>> await ag.rpc_async("worker1", read, args=(rref, "a"))
        1
    """

    # Of these, `record`, `released` and `type_future` are for the library: see `futures.Reference`.
    __slots__ = (
        "__weakref__",
        "_call",
        "_creation",
        "_refs",
        "record",
        "released",
        "type_future",
    )

    record: Record  # of this worker's part of the protocol; the RRef keeps it alive
    released: bool  # by `release`
    type_future: Future[type] | None  # asked for by `_get_type`; None again after an error
    _refs: RRefs
    _call: CreateFuture | None  # the creation under way, until the value is first asked for
    _creation: Future[None] | None  # asked for by `future`

    def __init__(self, value: T_co) -> None:
        self._refs = refs = current_rrefs()
        frame = users_frame()
        self.record = refs.protocol.own(value, (frame.f_code.co_filename, frame.f_lineno))
        self.released = False
        self._call = self._creation = self.type_future = None

    def __del__(self) -> None:
        # Runs anywhere and at any time, also while the interpreter ends and globals are gone.
        # No `record` if __init__ raised.
        record = getattr(self, "record", None)
        if record is not None and record.needs_release and not self.released:
            self._refs.messenger.schedule_drop(record)

    # ── ownership ───────────────────────────────────────────────────────────────────────────

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value."""
        record = self.record
        owner = record.owner if isinstance(record, UserRecord) else self._refs.protocol.me
        return WorkerInfo(owner.name, owner.rank)

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        record = self.record
        return record.owner.name if isinstance(record, UserRecord) else self._refs.agent.name

    def is_owner(self) -> bool:
        """Return whether the value is on this worker."""
        return isinstance(self.record, OwnerRecord)

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner knows of this reference; inside a called function it does."""
        record = self.record
        return isinstance(record, OwnerRecord) or record.use is Use.CONFIRMED

    # ── value ───────────────────────────────────────────────────────────────────────────────

    def to_here(self, timeout: float | None = None) -> Future[T_co]:
        """Fetch the value: a fresh copy, or at the owner the object itself.

        Waits for its creation; the error of the creating function is raised here too.
        """
        if type(self.record) is OwnerRecord:
            return self._refs.wait(self, timeout, "RRef.to_here")
        if (creation := self._call) is not None:
            # Only the first fetch can piggyback on the creation, and only before that has left.
            self._call = None
            if timeout is None and self._refs.piggyback_fetch(self, creation):
                return creation
        frame = sys._getframe(1)
        if frame.f_code is _AWAIT:
            assert frame.f_back is not None
            frame = frame.f_back
        return self._refs.ask(self, "rref.fetch", timeout=timeout, carry=True, frame=frame)

    def __await__(self) -> Generator[Any, None, T_co]:
        return self.to_here().__await__()

    def local_value(self) -> T_co:
        """Return the value itself; only at its owner, elsewhere NotOwner.

        While it is being created, this waits in a thread, and is an RRefError on an event loop.
        """
        # Of a user's reference only whether it was released: it has no value here in any case.
        checked = self.released or isinstance(self.record, OwnerRecord)
        record = self._refs.usable(self) if checked else self.record
        if isinstance(record, UserRecord):
            me, owner = self._refs.protocol.me, record.owner
            raise NotOwner(
                f"{self} has no local value on {me.name} (rank {me.rank}): it is on its owner "
                f"{owner.name} (rank {owner.rank}); use `await rref`, or call a function there",
                owner.name,
            )
        if not record.ready:
            if asyncio._get_running_loop() is not None:
                raise RRefError(
                    f"{self} is still being created, and waiting would stop this event loop: "
                    "use `await rref`",
                    self._refs.agent.name,
                )
            block_on(self._refs.agent, self._refs.wait(self, None, "RRef.local_value"))
        value: T_co = record.result()
        return value

    def future(self) -> Future[None]:
        """Return the future of its creation: ends with None, or with the creator's error."""
        creation = self._creation
        if creation is None or creation.cancelled():
            creation = self._creation = self._begin(self._created, "creation")
        return creation

    async def _created(self) -> None:
        try:
            await self._refs.created(self)
        except BaseException:
            # An awaited error holds frames that hold this reference, which must not hold it.
            self._creation = None
            raise

    def _begin(self, work: Callable[[], Any], what: str) -> Future[Any]:
        """Run a coroutine function about this reference on the loop, from any thread."""
        agent = self._refs.agent
        future: Future[Any] = Future(loop=agent.loop)
        future.info = CallInfo(f"RRef {what}")
        self._refs.messenger.on_loop(lambda: agent.spawn(_run(work, future, agent.name)))
        return future

    # ── calling its methods ─────────────────────────────────────────────────────────────────

    @overload
    def call(
        self,
        method: Callable[Concatenate[T_co, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]: ...
    @overload
    def call(
        self, method: Callable[Concatenate[T_co, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method at the owner: `await rref.call(Counter.add, 2)`.

        The same as `rref.rpc_async().add(2)`, and an editor knows parameters and result. The method
        is found by its name: of a subclass, its own method is called. TypeError for a function that
        is no method of a class.
        """
        name = method_name(method)
        return AsyncProxy(self._refs, self, None).begin(name, args, kwargs, sys._getframe(1))

    def rpc_async(self, timeout: float | None = None) -> AsyncProxy:
        """Call a method at the owner: `await rref.rpc_async().method(...)`."""
        return AsyncProxy(self._refs, self, timeout)

    # The proxy is typed as the value: its methods have the parameters and results of the value's.
    def rpc_sync(self, timeout: float | None = None) -> T_co:
        """Call a method at the owner and wait, off the loop: `rref.rpc_sync().method(...)`."""
        return SyncProxy(self._refs, self, timeout)  # type: ignore[return-value]

    def remote(self, timeout: float | None = None) -> RemoteProxy:
        """Call a method at the owner and leave its result there: `rref.remote().method(...)`."""
        return RemoteProxy(self._refs, self, timeout)

    def rpc_stream(self, timeout: float | None = None) -> StreamProxy:
        """Read a generator method at the owner: `async for x in rref.rpc_stream().method()`.

        Leaving the loop closes the generator; a slow reader slows it down; see `ag.rpc_stream`.

            >>> class Model:
            ...     def tokens(self, n):
            ...         yield from range(n)
            >>> model = ag.remote("worker1", Model)
            >>> [token async for token in model.rpc_stream().tokens(3)]
            [0, 1, 2]
        """
        return StreamProxy(self._refs, self, timeout)

    def _get_type(self, timeout: float | None = None, blocking: bool = True) -> Any:
        """Return the type of the value; it is fetched once. `blocking=False` gives the future.

        On an event loop WrongThread, unless the type is known.
        """
        known = self.type_future
        if known is None or known.cancelled():
            known = self.type_future = self._ask_type(timeout)
        if not blocking:
            return known
        if not known.done():
            if asyncio._get_running_loop() is not None:
                raise WrongThread("await rref._get_type(blocking=False) on an event loop")
            return block_on(self._refs.agent, known)
        return known.result()

    def _ask_type(self, timeout: float | None) -> Future[type]:
        if isinstance(self.record, UserRecord):
            return self._refs.ask(self, "rref.type", timeout=timeout)

        async def find() -> type:
            try:
                return type(await self._refs.wait(self, timeout, "RRef._get_type"))
            except BaseException:
                self.type_future = None  # as in `_created`
                raise

        record = self.record
        usable = record.creator_error is None and not self.released
        if record.ready and record.error is None and usable:
            # Without a task: `blocking=True` may then be used on the loop, too.
            future: Future[type] = Future(loop=self._refs.agent.loop)
            future.info = CallInfo("RRef type")
            future.set_result(type(record.value))
            return future
        return self._begin(find, "type")

    # ── gradients ───────────────────────────────────────────────────────────────────────────

    async def backward(self, ctx_or_id: Any = None, retain_graph: bool = False) -> None:
        """Start a backward pass from the value, at its owner, in an autograd context.

        At the owner the context may be left out: an ordinary backward pass into `.grad`.
        """
        context_id = getattr(ctx_or_id, "id", ctx_or_id)
        if context_id is not None and type(context_id) is not int:
            raise TypeError(f"a context or its id is needed, not {type(ctx_or_id).__name__}")
        if isinstance(self.record, OwnerRecord):
            value = await self._refs.wait(self, None, "RRef.backward")
            await self._refs.value_services.backward(value, context_id, retain_graph)
            return
        if context_id is None:
            raise RRefError(
                "the context must be given: rref.backward(ctx) for a value on another worker",
                self.owner_name(),
            )
        await self._refs.ask(self, "rref.backward", context_id, retain_graph, timeout=None)

    # ── release ─────────────────────────────────────────────────────────────────────────────

    async def release(self) -> None:
        """Release the reference; returns when the owner has. Later use: RRefReleased."""
        first, self.released = not self.released, True
        record, messenger = self.record, self._refs.messenger
        if isinstance(record, OwnerRecord):
            if first and record.needs_release:
                messenger.schedule_drop(record)
            return
        if record.use is Use.RELEASED:
            return
        acknowledged = self._refs.agent.loop.create_future()
        record.on_released = with_callback(record.on_released, wake(acknowledged))
        if first:
            # At once, not coalesced: somebody waits.
            self._refs.protocol.user_table.drop(record)
            messenger.flush()
        await acknowledged

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> Literal[False]:
        await self.release()
        return False

    # ── display ─────────────────────────────────────────────────────────────────────────────

    def __str__(self) -> str:
        record = self.record
        if isinstance(record, OwnerRecord):
            return f"OwnerRRef({format_id(record.id)})"
        return f"UserRRef(RRefId = {format_id(record.id)}, ForkId = {format_id(record.fork)})"

    def _state(self) -> str:
        record = self.record
        if self.released:
            return "released"
        if isinstance(record, OwnerRecord):
            if not record.ready:
                return "being created"
            return "failed" if record.error is not None else type(record.value).__name__
        if record.use is Use.CONFIRMED:
            known = self.type_future
            with contextlib.suppress(Exception):
                if known is not None and known.done():
                    return known.result().__name__
        return record.use.name.lower()

    def __repr__(self) -> str:
        return f"<RRef on {self.owner_name()}: {self._state()}>"

    def _repr_html_(self) -> str:
        role = "owned here" if self.is_owner() else "used here"
        return card(
            GREEN, f"<b>RRef</b> on {code(self.owner_name())} {quiet(self._state() + ', ' + role)}"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RRefError(
            "an RRef can only travel inside a call, as an argument or a result: pickling one "
            "elsewhere would make a reference that its owner does not know of",
            self.owner_name(),
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)


async def _run(work: Callable[[], Any], future: Future[Any], name: str) -> None:
    """End a future with the outcome of a coroutine function."""
    try:
        result = await work()
    except asyncio.CancelledError:  # not of a waiter: the worker of this name closes
        if not future.done():
            future.set_exception(WorkerClosed(f"{name} was shut down", name))
        raise
    except Exception as error:
        if not future.done():  # its frames hold the reference, and the waiter holds the error
            future.set_exception(error.with_traceback(None))
    else:
        if not future.done():
            future.set_result(result)
    finally:  # an error's traceback holds this frame, which must not hold the error in turn
        del future, work


def wrap(refs: RRefs, record: Record, creation: CreateFuture | None = None) -> RRef[Any]:
    """Make the RRef of a record; `creation` is under way."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._refs, rref.record, rref._call = refs, record, creation
    rref.released, rref._creation, rref.type_future = False, None, None
    return rref


_AWAIT: Final = RRef.__await__.__code__  # its caller is the call site, not it itself


@overload
def remote(
    to: To, func: Callable[[], Coroutine[Any, Any, T]], *, timeout: float | None = None
) -> RRef[T]: ...
@overload
def remote(to: To, func: Callable[[], T], *, timeout: float | None = None) -> RRef[T]: ...
@overload
def remote(
    to: To,
    func: Callable[[*Ts], Coroutine[Any, Any, T]],
    args: tuple[*Ts],
    *,
    timeout: float | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], *, timeout: float | None = None
) -> RRef[T]: ...
@overload
def remote(
    to: To,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    *,
    timeout: float | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: To,
    func: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: Kwargs,
    *,
    timeout: float | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: To,
    func: Callable[..., Coroutine[Any, Any, T]],
    *,
    kwargs: Kwargs,
    timeout: float | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[..., T], *, kwargs: Kwargs, timeout: float | None = None
) -> RRef[T]: ...
def remote(
    to: To,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
) -> RRef[Any]:
    """Call `func(*args, **kwargs)` on worker `to` and leave the result there.

    Returns at once. Unknown workers and arguments that cannot travel are raised here; the error of
    the function appears wherever the reference is used. `timeout` limits the creation.

        >>> class Counter:
        ...     def __init__(self):
        ...         self.n = 0
        ...     def add(self, by):
        ...         self.n += by
        ...         return self.n
        >>> counter = ag.remote("worker1", Counter)
        >>> await counter.rpc_async().add(2)
        2
        >>> (await counter).n  # a copy
        2
    """
    # A caller inside the library, such as `LocalCluster`, is not where user code made it.
    frame = sys._getframe(1)
    if frame.f_globals.get("__name__", "").startswith("aiograd."):
        frame = users_frame()
    rref = current_rrefs().remote(to, func, args, kwargs, timeout=timeout, frame=frame)
    return rref  # type: ignore[return-value]  # `wrap` made it; the registry does not know RRef
