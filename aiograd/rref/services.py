"""The messages that workers exchange about references, and the services that answer them.

`Messenger` carries the reference-count protocol:

    rref.fork      user → owner     I hold these forks       answer: which of them count
    rref.accept    child → parent   these are confirmed      answer: nothing
    rref.release   user → owner     I am done with these     answer: nothing
    rref.audit     sharer → holder  do you know these?       answer: UNKNOWN, CONFIRMING, SETTLED
    rref.session   creator → owner  creations up to this id never come; posted when a lost session
                                    is followed by a new one

The first three are retried until answered, so the protocol takes them in any order and number.
What collects in one tick of the loop leaves as one message per recipient and kind; references that
user code drops one by one are coalesced for a few milliseconds. Leases of lost workers and audits
run on timers of the loop; the protocol decides what they mean.

`ValueServices` answers the users of this worker's values:

    rref.fetch     the value            rref.type      its type        rref.created   is it there?
    rref.has       an attribute?        rref.backward  start a backward pass from it

All of them wait until the value is there, and raise what its function raised. The protocol decides
whether the sender may use the value.
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
    Overloaded,
    OwnerLost,
    ProtocolError,
    RRefError,
    RRefExpired,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc.callee.exposure import exposed_method
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.ledger import SHARES
from aiograd.rpc.notify import Coalescer, Notifier, give_outcome
from aiograd.rref.refcount.access import AccessChecks
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import (
    FORK_SIZE,
    OwnerRecord,
    Record,
    RefId,
    Use,
    UserRecord,
    fresh_copy,
    pack_fork,
    pack_ids,
    pack_releases,
    unpack_fork,
    unpack_forks,
    unpack_ids,
)
from aiograd.rref.refcount.user import Batch
from aiograd.rref.room import Room

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent


T = TypeVar("T")

# Seconds to answer an audit. Not the lease: that may be shorter than a round trip, and a question
# that times out every time would never abandon a fork.
AUDIT_TIMEOUT: Final = 5.0
# Fork requests that a partner may have under way. Between partners references are not passed on, so
# an honest one has none.
_PARTNERS_REQUESTS: Final = 4096


class Messenger:
    """The reference-count protocol of one worker, on its loop."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.protocol: Protocol = Protocol(PeerInfo(agent.name, agent.rank, agent.incarnation))
        self.access: AccessChecks = AccessChecks(self.protocol)
        # What finalizers dropped, in any thread. A deque: its append is atomic.
        self._dropped: deque[Record] = deque()
        self._flush_scheduled = False
        # A copy of the agent's own context, not that of the call in which a reference happened to
        # be dropped or sent: a message of ours must not inherit that call's deadline.
        self._context = agent.context.copy()
        self._coalescer = Coalescer(agent.loop, self._context, self.flush)  # of `_dropped`
        self._notifier = Notifier(agent, self.protocol.unreachable, self._context)
        clock = agent.loop.time
        self._values = Room(self._values_of, lambda: agent.options.partner_values, clock)
        references = SHARES["references"]
        self._references = Room(self._references_of, lambda: references(agent.options), clock)
        self._lease_timers: set[asyncio.TimerHandle] = set()
        self._audit_timer: asyncio.TimerHandle | None = None
        self._resting: list[asyncio.Future[None]] = []  # of `rest`; done when nothing is left
        agent.services["rref.fork"] = self._on_fork
        agent.services["rref.accept"] = self._on_accept
        agent.services["rref.release"] = self._on_release
        agent.services["rref.audit"] = self._on_audit
        agent.services["rref.session"] = self._on_session
        agent.lost.append(self._on_lost)
        agent.returned.append(self._on_returned)
        agent.watched.append(self.protocol.watched)

    def party(self, peer: PeerInfo) -> PeerInfo:
        """Return the protocol's record of a peer."""
        me = self.protocol.me
        return me if peer.incarnation == me.incarnation else peer

    def reach(self, peer: PeerInfo) -> str:
        """Return how to address a worker; OwnerLost unless this very incarnation is a member."""
        member = self.agent.directory.get(peer.name)
        if member is None or member.incarnation != peer.incarnation:
            raise OwnerLost(peer.name, "no", "another worker has its name now" if member else "")
        return peer.name

    def on_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` on the loop, which owns the protocol's state, from any thread.

        Blocks the thread meanwhile. Raises what `work` raised, and WorkerClosed if the loop is
        closed.
        """
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
        # By the pool: it counts this thread as blocked and may start another one meanwhile.
        self.agent.pool.acquire(ended)
        value, error = outcome.pop()
        try:
            if error is not None:
                raise error
            return value  # type: ignore[no-any-return]
        finally:
            del error  # its traceback holds this frame, which must not hold it in turn

    # ── notifications ───────────────────────────────────────────────────────────────────────

    def schedule_drop(self, record: Record) -> None:
        """Take note that user code dropped a reference.

        Finalizers call this, so in any thread and at any moment.
        """
        # No lock: the garbage collector may interrupt code that holds it, in this very thread.
        self._dropped.append(record)
        try:
            self._coalescer.schedule()
        except RuntimeError:  # the loop is closed: nothing can be sent any more
            self._dropped.clear()

    def schedule_flush(self) -> None:
        """Send the outbox at the end of this tick, if there is anything in it."""
        if self.protocol.user_table.outbox and not self._flush_scheduled:
            self._flush_scheduled = True
            self.agent.loop.call_soon(self.flush, context=self._context)
        if self._resting:
            self.check_rest()

    def flush(self) -> None:
        """Send all notifications that have collected."""
        self._flush_scheduled = False
        user_table, owner_table = self.protocol.user_table, self.protocol.owner_table
        # Before the outbox is taken, so that releases leave with what is there already.
        while self._dropped:
            record = self._dropped.popleft()
            if isinstance(record, UserRecord):
                user_table.drop(record)
            else:
                owner_table.drop(record)
        for batch in user_table.take():
            # Releases and acceptances belong to a lost session and end with it: no reason to dial
            # its worker. A fork may have arrived after the loss, from another user: then it is.
            unreachable = batch.to.incarnation in self.protocol.unreachable
            if batch.releases and unreachable:
                for record in batch.releases:
                    user_table.released(record)
            elif batch.releases:
                self._send_releases(batch)
            if batch.forks:
                self._send_forks(batch)
            if batch.accepts and not unreachable:
                self._notifier.notify(
                    batch.to, _ignore, "rref.accept", pack_ids(batch.accepts), lazy=False
                )
        self.check_rest()

    def _send_releases(self, batch: Batch) -> None:
        def ended(answer: Any, error: Any) -> None:
            user_table = self.protocol.user_table
            for record in batch.releases:  # also after an error: the owner is gone then
                user_table.released(record)
            self.check_rest()

        # Low priority unless `RRef.release` waits for the answer.
        lazy = not any(record.on_released for record in batch.releases)
        releases = pack_releases(batch.releases)
        self._notifier.notify(batch.to, ended, "rref.release", releases, lazy=lazy)

    def _send_forks(self, batch: Batch) -> None:
        # Some may have failed with a session since they arrived.
        batch.forks = [record for record in batch.forks if record.use is Use.CONFIRMING]
        if not batch.forks:
            return
        owner, user_table = batch.to, self.protocol.user_table
        number, low = user_table.number(owner)

        def ended(answer: Any, error: Any) -> None:
            user_table.close(owner, number)
            # Without an answer none of them counts.
            for record, counts in zip(batch.forks, answer or bytes(len(batch.forks)), strict=True):
                user_table.answered(record, None if counts else owner_lost(error) or _freed(owner))
            self.schedule_flush()

        forks = [pack_fork(record.id, record.fork, record.claim) for record in batch.forks]
        packed = b"".join(forks)
        self._notifier.notify(owner, ended, "rref.fork", number, low, packed, lazy=False)

    # ── services ────────────────────────────────────────────────────────────────────────────

    def _on_fork(self, sender: PeerInfo, number: int, low: int, forks: bytes) -> bytes:
        requested = _unpacked(unpack_forks, forks, "rref.fork", sender)
        if not (_is_count(number) and _is_count(low)):
            raise ProtocolError("rref.fork: malformed number of a request", sender.name)
        if self.agent.restricts(sender):
            if number - low >= _PARTNERS_REQUESTS:
                raise ProtocolError("rref.fork: too many requests are under way", sender.name)
            self.access.may_claim(sender, requested)
            self.check_room(sender, len(requested))
        return bytes(self.protocol.requested(sender, number, low, requested))

    def _on_accept(self, sender: PeerInfo, forks: bytes) -> None:
        accepted = _unpacked(unpack_ids, forks, "rref.accept", sender)
        if self.agent.restricts(sender):
            self.access.may_confirm(sender, accepted)
        self.protocol.accepted(accepted)
        self.schedule_flush()

    def _on_release(self, sender: PeerInfo, forks: bytes) -> None:
        releases = _unpacked(unpack_forks, forks, "rref.release", sender)
        if self.agent.restricts(sender):
            self.access.may_release(sender, releases)
            ahead = sum(map(self.protocol.owner_table.comes_ahead, releases))
            if ahead:  # remembered until the creation comes
                self.check_room(sender, ahead)
        self.protocol.released(releases)
        self.check_rest()

    def _on_audit(self, sender: PeerInfo, forks: bytes) -> bytes:
        asked = _unpacked(unpack_ids, forks, "rref.audit", sender)
        if self.agent.restricts(sender):
            self.access.may_audit(sender, asked)
        return bytes(self.protocol.report_forks(asked))

    def _on_session(self, sender: PeerInfo, number: int) -> None:
        if not _is_count(number):
            raise ProtocolError(
                f"rref.session: malformed id of a reference ({number!r:.80}, expected an int ≥ 0)",
                sender.name,
            )
        self.protocol.session_begun(sender, number)
        self.check_rest()

    # ── room ────────────────────────────────────────────────────────────────────────────────

    def check_room(self, partner: PeerInfo, more: int) -> None:
        """Raise Overloaded if a partner would have more values and forks here than it may."""
        if not self._values.take(partner.name, more):
            self.agent.limits.reached("values")
            most = self._values.most()
            why = f"{most} values are kept for {partner.name} already (Options.partner_values)"
            raise Overloaded(self.agent.name, why)

    def check_references(self, partner: PeerInfo) -> None:
        """Raise Overloaded if more references to values of a partner would be here than may be.

        A partner that sends them, and does not answer their releases, keeps their records here."""
        if not self._references.take(partner.name, 1):
            self.agent.limits.reached("references")
            why = (
                f"{self._references.most()} references to values of {partner.name} are here already"
            )
            raise Overloaded(self.agent.name, why)

    def _values_of(self, name: str) -> int:
        links = self.agent.links.table.values()
        starts = {link.peer.incarnation for link in links if link.peer.name == name}
        return self.protocol.owner_table.kept_for(starts | self.protocol.leased(name))

    def _references_of(self, name: str) -> int:
        records = self.protocol.user_table.records.values()
        return sum(record.owner.name == name for record in records)

    # ── loss and return ─────────────────────────────────────────────────────────────────────

    def _on_lost(self, peer: PeerInfo, error: Exception) -> None:
        number = self.protocol.lost(peer)

        def over() -> None:
            self._lease_timers.discard(timer)
            self.protocol.lease_over(number)
            self.schedule_flush()

        timer = self.agent.loop.call_later(self.agent.options.lease, over, context=self._context)
        self._lease_timers.add(timer)
        self.schedule_flush()  # acceptances of forks that failed: their sharers need not wait

    def _on_returned(self, peer: PeerInfo) -> None:
        # The number of the loss is an id, so it tells the sessions apart: uses of a value whose
        # creation was lost with the old one end at once, and those of the new one are waited for.
        number = self.protocol.returned(peer.incarnation)
        if number is not None:
            self.agent.post(peer, "rref.session", number)

    # ── audits ──────────────────────────────────────────────────────────────────────────────

    def schedule_audit(self) -> None:
        """Let an audit run, because a fork was sent that may never be heard of."""
        if self._audit_timer is None:
            # A fork ages for one round, then there are two questions half a lease apart: a fork
            # that was thrown away is abandoned within two leases.
            self._audit_timer = self.agent.loop.call_later(
                self.agent.options.lease / 2, self._run_audit, context=self._context
            )

    def _run_audit(self) -> None:
        self._audit_timer = None
        self.audit(at_shutdown=False)
        if self.protocol.audit:
            self.schedule_audit()

    def audit(self, at_shutdown: bool) -> list[asyncio.Future[Any]]:
        """Ask all holders about the forks they were sent and are silent about."""
        futures: list[asyncio.Future[Any]] = []
        for holder, forks in self.protocol.audit.round(at_shutdown):
            try:
                name = self.reach(holder)
                # Calls to it are held back here by flow control, perhaps those with the forks in
                # question; the holder would not know these, rightly.
                if self.agent.link(name).caller.window:
                    continue
                timeout = max(self.agent.options.lease, AUDIT_TIMEOUT)
                future = self.agent.request(name, "rref.audit", pack_ids(forks), timeout=timeout)
            except AiogradError:
                continue  # gone: its lease decides
            done = functools.partial(self._audited, forks, at_shutdown)
            future.add_done_callback(functools.partial(give_outcome, done), context=self._context)
            futures.append(future)
        return futures

    def _audited(self, forks: list[RefId], at_shutdown: bool, answer: Any, error: Any) -> None:
        if error is None:  # else the next round asks again
            self.protocol.take_audit(forks, answer, at_shutdown)
            self.schedule_flush()

    # ── shutdown ────────────────────────────────────────────────────────────────────────────

    def check_rest(self) -> None:
        """Wake `rest` if the last record has left the tables."""
        # Called for every release, and `_resting` is empty until a shutdown.
        if self._resting and self.protocol.at_rest:
            waiting, self._resting = self._resting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def rest(self) -> None:
        """Wait until nothing is owned for others, used or shared here."""
        # A loop: another reference may arrive between the wake-up and this task's turn.
        while self._dropped or not self.protocol.at_rest:
            future = self.agent.loop.create_future()
            self._resting.append(future)
            await future

    async def release_all(self, limit: float) -> None:
        """Release everything, and wait until others have, too; at most until loop time `limit`."""
        protocol = self.protocol
        # What user code dropped first: `force` marks the rest as dropped.
        self.flush()
        for record in list(protocol.user_table.records.values()):
            protocol.user_table.force(record)
        protocol.end_leases()
        self.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(limit):
                # Twice: what is abandoned in the first round shows elsewhere in the second.
                for _ in range(2):
                    if answers := self.audit(at_shutdown=True):
                        await asyncio.wait(answers)
                        await asyncio.sleep(0)  # their callbacks run in the next iteration
                await self.rest()

    def close(self) -> None:
        """Cancel all timers and end all forks: no answer will come any more."""
        for timer in self._lease_timers:
            timer.cancel()
        self._lease_timers.clear()
        self._coalescer.close()
        self._notifier.close()
        if self._audit_timer is not None:
            self._audit_timer.cancel()
        user_table = self.protocol.user_table
        for record in list(user_table.records.values()):
            user_table.released(record)  # wakes `RRef.release`


def _unpacked(unpack: Callable[[bytes], T], data: Any, service: str, sender: PeerInfo) -> T:
    """Unpack ids in a message; ProtocolError if it is malformed."""
    try:
        return unpack(data)
    except (struct.error, TypeError):
        got = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise ProtocolError(f"{service}: malformed ids of forks ({got})", sender.name) from None


def _is_count(number: Any) -> bool:
    """Whether a peer sent a number as ids have them: the codec would take ints of a kilobyte."""
    return type(number) is int and 0 <= number < 1 << 63


def owner_lost(error: Any) -> Any:
    """Return the loss of a worker as the loss of a value's owner; other errors as they are."""
    # The exact class: a subclass says more than OwnerLost would.
    if type(error) is WorkerLost:
        return OwnerLost(error.worker, error.executed, error.why)
    return error


def _ignore(answer: Any, error: Any) -> None:
    """Ignore the outcome of an acceptance: it was taken, or the parent is gone."""


def _freed(owner: PeerInfo) -> RRefExpired:
    return RRefExpired(
        f"{owner.name} gave the value up before this reference to it arrived", owner.name
    )


BackwardHook = Callable[[Any, int | None, bool], Awaitable[None] | None]
"""hook(value, context id, retain_graph), on the owner's loop."""


class ValueServices:
    """What other workers may ask about the values of one worker."""

    def __init__(self, agent: Agent, messenger: Messenger) -> None:
        self._agent = agent
        self._messenger = messenger
        self.backward_hook: BackwardHook | None = None  # set by the autograd layer
        self.context_guard: Callable[[PeerInfo, int], None] | None = None  # so is this; may refuse
        for name in ("fetch", "type", "created", "has", "backward"):
            agent.services[f"rref.{name}"] = getattr(self, f"_on_{name}")

    def found(self, sender: PeerInfo, fork: bytes) -> OwnerRecord:
        """Return the value that `sender` may use by this packed fork, ready or not.

        Raises ProtocolError, NotAllowed, RRefExpired or RRefReleased.
        """
        try:
            ref_id, fork_id, known = unpack_fork(fork)
        except (struct.error, TypeError):
            got = f"{len(fork)} bytes" if isinstance(fork, bytes) else type(fork).__name__
            raise ProtocolError(
                f"malformed fork of a reference ({got}, expected {FORK_SIZE} bytes)", sender.name
            ) from None
        if self._agent.restricts(sender):
            self._messenger.access.may_use(sender, ref_id, fork_id)
            # A use may come before its creation, and then makes room for it.
            if ref_id not in self._messenger.protocol.owner_table.records:
                self._messenger.check_room(sender, 1)
        return self._messenger.protocol.look_up(sender, ref_id, fork_id, known)

    def later(
        self,
        record: OwnerRecord,
        look: Callable[[OwnerRecord], Any] = lambda record: record.value,
    ) -> asyncio.Future[Any]:
        """Return a future of the value, or of something about it; without a deadline of its own.

        If the creating function failed, `look` is not called: its error is the outcome.
        """
        future: asyncio.Future[Any] = self._agent.loop.create_future()

        def ready() -> None:
            if future.done():
                return
            if record.error is not None:  # not raised: its traceback would hold this future
                future.set_exception(fresh_copy(record.error, record.traceback))
            else:
                try:
                    future.set_result(look(record))
                    return
                except Exception as error:  # of a property of the value, say
                    future.set_exception(error.with_traceback(None))
            # Mark it as retrieved: a call abandoned before its first step, or with arguments that
            # cannot be decoded, never awaits what its subject waits for.
            future.exception()

        if record.ready:
            ready()
        else:
            record.waiters[future] = ready
            # A call that is cancelled must not keep an abandoned record in the table.
            future.add_done_callback(lambda _: record.waiters.pop(future, None))
        return future

    async def backward(self, value: Any, context_id: int | None, retain_graph: bool) -> None:
        """Start a backward pass from a value of this worker; RRefError without autograd."""
        if self.backward_hook is None:
            raise RRefError("no autograd is attached to this worker", self._agent.name)
        if (pending := self.backward_hook(value, context_id, retain_graph)) is not None:
            await pending

    # ── services ────────────────────────────────────────────────────────────────────────────

    def _on_fetch(self, sender: PeerInfo, fork: bytes) -> Any:
        record = self.found(sender, fork)
        # The value itself, if it is there, spares a future and its callback. A value that is itself
        # a future or a coroutine must not be awaited for its caller: inside the future of `later`
        # it is a result, which cannot travel, and the caller is told so.
        value = record.value
        if record.ready and not asyncio.isfuture(value) and not asyncio.iscoroutine(value):
            return record.result()
        return self.later(record)

    def _on_type(self, sender: PeerInfo, fork: bytes) -> Any:
        if self._agent.restricts(sender):  # a type is code, and only plain data go to a partner
            raise NotAllowed("a partner may fetch a value, not look at its type", self._agent.name)
        return self.later(self.found(sender, fork), lambda record: type(record.value))

    def _on_created(self, sender: PeerInfo, fork: bytes) -> Any:
        return self.later(self.found(sender, fork), lambda record: None)

    def _on_has(self, sender: PeerInfo, fork: bytes, name: str) -> Any:
        if type(name) is not str:
            raise ProtocolError("rref.has: malformed name of an attribute", sender.name)
        if self._agent.trusts(sender):
            return self.later(self.found(sender, fork), lambda record: hasattr(record.value, name))
        # A guest learns of exposed methods only; `hasattr` would run properties for it, too.
        return self.later(
            self.found(sender, fork), lambda record: exposed_method(record.value, name) is not None
        )

    async def _on_backward(
        self, sender: PeerInfo, fork: bytes, context_id: int, retain_graph: bool
    ) -> None:
        record = self.found(sender, fork)
        if type(retain_graph) is not bool and self._agent.restricts(sender):
            raise ProtocolError("rref.backward: malformed request", sender.name)
        if self.context_guard is not None:
            self.context_guard(sender, context_id)
        await self.backward(await self.later(record), context_id, retain_graph)
