"""The seams through which other layers take part in messages.

A *traveller* takes care of values of one type on the way, *baggage* is carried by whole
messages, and a *result store* lets the result of a call stay where it was made. `rpc` calls them at
the right moments and knows nothing of what they do.

What may be done to a message on purpose: the seam for fault injection.

`agent.fault_injector` is None, or an object whose `on_send(kind, to)` gives a `FaultAction` for
every message: `kind` is "call", "op", "remote", "reply", or a service's name, `to` the name of the
receiving worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, NamedTuple, Protocol

from aiograd.errors import ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.wire.codec import Promise, Traveller, Travellers

__all__ = [
    "BOX",
    "FINISH",
    "Arrival",
    "Baggage",
    "Departure",
    "RecordTraveller",
    "ResultStore",
    "Traveller",
    "Travellers",
    "loaded",
]

# The key, in `Arrival.scratch`, of what is called when the whole payload is decoded: a traveller
# may need to know all of its values at once.
FINISH: Final = "finish"
# The key, in the scratch of a message, of a class and its box, if a traveller has taken values of
# the class over the general codec that may take the fast one: see `wire.fastcodec.SecondBox`.
BOX: Final = "box"


class Departure:
    """One message about to leave. `undo` is run, last first, if it never does."""

    __slots__ = ("carried", "kind", "plain", "scratch", "to", "undo")

    def __init__(self, to: PeerInfo, kind: str, carried: Any = None) -> None:
        self.to: PeerInfo = to
        self.plain: bool = False  # only plain data can travel there: no classes, no functions
        self.kind: str = kind  # "call", "op", "remote", "reply", or the service's name
        self.carried: Any = carried
        self.scratch: dict[Any, Any] = {}
        self.undo: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Take back what travellers and baggage did for this message: it is not sent."""
        run_undo(self.undo)


def run_undo(undo: list[Callable[[], None]] | None) -> None:
    """Run and remove the callbacks, last first; one that raises does not stop the others."""
    while undo:
        with contextlib.suppress(Exception):
            undo.pop()()


class Call(Protocol):
    """A call that a message answers."""

    def origin(self) -> object:
        """Return where the call came from; its text names the function and the line."""


class Arrival:
    """One message that came in. What it brings may be used when all `waits` are done."""

    __slots__ = ("call", "carried", "kind", "restricted", "scratch", "sender", "waits")

    def __init__(
        self, sender: PeerInfo, kind: str, restricted: bool, call: Call | None = None
    ) -> None:
        self.sender: PeerInfo = sender
        self.kind: str = kind
        self.restricted: bool = (
            restricted  # only plain data crosses: what it brings must be checked
        )
        self.call: Call | None = call  # which it answers
        self.carried: Any = None
        self.scratch: dict[Any, Any] = {}
        self.waits: list[asyncio.Future[Any]] = []

    def origin(self) -> object | None:
        """Return the call that this message answers; None for other messages."""
        return None if self.call is None else self.call.origin()


async def loaded(promise: Promise) -> None:
    """Load a promised traveller in a thread: the import of its library would block the loop."""
    if promise.loading is None:
        promise.loading = asyncio.ensure_future(asyncio.to_thread(promise.load))
    try:
        # Shielded: a call that is cancelled meanwhile must not take the library from the others.
        await asyncio.shield(promise.loading)
    except Exception:
        promise.loading = None  # it may be installed by the next time
        raise


class RecordTraveller:
    """Takes a small dataclass apart into its fields, and checks their types on arrival."""

    def __init__(self, tag: str, cls: Any) -> None:
        self.tag = tag
        self._cls = cls
        self._names = [field.name for field in fields(cls)]
        samples = {"str": str, "int": int, "bytes": bytes, "bool": bool, "dict[str, str]": dict}
        self._types = [samples.get(str(field.type), tuple) for field in fields(cls)]
        self._pairs = [i for i, f in enumerate(fields(cls)) if str(f.type) == "dict[str, str]"]
        self._texts = [i for i, f in enumerate(fields(cls)) if str(f.type) == "tuple[str, ...]"]

    def depart(self, value: Any, departure: Departure) -> Any:
        """Return the values of the fields."""
        return tuple(getattr(value, name) for name in self._names)

    def arrive(self, data: Any, arrival: Arrival) -> Any:
        """Make the dataclass again; ProtocolError if the fields have other types."""
        if type(data) is not tuple or list(map(type, data)) != self._types:
            raise ProtocolError(f"a {self.tag} of another form", arrival.sender.name)
        texts = [text for i in self._texts for text in data[i]]
        texts += [text for i in self._pairs for pair in data[i].items() for text in pair]
        if any(type(text) is not str for text in texts):
            raise ProtocolError(f"a {self.tag} of another form", arrival.sender.name)
        return self._cls(*data)


class Baggage(Protocol):
    """What calls and replies carry beside their payload: two numbers of 64 bits and one of 32."""

    def current(self) -> Any | None:
        """Return what a call made here and now carries; None if nothing."""

    def enter(self, carried: Any) -> Any:
        """Make what a call carried current, in the context in which its function runs."""

    def depart(self, carried: Any, departure: Departure) -> tuple[int, int, int] | None:
        """Return the numbers to send; None to send none."""

    def arrive(self, data: tuple[int, int, int], arrival: Arrival) -> Any | None:
        """Return what the numbers mean here; None if it is gone."""

    def keep(self, arrival: Arrival, size: int) -> bool:
        """Whether what a restricted peer's message brought outlives its call, and counts with what
        it carried: `size` bytes. Overloaded if that is too much for the peer."""


class ResultStore(Protocol):
    """Keeps results of calls at the callee."""

    def expect(self, sender: PeerInfo, token: Any) -> None:
        """Note that a call has begun whose result stays here under `token`."""

    def keep(self, sender: PeerInfo, token: Any, value: Any) -> None:
        """Store the result of an expected call."""

    def charge(self, sender: PeerInfo, token: Any, size: int) -> None:
        """Count the decoded arguments of a restricted peer's call for as long as its result stays
        here. Overloaded if that is too much for the peer."""

    def fail(self, sender: PeerInfo, token: Any, error: BaseException) -> None:
        """Store why an expected call has no result."""

    def made(self, sender: PeerInfo, token: Any, value: Any) -> None:
        """`expect` and `keep` in one, for what ran right where its call was read."""


class FaultAction(NamedTuple):
    """`action` is "send", "fail", "drop", "delay" (by `seconds`) or "duplicate"."""

    action: str = "send"
    seconds: float = 0.0


SEND: Final = FaultAction()
FAIL: Final = FaultAction("fail")
DROP: Final = FaultAction("drop")
DUPLICATE: Final = FaultAction("duplicate")


class FaultInjector(Protocol):
    """Decides what happens to each message that a worker sends."""

    def on_send(self, kind: str, to: str) -> FaultAction:
        """Choose for one message of this kind to the worker named `to`."""
