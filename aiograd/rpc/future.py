"""`Future`, the answer to a call that is under way, and `CallInfo`: what is known of the call."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from types import CodeType, FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiograd.errors import WorkerClosed

if TYPE_CHECKING:
    from aiograd.rpc.link.send import OpenCall
    from aiograd.rpc.runtime.deadlines import Bucket

_log = logging.getLogger("aiograd")
T = TypeVar("T")


class Owner(Protocol):
    """What has a call under way, and has to know when nobody waits for it any more."""

    def cancelled(self, future: Future[Any]) -> None:
        """Cancel the work at the callee: nobody waits for the answer any more."""

    def piggyback(self, future: Future[Any]) -> bool:
        """Let the reply bring a copy of a result that stays; False if the call has left."""

    def replace(self, future: Future[Any], other: Future[Any]) -> None:
        """Let another future wait for the answer."""

    def expired(self, future: Future[Any]) -> None:
        """End a call whose deadline has come."""


class Ending(Protocol):
    """What wants to know how a call ends: a recording of it."""

    def end(self, future: Future[Any], error: BaseException | None = None) -> None:
        """Note that the call has ended without an answer of the callee."""

    def answered(self, future: Future[Any], flags: int, body: Any) -> None:
        """Note the reply or fault, before it is unpacked."""


class CallSite:
    """The line that made a call, and the name of the function; looked up when it is printed."""

    __slots__ = ("_code", "_instruction", "_name")

    def __init__(self, name: str, code: CodeType | None, instruction: int) -> None:
        # Not the frame, which would keep the caller's variables alive.
        self._name, self._code, self._instruction = name, code, instruction

    def __str__(self) -> str:
        return f"{self._name} {_at_line(self._code, self._instruction)}"


def _at_line(code: CodeType | None, instruction: int) -> str:
    if code is None:
        return "from the library"
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"at {code.co_filename}:{line}"


class CallInfo:
    """What is known about one call, request or other wait: made here and nowhere else."""

    # As in `callee.invocation.Invocation`: defaults in the class of what few calls need.
    id: int = 0  # its sequence number, once it is sent
    caller: Owner | None = None  # while it is under way
    began: float = 0.0  # loop time at which it began, if it has no deadline: else that says it
    queued: OpenCall | None = None  # if its result stays at the callee
    carried: Any = None  # its baggage, if its result stays at the callee; until that answers
    undo: list[Any] | None = None  # what travellers did, if it never leaves
    parent: Any = None  # the identity of the call that made it (`CallScope.call`), if one did
    # What travellers left for each other, as in `Arrival`: nothing, in a reply without baggage.
    scratch: Mapping[Any, Any] = MappingProxyType({})

    def __init__(
        self,
        name: str = "",
        label: str = "call",
        seconds: float = 0.0,
        deadline: float = 0.0,
        frame: FrameType | None = None,
    ) -> None:
        self.name: str = name  # of the function or service
        self.label: str = label  # "call", "op", "remote", "look", or the service's name
        self.seconds: float = seconds  # that the call may take
        self.deadline: float = deadline  # loop time at which they are over
        # The call site. Not the frame itself, which would keep the caller's variables alive.
        self.code: CodeType | None = None if frame is None else frame.f_code
        self.instruction: int = 0 if frame is None else frame.f_lasti
        self.bucket: Bucket | None = None  # where its deadline waits
        self.trace: Any = None  # an `Ending`, while a recording wants to know
        self.stream: Any = None  # the reader's end, if it gives items

    @property
    def call_site(self) -> str:
        """File and line of the code that made the call."""
        return _at_line(self.code, self.instruction)

    def origin(self) -> CallSite:
        """Return where the call came from, for what its result brings: it keeps nothing alive."""
        return CallSite(self.name, self.code, self.instruction)


class Future(asyncio.Future[T]):
    """An `asyncio.Future` that knows its call: cancelling it cancels the work over there.

    Await it any number of times. A failure that nobody looks at is logged with the line that made
    the call.

        >>> future = ag.rpc_async("worker1", asyncio.sleep, args=(0, "done"))
        >>> await future
        'done'
        >>> future.done(), future.result()
        (True, 'done')
    """

    # Set by the code that makes it: an `__init__` of our own would cost as much as the future.
    # A future that user code makes has none.
    __slots__ = ("info",)
    info: CallInfo

    def __repr__(self) -> str:
        # What asyncio and anyio print when they want a coroutine and get a call: so it says more.
        info = getattr(self, "info", None)
        if info is None or self.done():
            return super().__repr__()
        return (
            f"<Future pending: the call of {info.name} {info.call_site} has begun. Await it; a "
            "task group wants an async function that does: `async def call(): return await ...`>"
        )

    def cancel(self, msg: Any | None = None) -> bool:
        """Stop waiting, and cancel the coroutine over there, with everything it waits for."""
        loop = self.get_loop()
        if asyncio._get_running_loop() is not loop and loop.is_running():
            # In another thread, where its call may be about to begin: behind that.
            if self.done():
                return False
            loop.call_soon_threadsafe(self.cancel, msg)
            return True
        info = getattr(self, "info", None)
        caller = None if info is None else info.caller
        if not super().cancel(msg):
            return False
        if caller is not None:
            caller.cancelled(self)
        return True

    def expire(self) -> None:
        """End the call because its deadline has come (called by `Deadlines`)."""
        if self.info.caller is not None:
            self.info.caller.expired(self)

    def __reduce__(self) -> Any:
        raise TypeError("a Future cannot travel: await it and send its result")

    # Hidden from type checkers, for which it would be legal to iterate.
    if not TYPE_CHECKING:

        def __iter__(self) -> Any:
            # asyncio's would give the future itself as the first item.
            raise TypeError(f"a Future cannot be iterated over: {self._describe()}")

    def _describe(self) -> str:
        info = getattr(self, "info", None)
        what = f"the answer of {info.name}()" if info is not None and info.name else "an answer"
        return f"it stands for {what}, which `await` gives; did you forget it?"

    def set_exception(self, exception: Any) -> None:
        """Fail the call; an exception that nobody retrieves is logged."""
        super().set_exception(exception)
        # Only a failed future has something to log when it is dropped. A `__del__` on every future
        # would make the collector's work harder for all of them.
        self.__class__ = _failed(self.__class__)


class _OfTheAnswer:
    """An attribute that the answer has, and not its future: it says that `await` is missing.

    One for each name, because a `__getattr__` for all names would make every other attribute of a
    future slower: 256 calls in flight took 7 % longer (`benchmarks/peers`, rpc.inline.tput.256).
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, future: Future[Any] | None, kind: type[Any]) -> Any:
        what = f"{kind.__name__!r} object" if future is not None else f"class {kind.__name__!r}"
        hint = "" if future is None else f": {future._describe()}"
        name = self._name
        raise AttributeError(f"{what} has no attribute {name!r}{hint}", name=name, obj=future)


def name_forgotten_await(kind: type[Any]) -> None:
    """Let futures name the missing `await` when an attribute of `kind` is looked for on them."""
    for name in dir(kind):
        if not name.startswith("_") and not hasattr(Future, name):
            setattr(Future, name, _OfTheAnswer(name))


for _kind in (str, bytes, int, float, complex, list, tuple, dict, set):
    name_forgotten_await(_kind)


@functools.cache
def _failed(kind: type[Future[Any]]) -> type[Future[Any]]:
    """Return the class of futures of this kind that have failed."""
    return type(kind.__name__, (kind,), {"__slots__": (), "__del__": _log_unseen})


def _log_unseen(future: Future[Any]) -> None:
    # The base class sets this while an exception waits to be looked at.
    if future._log_traceback:
        future._log_traceback = False
        info, error = getattr(future, "info", None), future.exception()
        name = (info and info.name) or "a call"
        site = "from the library" if info is None else info.call_site
        if isinstance(error, WorkerClosed):
            # It did not fail: this worker left before the answer came.
            _log.error("%s was not awaited (called %s), and has ended: %s", name, site, error)
            return
        # With its notes: the traceback of the function is one, and nobody else shows it.
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        _log.error("%s failed and nobody awaited it (called %s): %r%s", name, site, error, notes)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a future with an error, unless it has ended."""
    if not future.done():
        future.set_exception(error)
