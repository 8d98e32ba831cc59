"""All references of one worker: `RRefs` makes, sends and uses them, `ValueStore` keeps values.

    remote()    ──▶ RRefs.remote ──▶ call with a token ──▶ owner: ValueStore.expect, keep or fail
    await rref  ──▶ RRefs.ask, or the reply to the creation brings the value ──▶ owner: services
    an argument ──▶ RRefs.depart ──▶ fork in the message ──▶ RRefs.arrive at the recipient

What keeps a value alive is decided in `refcount` and carried to other workers by `services`. RRefs
plugs into the agent as a *traveller*: the codec calls it for every reference in a message.

`ValueStore` is the owner's side of `remote`. The agent tells its *result store* when a call whose
result stays here begins and ends. The token of the call says under which id the result is kept,
for which creator, and which line of user code asked for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from aiograd.errors import (
    AiogradError,
    DeadlineExceeded,
    NotAllowed,
    OwnerLost,
    RemoteError,
    RRefError,
    RRefLeak,
    RRefReleased,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc import scope
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.future import CallInfo, Future
from aiograd.rpc.link.ledger import MEMORY
from aiograd.rpc.scope import SCOPE
from aiograd.rref.futures import CreateFuture, LocalWait, OwnerFuture, Reference, wake
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import (
    ID_SIZE,
    CallSite,
    CallSites,
    OwnerRecord,
    Record,
    RefId,
    Use,
    UserRecord,
    fresh_copy,
    pack_creation,
    pack_fork,
    stamp_of,
    unpack_id,
    with_callback,
)
from aiograd.rref.serial import Turns
from aiograd.rref.services import BackwardHook, Messenger, ValueServices, owner_lost

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.extension import Arrival, Departure

_log = logging.getLogger("aiograd")

# Seconds that a shutdown without a deadline waits for other workers to release their references.
_SETTLE_TIME: Final = 60.0


class RRefs:
    """All references of one worker: makes them, sends them, asks their owners.

    `wrap(refs, record[, creation])` makes the `RRef` of a record.
    """

    def __init__(self, agent: Agent, wrap: Callable[..., Reference]) -> None:
        self.agent = agent
        self.messenger: Messenger = Messenger(agent)
        self.protocol: Protocol = self.messenger.protocol
        self.value_services: ValueServices = ValueServices(agent, self.messenger)
        self.turns: Turns = Turns(agent.loop)  # of calls of serial objects
        self.closed: bool = False
        # Given, not imported: `rref` imports this module.
        self._wrap = wrap
        self._call_sites = CallSites()
        agent.result_store = ValueStore(agent, self.messenger, self._call_sites)

    @property
    def backward_hook(self) -> BackwardHook | None:
        """What starts a backward pass from a value; set by the autograd layer."""
        return self.value_services.backward_hook

    @backward_hook.setter
    def backward_hook(self, hook: BackwardHook | None) -> None:
        """Set what starts a backward pass from a value."""
        self.value_services.backward_hook = hook

    # ── making ──────────────────────────────────────────────────────────────────────────────

    def remote(
        self,
        to: Any,
        func: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        frame: FrameType | None = None,
        subject: Reference | None = None,
    ) -> Reference:
        """Call `func` on `to`, leave the result there, and return a reference to it.

        Raises what is known before sending. `frame` is the call site; `subject` is kept alive until
        the owner answers.
        """
        agent, protocol = self.agent, self.protocol
        # The cache of `agent.link`, looked up in place: every remote() passes here.
        link = agent.links.routes.get(to) if type(to) is str else None
        if link is None:
            link = agent.link(to)
        owner = link.peer
        # A partner must not learn the paths of files here.
        site = b"" if frame is None or link.restricted else self._call_sites.encode(frame)
        record: Record
        if owner.incarnation == protocol.me.incarnation:
            record = protocol.create_here(self._call_sites.decode(site))
        else:
            record = protocol.create(owner)
        future = CreateFuture(loop=agent.loop)
        future.registry, future.record, future.subject = self, record, subject
        future.rref = None
        future.limited, future.inherited = timeout is not None, SCOPE.get().deadline
        token = pack_creation(record.id, site)
        try:
            agent.call(
                to, func, args, kwargs, timeout=timeout, keep=token, frame=frame, future=future
            )
        except BaseException:
            protocol.discard_creation(record)
            raise
        return self._wrap(self, record, future)

    def creation_ended(self, record: Record, error: Exception | None) -> None:
        """Take note that the owner has answered a creation, or never will."""
        if error is not None:
            error = self._creation_error(record, error)
        if isinstance(record, UserRecord):
            self.protocol.user_table.answered(record, error)
        else:
            self.protocol.created_here(record, error)
        self.messenger.schedule_flush()

    def _creation_error(self, record: Record, error: Exception) -> Exception:
        """Return what uses of a reference raise whose creation failed; the error is the cause."""
        if isinstance(error, DeadlineExceeded):
            owner = record.owner.name if isinstance(record, UserRecord) else self.agent.name
            # Not DeadlineExceeded, which a use raises that is late itself and may be retried.
            late = RRefError(
                f"RRef creation timed out: {error.function}() did not end on {owner} within "
                f"{error.seconds:g} s, so its value may not exist",
                owner,
            )
            late.__cause__ = error
            return late
        # Not OwnerLost: the session was lost, and the owner may be back. If it is gone for good,
        # `Protocol.check` raises OwnerLost before this error.
        if type(error) is WorkerLost:
            failed = RRefError(f"RRef creation failed: {error}", error.worker)
            failed.__cause__ = owner_lost(error)
            return failed
        return error

    # ── sending and receiving (a `Traveller`) ───────────────────────────────────────────────

    tag = "rref"

    def depart(self, rref: Reference, departure: Departure) -> Any:
        """Return a fork of the reference for a message; from any thread.

        Raises why the reference cannot be used, or not be sent to this recipient.
        """
        to = self.messenger.party(departure.to)
        data = self.messenger.on_loop(self._depart, rref, to, departure.plain)
        # A message that never leaves takes its fork back: no recipient will ever release it.
        departure.undo.append(functools.partial(self._undo, data))
        return data

    def _depart(self, rref: Reference, to: PeerInfo, plain: bool) -> Any:
        record = self.usable(rref)
        if plain and isinstance(record, OwnerRecord):
            self.messenger.check_room(to, 1)  # a partner that never releases what it is given
        if plain or (isinstance(record, UserRecord) and self._is_partner(record.owner)):
            self.messenger.access.may_send(record, to)
        data = self.protocol.depart(record, to)
        self.messenger.schedule_audit()
        return data

    def _is_partner(self, owner: PeerInfo) -> bool:
        # By the directory: the owner of a reference from a third worker may have no link here.
        peer = self.agent.directory.get(owner.name)
        return peer is not None and self.agent.restricts(peer)

    def _undo(self, data: Any) -> None:
        def undo() -> None:
            self.protocol.undo(data)
            self.messenger.flush()

        if threading.get_ident() == self.agent.thread:
            undo()
        else:
            self.agent.from_thread(undo)

    def arrive(self, data: Any, arrival: Arrival) -> Reference:
        """Return the reference that a message brought.

        The called function waits until the owner has confirmed it, so that inside the function a
        reference can be used.
        """
        record = self.receive(data, arrival.sender)
        if isinstance(record, UserRecord) and record.use is Use.CONFIRMING:
            arrival.waits.append(self._confirmation(record))
        return self._wrap(self, record)

    def receive(self, data: Any, sender: PeerInfo) -> Record:
        """Enter a fork that a message brought into the tables, and return its record.

        Raises NotAllowed for a fork that a restricted sender may not bring.
        """
        party = self.messenger.party(sender)
        if self.agent.restricts(sender):
            self.messenger.access.may_bring(party, data)
            if data[2] != self.agent.incarnation:
                self.messenger.check_references(party)
        record = self.protocol.arrive(data, party)
        self.messenger.schedule_flush()
        return record

    def _confirmation(self, record: UserRecord) -> asyncio.Future[None]:
        """Return a future that ends when the owner has confirmed or refused a fork."""
        future: asyncio.Future[None] = self.agent.loop.create_future()

        def answered() -> None:
            if future.done():
                return
            if record.error is None:
                future.set_result(None)
            else:
                future.set_exception(fresh_copy(record.error))
                # Mark it as retrieved: a message may bring several references, and only the first
                # failure is awaited.
                future.exception()

        record.on_confirmed = with_callback(record.on_confirmed, answered)
        return future

    # ── using ───────────────────────────────────────────────────────────────────────────────

    def usable(self, rref: Reference) -> Record:
        """Return the record of a reference; raise why it cannot be used."""
        record = rref.record
        if rref.released:
            owner = rref.owner_name()
            raise RRefReleased(
                f"this reference to a value on {owner} was used after deletion: it was released; "
                "make another one, or release it later",
                owner,
            )
        self.protocol.check(record)
        return record

    def ask(
        self,
        rref: Reference,
        service: str,
        *args: Any,
        timeout: float | None,
        carry: bool = False,
        frame: FrameType | None = None,
    ) -> Future[Any]:
        """Ask the owner of a value on another worker; the future has the answer and all errors.

        `carry`: the current context goes with the question. `frame`: the call site.
        """
        record = rref.record
        answer = OwnerFuture(loop=self.agent.loop)
        answer.rref = rref
        assert isinstance(record, UserRecord)
        try:
            # `usable` only for what it would refuse: this is cheaper than the call of it.
            if record.error is not None or rref.released or record.use >= Use.RELEASING:
                self.usable(rref)
            name = self.messenger.reach(record.owner)
            self.agent.request(
                name,
                service,
                pack_fork(record.id, record.fork, record.known),
                *args,
                timeout=timeout,
                carry=carry,
                future=answer,
                frame=frame,
            )
            answer.follow(record)
        except (RRefError, OwnerLost) as error:
            # The traceback would hold this frame, and that the reference.
            answer.info = CallInfo(service)
            answer.set_exception(error.with_traceback(None))
        return answer

    def piggyback_fetch(self, rref: Reference, creation: CreateFuture) -> bool:
        """Let the reply to a creation bring the value; False if it must be fetched separately.

        Then creating and fetching is one message, one reply and one future.
        """
        agent, info, inherited = self.agent, creation.info, creation.inherited
        caller, scope = info.caller, SCOPE.get()
        if (
            # The creation has ended.
            caller is None
            # One future has one deadline: the creation must not end later than the fetch may.
            or scope.deadline != inherited
            or (inherited == math.inf and info.seconds > agent.options.timeout)
            # The message under way belongs to the loop.
            or threading.get_ident() != agent.thread
            # A recording shows the fetch as a call of its own.
            or scope.recording is not None
            # What a fetch brings belongs to the baggage of the fetch, not to that of the creation.
            or (agent.baggage is not None and agent.baggage.current() is not info.carried)
            # The message has left. The last clause, because it changes the message.
            or not caller.piggyback(creation)
        ):
            return False
        creation.deadline = agent.loop.time() + info.seconds
        creation.rref = rref
        return True

    def fetch_separately(self, answer: CreateFuture) -> None:
        """Fetch a value that the reply to its creation did not bring: it cannot be sent, or failed.

        `answer` ends with the outcome, within the deadline of its fetch.
        """
        rref = answer.rref
        assert rref is not None
        record = rref.record
        assert isinstance(record, UserRecord)
        # In a context of its own: the code that happens to read the reply may have a deadline, too.
        left = max(answer.deadline - self.agent.loop.time(), 0.001)
        request = functools.partial(self.agent.request, timeout=left, future=answer)
        fork = pack_fork(record.id, record.fork, record.known)
        try:
            self.agent.context.copy().run(request, record.owner.name, "rref.fetch", fork)
        except AiogradError as error:
            answer.set_exception(error.with_traceback(None))

    def wait(self, rref: Reference, timeout: float | None, what: str) -> Future[Any]:
        """Wait for a value of this worker; the future has the outcome and all errors.

        `what` names the wait in errors. From any thread.
        """
        agent, record = self.agent, rref.record
        assert isinstance(record, OwnerRecord)
        wait = LocalWait(agent.loop, record, agent.name)
        wait.info.name = what
        try:
            self.usable(rref)
        except RRefError as error:
            wait.set_exception(error.with_traceback(None))
            return wait
        if record.ready:
            wait.end()
            return wait
        wait.info.seconds, deadline = agent.deadline(timeout)
        if threading.get_ident() == agent.thread:
            self._enter(wait, deadline)
        else:
            agent.from_thread(self._enter, wait, deadline)
        return wait

    def _enter(self, wait: LocalWait, deadline: float) -> None:
        wait.begin(self.agent.deadlines.bucket(deadline) if deadline != math.inf else None)

    async def created(self, rref: Reference) -> None:
        """Wait until a value is there; raise what prevented it."""
        record = rref.record
        if isinstance(record, OwnerRecord):
            # Created from this worker, and not answered: the creator's error comes first, because
            # the function may still run after it.
            if record.id in record.forks:
                answered = self.agent.loop.create_future()
                record.on_answered = with_callback(record.on_answered, wake(answered))
                await answered
            if record.creator_error is not None:
                raise _cause(record.creator_error)
            await self.wait(rref, math.inf, "RRef.future")
            return
        if record.unanswered:
            answered = self.agent.loop.create_future()
            record.on_confirmed = with_callback(record.on_confirmed, wake(answered))
            await answered
        if record.error is not None:
            raise _cause(record.error)
        # A fork from another worker may be confirmed before the value is there.
        await self.ask(rref, "rref.created", timeout=math.inf)

    # ── shutdown ────────────────────────────────────────────────────────────────────────────

    async def settle(self, deadline: float) -> None:
        """Release all references held here, and wait until other workers have released theirs.

        `deadline` is loop time. Leaks are logged, or RRefLeak with `Options.strict_leaks`.
        """
        now = self.agent.loop.time()
        # Half of the time that is left: workers that never release must not use up what the rest
        # of the shutdown needs.
        limit = now + ((deadline - now) / 2 if deadline != math.inf else _SETTLE_TIME)
        await self.messenger.release_all(limit)
        leaks = self.protocol.owner_table.leaks()
        if not leaks:
            return
        sites = [leak.call_site for leak in leaks]
        where = [f"{file}:{line}" for file, line in sites if file]
        text = (
            f"Leaking RRef: {len(leaks)} value(s) on {self.agent.name} were still in use elsewhere "
            f"at shutdown, made at {', '.join(sorted(set(where))[:20]) or 'unknown lines'}"
        )
        if self.agent.options.strict_leaks:
            raise RRefLeak(text, self.agent.name)
        _log.warning(text)

    async def close(self) -> None:
        """Stop all timers; references cannot be used any more."""
        self.closed = True
        self.messenger.close()

    def counters(self) -> dict[str, int]:
        """Return the sizes of the tables, for `debug_info`; all 0 at rest."""
        return {
            "owner_rrefs": len(self.protocol.owner_table.records),
            "user_rrefs": len(self.protocol.user_table.records),
        }


def _cause(error: Exception) -> Exception:
    """Return what the future of a creation raises: not what the failure means for uses."""
    cause = error.__cause__
    return fresh_copy(cause if isinstance(cause, Exception) else error)


def current_rrefs() -> RRefs:
    """Return the references of the current worker; WorkerClosed if it has none."""
    refs = scope.current().parts.get(RRefs)
    if refs is None:
        raise WorkerClosed("this worker was started without references")
    return refs  # type: ignore[no-any-return]


class ValueStore:
    """The results that other workers create on this one; the agent's `ResultStore`."""

    def __init__(self, agent: Agent, messenger: Messenger, call_sites: CallSites) -> None:
        self._agent, self._messenger, self._call_sites = agent, messenger, call_sites
        self._owner_table, self._me = messenger.protocol.owner_table, messenger.protocol.me

    def expect(self, sender: PeerInfo, token: Any) -> None:
        """Record a value whose function begins; raise NotAllowed or Overloaded to refuse it."""
        self._owner_table.expect(sender.incarnation, *self._announced(sender, token))

    def keep(self, sender: PeerInfo, token: Any, value: Any) -> None:
        """Set the value: its function has returned."""
        self._owner_table.settle(unpack_id(token), value)
        self._messenger.check_rest()

    def fail(self, sender: PeerInfo, token: Any, error: BaseException) -> None:
        """Set an error in place of the value: its function has raised it, or never began."""
        self._discharge(token)
        self._owner_table.settle(unpack_id(token), None, self._outcome(error))
        self._messenger.check_rest()

    def charge(self, sender: PeerInfo, token: Any, size: int) -> None:
        """Count a partner's arguments while the value is kept: they may live on in it."""
        record = self._owner_table.records.get(unpack_id(token))
        if record is not None:
            hold = self._agent.accounts.of(sender.name).hold()
            hold.take(MEMORY, size)
            record.hold = hold  # ends with the record

    def _discharge(self, token: Any) -> None:
        record = self._owner_table.records.get(unpack_id(token))
        if record is not None and (hold := getattr(record, "hold", None)) is not None:
            hold.close()

    def made(self, sender: PeerInfo, token: Any, value: Any) -> None:
        """Do `expect` and `keep` in one step, for an op that ran where its call was read."""
        ref_id, fork, call_site = self._announced(sender, token)
        self._owner_table.made(sender.incarnation, ref_id, fork, call_site, value)

    def _announced(self, sender: PeerInfo, token: bytes) -> tuple[RefId, RefId, CallSite]:
        """Return the id of a new value, the creator's fork, and the call site."""
        rank, stamp, number = ref_id = unpack_id(token)
        # An id of another worker could name a value that somebody else creates here.
        if stamp != stamp_of(sender.incarnation):
            raise NotAllowed("a value is created under an id of its creator", self._agent.name)
        # A trusted worker is not limited: it may run any code here anyway.
        restricted = self._agent.restricts(sender)
        if restricted:
            self._messenger.check_room(sender, 1)
        # The creator's own fork: see `Protocol.create`, `create_here`.
        mine = sender.incarnation == self._me.incarnation
        fork = ref_id if mine else (rank, stamp, number + 1)
        # The call site is text of the creator's choice, kept with every value: not for partners.
        site = b"" if restricted else token[ID_SIZE:]
        return ref_id, fork, self._call_sites.decode(site)

    def _outcome(self, error: BaseException) -> Exception:
        """Return what users of a value get that could not be made."""
        name = self._agent.name
        # The callee refuses an abandoned call with 0 seconds of its own worker. Users did not set
        # that deadline, the creator did.
        if isinstance(error, DeadlineExceeded) and (error.worker, error.seconds) == (name, 0):
            return RRefError(f"RRef creation on {name} timed out, or was cancelled", name)
        # A future refuses StopIteration, and CancelledError or SystemExit would act on a user.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return error
        return RemoteError(type(error).__name__, str(error), worker=name)
