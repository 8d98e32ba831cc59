"""Carries what workers tell each other about references.

    rref.fork      user → owner     I hold these forks       answer: which of them count
    rref.accept    child → parent   these are confirmed      answer: nothing
    rref.release   user → owner     I am done with these     answer: nothing
    rref.audit     sharer → holder  do you know these?       answer: how far each has come
    rref.session   creator → owner  creations up to this id never come; posted when a lost session
                                    is followed by a new one

The first four are sent again until answered, so the protocol takes them in any order and number.
What collects in one tick of the loop leaves as one message per receiver and kind; what user code
drops one by one, in a few milliseconds (`Company`). Leases of lost workers and questions about
forks not heard of run on timers of the loop; what they mean is the protocol's business.

The owner's answers to those who use its values.

    rref.fetch     the value            rref.type      its type        rref.created   is it there?
    rref.has       an attribute?        rref.backward  start a backward pass from it

All of them wait until the value is there, and raise what its function raised. Whether the asker
may use the value is for the protocol to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiograd.errors import (
    AiogradError,
    NotAllowed,
    OwnerLost,
    ProtocolError,
    RRefError,
    RRefExpired,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc.callee.exposure import exposed_method
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.company import Company
from aiograd.rref.refcount.access import Partners
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import (
    Held,
    Owned,
    Party,
    RefId,
    Use,
    again,
    pack_fork,
    pack_ids,
    pack_releases,
    unpack_fork,
    unpack_forks,
    unpack_ids,
)
from aiograd.rref.refcount.user import Batch
from aiograd.rref.telling import Telling, hand_over

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent


T = TypeVar("T")
ANSWERING: Final = 5.0  # seconds to answer a question; a lease may be shorter than the way is long


class Control:
    """The protocol of one worker, on its loop."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.protocol = Protocol(Party(agent.name, agent.rank, agent.incarnation))
        self.partners = Partners(self.protocol)
        self._parties = {agent.incarnation: self.protocol.me}  # everybody met so far
        self._dropped: deque[Held | Owned] = deque()  # by finalizers, in any thread
        self._waking = False  # a flush is on its way
        # Not of the call in which a reference happened to be dropped: its deadline is not ours.
        self._context = agent.context.copy()
        self._company = Company(agent.loop, self._context, self.flush)  # of those dropped
        self.telling = Telling(agent, self.protocol.gone, self._context)
        self.reach = self.telling.reach
        self._timers: set[asyncio.TimerHandle] = set()  # of leases
        self._audit: asyncio.TimerHandle | None = None
        self._resting: list[asyncio.Future[None]] = []  # done when nothing is left
        agent.services["rref.fork"] = self._on_fork
        agent.services["rref.accept"] = self._on_accept
        agent.services["rref.release"] = self._on_release
        agent.services["rref.audit"] = self._on_audit
        agent.services["rref.session"] = self._on_session
        agent.lost.append(self._on_lost)
        agent.returned.append(self._on_returned)

    # ── who is who ──────────────────────────────────────────────────────────────────────────

    def party(self, peer: PeerInfo) -> Party:
        """The protocol's name for a peer."""
        party = self._parties.get(peer.incarnation)
        if party is None:
            party = Party(peer.name, peer.rank, peer.incarnation)
            self._parties[peer.incarnation] = party
        return party

    def on_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Do something with the protocol, whose state belongs to the loop, from any thread."""
        if threading.get_ident() == self.agent.thread:
            return work(*args)
        outcome: list[Any] = []
        ended = threading.Lock()
        ended.acquire()

        def run() -> None:
            try:
                outcome.append((work(*args), None))
            except Exception as error:
                outcome.append((None, error))
            ended.release()

        try:
            self.agent.loop.call_soon_threadsafe(run, context=self._context)
        except RuntimeError:
            raise WorkerClosed(f"{self.agent.name} was shut down", self.agent.name) from None
        self.agent.pool.acquire(ended)
        value, error = outcome.pop()
        try:
            if error is not None:
                raise error
            return value  # type: ignore[no-any-return]
        finally:
            del error  # its traceback holds this frame, which must not hold it in turn

    # ── telling ─────────────────────────────────────────────────────────────────────────────

    def let_go(self, ref: Held | Owned) -> None:
        """User code dropped a reference. Called by finalizers, so anywhere and at any moment."""
        self._dropped.append(ref)
        try:
            self._company.expect()
        except RuntimeError:  # the loop is closed: there is nobody to tell
            self._dropped.clear()

    def soon(self) -> None:
        """There may be something to tell; say it at the end of this tick."""
        if self.protocol.using.outbox and not self._waking:
            self._waking = True
            self.agent.loop.call_soon(self.flush, context=self._context)
        if self._resting:
            self.changed()

    def flush(self) -> None:
        """Tell everybody what they should know."""
        self._waking = False
        using, owning = self.protocol.using, self.protocol.owning
        while self._dropped:
            ref = self._dropped.popleft()
            if isinstance(ref, Held):
                using.drop(ref)
            else:
                owning.drop(ref)
        for batch in using.take():
            # What belongs to a lost session is nothing to dial for. A fork may have come after the
            # loss, from another user: then it is worth it.
            out_of_reach = batch.to.incarnation in self.protocol.gone
            if batch.releases and out_of_reach:
                for held in batch.releases:
                    using.released(held)
            elif batch.releases:
                self._tell_releases(batch)
            if batch.forks:  # some may have failed with a session since they came
                batch.forks = [held for held in batch.forks if held.use is Use.CONFIRMING]
                self._tell_forks(batch)
            if batch.accepts and not out_of_reach:
                self.telling.tell(batch.to, _nothing, "rref.accept", pack_ids(batch.accepts))
        self.changed()

    def _tell_releases(self, batch: Batch) -> None:
        def ended(answer: Any, error: Any) -> None:
            using = self.protocol.using
            for held in batch.releases:  # also if the owner is gone: then nothing is left to give
                using.released(held)
            self.changed()

        lazy = not any(held.on_released for held in batch.releases)
        releases = pack_releases(batch.releases)
        self.telling.tell(batch.to, ended, "rref.release", releases, lazy=lazy)

    def _tell_forks(self, batch: Batch) -> None:
        if not batch.forks:
            return
        owner, using = batch.to, self.protocol.using
        number, low = using.number(owner)

        def ended(answer: Any, error: Any) -> None:
            using.close(owner, number)
            for held, counts in zip(batch.forks, answer or bytes(len(batch.forks)), strict=True):
                using.answered(held, None if counts else owner_lost(error) or _refused(owner))
            self.soon()

        forks = [pack_fork(held.id, held.fork, held.claim) for held in batch.forks]
        self.telling.tell(owner, ended, "rref.fork", number, low, b"".join(forks))

    # ── being told ──────────────────────────────────────────────────────────────────────────

    def _on_fork(self, sender: PeerInfo, number: int, low: int, forks: bytes) -> bytes:
        party, told = self.party(sender), list(unpack_forks(forks))
        if self.agent.restricts(sender):
            self.partners.may_claim(party, told)
        return bytes(self.protocol.requested(party, number, low, told))

    def _on_accept(self, sender: PeerInfo, forks: bytes) -> None:
        party, told = self.party(sender), list(unpack_ids(forks))
        if self.agent.restricts(sender):
            self.partners.may_confirm(party, told)
        self.protocol.accepted(told)
        self.soon()

    def _on_release(self, sender: PeerInfo, releases: bytes) -> None:
        party, told = self.party(sender), unpack_forks(releases)
        if self.agent.restricts(sender):
            self.partners.may_give_back(party, told)
        self.protocol.released(told)
        self.changed()

    def _on_audit(self, sender: PeerInfo, forks: bytes) -> bytes:
        return bytes(self.protocol.look_for(unpack_ids(forks)))

    def _on_session(self, sender: PeerInfo, number: int) -> None:
        if type(number) is not int or number < 0:
            raise ProtocolError("rref.session: no id of a reference", sender.name)
        self.protocol.session_begun(self.party(sender), number)
        self.changed()

    # ── loss and return ─────────────────────────────────────────────────────────────────────

    def _on_lost(self, peer: PeerInfo, error: Exception) -> None:
        number = self.protocol.lost(peer.incarnation)

        def over() -> None:
            self._timers.discard(timer)
            out_of_reach = self.protocol.lease_over(self.party(peer), number)
            # What was sent to it since then is still asked about, or lost again.
            if out_of_reach and not self.protocol.watch.held_by(peer.incarnation):
                self._parties.pop(peer.incarnation, None)
            self.soon()

        timer = self.agent.loop.call_later(self.agent.options.lease, over, context=self._context)
        self._timers.add(timer)
        self.soon()  # forks that failed are told to who shared them

    def _on_returned(self, peer: PeerInfo) -> None:
        number = self.protocol.returned(peer.incarnation)
        if number is not None:
            self.agent.post(peer, "rref.session", number)

    # ── forks not heard of ──────────────────────────────────────────────────────────────────

    def watch(self) -> None:
        """Something was sent away: ask about it if nothing is heard of it."""
        if self._audit is None:
            # Two questions half a lease apart, after one of patience: gone within two leases.
            # In a context of its own: the call that sent it has a deadline, the question has not.
            self._audit = self.agent.loop.call_later(
                self.agent.options.lease / 2, self._ask, context=self._context
            )

    def _ask(self) -> None:
        self._audit = None
        self.audit(hurry=False)
        if self.protocol.watch:
            self.watch()

    def audit(self, hurry: bool) -> list[asyncio.Future[Any]]:
        """Ask everybody about the forks they were sent and said nothing about."""
        futures: list[asyncio.Future[Any]] = []
        for holder, forks in self.protocol.watch.round(hurry).items():
            try:
                name = self.reach(self._parties[holder])
                if self.agent.link(name).caller.window:
                    continue  # calls are held back here, perhaps those with the forks in question
                patience = max(self.agent.options.lease, ANSWERING)
                future = self.agent.request(name, "rref.audit", pack_ids(forks), timeout=patience)
            except AiogradError:
                continue  # gone: its lease will tell
            done = functools.partial(self._audited, forks, hurry)
            future.add_done_callback(functools.partial(hand_over, done), context=self._context)
            futures.append(future)
        return futures

    def _audited(self, forks: list[RefId], hurry: bool, answer: Any, error: Any) -> None:
        if error is None:
            self.protocol.audited(forks, answer, hurry)
            self.soon()

    # ── the end ─────────────────────────────────────────────────────────────────────────────

    def changed(self) -> None:
        """Something may have left a table."""
        if self._resting and self.protocol.at_rest:
            waiting, self._resting = self._resting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def rest(self) -> None:
        """Wait until nothing is owned for others, used or shared here."""
        while self._dropped or not self.protocol.at_rest:
            future = self.agent.loop.create_future()
            self._resting.append(future)
            await future

    async def settle(self, limit: float) -> None:
        """Give everything back, and wait until the others have; at most until `limit`."""
        protocol = self.protocol
        self.flush()
        for held in list(protocol.using.held.values()):
            protocol.using.force(held)
        for gone in list(self._parties.values()):
            protocol.end_of(gone)
        self.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(limit):
                for _ in range(2):  # a give-up of the first round is told in the second
                    if answers := self.audit(hurry=True):
                        await asyncio.wait(answers)
                        await asyncio.sleep(0)
                await self.rest()

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._company.close()
        self.telling.close()
        if self._audit is not None:
            self._audit.cancel()
        using = self.protocol.using
        for held in list(using.held.values()):
            using.released(held)


def owner_lost(error: Any) -> Any:
    """Say what the loss of a worker means for a reference whose owner it was."""
    if type(error) is WorkerLost:
        return OwnerLost(error.worker, error.executed, error.why)
    return error


def _nothing(answer: Any, error: Any) -> None:
    """An acceptance was taken, or the parent is gone."""


def _refused(owner: Party) -> RRefExpired:
    return RRefExpired(
        f"{owner.name} gave the value up before this reference to it arrived", owner.name
    )


BackwardHook = Callable[[Any, int | None, bool], Awaitable[None] | None]
"""hook(value, context id, retain_graph), on the owner's loop."""


class Serving:
    """What others may ask about the values of one worker."""

    def __init__(self, agent: Agent, control: Control) -> None:
        self._agent = agent
        self._control = control
        self.backward_hook: BackwardHook | None = None  # set by the autograd layer
        self.context_guard: Callable[[PeerInfo, int], None] | None = None  # so is this; may refuse
        for name in ("fetch", "type", "created", "has", "backward"):
            agent.services[f"rref.{name}"] = getattr(self, f"_on_{name}")

    def found(self, sender: PeerInfo, fork: bytes) -> Owned:
        """What a user may use by this fork, ready or not."""
        try:
            ref_id, fork_id, known = unpack_fork(fork)
        except (struct.error, TypeError):
            raise ProtocolError("a fork of another form", sender.name) from None
        party = self._control.party(sender)
        if self._agent.restricts(sender):
            self._control.partners.may_use(party, ref_id, fork_id)
        return self._control.protocol.look_up(party, ref_id, fork_id, known)

    def later(
        self, owned: Owned, look: Callable[[Owned], Any] = lambda owned: owned.value
    ) -> asyncio.Future[Any]:
        """A future of the value, or of something about it; without a deadline of its own.

        If there is no value, `look` is not asked: the error is the answer.
        """
        future: asyncio.Future[Any] = self._agent.loop.create_future()

        def ready() -> None:
            if future.done():
                return
            if owned.error is not None:  # not raised: its traceback would hold this future
                future.set_exception(again(owned.error, owned.trace))
                return
            try:
                future.set_result(look(owned))
            except Exception as error:  # of a property of the value, say
                future.set_exception(error.with_traceback(None))

        if owned.ready:
            ready()
        else:
            owned.waiters[future] = ready
            future.add_done_callback(lambda _: owned.waiters.pop(future, None))  # cancelled
        return future

    async def backward(self, value: Any, context_id: int | None, retain_graph: bool) -> None:
        """Start a backward pass from a value of this worker."""
        if self.backward_hook is None:
            raise RRefError("no autograd is attached to this worker", self._agent.name)
        if (pending := self.backward_hook(value, context_id, retain_graph)) is not None:
            await pending

    # ── the services ────────────────────────────────────────────────────────────────────────

    def _on_fetch(self, sender: PeerInfo, fork: bytes) -> Any:
        owned = self.found(sender, fork)
        return owned.result() if owned.ready else self.later(owned)

    def _on_type(self, sender: PeerInfo, fork: bytes) -> Any:
        if self._agent.restricts(sender):  # types are code
            raise NotAllowed("a partner may fetch a value, not look at its type", self._agent.name)
        return self.later(self.found(sender, fork), lambda owned: type(owned.value))

    def _on_created(self, sender: PeerInfo, fork: bytes) -> Any:
        return self.later(self.found(sender, fork), lambda owned: None)

    def _on_has(self, sender: PeerInfo, fork: bytes, name: str) -> Any:
        if self._agent.trusts(sender):
            return self.later(self.found(sender, fork), lambda owned: hasattr(owned.value, name))
        return self.later(
            self.found(sender, fork), lambda owned: exposed_method(owned.value, name) is not None
        )

    async def _on_backward(
        self, sender: PeerInfo, fork: bytes, context_id: int, retain_graph: bool
    ) -> None:
        owned = self.found(sender, fork)
        if self.context_guard is not None:
            self.context_guard(sender, context_id)
        await self.backward(await self.later(owned), context_id, retain_graph)
