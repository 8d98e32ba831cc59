"""What a partner may say about contexts: only about those it takes part in, and in the right form.

Over a restricted connection a context is known by 48 random bits. Who calls with its id takes part
in it; whoever else speaks of it is refused. Only who brought a context here may end it here. Forms
and sizes are checked before the engine sees them, since a partner may send any plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.errors import NotAllowed, Overloaded, ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.wire.safecodec import BIG_INT, ITEMS

if TYPE_CHECKING:
    from aiograd.dist.context import Context
    from aiograd.dist.registry import Contexts

CONTEXTS: Final = 4096  # open at once on a worker that has partners; theirs must not fill it
EARLY: Final = 256  # passes of a context that a partner may mention before they begin
RANKS: Final = 1 << 16  # a rank has 16 bits, as in the id of a context
Service = Callable[..., Any]


class Partners:
    """Checks for one worker what its partners say about contexts."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._agent = contexts.agent

    def guard(self, service: Service) -> Service:
        """A service about a context, for those who take part in it."""

        def guarded(sender: PeerInfo, context_id: int, *rest: Any) -> Any:
            self.takes_part(sender, context_id)
            return service(sender, context_id, *rest)

        return guarded

    def guard_gradients(self, service: Service) -> Service:
        def guarded(sender: PeerInfo, context_id: int, *rest: Any) -> Any:
            if self._agent.restricts(sender):
                context = self._known(sender, context_id)
                _check_gradients(sender, context, *rest)
            return service(sender, context_id, *rest)

        return guarded

    def guard_outcomes(self, service: Service) -> Service:
        def guarded(sender: PeerInfo, context_id: int, reports: Any) -> Any:
            if self._agent.restricts(sender):
                self._known(sender, context_id)
                if not _are_reports(reports):
                    raise ProtocolError("gradients.outcomes: malformed reports", sender.name)
            return service(sender, context_id, reports)

        return guarded

    def guard_release(self, service: Service) -> Service:
        def guarded(sender: PeerInfo, *context_ids: int) -> Any:
            if not self._agent.restricts(sender):
                return service(sender, *context_ids)
            for context_id in context_ids:
                context = self._find(context_id)
                if context is not None:
                    if sender.incarnation not in context.callers:
                        raise self._refusal(sender, context_id)
                    service(sender, context_id)

        return guarded

    def takes_part(self, sender: PeerInfo, context_id: int) -> None:
        """NotAllowed if a partner speaks of a context that it does not take part in."""
        if self._agent.restricts(sender):
            self._known(sender, context_id)

    def may_bring(self, sender: PeerInfo, data: Any) -> None:
        """A call or reply of a partner brings a context: look at its form and at our room."""
        if not (type(data) is tuple and len(data) == 3 and all(type(n) is int for n in data)):
            raise ProtocolError("baggage of another form", sender.name)
        context_id, edge, outputs = data
        if not (0 <= context_id < 1 << 64 and 0 <= edge < 1 << 64 and 0 <= outputs <= ITEMS):
            raise ProtocolError("baggage out of bounds", sender.name)
        context = self._contexts.find(context_id)
        if context is None:
            if self._contexts.counters()["contexts"] >= CONTEXTS:
                self._agent.limits.reached("contexts")
                raise Overloaded(self._agent.name, f"{CONTEXTS} autograd contexts are open")
        elif edge in context.receives:
            raise ProtocolError("an edge is used once", sender.name)

    def _find(self, context_id: Any) -> Context | None:
        if type(context_id) is not int:
            raise ProtocolError("a context's id is an int")
        return self._contexts.find(context_id)

    def _known(self, sender: PeerInfo, context_id: Any) -> Context:
        context = self._find(context_id)
        if context is not None:
            home = self._agent.directory.get(context_id >> 48)
            told = context.told.get(sender.name)
            for peer in (home, told):
                if peer is not None and peer.incarnation == sender.incarnation:
                    return context
            if sender.incarnation in context.callers:
                return context
        raise self._refusal(sender, context_id)

    def _refusal(self, sender: PeerInfo, context_id: int) -> NotAllowed:
        why = f"{sender.name} takes no part in autograd context {context_id} on {self._agent.name}"
        return NotAllowed(why, self._agent.name)


def _check_gradients(
    sender: PeerInfo,
    context: Context,
    number: Any,
    credit: Any,
    places: Any,
    reached: Any,
    expected: Any,
    invitation: Any,
    answers: Any,
) -> None:
    """Refuse what would make the engine compute with anything but small numbers and arrays."""
    fits = (
        type(number) is type(credit) is type(places) is type(reached) is int
        and 0 <= places <= 8 * BIG_INT
        and reached >= 0  # its size is bounded by the codec
        and 0 <= credit <= 1 << places
        and type(answers) is list
        and all(map(_is_answer, answers))
        and (expected is None or _are_ints(expected))
        and (invitation is None or _is_invitation(invitation))
    )
    if not fits:
        raise ProtocolError("gradients of another form", sender.name)
    if number not in context.early and len(context.early) >= EARLY:
        context.home.agent.limits.reached("contexts")
        raise Overloaded(context.home.agent.name, f"{EARLY} passes that never began")


def _are_ints(value: Any) -> bool:
    return type(value) is list and all(type(each) is int for each in value)


def _is_answer(value: Any) -> bool:
    if not (type(value) is tuple and len(value) == 3 and type(value[0]) is int):
        return False
    _, gradients, loops = value
    return (
        gradients is None or (type(gradients) is list and all(map(_is_gradient, gradients)))
    ) and (loops is None or (type(loops) is list and all(map(_is_loop, loops))))


def _is_loop(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) == 3
        and all(type(number) is int and number >= 0 for number in value)
        and value[2] < ITEMS
    )


def _is_gradient(value: Any) -> bool:
    return value is None or isinstance(value, np.ndarray | Coo) or hasattr(value, "requires_grad")


def _is_invitation(value: Any) -> bool:
    if not (type(value) is tuple and len(value) == 6):
        return False
    name, rank, incarnation, *terms = value
    return (
        type(name) is str
        and type(rank) is int
        and 0 <= rank < RANKS
        and type(incarnation) is bytes
        and len(incarnation) == 16
        and tuple(map(type, terms)) == (bool, bool, bool)
    )


def _are_reports(value: Any) -> bool:
    return type(value) is list and all(map(_is_report, value))


def _is_report(value: Any) -> bool:
    if not (type(value) is tuple and len(value) == 7):
        return False
    incarnation, name, *numbers, running, failed = value
    return (
        type(incarnation) is bytes
        and len(incarnation) == 16
        and type(name) is str
        and all(type(number) is int for number in numbers)
        and all(type(each) is tuple for each in (running, failed))
        and all(type(number) is int for number in (*running, *failed))
    )


class CooTraveller:
    """Sparse arrays between partners: their parts, and a check that they belong together."""

    tag = "coo"

    def depart(self, coo: Coo, departure: Any) -> Any:
        return coo.indices, coo.values, coo.shape, coo.coalesced

    def arrive(self, data: Any, arrival: Any) -> Coo:
        indices, values, shape, coalesced = data
        if not (isinstance(indices, np.ndarray) and isinstance(values, np.ndarray)):
            raise ProtocolError("a sparse array is made of arrays")
        if type(shape) is not tuple or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise ProtocolError("a sparse array has a shape")
        if indices.ndim != 2 or indices.dtype.kind != "i" or indices.shape[0] > len(shape):
            raise ProtocolError("a sparse array has two-dimensional indices")
        sparse = indices.shape[0]
        if values.shape != (indices.shape[1], *shape[sparse:]):
            raise ProtocolError("values of a sparse array do not fit its shape")
        limits = np.array(shape[:sparse], np.int64).reshape(-1, 1)
        if indices.size and ((indices < 0).any() or (indices >= limits).any()):
            raise ProtocolError("an index of a sparse array is out of bounds")
        return Coo(indices, values, shape, coalesced is True and _is_sorted(indices))


def _is_sorted(indices: np.ndarray) -> bool:
    """Whether positions are in order and differ, as in a coalesced array."""
    if indices.shape[1] < 2:
        return True
    step = np.diff(indices, axis=1)
    first = np.argmax(step != 0, axis=0)
    return bool((np.take_along_axis(step, first[None, :], axis=0) > 0).all())
