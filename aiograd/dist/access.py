"""Access checks: what a restricted peer may say about contexts.

Over a restricted connection a context is known by 48 random bits. A peer that calls with its id takes
part in the context; every other peer that speaks of it is refused. Only a peer that brought a context
here may release it here. Forms and sizes are checked before the engine sees them, since a restricted
peer may send any plain data. What is kept of its messages counts for its share (`rpc.link.ledger`):
contexts, edges, passes, marks of aborted ones, and the memory of what waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.dist.channel import Channel
from aiograd.dist.context import Context
from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.ledger import MEMORY, Hold
from aiograd.wire.names import is_name
from aiograd.wire.safecodec import BIG_INT, ITEMS

# Passes that an honest report lists one by one: those that run, and those that failed.
REPORTED: Final = 4096
_LISTED: Final = 64  # of them, up to which nothing is counted
TEXT: Final = 256  # characters of the name of a worker or an operation
_MESSAGE: Final = 512  # bytes that a gradient message takes besides its arrays
_NUMBERS: Final = 1 << 64  # ids of contexts and edges, and numbers of passes
RANKS: Final = 1 << 16  # a rank has 16 bits, as in the id of a context
Service = Callable[..., Any]


class ContextLookup(Protocol):
    """The contexts of this worker."""

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, if it has one."""

    def all(self) -> list[Context]:
        """Return all open contexts."""


class PassLookup(Protocol):
    """The passes under way on this worker."""

    def get(self, key: tuple[int, int], /) -> Any:
        """Return a pass by context and number; None if it is not under way here."""


class ContextAccess:
    """Checks for one worker what its restricted peers say about contexts.

    The `guard…` methods wrap a service. Messages of trusted peers pass without a look: they may run
    any code here, so checks would only cost time.
    """

    def __init__(self, channel: Channel, contexts: ContextLookup) -> None:
        self._channel, self._contexts = channel, contexts
        self.passes: PassLookup = {}  # set by `attach`: the engine is made after the registry

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
            """Check sender and message, then serve it; what is kept of it is counted."""
            if not self._channel.restricts(sender):
                return service(sender, context_id, *rest)
            context = self._known(sender, context_id)
            number, invitation, body = _gradients(sender, *rest)
            hold = context.hold_of(self._channel.account(sender.name))
            self._give_back_fed(context, hold, sender.name)
            joins = invitation is not None and number not in context.passes
            if joins:
                hold.check("passes")
            # Taken before it is known whether the message is kept: it is decoded already.
            size = _size_of(body)
            hold.take(MEMORY, size)
            try:
                answer = service(sender, context_id, *rest)
            finally:
                if self._waits(context, number):
                    _kept(context, sender.name).append((number, size))
                else:
                    hold.give_back(MEMORY, size)
            if joins and number in context.passes:
                hold.take("passes")
                context.passes[number].hold = hold
            return answer

        return guarded

    def _waits(self, context: Context, number: int) -> bool:
        """Whether messages of a pass wait here: for its invitation, or for a thread."""
        active = self.passes.get((context.id, number))
        return number in context.early or (active is not None and bool(active.inbox))

    def _give_back_fed(self, context: Context, hold: Hold, name: str) -> None:
        """Give back the memory of messages that have been fed to their passes since."""
        kept = _kept(context, name)
        if kept:
            context.kept_messages[name] = [
                (number, size) for number, size in kept if self._waits(context, number)
            ]
            left = sum(size for _, size in context.kept_messages[name])
            hold.give_back(MEMORY, sum(size for _, size in kept) - left)

    def guard_failed(self, service: Service) -> Service:
        """Guard reports of failures: only of a pass that the sender takes part in."""

        def guarded(sender: PeerInfo, context_id: int, *rest: Any) -> Any:
            """Check sender and report, then serve it."""
            if self._channel.restricts(sender):
                self._known(sender, context_id)
                if not _is_failure(*rest):
                    raise ProtocolError("gradients.failed: malformed report", sender.name)
                active = self.passes.get((context_id, rest[0]))
                if active is not None and not active.state.names(sender.incarnation):
                    raise self._refusal(sender, context_id)
            return service(sender, context_id, *rest)

        return guarded

    def guard_abort(self, service: Service) -> Service:
        """Guard aborts: of passes that the sender takes part in, or that it may have begun itself."""

        def guarded(sender: PeerInfo, context_id: int, *rest: Any) -> Any:
            """Check sender and abort, then serve it."""
            if not self._channel.restricts(sender):
                return service(sender, context_id, *rest)
            context = self._known(sender, context_id)
            if not _is_abort(*rest):
                raise ProtocolError("gradients.abort: malformed request", sender.name)
            number, originator, _ = rest
            active = self.passes.get((context_id, number))
            if active is None:
                # A mark for messages to come. Of a pass of its own only, else it would end one that
                # another worker is about to begin; that worker tells us itself.
                opener = self._channel.directory.get(number >> 48)
                own = opener is not None and opener.incarnation == sender.incarnation
                if not own or originator != sender.incarnation:
                    return True
            elif not active.state.names(sender.incarnation):
                raise self._refusal(sender, context_id)
            hold = context.hold_of(self._channel.account(sender.name))
            new = number not in context.aborted
            if new:
                hold.check("aborts")
            answer = service(sender, context_id, *rest)
            if new and number in context.aborted:
                hold.take("aborts")
            return answer

        return guarded

    def guard_outcomes(self, service: Service) -> Service:
        """Guard the service of outcome reports: also check the form of each report."""

        def guarded(sender: PeerInfo, context_id: int, reports: Any) -> Any:
            """Check sender and reports, then serve it."""
            if self._channel.restricts(sender):
                context = self._known(sender, context_id)
                if not _are_reports(reports):
                    raise ProtocolError("gradients.outcomes: malformed reports", sender.name)
                # An honest report is short. What is longer counts while the context is open.
                listed = sum(len(running) + len(failed) for *_, running, failed in reports)
                if listed > _LISTED:
                    hold = context.hold_of(self._channel.account(sender.name))
                    hold.take(MEMORY, 64 * listed)
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
        if not (_is_number(context_id) and _is_number(edge) and 0 <= outputs <= ITEMS):
            raise ProtocolError("baggage: an integer is out of bounds", sender.name)
        context, account = self._contexts.find(context_id), self._channel.account(sender.name)
        if context is None:
            account.check("contexts")
        elif edge in context.receives:
            # A second message under its id would replace the receiving end, and lose its gradient.
            raise ProtocolError(f"baggage: edge {edge} was used before", sender.name)
        if edge:
            account.check("edges")

    def brought(self, sender: PeerInfo, context: Context, edge: int, new: bool) -> None:
        """Count what a restricted peer's message has added here, after `may_bring`."""
        hold = context.hold_of(self._channel.account(sender.name))
        if new:
            context.brought_by = sender.name
            hold.take("contexts")
        if edge:
            hold.take("edges")

    def keep(self, sender: PeerInfo, context: Context, size: int) -> None:
        """Let the memory of a message count while its context is open: the tape here may keep it."""
        context.hold_of(self._channel.account(sender.name)).take(MEMORY, size)

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


def _kept(context: Context, name: str) -> list[tuple[int, int]]:
    """Return numbers of passes and sizes of a peer's messages that wait here."""
    return context.kept_messages.setdefault(name, [])


def _gradients(sender: PeerInfo, *message: Any) -> tuple[int, Any, Any]:
    """Refuse what would make the engine compute with anything but small numbers and arrays."""
    if len(message) == 3:
        number, invitation, body = message
        if (
            _is_number(number)
            and (invitation is None or _is_invitation(invitation))
            and type(body) is tuple
            and len(body) == 4
            and _is_body(*body)
        ):
            return number, invitation, body
    raise ProtocolError("gradients: malformed message", sender.name)


def _size_of(body: Any) -> int:
    """Return the bytes that a gradient message takes here."""
    answers, expected, _, _ = body
    size = _MESSAGE + 64 * (len(answers) + len(expected or ()))
    for _, gradients, loops in answers:
        size += 64 * len(loops or ())
        size += sum(64 + getattr(gradient, "nbytes", 0) for gradient in gradients or ())
    return size


# The checks below compare exact types instead of using `isinstance`: a bool is an int, too, and must
# not pass as a number or a rank.


def _is_body(answers: Any, expected: Any, credit: Any, reached: Any) -> bool:
    return (
        type(answers) is list
        and all(map(_is_answer, answers))
        and (expected is None or _are_edges(expected))
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


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _NUMBERS


def _is_failure(*report: Any) -> bool:
    if len(report) != 4:
        return False
    number, worker, op, _ = report  # the fault is checked where it is rebuilt
    return _is_number(number) and _is_text(worker) and _is_text(op)


def _is_abort(*request: Any) -> bool:
    if len(request) != 3:
        return False
    number, originator, _ = request
    return _is_number(number) and type(originator) is bytes and len(originator) == 16


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= TEXT


def _are_edges(value: Any) -> bool:
    return type(value) is list and all(map(_is_number, value))


def _is_answer(value: Any) -> bool:
    if not (type(value) is tuple and len(value) == 3 and _is_number(value[0])):
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
        and all(map(_is_number, value))
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
        and is_name(name)
        and type(rank) is int
        and 0 <= rank < RANKS
        and type(incarnation) is bytes
        and len(incarnation) == 16
        and tuple(map(type, terms)) == (bool, bool, bool)
    )


def _are_reports(value: Any) -> bool:
    return type(value) is list and len(value) <= REPORTED and all(map(_is_report, value))


def _is_report(value: Any) -> bool:
    if not (type(value) is tuple and len(value) == 7):
        return False
    incarnation, name, *numbers, running, failed = value
    return (
        type(incarnation) is bytes
        and len(incarnation) == 16
        and type(name) is str
        and is_name(name)
        and all(type(number) is int and -1 <= number < _NUMBERS for number in numbers)
        and all(type(each) is tuple and len(each) <= REPORTED for each in (running, failed))
        and all(map(_is_number, (*running, *failed)))
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
