"""Access checks: what a restricted peer may say about contexts.

Over a restricted connection a context is known by 48 random bits. A peer that calls with its id takes
part in the context; every other peer that speaks of it is refused. Only a peer that brought a context
here may release it here. Forms and sizes are checked before the engine sees them, since a restricted
peer may send any plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.dist.channel import Channel
from aiograd.dist.context import Context
from aiograd.errors import NotAllowed, Overloaded, ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.wire.safecodec import BIG_INT, ITEMS

# Contexts open at once on a worker that has restricted peers: theirs must not fill its memory.
CONTEXTS: Final = 4096
# Passes of a context that a restricted peer may mention before they begin: their messages are kept.
EARLY: Final = 256
RANKS: Final = 1 << 16  # a rank has 16 bits, as in the id of a context
Service = Callable[..., Any]


class ContextLookup(Protocol):
    """The contexts of this worker."""

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, if it has one."""

    def all(self) -> list[Context]:
        """Return all open contexts."""


class ContextAccess:
    """Checks for one worker what its restricted peers say about contexts.

    The `guard…` methods wrap a service. Messages of trusted peers pass without a look: they may run
    any code here, so checks would only cost time.
    """

    def __init__(self, channel: Channel, contexts: ContextLookup) -> None:
        self._channel, self._contexts = channel, contexts

    def guard(self, service: Service) -> Service:
        """Guard a service about a context: only for peers that take part in it."""

        def guarded(sender: PeerInfo, context_id: int, *rest: Any) -> Any:
            """Check the sender, then serve it."""
            self.takes_part(sender, context_id)
            return service(sender, context_id, *rest)

        return guarded

    def guard_gradients(self, service: Service) -> Service:
        """Guard the service of gradient messages: also check the form of each message."""

        def guarded(sender: PeerInfo, context_id: int, *rest: Any) -> Any:
            """Check sender and message, then serve it."""
            if self._channel.restricts(sender):
                context = self._known(sender, context_id)
                self._check_gradients(sender, context, *rest)
            return service(sender, context_id, *rest)

        return guarded

    def guard_outcomes(self, service: Service) -> Service:
        """Guard the service of outcome reports: also check the form of each report."""

        def guarded(sender: PeerInfo, context_id: int, reports: Any) -> Any:
            """Check sender and reports, then serve it."""
            if self._channel.restricts(sender):
                self._known(sender, context_id)
                if not _are_reports(reports):
                    raise ProtocolError("gradients.outcomes: malformed reports", sender.name)
            return service(sender, context_id, reports)

        return guarded

    def guard_release(self, service: Service) -> Service:
        """Guard the service of releases: only a peer that brought a context may end it here."""

        def guarded(sender: PeerInfo, *context_ids: int) -> Any:
            """Check the sender for each context, then serve it."""
            if not self._channel.restricts(sender):
                return service(sender, *context_ids)
            for context_id in context_ids:
                context = self._find(context_id)
                # An unknown id is not remembered as released, as it is for trusted peers: the table
                # is bounded, and a peer could push the ids of others out of it.
                if context is not None:
                    if sender.incarnation not in context.callers:
                        raise self._refusal(sender, context_id)
                    service(sender, context_id)

        return guarded

    def guard_known(self, service: Service) -> Service:
        """Guard the question whether a context is open: "no" for peers that take no part in it."""

        def guarded(sender: PeerInfo, context_id: int) -> Any:
            """Answer as for an unknown context, so that it does not tell which exist."""
            try:
                self.takes_part(sender, context_id)
            except NotAllowed:
                return False
            return service(sender, context_id)

        return guarded

    def takes_part(self, sender: PeerInfo, context_id: int) -> None:
        """Raise NotAllowed if a restricted peer speaks of a context it does not take part in."""
        if self._channel.restricts(sender):
            self._known(sender, context_id)

    def may_bring(self, sender: PeerInfo, data: Any) -> None:
        """Check the baggage of a restricted peer's message: its form, and our room for a context."""
        if not (type(data) is tuple and len(data) == 3 and all(type(n) is int for n in data)):
            raise ProtocolError("baggage: expected three integers", sender.name)
        context_id, edge, outputs = data
        if not (0 <= context_id < 1 << 64 and 0 <= edge < 1 << 64 and 0 <= outputs <= ITEMS):
            raise ProtocolError("baggage: an integer is out of bounds", sender.name)
        context = self._contexts.find(context_id)
        if context is None:
            if len(self._contexts.all()) >= CONTEXTS:
                self._channel.limit_reached("contexts")
                raise Overloaded(self._channel.name, f"{CONTEXTS} autograd contexts are open")
        elif edge in context.receives:
            # A second message under its id would replace the receiving end, and lose its gradient.
            raise ProtocolError(f"baggage: edge {edge} was used before", sender.name)

    def _find(self, context_id: Any) -> Context | None:
        if type(context_id) is not int:
            raise ProtocolError(f"a context id is an int, not {type(context_id).__name__}")
        return self._contexts.find(context_id)

    def _known(self, sender: PeerInfo, context_id: Any) -> Context:
        """Return a context that a peer takes part in: it opened it, brought it, or got it from us."""
        context = self._find(context_id)
        if context is not None:
            # By incarnation, not by name: a successor takes no part in contexts of before.
            home = self._channel.directory.get(context_id >> 48)
            recipient = context.recipients.get(sender.name)
            for peer in (home, recipient):
                if peer is not None and peer.incarnation == sender.incarnation:
                    return context
            if sender.incarnation in context.callers:
                return context
        # The same for an unknown context and for one of others, so it does not tell which exist.
        raise self._refusal(sender, context_id)

    def _refusal(self, sender: PeerInfo, context_id: int) -> NotAllowed:
        here = self._channel.name
        why = f"{sender.name} takes no part in autograd context {context_id} on {here}"
        return NotAllowed(why, here)

    def _check_gradients(
        self, sender: PeerInfo, context: Context, number: Any, invitation: Any, body: Any
    ) -> None:
        """Refuse what would make the engine compute with anything but small numbers and arrays."""
        fits = (
            type(number) is int
            and (invitation is None or _is_invitation(invitation))
            and type(body) is tuple
            and len(body) == 4
            and _is_body(*body)
        )
        if not fits:
            raise ProtocolError("gradients: malformed message", sender.name)
        if number not in context.early and len(context.early) >= EARLY:
            self._channel.limit_reached("contexts")
            raise Overloaded(self._channel.name, f"{EARLY} passes that never began")


# The checks below compare exact types instead of using `isinstance`: a bool is an int, too, and must
# not pass as a number or a rank.


def _is_body(answers: Any, expected: Any, credit: Any, reached: Any) -> bool:
    return (
        type(answers) is list
        and all(map(_is_answer, answers))
        and (expected is None or _are_ints(expected))
        and _is_credit(credit)
        and type(reached) is int
        and reached >= 0  # its size is bounded by the codec
    )


def _is_credit(value: Any) -> bool:
    if not (type(value) is tuple and len(value) == 2):
        return False
    number, places = value
    # Bounded before it is used: `1 << places` of a large number alone would fill the memory.
    return (
        type(number) is type(places) is int
        and 0 <= places <= 8 * BIG_INT
        and 0 <= number <= 1 << places
    )


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
    # A place becomes a shift of the bits of an edge, so it must be small.
    return (
        type(value) is tuple
        and len(value) == 3
        and all(type(number) is int and number >= 0 for number in value)
        and value[2] < ITEMS
    )


def _is_gradient(value: Any) -> bool:
    # No tuple: packed arrays (see `codec`) are for trusted peers, since `decode` checks nothing.
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
    """Takes sparse arrays to and from restricted peers, and checks that their parts fit."""

    tag = "coo"

    def depart(self, coo: Coo, departure: Any) -> Any:
        """Take a sparse array apart."""
        return coo.indices, coo.values, coo.shape, coo.coalesced

    def arrive(self, data: Any, arrival: Any) -> Coo:
        """Put a sparse array together; ProtocolError if its parts do not fit each other."""
        indices, values, shape, coalesced = data
        if not (isinstance(indices, np.ndarray) and isinstance(values, np.ndarray)):
            raise ProtocolError("a sparse array is made of arrays")
        if type(shape) is not tuple or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise ProtocolError("a sparse array has a shape")
        # Fewer sparse axes than axes are fine: the values then have the rest of the shape.
        if indices.ndim != 2 or indices.dtype.kind != "i" or indices.shape[0] > len(shape):
            raise ProtocolError("a sparse array has two-dimensional indices")
        sparse = indices.shape[0]
        if values.shape != (indices.shape[1], *shape[sparse:]):
            raise ProtocolError("values of a sparse array do not fit its shape")
        limits = np.array(shape[:sparse], np.int64).reshape(-1, 1)
        if indices.size and ((indices < 0).any() or (indices >= limits).any()):
            raise ProtocolError("an index of a sparse array is out of bounds")
        # The claim to be coalesced is not believed: sums over positions rely on it.
        return Coo(indices, values, shape, coalesced is True and _is_sorted(indices))


def _is_sorted(indices: np.ndarray) -> bool:
    """Tell whether positions are in order and differ, as in a coalesced array."""
    if indices.shape[1] < 2:
        return True
    step = np.diff(indices, axis=1)
    first = np.argmax(step != 0, axis=0)
    return bool((np.take_along_axis(step, first[None, :], axis=0) > 0).all())
